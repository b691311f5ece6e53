"""A copying drafter for an engine that runs the target itself and tells no request ids.

Whose a row is, is seen from what it holds. How much to draft is decided by the same policy as in forerun's own engine,
for which the time from one call to the next is that of a step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from forerun.core.row import Row
from forerun.core.sampling import Sampler
from forerun.core.step import Emitted, context_for
from forerun.core.tree import TokenTree
from forerun.deploy import COPYING, methods
from forerun.drafters import AUTO, drafter_class
from forerun.drafters.base import Drafter, DrafterSetup
from forerun.drafters.guarded import Guarded
from forerun.engine.config import SpeculativeConfig, arms_of
from forerun.engine.costs import Nominal
from forerun.engine.policy.policy import Policy, policy_for
from forerun.errors import ArgumentError
from forerun.manifests import read_object
from forerun.types import Budget, SamplingParams, Source, StepTrace

if TYPE_CHECKING:
    from forerun.model import Target

Config = Mapping[str, Any] | str | SpeculativeConfig | None
TOKENS = "num_speculative_tokens"
_GREEDY = Sampler(SamplingParams(temperature=0.0), ())  # Copied tokens are deterministic, whatever the request samples


def options(variable: str) -> dict[str, Any]:
    """What an environment variable configures, ``suffix`` where it is not set: JSON, or a file with it. ArgumentError:
    no JSON object."""
    text = os.environ.get(variable) or "{}"
    if text.lstrip().startswith("{"):
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise ArgumentError(f"{variable} is no JSON: {error}") from error
    else:
        remedy = f"{variable} is neither a JSON object nor a file that holds one"
        found = read_object(Path(text).expanduser(), remedy, ArgumentError)
    return {"method": "suffix", **found}


@dataclass(frozen=True, slots=True)
class Stranger:
    """What is known of a target that another engine runs."""

    vocab_size: int
    num_layers: int = 0
    computes_padding: bool = False

    def memory_bytes(self) -> int:
        """Unknown; what drafts here has no weights to compare with."""
        return 1


@dataclass(slots=True)
class _Sequence:
    row: Row
    held: NDArray[np.int32]  # The row's tokens, with room to grow

    def grow(self, tokens: NDArray[np.int32]) -> int:
        """Take over what `tokens` have behind the text; how many."""
        known = len(self.row.tokens)
        if len(tokens) > len(self.held):
            self.held = np.resize(self.held, 2 * len(tokens))
        self.held[known : len(tokens)] = tokens[known:]
        self.row.commit(tokens[known:].tolist())
        return len(tokens) - known

    def begins(self, tokens: NDArray[np.int32]) -> bool:
        """Whether `tokens` go on with this text."""
        known = len(self.row.tokens)
        return known <= len(tokens) and bool((tokens[:known] == self.held[:known]).all())


@dataclass(frozen=True, slots=True)
class _Step:
    """What was drafted, until it is known how the texts go on."""

    sequences: Sequence[_Sequence]
    lengths: Sequence[int]  # Their tokens then
    began: float  # s
    ended: float


class Sequences:
    """Rows of tokens that another engine keeps, and a drafter's drafts for them.

    A row that goes on with a known text is that sequence, wherever it stands now: two that hold the same are the same
    to a drafter, too. What is in no row any more is forgotten; a request that was preempted is read again.
    """

    def __init__(
        self,
        config: Config,
        *,
        vocab_size: int,
        rows: int,
        slots: int,
        nodes: int,
        tokenizer: Any = None,
        chains: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            config: as `LLM` takes it. Where it is ``adaptive``, a policy decides how much is drafted; how long the
                engine takes for a step it sees from when it is called.
            vocab_size: of the target.
            rows: most sequences at a time.
            slots: most tokens of one.
            nodes: most drafted tokens of one.
            tokenizer: of the target, for drafters that were made of texts.
            chains: the engine scores no trees; of each the best path is drafted.
            clock: seconds.

        Raises:
            ArgumentError: the drafter, or one that it is made of, is none of `COPYING` or ``auto``.
        """
        parsed = _parsed(config)
        setup = DrafterSetup(target=cast("Target", Stranger(vocab_size)), tokenizer=tokenizer, rows=rows, slots=slots)
        self._policy: Policy | None = None
        if parsed.adaptive:
            arms = [one for one in arms_of(parsed) if one.method in COPYING]  # `auto` knows others
            self._policy = policy_for(
                arms, setup, nodes=nodes, costs=Nominal(), measure=True, chains=chains, clock=clock
            )
            self.drafters: list[Drafter] = [arm.drafter for arm in self._policy.arms]
        else:
            self.drafters = [Guarded.built(parsed.method, parsed.drafter_options, setup)]
        self._slots, self._nodes, self._chains, self._clock = slots, nodes, chains, clock
        self._free = list(range(rows))[::-1]
        self._sequences: list[_Sequence] = []
        self._step: _Step | None = None

    def draft(self, texts: Sequence[NDArray[np.int32]], most: Sequence[int]) -> list[TokenTree]:
        """A tree of at most ``most[i]`` nodes for each row's text, prompt and answer so far; 0 for none."""
        began = self._clock()
        found, fresh = self._found(texts)
        if self._policy is not None and self._step is not None:
            self._learn(self._policy, self._step, began)
        rows = [one.row for one in found]
        if grown := [index for index, count in enumerate(fresh) if count]:
            context = context_for(rows, grown, [fresh[index] for index in grown], {})
            for drafter in self.drafters:
                drafter.extend(context)
        trees = dict[int, TokenTree]()
        asked = [index for index, limit in enumerate(most) if limit > 0]
        self._step = None
        if asked:
            limits = [min(most[index], self._nodes) for index in asked]
            for index, tree in zip(asked, self._drafted([rows[index] for index in asked], limits), strict=True):
                trees[index] = tree
            chosen = [found[index] for index in asked]
            lengths = [len(one.row.tokens) for one in chosen]
            self._step = _Step(chosen, lengths, began, self._clock())
        return [trees.get(index) or TokenTree(row.tokens[-1]) for index, row in enumerate(rows)]

    def _drafted(self, rows: list[Row], limits: list[int]) -> list[TokenTree]:
        everyone = range(len(rows))
        if self._policy is None:
            context = context_for(rows, everyone, [0] * len(rows), {})
            trees = self.drafters[0].propose(context, Budget(nodes=tuple(limits), depth=tuple(limits)))
        else:
            for row in rows:
                row.room = max(1, self._slots - len(row.tokens))
            trees = [TokenTree(row.tokens[-1]).seal() for row in rows]
            for group in self._policy.plan(rows, everyone, limits):
                for index, tree in zip(group.members, group.trees or (), strict=True):
                    trees[index] = tree
            trees = self._policy.admit(trees)
        if self._chains:
            trees = [tree if max(tree.depths) == tree.size else tree.only(tree.best_path()) for tree in trees]
        return trees

    def _learn(self, policy: Policy, step: _Step, now: float) -> None:
        """Tell the policy how the texts went on; what became of rows that have left is not known."""
        running = {id(one) for one in self._sequences}
        gained = [one.row.tokens[length:] for one, length in zip(step.sequences, step.lengths, strict=True)]
        if not all(gained) or not all(id(one) in running for one in step.sequences):
            return
        trace = StepTrace(
            step=policy.steps,
            position=0,
            drafter=None,
            rule="",
            nodes=(),
            path=(),
            next_token=0,
            kind=Source.TARGET,
            draft_ms=1e3 * (step.ended - step.began),
            verify_ms=1e3 * (now - step.ended),
            commit_ms=0.0,
        )
        policy.learn(
            [Emitted(tokens=tokens, sources=[], drafted=0, depth=0, logprobs=None, trace=trace) for tokens in gained]
        )

    def _found(self, texts: Sequence[NDArray[np.int32]]) -> tuple[list[_Sequence], list[int]]:
        """Each row's sequence and how many of its tokens are new. They are kept in the order of the rows, so that a row
        which stays where it was is found at once."""
        left = dict(enumerate(self._sequences))
        known: list[_Sequence | None] = []
        for index, tokens in enumerate(texts):
            one = left.get(index)
            known.append(left.pop(index) if one is not None and one.begins(tokens) else None)
        for index, tokens in enumerate(texts):
            if known[index] is None:
                at = max(
                    (at for at, one in left.items() if one.begins(tokens)),
                    key=lambda at: len(left[at].row.tokens),
                    default=None,
                )
                known[index] = None if at is None else left.pop(at)
        if left:
            self._forget([one.row.cache_row for one in left.values()])
        self._sequences = [self._new(tokens) if one is None else one for one, tokens in zip(known, texts, strict=True)]
        return self._sequences, [one.grow(tokens) for one, tokens in zip(self._sequences, texts, strict=True)]

    def _forget(self, rows: list[int]) -> None:
        self._free += rows
        if self._policy is not None:
            self._policy.forget(rows, [0] * len(rows))
        else:
            self.drafters[0].truncate(rows, [0] * len(rows))

    def _new(self, tokens: NDArray[np.int32]) -> _Sequence:
        assert self._free, "more rows than the engine said"
        row = Row(
            cache_row=self._free.pop(),
            tokens=[],
            prompt_length=max(1, len(tokens) - 1),
            sampler=_GREEDY,
            seed=0,
            stop_ids=frozenset(),
            room=1,
        )
        return _Sequence(row, np.empty(0, np.int32))


def _parsed(config: Config) -> SpeculativeConfig:
    parsed = SpeculativeConfig.parse(config)
    if parsed is None:
        raise ArgumentError("no drafter is named; expected for example {'method': 'suffix'}")
    given = [*methods(parsed.named)]
    given += ["a model"] if parsed.method == AUTO and "model" in parsed.options else []
    for method in given:
        if method not in (*COPYING, AUTO):
            raise ArgumentError(
                f"{method} needs the target's states or distributions, which a plug-in is not given; there are "
                f"{', '.join(COPYING)} and {AUTO}"
            )
    if parsed.method != AUTO and all(one.name != TOKENS for one in fields(drafter_class(parsed.method).Config)):
        return replace(parsed, num_speculative_tokens=None)
    return parsed
