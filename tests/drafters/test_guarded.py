"""A row that a drafter has failed is closed to it until the row begins anew; all other rows keep what they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.core.sampling import Rng, Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.drafters.guarded import Deferred, Guarded
from forerun.types import Budget, CommittedTokens, SamplingParams, Source, Verdict

GREEDY = SamplingParams(temperature=0.0)


class Panic(BaseException):
    """What a library in Rust raises: no `Exception`."""


class Noting(Drafter):
    """Notes what it is asked, and fails in some of it."""

    name = "noting"

    def __init__(self, fails: Callable[[str, Sequence[int]], BaseException | None] = lambda *_: None) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.fails, self.reads, self.nodes = fails, 0, 1

    @property
    def requires(self) -> frozenset[int]:
        self.reads += 1
        return frozenset()

    def _note(self, verb: str, rows: Sequence[int]) -> None:
        self.calls.append((verb, list(rows)))
        if (error := self.fails(verb, rows)) is not None:
            raise error

    def extend(self, context: DraftContext) -> None:
        self._note("extend", context.rows)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        self._note("propose", context.rows)
        trees = context.trees()
        for row, tree in zip(context.rows, trees, strict=True):
            tree.add_path([row + 1] * self.nodes)
        return trees

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Any) -> None:
        assert [verdict.next_token for verdict in verdicts] == list(context.rows) == list(scores)
        self._note("observe", context.rows)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self._note("truncate", rows)


class Rows(list[int]):
    """Scores, as far as they are asked to be of some rows."""

    def of(self, members: Sequence[int]) -> Rows:
        return Rows(self[index] for index in members)


def guarded(drafter: Drafter) -> Guarded:
    target: Any = SimpleNamespace(vocab_size=10, num_layers=2)
    return Guarded(drafter, "noting", DrafterSetup(target=target, tokenizer=None, rows=4, slots=64))


def context(rows: Sequence[int], fresh: int = 1, length: int = 3) -> DraftContext:
    return DraftContext(
        rows=list(rows),
        tokens=[CommittedTokens(range(length)) for _ in rows],
        prompt_lengths=[1 for _ in rows],
        fresh=[fresh for _ in rows],
        samplers=[Sampler(GREEDY, [1]) for _ in rows],
        rng=[Rng(0, 3) for _ in rows],
        hidden_states={},
    )


def drafted(made: Guarded, rows: Sequence[int], nodes: int = 2) -> list[tuple[int, ...]]:
    """The tokens proposed for each row."""
    trees = made.propose(context(rows, fresh=0), Budget(nodes=[nodes] * len(rows), depth=[nodes] * len(rows)))
    return [tuple(tree.tokens[1:]) for tree in trees]


def observed(made: Guarded, rows: Sequence[int]) -> None:
    verdicts = [Verdict(path=(), next_token=row, kind=Source.TARGET) for row in rows]
    made.observe(context(rows), verdicts, Rows(rows))  # type: ignore[arg-type]


def counted(made: Guarded) -> dict[int, int]:
    return {row: count for row in range(4) if (count := made._failures.pop(row, 0))}


def in_verb(verb: str, error: BaseException) -> Callable[[str, Sequence[int]], BaseException | None]:
    """Row 2 has the drafter fail in this verb."""
    return lambda asked, rows: error if asked == verb and 2 in rows else None


@pytest.mark.parametrize("error", [RuntimeError("no"), Panic("no")], ids=["exception", "panic"])
@pytest.mark.parametrize("verb", ["extend", "propose", "observe", "truncate"])
def test_a_row_that_it_failed_is_closed_until_it_begins_anew(verb: str, error: BaseException) -> None:
    drafter = Noting(in_verb(verb, error))
    made = guarded(drafter)
    ask = {
        "extend": lambda rows: made.extend(context(rows)),
        "propose": lambda rows: drafted(made, rows),
        "observe": lambda rows: observed(made, rows),
        "truncate": lambda rows: made.truncate(rows, [2] * len(rows)),
    }
    ask[verb]([2])
    assert counted(made) == {2: 1} and made.failed
    drafter.fails = lambda *_: None
    drafter.calls.clear()
    made.extend(context([1, 2]))
    assert drafted(made, [2, 1]) == [(), (2,)]
    observed(made, [1, 2])
    made.truncate([2, 1], [2, 2])
    assert drafted(made, [2]) == [()]
    assert drafter.calls == [(name, [1]) for name in ("extend", "propose", "observe", "truncate")]
    made.truncate([2], [0])
    made.extend(context([2], fresh=3))
    assert drafted(made, [1, 2]) == [(2,), (3,)]
    assert not counted(made)


def test_a_row_that_could_not_be_freed_is_freed_before_the_next_text() -> None:
    drafter = Noting(in_verb("truncate", RuntimeError("no")))
    made = guarded(drafter)
    made.extend(context([2], fresh=3))
    made.truncate([2], [0])
    assert counted(made) == {2: 1}
    made.extend(context([2], fresh=3))
    assert counted(made) == {2: 1} and drafted(made, [2]) == [()], "it fails again, and the next text has no drafts"
    drafter.fails = lambda *_: None
    made.extend(context([2], fresh=1))
    assert drafted(made, [2]) == [()], "the text goes on, of which it knows nothing"
    drafter.calls.clear()
    made.extend(context([2], fresh=3))
    assert drafter.calls == [("truncate", [2]), ("extend", [2])]
    assert drafted(made, [2]) == [(3,)]


def test_what_is_wrong_in_one_row_costs_the_others_nothing() -> None:
    drafter = Noting()
    drafter.nodes = 2
    made = guarded(drafter)
    trees = made.propose(context([0, 1, 2], fresh=0), Budget(nodes=[2, 1, 2], depth=[2, 2, 2]))
    assert [tree.tokens[1:] for tree in trees] == [(1, 1), (2,), (3, 3)], "what was drawn first is submitted"
    assert counted(made) == {1: 1}
    assert drafted(made, [0, 1, 2]) == [(1, 1), (), (3, 3)]


def test_a_row_that_it_gives_up_itself_is_closed() -> None:
    class Giving(Noting):
        def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
            context.fail(0, ArithmeticError("NaN"))
            return super().propose(context, budget)

    made = guarded(Giving())
    assert drafted(made, [3, 1]) == [(4,), (2,)] and counted(made) == {3: 1}
    outer = context([0, 1], fresh=0)
    made.propose(outer, Budget(nodes=[2, 2], depth=[2, 2]))
    assert not outer.failures, "it is counted once, not again by whoever asked"


def test_what_it_says_of_itself_is_asked_once() -> None:
    drafter = Noting()
    made = guarded(drafter)
    drafted(made, [1, 2])
    assert (made.requires, made.watches, made.remembers, made.depth) == (frozenset(), False, False, None)
    assert drafter.reads == 2, "for itself and for `remembers`"


def test_one_that_cannot_say_what_it_reads_is_asked_for_nothing() -> None:
    class Mute(Noting):
        @property
        def requires(self) -> frozenset[int]:
            raise RuntimeError("no")

    drafter = Mute()
    made = guarded(drafter)
    made.extend(context([1, 2], fresh=3))
    assert drafted(made, [1, 2]) == [(), ()] and made.requires == frozenset()
    assert not drafter.calls
    counts = counted(made)
    assert counts.keys() == {1, 2} and not counted(made)
    made.truncate([1], [0])
    made.extend(context([1], fresh=3))
    assert counted(made) == {1: 1}, "the next answer goes without it, too"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), GeneratorExit()])
def test_what_ends_the_process_is_not_the_drafters(error: BaseException) -> None:
    made = guarded(Noting(in_verb("extend", error)))
    with pytest.raises(type(error)):
        made.extend(context([2]))


def test_committed_tokens_are_a_list_to_read() -> None:
    tokens = CommittedTokens([3, 1, 2])
    assert tokens == [3, 1, 2] and tokens[-2:] == [1, 2] and sorted(tokens) == [1, 2, 3]
    for copied in (list(tokens), tokens.copy(), tokens[:], replace(context([0]), tokens=[tokens]).tokens[0][:]):
        copied.append(4)  # type: ignore[attr-defined]
        assert copied == [3, 1, 2, 4] and tokens == [3, 1, 2]
    with pytest.raises(TypeError, match="to be read"):
        tokens.append(4)


def test_states_that_are_put_aside_keep_no_others_alive() -> None:
    """Of a step they are a view, of all rows and of the longest path; a row that waits for long keeps its own."""
    target: Any = SimpleNamespace(vocab_size=10, num_layers=2)
    made = Deferred(Reading(), "noting", DrafterSetup(target=target, tokenizer=None, rows=4, slots=64))
    for length in range(3, 9):
        step = context([0, 1, 2], length=length)
        made.extend(replace(step, hidden_states={1: torch.zeros(3, 7, 5)}))
    kept = [states for row in made._rows.values() for states in row.states[1]]
    assert len(kept) == 3 * 6 and sum(states.untyped_storage().nbytes() for states in kept) == 4 * 5 * len(kept)


class Reading(Noting):
    """Reads hidden states."""

    @property
    def requires(self) -> frozenset[int]:
        return frozenset({1})
