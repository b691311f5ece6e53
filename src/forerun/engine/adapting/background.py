"""The thread that turns what was collected into weights that serve. One intra-op thread, within a share of wall time.

Knows the order of things: wait for enough that is new, train a candidate, have it judged, offer it, save it when it was
taken. Does not know how any of these is done.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import torch

from forerun.engine.adapting.drafter import AdaptedDrafter
from forerun.engine.adapting.keeping import Keeper
from forerun.engine.adapting.learning import HELD_PIECES, LEAST_HELD, Learner, Trial
from forerun.engine.adapting.pieces import Store
from forerun.engine.adapting.settings import AdaptConfig
from forerun.engine.adapting.throttle import Throttle
from forerun.errors import ForerunError
from forerun.target.kernels.packing import ready

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Between two looks whether there is something to do, seconds."""


class Background:
    """Trains for one drafter until it is told to end.

    Args:
        model: the causal LM that serves, for which weights are made ready.
        ending: set to end; `run` then returns within one piece of work.
        version: of the weights that serve at the start, 0 for those of the checkpoint that was given.
    """

    def __init__(
        self,
        drafter: AdaptedDrafter,
        model: Any,
        learner: Learner,
        store: Store,
        *,
        config: AdaptConfig,
        throttle: Throttle,
        ending: threading.Event,
        keeper: Keeper | None,
        version: int = 0,
    ) -> None:
        self._drafter, self._model, self.learner, self._store = drafter, model, learner, store
        self._config, self._throttle, self._ending, self._keeper = config, throttle, ending, keeper
        self.version, self._former_version, self._next = version, version, version + 1
        self.discarded = 0
        """Candidates that were not better."""
        self.trial = Trial(served=0.0, candidate=0.0)
        """The last one."""
        self.failed = False
        self._used = 0
        self._rollbacks = 0

    def run(self) -> None:
        """Work until the end; an error ends it earlier, never the serving."""
        try:
            with _own_stream(self._model.device):
                while not self._ending.is_set():
                    if not self.turn():
                        self._ending.wait(_LOOK_S)
        except Exception as error:
            self.failed = True
            log.warning("adaptation stopped, drafting goes on with the weights that serve: %r", error)
            log.debug("adaptation", exc_info=True)

    def turn(self) -> bool:
        """Whatever there is to do now; False where that was nothing.

        A candidate is made while the last swap is still being watched; it is offered when that one has proved itself.
        """
        if self._drafter.rollbacks > self._rollbacks:
            self._roll_back()
            return True
        held = self._store.held(HELD_PIECES)
        enough = sum(len(piece.places) for piece in held) >= LEAST_HELD
        if not enough or self._store.added - self._used < self._config.fresh_pieces:
            return False
        self._used = self._store.added
        with self._throttle.paced() as pause:
            trial = self.learner.attempt(self._store.training(), self._used, held, pause)
            if trial is None:
                return False
            self.trial = trial
            if not trial.better:
                self.learner.discard()
                self.discarded += 1
                return True
            weights = ready(self._model, self.learner.twin.state_dict())
            if self._model.device.type == "cuda":
                torch.cuda.current_stream(self._model.device).synchronize()
        while not self._drafter.settled:
            if self._ending.wait(_LOOK_S):
                return False
        if self._drafter.rollbacks > self._rollbacks:
            return True
        self.learner.keep()
        measured = self._drafter.watch.acceptance
        self._drafter.offer(weights)
        self._save_when_taken(trial, measured)
        return True

    def _save_when_taken(self, trial: Trial, measured: float) -> None:
        """Wait for the engine's next proposal; what was never served is not written."""
        while self._drafter.waiting:
            if self._ending.wait(_LOOK_S):
                return
        self._former_version, self.version = self.version, self._next
        self._next += 1
        log.info(
            "adaptation: version %d serves; expected acceptance %.3f, before %.3f",
            self.version,
            trial.candidate,
            trial.served,
        )
        if self._keeper is None:
            return
        facts = {
            "examples": self._store.positions,
            "rejected_examples": self._store.rejected,
            "updates": self.learner.updates,
            "swaps": self._drafter.swaps,
            "rollbacks": self._drafter.rollbacks,
            "discarded": self.discarded,
            "expected_acceptance_before": trial.served,
            "expected_acceptance": trial.candidate,
            "measured_acceptance_before": measured,
        }
        try:
            with self._throttle.paced():
                self._keeper.save(self.learner.twin, self.version, facts)
        except ForerunError as error:
            log.warning("adaptation: version %d serves but could not be saved: %s", self.version, error)

    def _roll_back(self) -> None:
        self._rollbacks = self._drafter.rollbacks
        self.learner.roll_back()
        if self._keeper is not None:
            self._keeper.withdraw(self.version)
        self.version = self._former_version


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On a GPU a stream of its own, so that no step waits behind training; it begins when all before is done."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.synchronize(device)
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
