"""The base class of drafters, and the context that they draft from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from forerun.core.acceptance import Acceptance, Evidence, Proposal
from forerun.core.sampling import Rng, Sampler
from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError, nearest
from forerun.types import Boundary, Budget, DraftKind, Drawn, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.core.scores import Scores
    from forerun.model import Target


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftContext:
    """Everything a drafter may look at, for the B rows that share it."""

    rows: Sequence[int]  # (B,) cache row of each sequence; stays the same while a sequence lives
    tokens: Sequence[Sequence[int]]
    """(B,) all committed tokens of each row, prompt included; the last one is the root. They grow with the text."""
    prompt_lengths: Sequence[int]  # (B,) how many of the tokens are the prompt's
    fresh: Sequence[int]
    """(B,) how many of the last tokens this drafter has not been shown before. Zero in `Drafter.propose`."""
    samplers: Sequence[Sampler]  # (B,) the sampling parameters of each row, as makers of distributions
    rng: Sequence[Rng]  # (B,) the only source of randomness
    hidden_states: Mapping[Boundary, Tensor]
    """What the drafter required, (B, F, H), left aligned: one state for each fresh token but a sequence's very first:
    that of the token *before* it. So entry i belongs to token ``len(tokens) - 1 - count + i``, where count is
    ``min(fresh, len(tokens) - 1)``, and the last one to the token before the root."""
    predictions: Sequence[Sequence[int]] = ()
    """(B,) the answer that each row's client predicted, token ids; empty where there is none, or for all rows."""
    cache_salts: Sequence[str | None] = ()
    """(B,) the isolation domain of each row; None, or empty for all rows: the one that requests without a salt share.
    What is learned from a row may change drafts for rows of its own domain and of no other, see `PerDomain`."""
    adapt: Sequence[bool] = ()  # (B,) whether online adaptation may learn from each row; empty: from all
    failures: dict[int, Exception] = field(default_factory=dict)  # Cache row -> why it was failed; see `fail`

    def salt(self, index: int) -> str | None:
        """The isolation domain of one of the B rows."""
        return self.cache_salts[index] if self.cache_salts else None

    def fail(self, index: int, error: Exception) -> None:
        """In `propose`: nothing can be drafted for one of the B rows. The others keep their drafts, it is counted."""
        self.failures.setdefault(self.rows[index], error)

    def trees(self) -> list[TokenTree]:
        """A tree for each row, of its root alone."""
        return [TokenTree(tokens[-1]) for tokens in self.tokens]

    def of(self, indices: Sequence[int]) -> DraftContext:
        """The context of some of its rows, in that order."""
        index = list(indices)
        if index == list(range(len(self.rows))):
            return self

        def pick(values: Sequence[Any]) -> Sequence[Any]:
            return [values[i] for i in index] if values else values

        hidden_states = {boundary: states[index] for boundary, states in self.hidden_states.items()}
        picked: dict[str, Any] = {name: pick(getattr(self, name)) for name in _BY_ROW}
        return replace(self, hidden_states=hidden_states, **picked)


_BY_ROW = ("rows", "tokens", "prompt_lengths", "fresh", "samplers", "rng", "predictions", "cache_salts", "adapt")


@dataclass(kw_only=True, slots=True)
class Drafted(Proposal):
    """A draft that its drafter adds nodes to, each with its estimated acceptance."""

    tree: TokenTree
    start: int  # Committed tokens when it was made

    @classmethod
    def below(cls, tree: TokenTree, start: int, acceptance: Acceptance) -> Drafted:
        """A draft in `tree`, which is of its root alone or made of what `evidence` will say."""
        return cls(tree=tree, start=start, acceptance=acceptance, tokens=tree.tokens, parents=tree.parents)

    def add(self, token: int, parent: int, evidence: Evidence, drawn: Drawn = Drawn.DETERMINISTIC) -> int:
        """Add a token below `parent` and return its node; a deterministic one that is there already stays as it is."""
        node = self.tree.add(token, parent, drawn=drawn, confidence=self.acceptance.estimate(*evidence))
        self.evidence.setdefault(node, evidence)
        return node

    def follow(self, tokens: Sequence[int]) -> None:
        """Compare the draft with `tokens`, the whole text by now."""
        self.learn(tokens[self.start :])


def check_least(method: str, config: object, **least: int) -> None:
    """Raise ArgumentError where a configuration's option is below its least value; None stands for no limit."""
    for name, value in least.items():
        given = getattr(config, name)
        if given is not None and given < value:
            raise ArgumentError(f"{method}: {name} must be at least {value}, got {given}")


def check_choice(method: str, config: object, name: str, known: Sequence[str]) -> None:
    """Raise ArgumentError, naming the nearest, where a configuration's option is none of those that are known."""
    given = getattr(config, name)
    if given not in known:
        expected = f"one of {', '.join(known)}"
        raise ArgumentError(f"{method}: {name} is {expected}, got {given!r}.{nearest(str(given), known)}")


@lru_cache(maxsize=256)
def warn_drafter(method: str, task: str, error: str) -> None:
    """Say, once per kind of failure, that a drafter failed: it loses its drafts, no request its answer."""
    log.warning("drafter %r failed %s: %s", method, task, error)
    log.debug("drafter %r", method, exc_info=True)


class Failures:
    """Times that drafters failed, by cache row, until somebody asks. The drafters of an engine share one, those that
    are members of others too."""

    def __init__(self) -> None:
        self._counts = Counter[int]()

    def add(self, rows: Sequence[int]) -> None:
        """A drafter failed each of these rows."""
        self._counts.update(rows)

    def take(self, row: int) -> int:
        """How often a row was failed since this was last asked."""
        return self._counts.pop(row, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSetup:
    """What a drafter is built from, besides its own configuration."""

    target: Target
    tokenizer: PreTrainedTokenizerBase | None
    rows: int  # Cache rows of the engine
    slots: int  # Most tokens of one sequence, drafted ones included
    pass_ms: Callable[[int], float] | None = None
    """Milliseconds of the target's pass over one row with so many drafted nodes, measured at the first call; None: not
    known, and no reason to draft less."""
    failures: Failures = field(default_factory=Failures)
    """Where failures of the drafter, and of drafters in it, are counted."""

    def device_for(self, model: Any) -> torch.device | None:
        """Where a draft model goes: beside the target; None for one that is loaded, which stays where it is."""
        return self.target.device if isinstance(model, str | Path) else None


class Drafter:
    """The base of every drafter: does nothing, so that a method overrides only what it needs. It takes ``(config,
    setup)``, where ``config`` is an instance of its `Config` dataclass."""

    name: ClassVar[str]
    Config: ClassVar[type[Any]]  # Frozen dataclass of the method's options; each field documented with its unit

    def kind(self, sampler: Sampler) -> DraftKind:
        """What `propose` may return for a request with these sampling parameters; decides the verification rule. The
        default, deterministic trees, is lossless for every drafter; one that samples accepts more if it says so."""
        return DraftKind()

    @property
    def depth(self) -> int | None:
        """Most tokens on one path, where that is not the option `num_speculative_tokens`."""
        return None

    @property
    def requires(self) -> frozenset[Boundary]:
        """The layer boundaries whose hidden states the drafter reads."""
        return frozenset()

    @property
    def watches(self) -> bool:
        """Whether `observe` is wanted for every row that the drafter is shown, not only for those it drafted for."""
        return False

    @property
    def top_ids(self) -> int:
        """How many ids a node `observe` asks `scores.top_ids` for: read from the device with all else, if said here."""
        return 0

    @property
    def remembers(self) -> bool:
        """Whether a row's state is kept when its answer has ended, for the next prompt that begins like it.

        The row is then not freed but, later, truncated: to the common beginning, or to 0. Worth it where reading a text
        is dear; where hidden states are read, a prefix that the target does not run again can be had in no other way.
        """
        return bool(self.requires)

    @property
    def trainable(self) -> Any:
        """The causal LM whose weights online adaptation may exchange between steps; None: there is nothing to train.
        Such a drafter computes a row anew that is truncated to 0 and then extended by less than the whole text."""
        return None

    def extend(self, context: DraftContext) -> None:
        """Rows gained committed tokens: a prompt (chunk), a reused prefix, or the accepted path and the next token."""

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        """A tree for each row within the budget; may be its root alone, see `DraftContext.trees`."""
        raise NotImplementedError

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        """Learn and count from what the target said; changes no draft that was already made. ``scores.trees[i]`` is the
        tree of row i that was really scored, which may hold fewer nodes than were proposed."""

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Rows shrink to this many committed tokens (preemption, prefix reuse); 0 frees the row."""

    def memory_bytes(self) -> int:
        """Bytes that the drafter holds, weights and caches."""
        return 0


class Wrapper(Drafter):
    """A drafter around another one: what it does not override, it passes on."""

    drafter: Drafter

    def kind(self, sampler: Sampler) -> DraftKind:
        return self.drafter.kind(sampler)

    @property
    def depth(self) -> int | None:
        return self.drafter.depth

    @property
    def requires(self) -> frozenset[Boundary]:
        return self.drafter.requires

    @property
    def watches(self) -> bool:
        return self.drafter.watches

    @property
    def top_ids(self) -> int:
        return self.drafter.top_ids

    @property
    def remembers(self) -> bool:
        return self.drafter.remembers

    def extend(self, context: DraftContext) -> None:
        self.drafter.extend(context)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        return self.drafter.propose(context, budget)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        self.drafter.observe(context, verdicts, scores)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.drafter.truncate(rows, lengths)

    def memory_bytes(self) -> int:
        return self.drafter.memory_bytes()


def changed(sampler: Sampler, **params: Any) -> Sampler:
    """The sampler with some other sampling parameters."""
    words = sampler.bad_words
    return Sampler(
        replace(sampler.params, **params), sampler.prompt, banned_until_min=sampler.banned_until_min, bad_words=words
    )


class Seeds:
    """Shows sampled requests that have a seed as if they were greedy: what is drafted for them is deterministic.

    What drafters learn, and who is asked for how much, depends on other requests and on the clock. Sampled drafts show
    that in the text; deterministic ones are walked, and the text for a seed is plain decoding's. Without `hide` every
    context is shown as it is.
    """

    def __init__(self, *, hide: bool) -> None:
        self._hide = hide
        self._greedy = WeakKeyDictionary[Sampler, Sampler]()

    def hidden(self, context: DraftContext) -> DraftContext:
        """The context as a drafter is to see it when it proposes."""
        seen = [self.seen(sampler) for sampler in context.samplers]
        same = all(one is other for one, other in zip(seen, context.samplers, strict=True))
        return context if same else replace(context, samplers=seen)

    def seen(self, sampler: Sampler) -> Sampler:
        """The sampler as a drafter is to see it."""
        # Nobody asked for the same text again, or it is the same whatever is drafted.
        if not self._hide or sampler.greedy or sampler.params.seed is None:
            return sampler
        if sampler not in self._greedy:
            self._greedy[sampler] = changed(sampler, temperature=0.0)
        return self._greedy[sampler]
