"""Trains a float32 copy of the draft model on the replay buffer and compares what came out; and the throttle for it.

The loss is the forward divergence KL(target, draft) over the tokens that were kept and one event for all others, at
the request's temperature; positions where a draft was rejected weigh most. Candidates are compared by expected
acceptance, sum over x of min(target(x), draft(x)), on pieces that were held back, before and after. No thread, no file.
Source: Online Speculative Decoding (arXiv 2310.07177).
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forerun.engine.adapting import AdaptConfig
from forerun.engine.adapting.replay import Piece
from forerun.errors import UnsupportedModelError
from forerun.model.kernels.attention import NAME as FOLDED
from forerun.model.layers import OutputHead, base_of, is_quantised


class Throttle:
    """A budget of seconds that several threads spend and one of them waits for: at most `share` seconds of work per
    second of wall time; `ending` ends every pause. `now` is a clock, seconds; `wait` takes seconds and returns True
    where `ending` was set meanwhile."""

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
        """The block is work. What it is given rests until all work so far is paid for; True: it is time to end."""
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
_TINY = 1.0e-6
_CLIP = 1.0
_RECOVERY, _LEAST_RATE = 1.25, 64
"""What a kept candidate multiplies a lowered rate by; the rate given is never divided by more than this."""

Pause = Callable[[], bool]  # Called between pieces of work; True: give up, someone wants to end


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What became of one candidate."""

    served: float = 0.0  # Expected acceptance of the weights that serve, float32, on the held back pieces
    candidate: float = 0.0  # Of the candidate, on the same

    @property
    def better(self) -> bool:
        """At least as good; False where anything is not a number."""
        return self.candidate >= self.served


class Learner:
    """One draft model's float32 twin: always the served weights, except while a candidate is made.

    Args:
        model: the causal LM that serves; read once, its modules may be repacked.
        state: weights to begin with instead of its own, names as in the plain model.
    """

    def __init__(self, model: Any, config: AdaptConfig, *, state: dict[str, Tensor] | None = None) -> None:
        self.config = config
        self.twin = plain_twin(model, state)
        self._base, self._head = base_of(self.twin), OutputHead(self.twin)
        self.vocabulary = int(self.twin.config.get_text_config(decoder=True).vocab_size)
        self._rng = np.random.default_rng(0)
        self._trained = 0
        self._served = self.state()
        self._former = self._served
        self._rate = config.learning_rate
        self._optimizer = self._fresh_optimizer()
        self.updates = 0  # Steps of the optimizer

    def state(self) -> dict[str, Tensor]:
        """A copy of the twin's weights."""
        return {name: value.detach().clone() for name, value in self.twin.state_dict().items()}

    def attempt(self, pieces: Sequence[Piece], added: int, held: Sequence[Piece], pause: Pause) -> Trial | None:
        """Train a candidate on `pieces`, oldest first, of which `added` ever came in and the newer ones go first, and
        compare it on those `held` back; `keep` or `discard` must follow. None: there was no time to finish."""
        served = self.acceptance(held, pause)
        if served is None or not self._train(self._chosen(pieces, added), pause):
            return None
        candidate = self.acceptance(held, pause)
        return None if candidate is None else Trial(served=served, candidate=candidate)

    def keep(self) -> None:
        """The candidate serves from now on; the rate recovers."""
        self._former, self._served = self._served, self.state()
        self._rate = min(self.config.learning_rate, self._rate * _RECOVERY)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate

    def discard(self) -> None:
        """Back to the weights that serve; the optimizer forgets, and goes on at half the rate."""
        self.twin.load_state_dict(self._served)
        self._rate = max(self.config.learning_rate / _LEAST_RATE, self._rate / 2)
        self._optimizer = self._fresh_optimizer()

    def roll_back(self) -> None:
        """The weights before the last `keep` serve again, as after `discard`."""
        self._served = self._former
        self.discard()

    def acceptance(self, pieces: Sequence[Piece], pause: Pause) -> float | None:
        """Expected share of this model's drafts that the target keeps, over the positions of `pieces`: 1 at temperature
        0 where the likeliest tokens agree; elsewhere a lower bound, for what lies outside the kept tokens counts as
        rejected."""
        total, count = 0.0, 0
        for piece in pieces:
            with torch.no_grad():
                total += float(self._accepted(piece).sum())
            count += len(piece.positions)
            if pause():
                return None
        return total / count if count else math.nan

    def loss(self, piece: Piece) -> Tensor:
        """Weighted sum over the positions divided by the sum of weights, nats; carries gradients."""
        logs = self._log_probs(piece)
        ids = torch.from_numpy(piece.ids).long()
        probs = torch.from_numpy(piece.probs).float().to(logs.device)
        known = logs.gather(1, ids.to(logs.device))
        rest = (1 - known.exp().sum(1)).clamp_min(_TINY).log()
        mass = (1 - probs.sum(1)).clamp_min(0)
        entropy = torch.special.entr(probs).sum(1) + torch.special.entr(mass)
        divergence = -(probs * known).sum(1) - mass * rest - entropy
        weights = torch.where(torch.from_numpy(piece.rejected), 1.0, self.config.kept_weight).to(logs.device)
        loss: Tensor = (divergence * weights).sum() / weights.sum().clamp_min(_TINY)
        return loss

    def _accepted(self, piece: Piece) -> Tensor:
        """(M,) probability that a draft at each position is accepted."""
        logs = self._log_probs(piece)
        ids = torch.from_numpy(piece.ids).long().to(logs.device)
        if piece.temperature == 0:
            return (logs.argmax(-1) == ids[:, 0]).float()
        probs = torch.from_numpy(piece.probs).float().to(logs.device)
        return torch.minimum(probs, logs.gather(1, ids).exp()).sum(1)

    def _log_probs(self, piece: Piece) -> Tensor:
        """(M, V) log-probabilities of the twin at the piece's positions, at its temperature."""
        tokens = torch.from_numpy(np.where(piece.tokens < self.vocabulary, piece.tokens, 0)).long()
        states = self._base(input_ids=tokens.unsqueeze(0).to(self.twin.device), use_cache=False).last_hidden_state
        logits = self._head(states[:, torch.from_numpy(piece.positions).long().to(states.device)])
        heat = piece.temperature or 1.0
        return torch.log_softmax(logits[0].float() / heat, dim=-1)

    def _train(self, pieces: Sequence[Piece], pause: Pause) -> bool:
        """One pass over the pieces; False where it was cut short."""
        size = self.config.batch_pieces
        for start in range(0, len(pieces), size):
            batch = pieces[start : start + size]
            for piece in batch:
                (self.loss(piece) / len(batch)).backward()  # type: ignore[no-untyped-call]
                if pause():
                    return False
            nn.utils.clip_grad_norm_(self.twin.parameters(), _CLIP)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self.updates += 1
        return True

    def _chosen(self, pieces: Sequence[Piece], added: int) -> list[Piece]:
        """The pieces of a round, in random order: those that came in since the last one, filled up with older ones."""
        most = self.config.round_pieces
        fresh = min(added - self._trained, len(pieces), most)
        self._trained = added
        older = len(pieces) - fresh
        again = self._rng.permutation(older)[: most - fresh].tolist()
        chosen = [*pieces[older:], *(pieces[index] for index in again)]
        return [chosen[index] for index in self._rng.permutation(len(chosen)).tolist()]

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        self.twin.zero_grad(set_to_none=True)
        return torch.optim.AdamW(self.twin.parameters(), lr=self._rate, weight_decay=0.0)


def plain_twin(model: Any, state: dict[str, Tensor] | None = None) -> Any:
    """A float32 causal LM of plain modules on the same device, with the weights of `model`, or those of `state`.
    UnsupportedModelError: quantised, spread over devices, or with an adapter: there are no plain weights to train."""
    spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    if is_quantised(model) or getattr(model, "peft_config", None) or spread or getattr(model, "_tp_size", None):
        raise UnsupportedModelError(
            "this draft model is quantised, spread over devices or has an adapter, so that there are no plain weights "
            "to train; serve a plain checkpoint of it, or leave adaptation off"
        )
    config = copy.deepcopy(model.config)
    if config._attn_implementation == FOLDED:
        config._attn_implementation = "sdpa"  # the one that it stands for
    with torch.random.fork_rng(devices=[]):
        twin = type(model)(config).to(dtype=torch.float32, device=model.device)
    twin.load_state_dict(model.state_dict() if state is None else state)
    return twin.train(False).requires_grad_(True)
