"""`Sequences` lets a lookup drafter draft for an engine that runs the target itself and tells no
request ids.

Rows are recognised by the tokens they hold; where the engine tells what a request asks of its drafts, no row is taken
for another request's with the same text. How much to draft is decided by the same policy as in
forerun's own engine; the time from one call to the next counts as that of a step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from forerun.control.config import SpeculativeConfig, arms_of
from forerun.control.costs import Nominal
from forerun.control.policy import Policy, policy_for
from forerun.core.rules import walk
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DrafterSetup, warn_drafter
from forerun.decode.row import Row
from forerun.decode.step import Emitted, context_for, propose_trees
from forerun.deploy import COPYING, check_plugged, list_methods, reads_text_alone
from forerun.drafters import AUTO, check_options, drafter_class
from forerun.drafters.combined.composed import options_of
from forerun.drafters.guarded import Guarded
from forerun.drafters.lookup.base import LookupDrafter
from forerun.drafters.lookup.batch import DEPTH, END, NODES, ROW, START, WORK, Longs
from forerun.drafters.lookup.drafts import NONE, Ints, compiled
from forerun.errors import ArgumentError, of_the_process
from forerun.model import Target
from forerun.types import Budget, SamplingParams, StepTrace
from forerun.writing import read_object

_BLOCK = 64  # Tokens that are compared before a difference is looked for: without branches, so several at a time


class RecognisedRows(NamedTuple):
    """The known text that each of the B rows of a step goes on with."""

    work: Longs  # (WORK, B): the place of each as its ROW, and where its new tokens are in `KnownRows.tokens`
    gone: list[int]  # Places of texts that no row goes on with; a new text may have one of them now
    new: list[int]  # Which of the B rows are texts that begin now


class KnownRows:
    """The texts of all rows.

    A row that goes on with a known text is that sequence, wherever it stands now: two rows that
    hold the same are the same to a drafter, too.
    """

    def __init__(self, rows: int) -> None:
        self._known = _Known(
            np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32), np.arange(rows), np.zeros((2, rows), np.int64)
        )
        self._running = 0  # Rows of the last step
        self.recognise(np.zeros((0, 1), np.int32), np.zeros(0, np.int32))  # Has it compiled

    @property
    def tokens(self) -> Ints:
        """Return all texts in one array, (R * W,), with space for W tokens each."""
        return self._known.held.reshape(-1)

    def recognise(self, table: Ints, lengths: Ints) -> RecognisedRows:
        """Take in the rows of a step, ``table[i, : lengths[i]]``; AssertionError for more rows than
        were announced.
        """
        rows = len(lengths)
        known = self._known
        assert rows <= len(known.sizes), "more rows than the engine said"
        work = np.zeros((WORK, rows), np.int64)
        gone, new = _recognise(tuple(known), self._running, table, lengths, work)
        if gone < 0:
            self._known = known = self._widen(2 * -gone)
            gone, new = _recognise(tuple(known), self._running, table, lengths, work)
        self._running = rows
        lost, begun = known.changes
        return RecognisedRows(work, lost[:gone].tolist() if gone else [], begun[:new].tolist() if new else [])

    @property
    def width(self) -> int:
        """Return the space for a text, tokens."""
        return int(self._known.held.shape[1])

    def clear(self) -> None:
        """Forget all rows."""
        self._known.sizes[:] = 0
        self._running = 0

    def _widen(self, width: int) -> _Known:
        known = self._known
        held = np.zeros((len(known.sizes), width), np.int32)
        for place, size in enumerate(known.sizes.tolist()):
            held[place, :size] = known.held[place, :size]
        return known._replace(held=held)


class _Known(NamedTuple):
    held: Ints  # (R, W) the text of each place, with room to grow
    sizes: Ints  # (R,) tokens of each; 0 of a free one
    order: Longs  # (R,) the places, those of the last step's rows first
    changes: Longs  # (2, R) room for what is gone, places, and for what is new, rows


@compiled
def _begins(held: Ints, size: int, text: Ints, length: int) -> bool:
    """Return whether the text begins with the `size` tokens that are held."""
    if size > length:
        return False
    for done in range(0, size, _BLOCK):  # From the end: many texts begin alike
        first, last = max(0, size - done - _BLOCK), size - done
        mine = held[first:last]
        theirs = text[first:last]
        differs = 0
        for at in range(len(mine)):
            differs |= mine[at] ^ theirs[at]
        if differs != 0:
            return False
    return True


@compiled
def _place_rows(known: _Known, running: int, table: Ints, lengths: Ints, places: Longs) -> NDArray[np.bool_]:
    """Find the slot of each row, NONE for a new one; return which slots are left, (R,).

    A row that stayed where it was is found at once; another one is the longest text that it goes on
    with.
    """
    held, sizes, order = known.held, known.sizes, known.order
    free = np.ones(len(order), np.bool_)
    for row in range(len(lengths)):
        places[row] = NONE
        if row < running and _begins(held[order[row]], sizes[order[row]], table[row], lengths[row]):
            places[row] = order[row]
            free[order[row]] = False
    for row in range(len(lengths)):
        if places[row] != NONE:
            continue
        for slot in order[:running]:
            longest = free[slot] and (places[row] == NONE or sizes[slot] > sizes[places[row]])
            if longest and _begins(held[slot], sizes[slot], table[row], lengths[row]):
                places[row] = slot
        if places[row] != NONE:
            free[places[row]] = False
    return free


@compiled
def _recognise(all_known: Any, running: int, table: Ints, lengths: Ints, work: Longs) -> tuple[int, int]:
    """Fill ROW, START and END of `work` and `known.changes`; return how many texts are gone and how
    many rows are new.

    Where there is no space for the longest row, change nothing and return its length, negative.
    """
    known = _Known(*all_known)
    places = work[ROW]
    held, sizes, order = known.held, known.sizes, known.order
    longest = 0
    for length in lengths:
        longest = max(longest, length)
    if longest > held.shape[1]:
        return -longest, 0
    free = _place_rows(known, running, table, lengths, places)
    lost = 0
    new = 0
    for slot in order[:running]:
        if free[slot]:
            known.changes[0, lost] = slot
            lost += 1
            sizes[slot] = 0
    for row in range(len(lengths)):
        if places[row] == NONE:
            places[row] = np.argmax(free)
            known.changes[1, new] = row
            new += 1
            free[places[row]] = False
        slot, length = places[row], lengths[row]
        size, first = sizes[slot], slot * held.shape[1]
        work[START, row], work[END, row] = first + size, first + length
        held[slot, size:length] = table[row, size:length]
        sizes[slot], order[row] = length, slot
    at = len(lengths)
    for slot in range(len(order)):
        if free[slot]:
            order[at] = slot
            at += 1
    return lost, new


class DraftHints(NamedTuple):
    """The hints that a request brings for its drafts."""

    group: str | None = None  # What is learned of texts serves the requests of one group; None is one, too
    prediction: tuple[int, ...] = ()  # Token ids that the client expects as the completion


NO_HINTS = DraftHints()
Config = Mapping[str, Any] | str | SpeculativeConfig | None
TOKENS = "num_speculative_tokens"
_GREEDY = Sampler(SamplingParams(temperature=0.0), ())  # Copied tokens are deterministic, whatever the request samples


def read_options(variable: str) -> dict[str, Any]:
    """Return the drafter that an environment variable configures, ``suffix`` where it is not set.

    The variable holds JSON, or names a file with it. ArgumentError: no JSON object.
    """
    text = os.environ.get(variable) or "{}"
    if text.lstrip().startswith("{"):
        try:
            options: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise ArgumentError(f"{variable} is no JSON: {error}") from error
    else:
        options = read_object(
            Path(text).expanduser(), f"{variable} is neither a JSON object nor a file that holds one", ArgumentError
        )
    return {"method": "suffix", **options}


def read_fixed_config(variable: str, tokens: int) -> SpeculativeConfig:
    """Return the drafter that an environment variable configures, for an engine that scores as many
    drafted tokens at every step.

    `tokens` are scored for each request. ArgumentError: no drafter can draft that way.
    """
    options = {"num_speculative_tokens": tokens, "adaptive": False, **read_options(variable)}
    if options["method"] == AUTO or options["adaptive"] is not False:
        raise ArgumentError(
            f"{variable}: this engine scores as many tokens for each request at every step, so that nothing is "
            f"adaptive; leave adaptive out, and name a lookup drafter instead of {AUTO}"
        )
    return parse_config(options)


@dataclass(frozen=True, slots=True)
class ForeignTarget:
    """Everything known of a target that another engine runs."""

    vocab_size: int
    num_layers: int = 0
    computes_padding: bool = False

    def memory_bytes(self) -> int:
        """Return 1, because the size is unknown and no drafter here has weights to compare it with."""
        return 1


@dataclass(frozen=True, slots=True)
class _DraftedStep:
    """The drafts of a step, kept until it is known how the texts go on."""

    rows: Sequence[Row]
    lengths: Sequence[int]  # Their tokens then
    trees: Sequence[TokenTree]
    began: float  # s
    ended: float


class Sequences:
    """The rows of tokens that another engine keeps, with a drafter's drafts for
    them.

    What is in no row any more is forgotten; a request that was preempted is read again.
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
        predictions: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build the drafter and its policy.

        Args:
            config: as `LLM` takes it. Where it is ``adaptive``, a policy decides how much is drafted; how long the
                engine takes for a step it sees from when it is called.
            vocab_size: of the target.
            rows: most sequences at a time.
            slots: most tokens of one.
            nodes: most drafted tokens of one.
            tokenizer: of the target, for drafters that were made of texts.
            chains: the engine scores no trees; of each the best path is drafted.
            predictions: the engine hands on what requests bring, see `DraftHints`.
            clock: seconds.

        Raises:
            ArgumentError: the drafter, or one that it is made of, is none of `COPYING`, ``auto`` or a drafter outside
                of forerun that reads text alone.
        """
        parsed = parse_config(config, predictions=predictions)
        setup = DrafterSetup(
            target=cast("Target", ForeignTarget(vocab_size)), tokenizer=tokenizer, rows=rows, slots=slots
        )
        self._policy: Policy | None = None
        if parsed.adaptive:
            arms = [arm for arm in arms_of(parsed) if reads_text_alone(arm.method)]  # `auto` knows others
            self._policy = policy_for(
                arms, setup, nodes=nodes, costs=Nominal(), measure=True, chains=chains, clock=clock
            )
            self.drafters: list[Guarded] = [arm.drafter for arm in self._policy.arms]
        else:
            self.drafters = [Guarded.build(parsed.method, parsed.drafter_options, setup)]
        self._slots, self._nodes, self._chains, self._clock = slots, nodes, chains, clock
        self._known = KnownRows(rows)
        self._rows: dict[int, Row] = {}  # By the place where they are known
        self._hints: dict[int, DraftHints] = {}  # The same, of requests that bring any
        self._step: _DraftedStep | None = None
        inside = self.drafters[0].drafter if self._policy is None else None
        chained = isinstance(inside, LookupDrafter) and inside.kind(_GREEDY).chain
        self._lookup = cast("LookupDrafter[Any]", inside) if chained else None

    def chains(
        self, table: Ints, lengths: Ints, most: Longs, hints: Sequence[DraftHints] | None = None
    ) -> list[list[int]]:
        """Draft at most ``most[i]`` tokens to go on with ``table[i, : lengths[i]]``, prompt and
        answer so far, for each row.

        Of a tree the best path is taken. `ngram` and `suffix` without a policy draft for all rows
        in one go. A failure costs this step's drafts and is logged. `hints` are those of the rows; None: there are
        none.
        """
        if self._lookup is None:
            return [list(tree.tokens[1:]) for tree in self.trees(table, lengths, most, hints)]
        try:
            recognised = self._recognise_rows(table, lengths)
            begun = {
                int(recognised.work[ROW, index]): int(lengths[index]) for index in self._beginning(recognised, hints)
            }
            if recognised.gone:  # Also where a new text has the place: what was completed there is learned
                self._lookup.truncate(recognised.gone, [0] * len(recognised.gone))
            for place, length in begun.items():
                self._lookup.begin(place, _prompt(length), self._hints.get(place, NO_HINTS).group)
            recognised.work[NODES] = recognised.work[DEPTH] = most
            return self._lookup.chains(self._known.tokens, recognised.work)
        except BaseException as error:
            self._lose(error)
            return [[] for _ in lengths]

    def trees(
        self, table: Ints, lengths: Ints, most: Longs, hints: Sequence[DraftHints] | None = None
    ) -> list[TokenTree]:
        """Draft a tree of at most ``most[i]`` nodes to go on with ``table[i, : lengths[i]]``, for
        each row.

        It is the root alone for 0 nodes, and where something fails, as in `chains`.
        """
        try:
            return self._grow(table, lengths, most, hints)
        except BaseException as error:
            self._lose(error)
            return [TokenTree(int(text[length - 1])) for text, length in zip(table, lengths, strict=False)]

    def _grow(self, table: Ints, lengths: Ints, most: Longs, hints: Sequence[DraftHints] | None) -> list[TokenTree]:
        began = self._clock()
        rows, fresh = self._read_rows(table, lengths, hints)
        if self._policy is not None and self._step is not None:
            self._learn(self._policy, self._step, began)
        if grown := [index for index, count in enumerate(fresh) if count]:
            context = context_for(rows, grown, [fresh[index] for index in grown], {})
            for drafter in self.drafters:
                drafter.extend(context)
        trees = dict[int, TokenTree]()
        limits = [min(limit, self._nodes) for limit in most.tolist()]
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        self._step = None
        if drafting:
            chosen = [rows[index] for index in drafting]
            drafted = self._draft_trees(chosen, [limits[index] for index in drafting])
            trees = dict(zip(drafting, drafted, strict=True))
            self._step = _DraftedStep(chosen, [len(row.tokens) for row in chosen], drafted, began, self._clock())
        return [trees.get(index) or TokenTree(row.tokens[-1]) for index, row in enumerate(rows)]

    def _lose(self, error: BaseException) -> None:
        """Forget all rows, so that they are read again: after `error` it is unknown how much of
        each was read.

        The error is logged, or raised where it is the process's.
        """
        held = list(self._rows)
        self._known.clear()
        self._rows.clear()
        self._hints.clear()
        self._step = None
        if self._lookup is not None:
            self._lookup.clear()
        else:
            self._truncate(held)
        if of_the_process(error):
            raise error
        warn_drafter(self.drafters[0].method, "to propose", error)

    def _truncate(self, places: Sequence[int]) -> None:
        nothing = [0] * len(places)
        if self._policy is not None:
            self._policy.forget(places, nothing)
        else:
            self.drafters[0].truncate(places, nothing)

    def clear(self) -> None:
        """Forget all rows."""
        self.trees(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64))

    def _draft_trees(self, rows: list[Row], limits: list[int]) -> list[TokenTree]:
        if self._policy is None:
            context = context_for(rows, range(len(rows)), [0] * len(rows), {})
            trees = self.drafters[0].propose(context, Budget(nodes=tuple(limits), depth=tuple(limits)))
        else:
            for row in rows:
                row.tokens_left = max(1, self._slots - len(row.tokens))
            trees = self._policy.admit(propose_trees(rows, self._policy.plan(rows, range(len(rows)), limits)))
        if self._chains:
            trees = [tree if max(tree.depths) == tree.size else tree.only(tree.best_path()) for tree in trees]
        return trees

    def _learn(self, policy: Policy, step: _DraftedStep, now: float) -> None:
        """Tell the policy how the texts went on; the outcome for rows that have left is unknown."""
        running = {id(row) for row in self._rows.values()}
        gained = [row.tokens[length:] for row, length in zip(step.rows, step.lengths, strict=True)]
        if not all(gained) or not all(id(row) in running for row in step.rows):
            return
        draft_ms, verify_ms = 1e3 * (step.ended - step.began), 1e3 * (now - step.ended)
        policy.learn([_make_emitted(*outcome, draft_ms, verify_ms) for outcome in zip(step.trees, gained, strict=True)])

    def _recognise_rows(self, table: Ints, lengths: Ints) -> RecognisedRows:
        """Recognise the rows of a step."""
        return self._known.recognise(np.ascontiguousarray(table, np.int32), np.ascontiguousarray(lengths, np.int32))

    def _beginning(self, recognised: RecognisedRows, hints: Sequence[DraftHints] | None) -> list[int]:
        """Return which rows begin now: the new ones, and those that turn out to be other requests' than those that
        their text was known of; these are read from their first token on.
        """
        for place in recognised.gone:
            self._hints.pop(place, None)
        if hints is None and not self._hints:
            return recognised.new
        begun = set(recognised.new)
        for index, place in enumerate(recognised.work[ROW].tolist()):
            hint = NO_HINTS if hints is None else hints[index]
            if hint != self._hints.pop(place, NO_HINTS) and index not in begun:
                begun.add(index)
                recognised.work[START, index] = place * self._known.width
            if hint != NO_HINTS:
                self._hints[place] = hint
        return sorted(begun)

    def _read_rows(self, table: Ints, lengths: Ints, hints: Sequence[DraftHints] | None) -> tuple[list[Row], list[int]]:
        """Return each row and how many of its tokens are new; texts that no row holds any more are
        forgotten.
        """
        recognised = self._recognise_rows(table, lengths)
        begun = [int(recognised.work[ROW, index]) for index in self._beginning(recognised, hints)]
        if forgotten := [
            *recognised.gone,
            *(place for place in begun if place in self._rows and place not in recognised.gone),
        ]:
            self._truncate(forgotten)
            for place in forgotten:
                self._rows.pop(place, None)
        rows = list[Row]()
        fresh = list[int]()
        places = recognised.work[ROW]
        for text, length, place in zip(table, lengths.tolist(), places.tolist(), strict=False):
            if place not in self._rows:
                self._rows[place] = _row(place, length, self._hints.get(place, NO_HINTS))
            row = self._rows[place]
            fresh.append(length - len(row.tokens))
            row.commit(text[len(row.tokens) : length].tolist())
            rows.append(row)
        return rows, fresh


def _prompt(tokens: int) -> int:
    """Return how many of a new text's tokens are the prompt's: the target has completed it with one."""
    return max(1, tokens - 1)


def _make_emitted(tree: TokenTree, tokens: list[int], draft_ms: float, verify_ms: float) -> Emitted:
    """Build the engine's step result for a row from the text that it went on with."""
    walked = walk(tree, lambda node: tokens[tree.depths[node]] if tree.depths[node] < len(tokens) else -1)
    trace = StepTrace(
        step=0,
        position=0,
        drafter=None,
        rule="",
        nodes=(),
        path=walked.path,
        next_token=walked.next_token,
        kind=walked.kind,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        commit_ms=0.0,
    )
    return Emitted(tokens=tokens, sources=[], drafted=tree.size, depth=max(tree.depths), logprobs=None, trace=trace)


def _row(place: int, tokens: int, hint: DraftHints) -> Row:
    return Row(
        cache_salt=hint.group,
        prediction=hint.prediction,
        cache_row=place,
        tokens=[],
        prompt_length=_prompt(tokens),
        sampler=_GREEDY,
        seed=0,
        stop_ids=frozenset(),
        tokens_left=1,
    )


def parse_config(config: Config, *, predictions: bool = False) -> SpeculativeConfig:
    """Parse a plug-in's configuration; ArgumentError if no plug-in drafts by it, or an option is
    unknown or missing. `predictions` says that requests may bring some.
    """
    parsed = SpeculativeConfig.parse(config)
    if parsed is None:
        raise ArgumentError("no drafter is named; expected for example {'method': 'suffix'}")
    named = [*list_methods(parsed.named)]
    named += ["a model"] if parsed.method == AUTO and "model" in parsed.options else []
    for method in named:
        if not (reads_text_alone(method) or method == AUTO):
            raise ArgumentError(
                f"{method} needs the target's states or distributions, which a plug-in is not given; there are "
                f"{', '.join(COPYING)}, {AUTO}, and module:Class for one of your own without requires and "
                "observe"
            )
    if parsed.rule is not None:
        raise ArgumentError(f"the engine verifies a plug-in's drafts by its own rule: leave rule {parsed.rule!r} out")
    check_plugged(parsed.named, predictions=predictions)
    if parsed.method != AUTO and all(field.name != TOKENS for field in fields(drafter_class(parsed.method).Config)):
        parsed = replace(parsed, num_speculative_tokens=None)
    for arm in arms_of(parsed):
        _check_options(arm.method, arm.drafter_options)
    return parsed


def _check_options(method: str, given: Mapping[str, Any]) -> None:
    """Raise ArgumentError where an option of the drafter, or of one that it is made of, is unknown,
    missing or out of range.
    """
    for member in getattr(check_options(method, given), "drafters", ()):
        _check_options(*options_of("member", member))
