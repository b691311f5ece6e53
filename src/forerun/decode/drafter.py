"""The base class of drafters, and the context that they draft from."""

from __future__ import annotations

import logging
import re
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from forerun.core.acceptance import Acceptance, Evidence, Proposal
from forerun.core.rng import Rng
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError, find_place, nearest, refuse_below, warn_once
from forerun.types import Boundary, Budget, DraftKind, Drawn, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.decode.scores import Scores
    from forerun.model import Target

log = logging.getLogger(__name__)
_VALUES = re.compile(r"'[^']*'|[-+]?\b\d[\d.]*(e[-+]?\d+)?|\b(nan|inf)\b")  # What differs between failures of a kind
T = TypeVar("T")
DraftOf = TypeVar("DraftOf", bound=Proposal)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftContext:
    """Everything that a drafter may read, for the B rows that it drafts for together."""

    rows: Sequence[int]  # (B,) cache row of each sequence; constant during a sequence's life
    tokens: Sequence[Sequence[int]]
    """(B,) committed tokens, from the prompt to the root. `Drafter.extend` gets a long prompt in chunks: the tokens up
    to the end of a chunk. From a row's first proposal on the list is the same growing object.
    """
    prompt_lengths: Sequence[int]  # (B,) number of prompt tokens
    fresh: Sequence[int]  # (B,) number of last tokens that this drafter has not read yet; 0 in `Drafter.propose`
    samplers: Sequence[Sampler]  # (B,) applies each row's sampling parameters
    rng: Sequence[Rng]  # (B,) the only source of randomness
    hidden_states: Mapping[Boundary, Tensor]
    """The states that the drafter requires, (B, F, H), left aligned: for each fresh token, except a sequence's first,
    the state of the token *before* it. So entry i belongs to token ``len(tokens) - 1 - count + i``, where count is
    ``min(fresh, len(tokens) - 1)``, and the last entry to the token before the root.
    """
    predictions: Sequence[Sequence[int]] = ()  # (B,) token ids that each client predicted as the output; may be empty
    cache_salts: Sequence[str | None] = ()
    """(B,) the isolation domain of each row; requests without a salt share the domain None, which an empty sequence
    means for all rows. What is learned from a row may only change drafts for rows of its own domain, see `PerDomain`.
    """
    failures: dict[int, Exception] = field(default_factory=dict)  # Cache row -> reported error, see `fail`

    def salt(self, index: int) -> str | None:
        """Return the isolation domain of one of the B rows."""
        return self.cache_salts[index] if self.cache_salts else None

    def fail(self, index: int, error: Exception) -> None:
        """Report, inside `propose`, that nothing can be drafted for one of the B rows. The other rows keep their
        drafts, and the failure is counted.
        """
        self.failures.setdefault(self.rows[index], error)

    def trees(self) -> list[TokenTree]:
        """Return a tree with only the root for each row."""
        return [TokenTree(tokens[-1]) for tokens in self.tokens]

    def of(self, indices: Sequence[int]) -> DraftContext:
        """Return the context of some of its rows, in that order."""
        index = list(indices)
        if index == list(range(len(self.rows))):
            return self

        def pick(values: Sequence[Any]) -> Sequence[Any]:
            return [values[i] for i in index] if values else values

        hidden_states = {boundary: states[index] for boundary, states in self.hidden_states.items()}
        picked: dict[str, Any] = {name: pick(getattr(self, name)) for name in _BY_ROW}
        return replace(self, hidden_states=hidden_states, **picked)

    def repeatable(self) -> DraftContext:
        """Return the context with `make_repeatable` samplers, for texts that must not depend on learned state."""
        seen = [make_repeatable(sampler) for sampler in self.samplers]
        same = all(repeatable_sampler is other for repeatable_sampler, other in zip(seen, self.samplers, strict=True))
        return self if same else replace(self, samplers=seen)


_BY_ROW = ("rows", "tokens", "prompt_lengths", "fresh", "samplers", "rng", "predictions", "cache_salts")


class Drafted(Proposal):
    """A proposal to which nodes are added one by one, each with its estimated acceptance. The tree starts with its root
    only.
    """

    def __init__(self, tree: TokenTree, acceptance: Acceptance) -> None:
        super().__init__(tokens=tree.tokens, parents=tree.parents, acceptance=acceptance)
        self.tree = tree

    def add(self, token: int, parent: int, evidence: Evidence, drawn: Drawn = Drawn.DETERMINISTIC) -> int:
        """Add a token below `parent` and return its node; an existing deterministic node is not changed."""
        node = self.tree.add(token, parent, drawn=drawn, confidence=self.acceptance.estimate(*evidence))
        self.evidence.setdefault(node, evidence)
        return node


def check_least(method: str, config: object, **least: int) -> None:
    """Raise ArgumentError if an option of a configuration is below its minimum; None means no limit."""
    refuse_below(f"{method}: ", config, **least)


def check_share(method: str, config: object, name: str) -> None:
    """Raise ArgumentError if an option of a configuration is not in 0..1."""
    value = getattr(config, name)
    if not 0 <= value <= 1:
        raise ArgumentError(f"{method}: {name} must be in 0..1, got {value}")


def check_choice(method: str, config: object, name: str, values: Sequence[str]) -> None:
    """Raise ArgumentError, naming the nearest value, if an option of a configuration has none of the known values."""
    value = getattr(config, name)
    if value not in values:
        expected = f"one of {', '.join(values)}"
        raise ArgumentError(f"{method}: {name} is {expected}, got {value!r}.{nearest(str(value), values)}")


def warn_drafter(method: str, task: str, error: BaseException) -> None:
    """Warn, once per kind of failure, that a drafter failed, and where. It loses its drafts; no request fails. Failures
    that were raised at the same line are of one kind, and so are messages that differ in numbers or quoted words.
    """
    frames = traceback.extract_tb(error.__traceback__)
    kind = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else _VALUES.sub("", str(error))
    about = f"drafter {method} {task} {type(error).__name__} {kind}"
    warn_once(log, about, "drafter %r failed %s: %r%s", method, task, error, find_place(error))
    log.debug("drafter %r", method, exc_info=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSetup:
    """The arguments of a drafter, besides its own configuration."""

    target: Target
    tokenizer: PreTrainedTokenizerBase | None
    rows: int  # Cache rows of the engine
    slots: int  # Most tokens of one sequence, drafted ones included
    pass_ms: Callable[[int], float] | None = None
    """Milliseconds of the target's pass over one row by number of drafted nodes, measured at the first call. None: not
    known, and drafts are not shortened.
    """
    failures: Counter[int] = field(default_factory=Counter)  # By cache row: failures of drafters, members included


class Drafter:
    """The base of every drafter. Its methods do nothing, so that a drafter overrides only what it needs. A drafter is
    made with ``(config, setup)``, where ``config`` is an instance of its `Config` dataclass. Its properties are read
    once, when it has been made; one that is invalid refuses the request that names the drafter.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]]  # Frozen dataclass of the method's options; each field documented with its unit
    reads_layers: ClassVar[bool] = False  # True if it reads hidden states or runs layers of the target

    def kind(self, sampler: Sampler) -> DraftKind:
        """Return the kind of trees that `propose` may return for a request with these sampling parameters, which
        decides the verification rule. The default, deterministic trees, is lossless for every drafter; sampling
        drafters get more tokens accepted if they state their kind.
        """
        return DraftKind()

    @property
    def depth(self) -> int | None:
        """Most tokens on one path, or None if that is the option `num_speculative_tokens`."""
        return None

    @property
    def requires(self) -> frozenset[Boundary]:
        """Layer boundaries whose hidden states the drafter reads."""
        return frozenset()

    @property
    def watches(self) -> bool:
        """True if `observe` is called for all rows that the drafter reads, not only for those that it drafted for."""
        return False

    @property
    def top_ids(self) -> int:
        """Number of ids per node that `observe` reads by `scores.top_ids`. Declared here, they are part of the step's
        single read from the device.
        """
        return 0

    @property
    def remembers(self) -> bool:
        """True if a row's state is kept when its request has ended, for the next prompt with a common prefix. The row
        is then not freed but truncated later, to the common prefix or to 0. This pays if reading a text is slow.
        Drafters that read hidden states need it to reuse a prefix, because the target does not run cached tokens again.
        """
        return bool(self.requires)

    def extend(self, context: DraftContext) -> None:
        """Read committed tokens: a prompt or a chunk of it, a reused prefix, or the accepted path and the next
        token.
        """

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        """Return a tree for each row within the budget; it may consist of the root only, see `DraftContext.trees`."""
        raise NotImplementedError

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        """Learn from the target's verdicts and scores, without changing a draft that was already made.
        ``scores.trees[i]`` is the tree of row i that was scored, which may have fewer nodes than were proposed.
        """

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Shrink rows to this many committed tokens (preemption, prefix reuse); 0 frees the row."""

    def grow(self, rows: int, slots: int) -> None:
        """Make room for `rows` cache rows of at most `slots` tokens each, while the drafter has no row."""

    def reread(self) -> None:
        """Rebuild what is derived from the target's weights, which have changed, while the drafter has no row."""

    def fail(self, rows: Sequence[int], task: str, error: BaseException) -> None:
        """Report that what was drafted for these cache rows broke the contract. The engine calls a drafter through a
        guard, which then asks it for no more drafts of these rows; a drafter itself has nothing to do here.
        """
        warn_drafter(self.name, task, error)

    def memory_bytes(self) -> int:
        """Return the bytes of the drafter's weights and caches."""
        return 0


class LearningDrafter(Drafter, Generic[DraftOf]):
    """The base of drafters that learn their acceptance: each row's last draft is compared with the tokens that
    followed.
    """

    def __init__(self) -> None:
        self._drafted: dict[int, DraftOf] = {}

    def extend(self, context: DraftContext) -> None:
        for row, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            drafted = self._drafted.pop(row, None)
            if drafted is not None:
                drafted.learn(tokens[len(tokens) - fresh :])

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row in rows:
            self._drafted.pop(row, None)


_CHANGED = WeakKeyDictionary[Sampler, dict[tuple[Any, ...], Sampler]]()


def with_params(sampler: Sampler, **params: Any) -> Sampler:
    """Return the sampler with some other sampling parameters; cached, so that equal calls return the same object."""
    variants = _CHANGED.setdefault(sampler, {})
    key = tuple(params.items())
    if key not in variants:
        banned, words, other = sampler.banned_until_min, sampler.bad_words, replace(sampler.params, **params)
        variants[key] = Sampler(other, sampler.prompt, banned_until_min=banned, bad_words=words)
    return variants[key]


def make_repeatable(sampler: Sampler) -> Sampler:
    """Return the sampler that a drafter gets: a greedy one for a sampled request with a seed, else the same one. What
    drafters learn, and how much they draft, depends on other requests and on the clock, and would change the text of
    sampled drafts. Deterministic drafts are verified by walking, so the text for a seed is that of plain decoding.
    """
    seeded = not sampler.greedy and sampler.params.seed is not None
    return with_params(sampler, temperature=0.0) if seeded else sampler


class PerDomain(Generic[T]):
    """Learned state, separate for each isolation domain (cache salt). A draft reveals what its drafter has read,
    through a trace, the number of accepted tokens, or timing, so everything learned, counts included, is kept in one of
    these.

    Each domain has a memory, made by `make`. There are at most `most`; the least recently used one is dropped, because
    every new salt makes one. Their total size, by `size`, is at most `most_size`, but the last used one always stays.
    """

    def __init__(
        self, make: Callable[[], T], *, most: int = 256, size: Callable[[T], int] = lambda _: 0, most_size: int = 0
    ) -> None:
        self._make, self._most, self._size, self._most_size = make, most, size, most_size
        self._kept = OrderedDict[str | None, T]()

    def of(self, salt: str | None) -> T:
        """Return the memory of a domain, and mark it as the most recently used one."""
        if salt in self._kept:
            self._kept.move_to_end(salt)
        else:
            self._kept[salt] = self._make()
            self.trim()
        return self._kept[salt]

    def trim(self) -> None:
        """Drop domains beyond the limits. Callers that make a memory grow call this; `of` calls it for a new one."""
        kept = self._kept
        while len(kept) > 1 and (len(kept) > self._most or sum(map(self._size, kept.values())) > self._most_size):
            kept.popitem(last=False)

    def all(self) -> Iterable[T]:
        return self._kept.values()
