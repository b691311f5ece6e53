"""Trains a float32 copy of the drafter's model on the replay buffer and compares the result; and
the throttle for it.

The loss is that of ``forerun train`` for this kind of drafter (`training.objectives`): of a draft model DistillSpec's,
of a head its own; positions where a draft was rejected enter more often. It compares the distributions at the request's
temperature: drafts are drawn from the one and verified by the other there. At temperature 0 it takes those at 1. What
counts then is that the likeliest tokens agree; the distribution at 0 names that token alone, the one at 1 also says how
near the others are. What top-k, top-p and penalties do to both is left out. Candidates are compared by the acceptance
that the objective measures, on pieces that were held back, before and after. No thread, no file.
Source: Online Speculative Decoding (arXiv 2310.07177).
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.drafters.heads.base import Head
from forerun.drafters.heads.kinds import kind_named
from forerun.engine.adapting import AdaptConfig
from forerun.engine.adapting.replay import AnswerPiece
from forerun.errors import UnsupportedModelError
from forerun.model.kernels.attention import NAME as FOLDED
from forerun.model.layers import is_quantised
from forerun.model.recordings import none_meanwhile
from forerun.training.batch import LossReport, Objective
from forerun.training.loop.update import scale
from forerun.training.objectives import objective_for
from forerun.training.objectives.base import FrozenTarget, pick_counted
from forerun.types import LAST_HIDDEN, Boundary


class Throttle:
    """A budget of seconds that several threads spend and one of them waits for: at most `share`
    seconds of work per second of wall time; `ending` ends every pause. `now` is a clock, seconds;
    `wait` takes seconds and returns True if `ending` was set meanwhile.
    """

    def __init__(
        self,
        share: float,
        ending: threading.Event,
        *,
        now: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._share, self._now, self._wait = share, now, ending.wait if wait is None else wait
        self._lock = threading.Lock()
        self._began = self._paid_until = now()
        self.busy = 0.0  # Seconds of work so far

    @property
    def used(self) -> float:
        """Seconds of work per second of wall time since the start."""
        return self.busy / max(1.0e-9, self._now() - self._began)

    @contextmanager
    def paced(self) -> Iterator[Callable[[], bool]]:
        """Count the block as work. The yielded function rests until all work so far is paid for; it
        returns True when it is time to end.
        """
        began = self._now()

        def pause() -> bool:
            nonlocal began
            self._spend(began)
            ending = self._wait(max(0.0, self._paid_until - self._now()))
            began = self._now()
            return ending

        try:
            yield pause
        finally:
            self._spend(began)

    def _spend(self, began: float) -> None:
        ended = self._now()
        with self._lock:
            self.busy += ended - began
            self._paid_until = max(self._paid_until, began) + (ended - began) / self._share


HELD_PIECES = 32  # Most held back pieces that a candidate is compared on
LEAST_HELD = 64  # Fewest held back positions that can tell
_CLIP = 1.0
_TEMPERATURES = 64  # Objectives kept, one a temperature
_RECOVERY, _LEAST_RATE = 1.25, 64
"""Factor by which a kept candidate raises a lowered rate, and the most that the given rate is ever
divided by.
"""

Pause = Callable[[], bool]  # Called between pieces of work; True: give up, someone wants to end


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateTrial:
    """The comparison of one candidate with the weights that serve."""

    served: float = 0.0  # Expected acceptance of the weights that serve, float32, on the held back pieces
    candidate: float = 0.0  # The same figure of the candidate
    gain: float = 0.0  # Decrease of its loss there, nats a prediction

    @property
    def better(self) -> bool:
        """True if more is accepted or, at the same acceptance, the loss is lower: likeliest tokens
        often stay the same over one round, and what moves towards them must not be lost. False if
        it is only as good, or anything is not a number.
        """
        return self.candidate > self.served or (self.candidate == self.served and self.gain > 0)


class Learner:
    """A float32 twin of the drafter's model with the objective that `forerun train` uses for such a
    drafter. It always holds the served weights, except while a candidate is made.

    Args:
        served: the causal LM or head that serves; read once, its modules may be repacked.
        target: the causal LM that it drafts for, of which embedding and output head are read.
        state: weights to begin with instead of its own, names as in the plain module.
    """

    def __init__(
        self, served: Any, target: Any, config: AdaptConfig, *, state: dict[str, Tensor] | None = None
    ) -> None:
        self.config = config
        twin = self.twin = plain_twin(served, state)
        own = isinstance(served, Head)
        if len(set((getattr(target, "hf_device_map", None) or {}).values())) > 1 or getattr(target, "_tp_size", None):
            raise UnsupportedModelError(
                "the target is spread over devices, and adaptation reads its output head on one; leave adaptation off"
            )
        make = objective_for(kind_named(served.config.kind if own else "distill"))
        frozen = FrozenTarget.of(target)

        @lru_cache(maxsize=_TEMPERATURES)
        def objective_at(temperature: float) -> Objective:
            made: Objective = make(twin, replace(frozen, temperature=temperature), make.Settings())
            return made

        self._objective_at = objective_at
        self.context = own
        self.boundaries = frozenset[Boundary]((*served.config.boundaries, LAST_HIDDEN) if own else (LAST_HIDDEN,))
        text = served.config if own else self.twin.config.get_text_config(decoder=True)
        self._vocabulary, self.device = int(text.vocab_size), next(self.twin.parameters()).device
        self._rng = np.random.default_rng(0)
        self._trained = 0
        self._served = self.state()
        self._former = self._served
        self._rate = config.learning_rate
        self._optimizer = self._fresh_optimizer()
        self.updates = 0  # Steps of the optimizer

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the twin's weights."""
        return {name: value.detach().clone() for name, value in self.twin.state_dict().items()}

    def attempt(
        self, pieces: Sequence[AnswerPiece], added: int, held: Sequence[AnswerPiece], pause: Pause
    ) -> CandidateTrial | None:
        """Train a candidate on `pieces`, oldest first, and compare it on those `held` back; `keep`
        or `discard` must follow. `added` pieces ever came in, and the newer ones go first. Returns
        None if there was no time to finish.
        """
        before = self.measured(held, pause)
        if before is None or not self._train(self._chosen(pieces, added), pause):
            return None
        after = self.measured(held, pause)
        return (
            None if after is None else CandidateTrial(served=before[0], candidate=after[0], gain=before[1] - after[1])
        )

    def keep(self) -> None:
        """Accept the candidate, which serves from now on; the rate recovers."""
        self._former, self._served = self._served, self.state()
        self._rate = min(self.config.learning_rate, self._rate * _RECOVERY)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate

    def discard(self) -> None:
        """Return to the weights that serve; the optimizer is reset, and continues at half the rate."""
        self.twin.load_state_dict(self._served)
        self._rate = max(self.config.learning_rate / _LEAST_RATE, self._rate / 2)
        self._optimizer = self._fresh_optimizer()

    def roll_back(self) -> None:
        """Return to the weights before the last `keep`, as after `discard`."""
        self._served = self._former
        self.discard()

    def measured(self, pieces: Sequence[AnswerPiece], pause: Pause) -> tuple[float, float] | None:
        """Return the expected share of this drafter's drafts that the target keeps, over the
        positions of `pieces`, and the loss there, nats a prediction. The share is the objective's,
        averaged over the depths that it drafts: at temperature 0 how often the likeliest tokens
        agree down to there, elsewhere the overlap of the distributions, if the objective knows it.
        """
        sums, loss, weight = dict[str, tuple[float, float]](), 0.0, 0.0
        for piece in pieces:
            with torch.no_grad():
                report = self._report(piece, piece.counted)
            metrics, loss, weight = report.metrics, loss + float(report.loss), weight + float(report.weight)
            sampled = piece.temperature > 0 and any(name.startswith("overlap_") for name in metrics)
            for name, (value, count) in metrics.items():
                word, _, depth = name.rpartition("_")
                if word == ("overlap" if sampled else "acceptance"):
                    former = sums.get(depth, (0.0, 0.0))
                    sums[depth] = former[0] + float(value), former[1] + float(count)
            if pause():
                return None
        shares = [value / count for value, count in sums.values() if count]
        return (sum(shares) / len(shares), loss / weight) if shares and weight else (math.nan, math.nan)

    def loss(self, piece: AnswerPiece) -> LossReport:
        """Return the objective's loss, with gradients, over the positions where a draft was
        rejected and a share of the others.
        """
        counted = piece.counted & pick_counted(
            piece.rejected, self._rng.random(len(piece.tokens)), self.config.accepted_share
        )
        return self._report(piece, counted)

    def _report(self, piece: AnswerPiece, counted: npt.NDArray[np.bool_]) -> LossReport:
        objective = self._objective_at(piece.temperature or 1.0)
        with nullcontext() if self.device.type == "cpu" else none_meanwhile():  # it may draw noise, or what it learns
            return objective(piece.batch(counted, self._vocabulary, self.device))

    def _train(self, pieces: Sequence[AnswerPiece], pause: Pause) -> bool:
        """Train one pass over the pieces. Returns False if it was cut short."""
        size = self.config.batch_pieces
        for start in range(0, len(pieces), size):
            weight = 0.0
            for piece in pieces[start : start + size]:
                report = self.loss(piece)
                report.loss.backward()  # type: ignore[no-untyped-call]
                weight += float(report.weight)
                if pause():
                    return False
            if weight:
                scale(self.twin, 1 / weight, _CLIP)
                self._optimizer.step()
                self.updates += 1
            self._optimizer.zero_grad(set_to_none=True)
        return True

    def _chosen(self, pieces: Sequence[AnswerPiece], added: int) -> list[AnswerPiece]:
        """Return the pieces of a round, in random order: those that came in since the last one,
        filled up with older ones.
        """
        most = self.config.round_pieces
        fresh = min(added - self._trained, len(pieces), most)
        self._trained = added
        older = len(pieces) - fresh
        again = self._rng.permutation(older)[: most - fresh].tolist()
        chosen = [*pieces[older:], *(pieces[index] for index in again)]
        return [chosen[index] for index in self._rng.permutation(len(chosen)).tolist()]

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        self.twin.zero_grad(set_to_none=True)
        learning = [weight for weight in self.twin.parameters() if weight.requires_grad]
        return torch.optim.AdamW(learning, lr=self._rate, weight_decay=0.0)


def plain_twin(served: Any, state: dict[str, Tensor] | None = None) -> Any:
    """Return a float32 module of plain layers on the same device, with the weights of `served`, a
    head or a causal LM, or those of `state`. Raises as `check_plain` does.
    """
    check_plain(served)
    config = copy.deepcopy(served.config)
    device = served.weight.device if isinstance(served, Head) else served.device
    if getattr(config, "_attn_implementation", None) == FOLDED:
        config._attn_implementation = "sdpa"  # the one that it stands for
    with torch.random.fork_rng(devices=[]):
        twin = type(served)(config).to(dtype=torch.float32, device=device)
    twin.load_state_dict(served.state_dict() if state is None else state)
    return twin.train(False)


def check_plain(served: Any) -> None:
    """Raise UnsupportedModelError for a drafter that is quantised, spread over devices, or has an
    adapter: there are no plain weights to train.
    """
    spread = len(set((getattr(served, "hf_device_map", None) or {}).values())) > 1
    if is_quantised(served) or getattr(served, "peft_config", None) or spread or getattr(served, "_tp_size", None):
        raise UnsupportedModelError(
            "this drafter is quantised, spread over devices or has an adapter, so that there are no plain weights "
            "to train; serve a plain checkpoint of it, or leave adaptation off"
        )
