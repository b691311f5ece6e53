"""One drafter that learns while it serves, from the outside: put around it, started, read, closed."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forerun.drafters.base import Drafter
from forerun.engine.adapting.background import Background
from forerun.engine.adapting.collecting import Collector
from forerun.engine.adapting.drafter import AdaptedDrafter
from forerun.engine.adapting.keeping import Keeper
from forerun.engine.adapting.learning import Learner
from forerun.engine.adapting.pieces import Store
from forerun.engine.adapting.settings import AdaptConfig
from forerun.engine.adapting.throttle import Throttle
from forerun.target import Target
from forerun.target.kernels.packing import exchange, ready

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptationStats:
    """Figures since the start of the process."""

    examples: int
    """Positions collected."""
    rejected_examples: int
    """Those of them where a draft was rejected."""
    stored_bytes: int
    """Of collected positions in memory."""
    updates: int
    """Steps of the optimizer."""
    swaps: int
    """Candidates that came to serve."""
    discarded: int
    """Candidates that were not better than what serves."""
    rollbacks: int
    version: int
    """Of the weights that serve; 0 are those of the checkpoint that was given."""
    expected_acceptance: float
    """Of the weights that served when the last candidate was judged, on held back positions; 0 before the first."""
    candidate_acceptance: float
    """Of that candidate, on the same."""
    acceptance: float
    """Share of judged drafted tokens that were kept, since the last swap, over the last 2000."""
    share: float
    """Seconds of work per second of wall time."""
    running: bool
    """False once an error has ended it."""


class Adaptation:
    """Makes the first drafter that can learn do so.

    Args:
        target: whose laws are learned.
        tokenizer: saved with the drafter; None: nothing is.

    Raises:
        ForerunError: from `around`: the directory belongs to another target, or the weights cannot be trained.
    """

    def __init__(self, config: AdaptConfig, target: Target, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._config, self._target, self._tokenizer = config, target, tokenizer
        self._ending = threading.Event()
        self._throttle = Throttle(config.share, self._ending)
        self._store = Store(config.memory_bytes)
        self.drafter: AdaptedDrafter | None = None
        self.background: Background | None = None
        self._thread: threading.Thread | None = None

    def around(self, drafter: Drafter) -> Drafter:
        """The drafter, adapted if it can be and none was before; starts nothing yet."""
        model = drafter.trainable
        if model is None or self.drafter is not None:
            return drafter
        config, keeper = self._config, None
        if config.directory is not None:
            keeper = Keeper(config.directory, self._target, self._tokenizer, model.dtype)
        kept = keeper.resume() if keeper is not None else None
        if kept is not None:
            exchange(ready(model, kept.state))
            log.info("adaptation: going on from %s", kept.path)
        learner = Learner(model, config, state=None if kept is None else kept.state)
        readable = min(self._target.vocab_size, learner.vocabulary)
        collector = Collector(self._store, top_k=config.top_k, held_every=config.held_every, readable=readable)
        self.drafter = AdaptedDrafter(drafter, collector, self._throttle)
        self.background = Background(
            self.drafter,
            model,
            learner,
            self._store,
            config=config,
            throttle=self._throttle,
            ending=self._ending,
            keeper=keeper,
            version=0 if kept is None else kept.version,
        )
        return self.drafter

    def start(self, owner: Any) -> None:
        """Begin to train in a thread, which ends with `close`, with `owner`, or with the process."""
        assert self.background is not None, "around() comes first, with a drafter that can adapt"
        self._thread = _single_threaded(self.background.run, "forerun-adaptation")
        weakref.finalize(owner, _end, self._ending, self._thread)

    def close(self) -> None:
        """End the thread: at most one piece of work later. Drafting goes on with the weights that serve."""
        if self._thread is not None:
            _end(self._ending, self._thread)

    def stats(self) -> AdaptationStats:
        """How far it is."""
        assert self.drafter is not None and self.background is not None, "around() comes first"
        return AdaptationStats(
            examples=self._store.positions,
            rejected_examples=self._store.rejected,
            stored_bytes=self._store.nbytes,
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


def _single_threaded(work: Any, name: str) -> threading.Thread:
    """A thread that runs `work` with one intra-op thread of its own; all others keep theirs, later ones too."""
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
