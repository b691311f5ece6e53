"""Online adaptation of one drafter: it is wrapped, trained in a thread, and its snapshots are kept
on disk.

The thread has one intra-op thread of torch's and a share of wall time: it waits for enough that is new, trains a
candidate, compares it, offers it, and saves it once it serves. Snapshots are ordinary checkpoints, transformers' or of
a head's public format, ``DIR/checkpoint-<version>`` with ``adaptation.json`` in it, the last two of them, and
``DIR/latest``, a link to the newest that serves. A directory is written under a hidden name and renamed, the link
likewise, so whoever is killed leaves the last one whole.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from forerun.checkpoints import HeadCheckpoint, TargetFacts, format_for, read_head, write_head
from forerun.drafters.base import Drafter
from forerun.drafters.heads.base import Head, HeadConfig
from forerun.engine.adapting import AdaptationStats, AdaptConfig
from forerun.engine.adapting.drafter import AdaptedDrafter
from forerun.engine.adapting.learning import HELD_PIECES, LEAST_HELD, CandidateTrial, Learner, Throttle, check_plain
from forerun.engine.adapting.replay import Collector, ReplayBuffer
from forerun.errors import CheckpointError, ForerunError
from forerun.manifests import TokenizerIdentity
from forerun.model import Target
from forerun.model.kernels.packing import exchange, ready
from forerun.model.load import save_model
from forerun.training.loop import checkpoint
from forerun.writing import remove_folder, tidy, written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

RECORD, LATEST = "adaptation.json", "latest"
KEEP = 2
_EMBEDDINGS = 64
_NUMBERS = 4096
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


class Adaptation:
    """Adapts the first drafter that can learn to the distributions of `target`. The tokenizer, if
    there is one, is saved with the drafter.
    """

    def __init__(self, config: AdaptConfig, target: Target, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._config, self._target, self._tokenizer = config, target, tokenizer
        self._ending = threading.Event()
        self._throttle = Throttle(config.share, self._ending)
        self._buffer = ReplayBuffer(config.memory_bytes)
        self.drafter: AdaptedDrafter | None = None
        self.background: Background | None = None
        self._thread: threading.Thread | None = None

    def around(self, drafter: Drafter) -> Drafter:
        """Return the drafter, wrapped for adaptation if it can learn and none was wrapped before;
        starts nothing yet. Raises ForerunError if the directory belongs to another target or
        drafter, or the weights cannot be trained.
        """
        model = drafter.trainable
        if model is None or self.drafter is not None:
            return drafter
        config, snapshots = self._config, None
        check_plain(model)
        if config.directory is not None:
            snapshots = Snapshots(config.directory, self._target, self._tokenizer, model)
        kept = snapshots.resume() if snapshots is not None else None
        if kept is not None:
            exchange(ready(model, kept.state))
            log.info("adaptation: going on from %s", kept.path)
        learner = Learner(model, self._target.model, config, state=None if kept is None else kept.state)
        collector = Collector(
            self._buffer, boundaries=learner.boundaries, context=learner.context, held_every=config.held_every
        )
        self.drafter = AdaptedDrafter(drafter, collector, self._throttle)
        version = 0 if kept is None else kept.version
        self.background = Background(
            self.drafter, model, learner, self._buffer, self._throttle, self._ending, snapshots, version
        )
        return self.drafter

    def start(self, owner: Any) -> None:
        """Start training in a thread, which ends with `close`, with `owner`, or with the process."""
        assert self.background is not None, "around() comes first, with a drafter that can adapt"
        self._thread = _start_single_threaded(self.background.run, "forerun-adaptation")
        weakref.finalize(owner, _end, self._ending, self._thread)

    def close(self) -> None:
        """End the thread, at most one piece of work later. Drafting continues with the weights that
        serve.
        """
        if self._thread is not None:
            _end(self._ending, self._thread)

    def stats(self) -> AdaptationStats:
        """Return the figures so far."""
        assert self.drafter is not None and self.background is not None, "around() comes first"
        return AdaptationStats(
            examples=self._buffer.positions,
            rejected_examples=self._buffer.rejected,
            stored_bytes=self._buffer.nbytes,
            updates=self.background.learner.updates,
            swaps=self.drafter.swaps,
            discarded=self.background.discarded,
            rollbacks=self.drafter.rollbacks,
            version=self.background.version,
            expected_acceptance=self.background.trial.served,
            candidate_acceptance=self.background.trial.candidate,
            acceptance=self.drafter.watch.acceptance,
            share=self._throttle.used,
            running=not (self.drafter.failed or self.background.failed or self._ending.is_set()),
        )


def _end(ending: threading.Event, thread: threading.Thread) -> None:
    ending.set()
    if thread is not threading.current_thread():
        thread.join()


def _start_single_threaded(work: Any, name: str) -> threading.Thread:
    """Start a thread that runs `work` with one intra-op thread of its own; all others keep theirs,
    later ones too.
    """
    before, begun = torch.get_num_threads(), threading.Event()

    def run() -> None:
        torch.set_num_threads(1)  # of this thread, but also what threads to come begin with
        begun.set()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    begun.wait()
    torch.set_num_threads(before)
    return thread


# --- training in the background ---------------------------------------------------------------------------------------

_LOOK_S = 0.05  # Between two looks whether there is something to do, seconds


@dataclass(eq=False)
class Background:
    """Trains one drafter in the background until it is told to end."""

    drafter: AdaptedDrafter
    model: Any  # The causal LM or head that serves, for which weights are made ready
    learner: Learner
    buffer: ReplayBuffer
    throttle: Throttle
    ending: threading.Event  # Set to end; `run` then returns within one piece of work
    snapshots: Snapshots | None
    version: int = 0  # Version of the weights that serve; 0: those of the checkpoint that was given
    discarded: int = 0  # Candidates that were not better
    trial: CandidateTrial = field(default_factory=CandidateTrial)  # The last one
    failed: bool = False

    def __post_init__(self) -> None:
        self._former_version, self._next = self.version, self.version + 1
        self._used = self._rollbacks = 0

    def run(self) -> None:
        """Work until the end; an error ends it earlier, never the serving."""
        try:
            with _own_stream(self.learner.device):
                while not self.ending.is_set():
                    if not self.turn():
                        self.ending.wait(_LOOK_S)
        except Exception as error:
            self.failed = True
            log.warning("adaptation stopped, drafting goes on with the weights that serve: %r", error)
            log.debug("adaptation", exc_info=True)

    def turn(self) -> bool:
        """Do whatever there is to do now; returns False if that was nothing. A candidate is made
        while the last swap is still being watched, and offered when that one has proved itself.
        """
        if self.drafter.rollbacks > self._rollbacks:
            self._roll_back()
            return True
        held = self.buffer.held(HELD_PIECES)
        enough = sum(piece.positions for piece in held) >= LEAST_HELD
        if not enough or self.buffer.added - self._used < self.learner.config.fresh_pieces:
            return False
        self._used = self.buffer.added
        with self.throttle.paced() as pause:
            trial = self.learner.attempt(self.buffer.training(), self._used, held, pause)
            if trial is None:
                return False
            self.trial = trial
            if not trial.better:
                self.learner.discard()
                self.discarded += 1
                return True
            weights = ready(self.model, self.learner.twin.state_dict())
            if self.learner.device.type == "cuda":
                torch.cuda.current_stream(self.learner.device).synchronize()
        while not self.drafter.settled:
            if self.ending.wait(_LOOK_S):
                return False
        if self.drafter.rollbacks > self._rollbacks:
            return True
        self.learner.keep()
        measured = self.drafter.watch.acceptance
        self.drafter.offer(weights)
        self._save_when_taken(trial, measured)
        return True

    def _save_when_taken(self, trial: CandidateTrial, measured: float) -> None:
        """Wait for the engine's next proposal, which takes the offer, then save the weights; what
        was never served is not written.
        """
        while self.drafter.waiting:
            if self.ending.wait(_LOOK_S):
                return
        self._former_version, self.version = self.version, self._next
        self._next += 1
        expected = f"expected acceptance {trial.candidate:.3f}, before {trial.served:.3f}"
        log.info("adaptation: version %d serves; %s", self.version, expected)
        if self.snapshots is None:
            return
        facts = {
            "examples": self.buffer.positions,
            "rejected_examples": self.buffer.rejected,
            "updates": self.learner.updates,
            "swaps": self.drafter.swaps,
            "rollbacks": self.drafter.rollbacks,
            "discarded": self.discarded,
            "expected_acceptance_before": trial.served,
            "expected_acceptance": trial.candidate,
            "measured_acceptance_before": measured,
        }
        try:
            with self.throttle.paced():
                self.snapshots.save(self.learner.twin, self.version, facts)
        except ForerunError as error:
            log.warning("adaptation: version %d serves but could not be saved: %s", self.version, error)

    def _roll_back(self) -> None:
        self._rollbacks = self.drafter.rollbacks
        self.learner.roll_back()
        if self.snapshots is not None:
            self.snapshots.withdraw(self.version)
        self.version = self._former_version


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context with a CUDA stream of its own, so that no step waits behind training; it
    begins when all earlier work is done.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Not by waiting for the device here: that is an error while the engine's thread records a pass.
    own.wait_stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(own)


# --- on disk ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A checkpoint to resume from."""

    path: Path
    version: int
    state: dict[str, Tensor]


class Snapshots:
    """The snapshot directory of one adapted drafter.

    Args:
        target: whose distributions it learns; a checkpoint for another one is refused.
        tokenizer: saved with every checkpoint, so that it can be drafted with as it stands.
        served: the head or causal LM as it was loaded, whose dtype the weights have on disk; what another one has
            learned is refused.
    """

    def __init__(
        self,
        directory: Path,
        target: Target,
        tokenizer: PreTrainedTokenizerBase | None,
        served: Any,
    ) -> None:
        self.directory, self._tokenizer, self._served = directory, tokenizer, served
        self._dtype: torch.dtype = served.weight.dtype if isinstance(served, Head) else served.dtype
        self._own = self._start = digest(served)
        self._facts = TargetFacts.of(target.model.config, target.name_or_path)
        self._target = fingerprint(target)
        self._described: dict[str, Any] = {"target": self._target, "target_name": Path(target.name_or_path).name}
        if tokenizer is not None:
            self._described["tokenizer"] = TokenizerIdentity.of(tokenizer).record()

    def resume(self) -> Snapshot | None:
        """Return the newest checkpoint that serves, or None; removes what an earlier process left
        half-written. Raises CheckpointError if it adapts a drafter to another target, or another
        drafter, or cannot be read.
        """
        tidy(self.directory)
        link = self.directory / LATEST
        path = link.resolve() if link.is_symlink() and link.is_dir() else checkpoint.latest(self.directory)
        if path is None:
            return None
        record = _read(path / RECORD)
        if record.get("target") != self._target:
            raise CheckpointError(
                f"{path} holds a drafter that was adapted to another target ({record.get('target_name')}); "
                "give another directory, or remove this one"
            )
        self._start = record.get("start", self._own)  # an older forerun did not record it
        if self._own not in (self._start, record.get("weights")):
            self._refuse(path, "began with other weights")
        state = self._weights(path)
        shapes = [{name: value.shape for name, value in one.items()} for one in (self._served.state_dict(), state)]
        if shapes[0] != shapes[1]:
            name = min(name for name in shapes[0].keys() | shapes[1] if shapes[0].get(name) != shapes[1].get(name))
            self._refuse(path, f"has other tensors ({name}) than the one that is served")
        return Snapshot(path=path, version=int(record["version"]), state=state)

    def save(self, twin: Any, version: int, facts: Mapping[str, Any]) -> Path:
        """Write `twin`, float32, as the checkpoint of this version, and let ``latest`` point to it.
        Raises CheckpointError if the disk is full or refuses; what was there before is untouched.
        """

        path = self.directory / f"checkpoint-{version}"
        with checkpoint.new_directory(path) as fresh:
            with torch.no_grad():
                stored = copy.deepcopy(twin).to(self._dtype)
            if isinstance(stored, Head):
                write_head(HeadCheckpoint.of(stored), fresh, format_for(stored.config.kind), self._facts)
            else:
                save_model(stored, self._tokenizer, fresh)
            origin = {"start": self._start, "weights": digest(stored)}
            record = {"version": version, **self._described, **origin, **facts}
            (fresh / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        self._link(path)
        checkpoint.rotate(self.directory, KEEP)
        return path

    def withdraw(self, version: int) -> None:
        """Withdraw a version that was rolled back: ``latest`` is the one before it again, if there
        is one.
        """
        bad = self.directory / f"checkpoint-{version}"
        if not bad.is_dir():
            return
        before = [path for number, path in checkpoint.checkpoints(self.directory) if number < version]
        if before:
            self._link(before[-1])
        remove_folder(bad)
        if not before:  # only now: whoever is killed in between must not begin with the newest there is
            self._link(None)

    def _weights(self, path: Path) -> dict[str, Tensor]:
        from transformers import AutoModelForCausalLM

        module: Any
        try:
            if isinstance(self._served, Head):
                module = read_head(path, num_layers=self._facts.num_layers).build(torch.float32)
            else:
                module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be loaded ({type(error).__name__}: {error}); remove it") from error
        if isinstance(module, Head) and (differs := differing_fields(module.config, self._served.config)):
            self._refuse(path, f"is configured otherwise ({', '.join(differs)}) than the one that is served")
        state: dict[str, Tensor] = module.state_dict()
        return state

    def _refuse(self, path: Path, why: str) -> NoReturn:
        raise CheckpointError(
            f"{path} holds what another drafter has learned, which {why}; serve the drafter that it began with, or "
            f"{path} itself, or give another directory"
        )

    def _link(self, path: Path | None) -> None:
        link = self.directory / LATEST
        try:
            if path is None:
                link.unlink(missing_ok=True)
                return
            with written(link) as fresh:
                fresh.symlink_to(path.name, target_is_directory=True)
        except OSError as error:
            log.warning("%s could not be pointed to %s: %s", link, path, error)


def fingerprint(target: Target) -> str:
    """Return the sha256 of a target's configuration, its vectors (norms, biases) and the first rows
    of its embedding.

    Enough to tell models apart without reading gigabytes. A fine-tune that left all of these as they were passes for
    the original: its drafter is then merely worse at first.
    """
    config = {key: value for key, value in target.config.to_dict().items() if key not in _VOLATILE}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    vectors = [weight for _, weight in sorted(target.model.named_parameters()) if weight.dim() == 1]
    for weight in (*vectors, target.model.get_input_embeddings().weight[:_EMBEDDINGS]):
        found.update(weight.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def digest(module: Any) -> str:
    """Return the sha256 of some numbers of each weight, evenly spread, as bfloat16, whatever dtype
    and layout they are held in.
    """
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        flat = value.detach().flatten()
        some = flat[:: max(1, len(flat) // _NUMBERS)].to("cpu", torch.bfloat16)
        found.update(name.encode() + some.view(torch.int16).numpy().tobytes())
    return found.hexdigest()


def differing_fields(one: HeadConfig, other: HeadConfig) -> list[str]:
    """Return the fields in which two heads of one shape draft differently, or ``["kind"]`` for
    heads of two kinds.
    """
    if type(one) is not type(other) or one.kind != other.kind:
        return ["kind"]
    names = [field.name for field in fields(one) if field.name not in ("extra", "initializer_range")]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        int(record["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}); --adapt-dir wants a directory of its own, written by forerun"
        ) from error
    return record
