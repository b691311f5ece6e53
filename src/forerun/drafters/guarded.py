"""`Guarded` isolates the engine from a drafter's errors: a drafter that fails loses its drafts, but no request fails.
`Deferred` also delays a drafter's work until a proposal is needed.

Engine, step, policy and combined drafters call a drafter only through `Guarded`. When any call fails for a row, the
drafter's state of that row is unknown, so the row is closed to it: the drafter reads nothing more of the row, and its
drafts for the row are empty, until the row is freed and reused.

Two faults are not caught: a drafter that never returns, and one that writes into the target's own cache.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from forerun.core.sampling import Sampler
from forerun.core.tree import Resume, TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup, make_repeatable, warn_drafter
from forerun.decode.scores import Scores
from forerun.drafters import build
from forerun.errors import ArgumentError, InvalidDraftError, of_the_process
from forerun.model import Target
from forerun.model.layers import check_boundaries
from forerun.types import Boundary, Budget, DraftKind, Drawn, Verdict

T = TypeVar("T")


class Guarded(Drafter):
    """Wraps a drafter so that it neither raises nor proposes an invalid draft, and counts its failures. The properties
    of the inner drafter (`depth`, `requires`, `watches`, ...) are read once, here; `method` is its name in messages.

    Raises:
        ArgumentError: a property is invalid, so it is unknown what the drafter needs.
    """

    name = "guarded"
    depth: int | None = None
    requires: frozenset[Boundary] = frozenset()
    top_ids: int = 0
    remembers: bool = False

    def __init__(self, drafter: Drafter, method: str, setup: DrafterSetup) -> None:
        self.drafter, self.method = drafter, method
        self.failed = False  # The drafter has failed since this was last set to False
        self._target, self._failures = setup.target, setup.failures
        self._closed = set[int]()
        self._owed = 0  # Failures that belong to no row; counted for the next row that it drafts for
        self.depth = self._read_property("depth", int | None, "a number of tokens or None")
        self.requires = frozenset(self._read_property("requires", Set, "a set of layer boundaries"))
        self._watches = self._read_property("watches", bool, "True or False")
        self.top_ids = self._read_property("top_ids", int, "a number of ids")
        self.remembers = self._read_property("remembers", bool, "True or False")

    def _read_property(self, name: str, kind: Any, expected: str) -> Any:
        """Return a property of the inner drafter. Raises ArgumentError, which names both, if that fails, if it is of
        another kind, or if the target has no such layer boundary.
        """
        try:
            value = getattr(self.drafter, name)
            if not isinstance(value, kind):
                raise TypeError(f"expected {expected}, got {value!r}")
            if kind is Set and value:
                check_boundaries(value, self._target.num_layers)
        except BaseException as error:
            if of_the_process(error):
                raise
            raise ArgumentError(f"drafter {self.method!r} cannot be used: its property {name}: {error!r}") from error
        return value

    @classmethod
    def build(cls, method: str, options: Mapping[str, Any], setup: DrafterSetup, **own: Any) -> Self:
        """Build a registered drafter with these options. Raises as `forerun.drafters.build` does."""
        return cls(build(method, options, setup), method, setup, **own)

    @property
    def watches(self) -> bool:
        return self._watches

    def wrap(self, around: Callable[[Drafter], Drafter]) -> None:
        """Replace the inner drafter by a wrapper around it."""
        self.drafter = around(self.drafter)

    def extend(self, context: DraftContext) -> None:
        """Pass committed tokens on, with only those hidden states that the drafter requires. A closed row is opened
        again if a new text begins.
        """
        for row, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            if row in self._closed and fresh >= len(tokens):
                Guarded.truncate(self, [row], [0])  # This failed, or was skipped, when the row became free
        if places := self._open(context):
            part = self._narrow(context, places)
            with self._guarding(part.rows, "to read committed tokens"):
                self.drafter.extend(part)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        """Return the drafter's trees where they are valid, and empty ones for all other rows."""
        places = self._open(context)
        trees = self._propose_for(context, places, budget) if places else {}
        return [trees.get(place) or TokenTree(tokens[-1]).seal() for place, tokens in enumerate(context.tokens)]

    def _propose_for(self, context: DraftContext, places: Sequence[int], budget: Budget) -> dict[int, TokenTree]:
        """Return the valid part of the trees for these rows, by index."""
        trees = dict[int, TokenTree]()
        nodes, depths = (tuple([values[place] for place in places]) for values in (budget.nodes, budget.depth))
        part = replace(self._narrow(context, places), failures={})  # Guards of inner drafters report theirs separately
        with self._guarding(part.rows, "to propose"):
            proposed = self.drafter.propose(part, Budget(nodes=nodes, depth=depths))
            if not isinstance(proposed, list | tuple) or len(proposed) != len(places):
                got = f"{len(proposed)}" if isinstance(proposed, list | tuple) else type(proposed).__name__
                raise InvalidDraftError(
                    f"a drafter proposes a list of {len(places)} TokenTrees, one for each row; got {got}"
                )
            for row, error in part.failures.items():
                self.fail([row], "to propose", error)
            for place, tree, most, deepest in zip(places, proposed, nodes, depths, strict=True):
                checked = check(tree, context.tokens[place][-1], most, deepest, self._target)
                trees[place] = checked.tree
                if checked.error is not None:
                    self.fail([context.rows[place]], "to propose", checked.error)
        return trees

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        if places := self._open(context):
            part = self._narrow(context, places)
            with self._guarding(part.rows, "to learn from a step"):
                self.drafter.observe(part, [verdicts[place] for place in places], scores.of(places))

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Truncate rows; those that become free are opened again."""
        affected = {row: n for row, n in zip(rows, lengths, strict=True) if n == 0 or row not in self._closed}
        with self._guarding(list(affected), "to forget"):
            if affected:
                self.drafter.truncate(list(affected), list(affected.values()))
            self._closed.difference_update(row for row, length in affected.items() if length == 0)

    def grow(self, rows: int, slots: int) -> None:
        """Let the drafter make room. If that fails, the rows that it has no room for fail one by one later."""
        with self._guarding([], "to make room"):
            self.drafter.grow(rows, slots)

    def reread(self) -> None:
        """Let the drafter rebuild what it derives from the target's weights."""
        with self._guarding([], "to read the target's weights"):
            self.drafter.reread()

    def memory_bytes(self) -> int:
        """Return the drafter's `memory_bytes`; 0 if that is not valid."""
        return max(0, self._ask("memory_bytes()", self.drafter.memory_bytes, 0))

    def kind(self, sampler: Sampler) -> DraftKind:
        """Return the drafter's `kind`, or a kind that is safe for any draft if that is not a `DraftKind`."""
        return self._ask("kind()", partial(self.drafter.kind, sampler), DraftKind())

    def fail(self, rows: Sequence[int], task: str, error: BaseException) -> None:
        """Warn of a failure, count it for each of these rows, and close the rows."""
        warn_drafter(self.method, task, error)
        self.failed = True
        self._closed.update(rows)
        self._failures.update(rows)

    # --- failures ---------------------------------------------------------------------------------------------------

    def _open(self, context: DraftContext) -> list[int]:
        """Return the indices of the context's rows that are not closed."""
        places = [place for place, row in enumerate(context.rows) if row not in self._closed]
        if places and self._owed:
            self._failures[context.rows[places[0]]] += self._owed
            self._owed = 0
        return places

    def _narrow(self, context: DraftContext, places: Sequence[int]) -> DraftContext:
        part = context.of(places)
        if part.hidden_states.keys() <= self.requires:
            return part
        return replace(
            part, hidden_states={key: states for key, states in part.hidden_states.items() if key in self.requires}
        )

    @contextmanager
    def _guarding(self, rows: Sequence[int], task: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if of_the_process(error):
                raise
            self.fail(rows, task, error)

    def _ask(self, name: str, ask: Callable[[], T], otherwise: T) -> T:
        """Return the result of a call that concerns no particular row. If that fails, or is of another type than
        `otherwise`, a failure is counted for the next row.
        """
        try:
            answer = ask()
            if not isinstance(answer, type(otherwise)):
                raise TypeError(f"expected {type(otherwise).__name__}, got {answer!r}")
            return answer
        except BaseException as error:
            if of_the_process(error):
                raise
            warn_drafter(self.method, f"to answer {name}", error)
            self._owed += 1
            return otherwise


# --- put off until it is asked ----------------------------------------------------------------------------------------

_MOST_STATES = 512  # Most deferred hidden states of a row, in tokens; more if those of all rows fit into `_MOST_BYTES`
_MOST_BYTES = 2**26  # States that exceed both limits are passed on at once, so that memory stays bounded


class Deferred(Guarded):
    """A guarded drafter whose `extend` is deferred until the next proposal, so that a drafter that is not queried costs
    almost nothing. Tokens and hidden states are kept, and passed on in one call before the next proposal for their row.
    A drafter without hidden states, whose `extend` is cheap, gets the outcome of its own proposals at once.

    The context after the last proposals is kept as it is, because most of its rows are queried again in the next step;
    states are copied only for the other rows.
    """

    name = "deferred"

    def __init__(self, drafter: Drafter, method: str, setup: DrafterSetup, *, greedy_with_seed: bool = False) -> None:
        """Guard a drafter. With `greedy_with_seed` it drafts deterministically for sampled requests with a seed, see
        `make_repeatable`.
        """
        super().__init__(drafter, method, setup)
        self._greedy_with_seed, self._most_rows = greedy_with_seed, setup.rows
        self.idle = False  # It is not queried at present, and `watches` is False
        self._waiting: DraftContext | None = None  # Context after the last proposals, not passed on yet
        self._rows: dict[int, _DeferredRow] = {}

    def kind(self, sampler: Sampler) -> DraftKind:
        return super().kind(make_repeatable(sampler) if self._greedy_with_seed else sampler)

    def grow(self, rows: int, slots: int) -> None:
        super().grow(rows, slots)
        self._most_rows = rows

    @property
    def watches(self) -> bool:
        return self._watches and not self.idle

    def extend(self, context: DraftContext) -> None:
        self._flush(frozenset())
        now, waiting = list[int](), list[int]()
        reads = {boundary: states for boundary, states in context.hidden_states.items() if boundary in self.requires}
        each = sum(states.shape[-1] * states.element_size() for states in reads.values())
        most = max(_MOST_STATES, _MOST_BYTES // self._most_rows // max(1, each))
        for index, (row_id, tokens, fresh) in enumerate(zip(context.rows, context.tokens, context.fresh, strict=True)):
            row = self._rows.setdefault(row_id, _DeferredRow())
            new = min(fresh, len(tokens) - 1)
            at_once = row.held + new > most if reads else row.proposed
            if (at_once or row.proposed) and row.read == len(tokens) - fresh and not row.states:
                (now if at_once else waiting).append(index)
                continue
            self._defer(context, index)
            if at_once:
                self._pass_on([index], context)
        if waiting:
            self._waiting = context.of(waiting)
        if now:
            self._mark_read(context, now)
            super().extend(context.of(now))

    def unread(self, row: int, length: int) -> int:
        """Return how many of a row's `length` tokens the drafter has not read yet."""
        known = self._rows.get(row)
        return length - (known.read if known is not None else 0)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        limits = zip(context.rows, budget.nodes, budget.depth, strict=True)
        queried = [index for index, (_, nodes, depth) in enumerate(limits) if nodes > 0 and depth > 0]
        self.catch_up(context, queried)
        for index in queried:
            self._rows[context.rows[index]].proposed = True
        return super().propose(context.repeatable() if self._greedy_with_seed else context, budget)

    def catch_up(self, context: DraftContext, wanted: Sequence[int]) -> None:
        """Pass on the deferred tokens of these rows of the context."""
        rows = [self._rows.setdefault(context.rows[index], _DeferredRow()) for index in wanted]
        self._flush({context.rows[index] for index in wanted})
        late = [index for index, row in zip(wanted, rows, strict=True) if row.read < len(context.tokens[index])]
        if late:
            self._pass_on(late, context)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self._flush(frozenset())
        for row_id, length in zip(rows, lengths, strict=True):
            if length == 0:
                self._rows.pop(row_id, None)
            elif (row := self._rows.get(row_id)) is not None:
                keep = max(0, length - row.read - (row.read == 0))
                states = row.states.items() if keep else ()
                row.states = {boundary: [torch.cat(parts)[:keep]] for boundary, parts in states}
                row.held = min(row.held, keep)
                row.read, row.proposed = min(row.read, length), False
        super().truncate(rows, lengths)

    def _defer(self, context: DraftContext, index: int) -> None:
        """Defer one of the context's rows, with a copy of its states, since the context's tensors hold all rows."""
        row = self._rows[context.rows[index]]
        new = min(context.fresh[index], len(context.tokens[index]) - 1)
        reads = [(boundary, states) for boundary, states in context.hidden_states.items() if boundary in self.requires]
        for boundary, states in reads:
            row.states.setdefault(boundary, []).append(states[index, :new].clone())
        row.held += new if reads else 0
        row.proposed = False

    def _flush(self, wanted: Set[int]) -> None:
        """Pass on the outcome of the last proposals for these rows, and defer that of the others."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        now = [index for index, row in enumerate(waiting.rows) if row in wanted]
        for index, row in enumerate(waiting.rows):
            if row not in wanted:
                self._defer(waiting, index)
        if now:
            self._mark_read(waiting, now)
            super().extend(waiting.of(now))

    def _pass_on(self, late: Sequence[int], context: DraftContext) -> None:
        """Pass on everything that was deferred for these rows of the context."""
        rows = [self._rows[context.rows[index]] for index in late]
        fresh = [len(context.tokens[index]) - row.read for index, row in zip(late, rows, strict=True)]
        hidden_states = {
            boundary: pad_sequence([torch.cat(row.states[boundary]) for row in rows], batch_first=True)
            for boundary in self.requires
            if all(boundary in row.states for row in rows)
        }
        for row in rows:
            row.states.clear()
            row.held = 0
        self._mark_read(context, late)
        super().extend(replace(context.of(late), fresh=fresh, hidden_states=hidden_states))

    def _mark_read(self, context: DraftContext, indices: Sequence[int]) -> None:
        for index in indices:
            row = self._rows[context.rows[index]]
            row.read, row.proposed = len(context.tokens[index]), False


@dataclass(slots=True)
class _DeferredRow:
    read: int = 0  # Tokens that the drafter has read
    proposed: bool = False  # The outcome of a proposal has not been passed on yet
    states: dict[Boundary, list[Tensor]] = field(default_factory=dict)  # Deferred: (F, H) per boundary and call
    held: int = 0  # Tokens with deferred states


# --- what may be submitted --------------------------------------------------------------------------------------------

_ROUNDING = 1e-4  # A confidence, which is a quotient of float32 probabilities, may exceed 1 by this


class Checked(NamedTuple):
    """The result of checking one row's tree."""

    tree: TokenTree  # The nodes that may be submitted, read-only
    error: InvalidDraftError | None = None  # The reason why other nodes were removed


def check(tree: TokenTree, root: int, most: int, deepest: int, target: Target) -> Checked:
    """Check a drafter's tree: its nodes and probabilities, at most `most` nodes, and a depth of at most `deepest`."""
    try:
        sound = _sound(tree, root, target)
    except Exception as broken:
        unreadable = InvalidDraftError(f"a tree that cannot be read: {broken!r}; its columns are lists of numbers")
        return Checked(TokenTree(root).seal(), broken if isinstance(broken, InvalidDraftError) else unreadable)
    error = None
    if sound.size > most or max(sound.depths) > deepest:
        within = [node for node, depth in enumerate(sound.depths[: most + 1]) if 0 < depth <= deepest]
        error = InvalidDraftError(
            f"{sound.size} nodes, {max(sound.depths)} deep, exceed the budget of {most} nodes and {deepest} tokens "
            "on a path"
        )
        sound = sound.only(within)
    for node, confidence in enumerate(sound.confidence):
        if not 0 <= confidence <= 1 + _ROUNDING:
            error = error or InvalidDraftError(f"node {node} has confidence {confidence}; a probability is from 0 to 1")
            sound.confidence[node] = 0.0
    return Checked(sound.seal(), error)


def _sound(tree: TokenTree, root: int, target: Target) -> TokenTree:
    """Return a copy of the tree. Raises InvalidDraftError if it is not a valid tree; any other error means that its
    columns are not lists.
    """
    if not isinstance(tree, TokenTree):
        raise InvalidDraftError(f"a drafter proposes one TokenTree for each row, got {type(tree).__name__}")
    made = TokenTree(root)
    made.tokens, made.parents = list(map(operator.index, tree.tokens)), list(map(operator.index, tree.parents))
    made.drawn = [kind if type(kind) is Drawn else Drawn(kind) for kind in tree.drawn]
    made.confidence, made.probes = list(map(float, tree.confidence)), set(map(operator.index, tree.probes))
    size = len(made.tokens)
    if not size or any(len(column) != size for column in (made.parents, made.drawn, made.confidence)):
        lengths = [len(column) for column in (made.tokens, made.parents, made.drawn, made.confidence)]
        raise InvalidDraftError(f"tokens, parents, drawn and confidence of a tree have the lengths {lengths}")
    if made.tokens[0] != root:
        raise InvalidDraftError(f"the tree's root holds token {made.tokens[0]}; the last committed token is {root}")
    made.parents[0], made.drawn[0], made.confidence[0] = -1, Drawn.DETERMINISTIC, 1.0
    _check_nodes(made, target.vocab_size)
    if made.sampled:
        pairs = zip(made.parents, made.drawn, strict=True)
        sampled_below = sorted({parent for parent, kind in pairs if kind is not Drawn.DETERMINISTIC})
        made.draft_probs = {parent: _probs(tree, parent, target.vocab_size) for parent in sampled_below}
    made.masses = {node: float(mass) for node, mass in tree.masses.items() if node in made.draft_probs}
    if tree.resume is not None:
        _check_resume(tree.resume, made, target)
        made.resume = tree.resume
    return made


def _check_nodes(tree: TokenTree, vocabulary: int) -> None:
    depths, tokens = tree.depths, tree.tokens[1:]
    for node, parent in enumerate(tree.parents[1:], start=1):
        if not 0 <= parent < node:
            raise InvalidDraftError(
                f"node {node} has parent {parent}; a parent comes before its child (0..{node - 1}), 0 is the root"
            )
        depths.append(depths[parent] + 1)
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        node, token = next(one for one in enumerate(tokens, start=1) if not 0 <= one[1] < vocabulary)
        raise InvalidDraftError(f"node {node} holds token {token}, outside the vocabulary of {vocabulary}")
    for node in tree.probes:
        if not 0 < node < len(tree.tokens):
            raise InvalidDraftError(f"node {node} is a probe, but there are the drafted nodes 1..{tree.size}")
        if tree.drawn[node] is not Drawn.DETERMINISTIC:
            raise InvalidDraftError(
                "a node was sampled and is a probe; probe nodes are never accepted and must be deterministic"
            )


def _probs(tree: TokenTree, parent: int, vocabulary: int) -> Tensor:
    """Return the distribution that the sampled children of a node were drawn from, over the target's vocabulary."""
    probs = tree.draft_probs.get(parent)
    if probs is None:
        raise InvalidDraftError(f"node {parent} has sampled children, but the draft records no probs; see `set_probs`")
    if not isinstance(probs, Tensor) or not probs.is_floating_point() or probs.ndim != 1 or len(probs) > vocabulary:
        got = f"{probs.dtype} of the shape {tuple(probs.shape)}" if isinstance(probs, Tensor) else type(probs).__name__
        raise InvalidDraftError(
            f"the draft probs of node {parent} are {got}, expected floats of the shape (V,), V at most {vocabulary}"
        )
    return pad(probs, (0, vocabulary - len(probs))) if len(probs) < vocabulary else probs


def _check_resume(resume: Resume, tree: TokenTree, target: Target) -> None:
    states, boundary = resume.states, resume.boundary
    shape, size = tuple(states.shape), tree.size + 1
    fits = len(shape) == 2 and 1 <= shape[0] <= size and shape[1] == target.hidden_size
    if not fits or not 1 <= boundary <= target.num_layers or states.dtype is not target.dtype:
        raise InvalidDraftError(
            f"the draft resumes {states.dtype} states of the shape {shape} at boundary {boundary}, expected "
            f"{target.dtype} of (1..{size}, {target.hidden_size}), root first, at a boundary of 1..{target.num_layers}"
        )
