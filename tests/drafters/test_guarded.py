"""What a tree must be before it is scored, and rows that a drafter has failed, which are closed to it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.test_tree import contents, random_tree
from drafters.asking import contexts, trees_of
from forerun.certify.enumeration import Distributions, World, exact_distribution, toy_distributions
from forerun.core.rng import Rng
from forerun.core.rules import rule_named
from forerun.core.tree import Resume, TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.drafters.guarded import Checked, Deferred, Guarded, check
from forerun.errors import ArgumentError, InvalidDraftError
from forerun.types import Budget, CommittedTokens, Drawn, SamplingParams, Source, Verdict

ROOT = 7
TARGET: Any = SimpleNamespace(vocab_size=10, hidden_size=4, num_layers=3, dtype=torch.float32)


def nodes(tokens: Sequence[Any], parents: Sequence[Any], /, **columns: Any) -> TokenTree:
    """A tree with these nodes 1, 2, ..., whatever they are; `columns` hold the root, too."""
    tree = TokenTree(ROOT)
    tree.tokens, tree.parents = [ROOT, *tokens], [-1, *parents]
    tree.drawn *= len(tokens) + 1
    tree.confidence *= len(tokens) + 1
    for name, column in columns.items():
        setattr(tree, name, column)
    return tree


def sampled(probs: Any = None, **columns: Any) -> TokenTree:
    """One node that was sampled; `probs` instead of the distribution that it was drawn from."""
    recorded = {0: torch.full((10,), 0.1) if probs is None else probs}
    return nodes([1], [0], **{"drawn": [Drawn.DETERMINISTIC, Drawn.IID], "draft_probs": recorded, **columns})


def two() -> TokenTree:
    return nodes([1, 2], [0, 1])


def checked(tree: Any, *, most: int = 8, deepest: int = 8) -> Checked:
    return check(tree, ROOT, most, deepest, TARGET)


FLAWS: list[tuple[Any, str]] = [
    (nodes([1, 2], [0, 2]), r"node 2 has parent 2; a parent comes before its child \(0\.\.1\)"),
    (nodes([1, 2], [2, 1]), "node 1 has parent 2"),
    (nodes([1], [1]), "node 1 has parent 1"),
    (nodes([1], [-1]), "node 1 has parent -1"),
    (nodes([1, 10], [0, 1]), "node 2 holds token 10, outside the vocabulary of 10"),
    (nodes([-1], [0]), "node 1 holds token -1"),
    (nodes([1], [0], confidence=[1.0, float("nan")]), "confidence nan"),
    (nodes([1], [0], confidence=[1.0, -0.1]), "confidence -0.1"),
    (nodes([1], [0], confidence=[1.0, 1.01]), "a probability is from 0 to 1"),
    (sampled(probes={1}), "sampled and is a probe"),
    (nodes([1] * 9, list(range(9))), "9 nodes, 9 deep, exceed the budget of 8 nodes"),
    (None, "one TokenTree for each row, got NoneType"),
    ([1, 2], "one TokenTree for each row, got list"),
    (TokenTree, "one TokenTree for each row, got type"),
    (TokenTree(3), "the tree's root holds token 3; the last committed token is 7"),
    (nodes([1], []), r"have the lengths \[2, 1, 2, 2\]"),
    (nodes([1], [0], confidence=[1.0]), r"have the lengths \[2, 2, 2, 1\]"),
    (nodes([1], [0], drawn=[Drawn.DETERMINISTIC] * 3), r"have the lengths \[2, 2, 3, 2\]"),
    (nodes([], [], tokens=[], parents=[], drawn=[], confidence=[]), r"have the lengths \[0, 0, 0, 0\]"),
    (nodes([1.0], [0]), "a tree that cannot be read"),
    (nodes(["1"], [0]), "a tree that cannot be read"),
    (nodes([1], [None]), "a tree that cannot be read"),
    (nodes([1], [0], confidence=[1.0, "sure"]), "a tree that cannot be read"),
    (nodes([1], [0], probes={0.5}), "a tree that cannot be read"),
    (nodes([1], [0], tokens=None), "a tree that cannot be read"),
    (nodes([1], [0], drawn=[Drawn.DETERMINISTIC, 9]), "a tree that cannot be read.*9 is not a valid Drawn"),
    (nodes([1], [0], probes={2}), r"node 2 is a probe, but there are the drafted nodes 1\.\.1"),
    (nodes([1], [0], probes={0}), "node 0 is a probe"),
    (nodes([1], [0], drawn=[Drawn.DETERMINISTIC, Drawn.IID]), "node 0 has sampled children, but the draft records no"),
    (sampled([0.1] * 10), "the draft probs of node 0 are list, expected floats"),
    (sampled(torch.ones(1, 10)), r"float32 of the shape \(1, 10\), expected floats of the shape \(V,\)"),
    (sampled(torch.ones(10, dtype=torch.int64)), "int64 of the shape"),
    (sampled(torch.ones(())), r"float32 of the shape \(\)"),
    (sampled(torch.ones(11)), r"float32 of the shape \(11,\), expected .* V at most 10"),
    (sampled(draft_probs=[torch.ones(10)]), "a tree that cannot be read"),
    (sampled(masses={0: "one"}), "a tree that cannot be read"),
    (nodes([1], [0], resume=3), "a tree that cannot be read"),
]


class Proposing(Drafter):
    """Proposes what it was given."""

    name = "proposing"

    def __init__(self, found: Any) -> None:
        self.found = found

    def propose(self, context: DraftContext, budget: Budget) -> Any:
        return self.found


def proposed(found: Any, rows: int) -> tuple[list[TokenTree], list[int]]:
    """What the guard submits of a proposal for these rows, and how often it counted each as failed."""
    made = Guarded(Proposing(found), "proposing", DrafterSetup(target=TARGET, tokenizer=None, rows=rows, slots=64))
    trees = trees_of(made, [[1, ROOT]] * rows, nodes=8, depth=8)
    return trees, [made._failures.pop(row, 0) for row in range(rows)]


@pytest.mark.parametrize(("tree", "message"), FLAWS)
def test_a_tree_at_fault_says_what_is_wrong_and_costs_the_rows_beside_it_nothing(tree: Any, message: str) -> None:
    found = checked(tree)
    assert found.error is not None
    with pytest.raises(InvalidDraftError, match=message):
        raise found.error
    again = checked(found.tree)
    assert again.error is None and again.tree.tokens == found.tree.tokens, "what is left is sound"
    trees, failures = proposed([two(), tree, two()], 3)
    assert [one.tokens for one in trees] == [(ROOT, 1, 2), found.tree.tokens, (ROOT, 1, 2)] and failures == [0, 1, 0]


@pytest.mark.parametrize(
    ("found", "got"),
    [
        *((None, "NoneType"), (two(), "TokenTree"), ({0: two()}, "dict"), (iter([two()]), "list_iterator")),
        *(([], "0"), ([two(), two()], "2")),
    ],
)
def test_what_is_no_list_of_a_tree_a_row_is_refused(found: Any, got: str, caplog: pytest.LogCaptureFixture) -> None:
    trees, failures = proposed(found, 1)
    assert [tree.tokens for tree in trees] == [(ROOT,)] and failures == [1]
    assert f"a drafter proposes a list of 1 TokenTrees, one for each row; got {got}" in caplog.text


def test_a_tree_that_is_too_large_is_cut_to_what_was_drawn_first() -> None:
    wide = nodes([1, 2, 3], [0, 0, 1])
    narrow = [(two(), 1, 2, [1]), (two(), 2, 1, [1]), (two(), 0, 2, []), (two(), 2, 0, []), (two(), 2, 2, [1, 2])]
    cases = [*narrow, (wide, 3, 1, [1, 2]), (wide, 2, 2, [1, 2]), (wide, 3, 2, [1, 2, 3])]
    for tree, most, deepest, kept in cases:
        found = checked(tree, most=most, deepest=deepest)
        assert found.tree.tokens == (ROOT, *(tree.tokens[node] for node in kept))
        assert (found.error is None) == (len(kept) == tree.size)
        assert checked(found.tree, most=most, deepest=deepest).error is None


def test_a_confidence_that_is_none_does_not_decide_what_is_submitted() -> None:
    tree = nodes([1, 2, 3], [0, 1, 2], drawn=[Drawn.DETERMINISTIC, *[Drawn.IID] * 3])
    tree.confidence = [1.0, float("nan"), 0.5, 2.0]
    tree.draft_probs = {node: torch.full((10,), 0.1) for node in range(3)}
    found = checked(tree)
    assert found.error is not None
    assert found.tree.tokens == (ROOT, 1, 2, 3) and found.tree.confidence == (1.0, 0.0, 0.5, 0.0)
    assert set(found.tree.draft_probs) == {0, 1, 2}
    assert all(torch.equal(probs, tree.draft_probs[node]) for node, probs in found.tree.draft_probs.items())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0, 3, 12])
def test_what_is_built_is_accepted(seed: int, size: int) -> None:
    tree = random_tree(seed, size, 10)
    found = check(tree, tree.tokens[0], 12, 12, TARGET)
    assert found.error is None and contents(found.tree) == contents(tree)


def test_probs_over_the_first_tokens_mean_these() -> None:
    probs = checked(sampled(torch.tensor([0.25, 0.75]))).tree.draft_probs[0]
    assert probs.tolist() == [0.25, 0.75, *[0.0] * 8]


def _growing(distributions: Distributions, submitted: Callable[[TokenTree], TokenTree]) -> Callable[[Rng], TokenTree]:
    """Draws a chain of two, of three behind token 0, where the budget is two; `submitted` is what becomes of it."""

    def draw(rng: Rng) -> TokenTree:
        tree, path = TokenTree(0), tuple[int, ...]()
        while len(path) < (3 if path[:1] == (0,) else 2):
            tree.set_probs(len(path), distributions[path].float())
            tree.add(rng.drafted(distributions[path].float(), len(path)), len(path), drawn=Drawn.IID)
            path = (*path, tree.tokens[-1])
        return submitted(tree)

    return draw


@pytest.mark.parametrize("rule", ["block", "traversal", "token_rejection", "recursive_rejection"])
def test_a_cut_by_the_order_of_drawing_keeps_the_distribution(rule: str) -> None:
    """Exactly, though whether a tree is too large depends on what was drawn; to lose it as a whole would be a bias."""

    def cut(tree: TokenTree) -> TokenTree:
        return check(tree, 0, 2, 2, three).tree

    def lost(tree: TokenTree) -> TokenTree:
        return tree if tree.size <= 2 else TokenTree(0)

    three: Any = SimpleNamespace(vocab_size=3)

    for seed in range(3):
        target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=3, seed=seed)
        distribution = exact_distribution(rule_named(rule), target, _growing(draft, cut), horizon=3)
        assert distribution.error(target) < 1e-6, "distributions travel in float32"
        assert exact_distribution(rule_named(rule), target, _growing(draft, lost), horizon=3).error(target) > 1e-3


def test_what_is_submitted_is_a_copy_that_nobody_writes_to() -> None:
    tree = random_tree(3, 8, 10)
    found, before = check(tree, tree.tokens[0], 8, 8, TARGET).tree, contents(tree)
    tree.tokens[1], tree.parents[2] = (tree.tokens[1] + 1) % 10, 0
    tree.add(1, 0)
    tree.probes.add(1)
    tree.draft_probs.clear()
    assert contents(found) == before != contents(tree) and found.draft_probs
    writes = (lambda: found.tokens.__setitem__(1, 3), lambda: found.parents.append(0), lambda: found.probes.add(1))
    for write in (*writes, lambda: found.add(1, 0), lambda: setattr(found, "tokens", [1])):
        with pytest.raises((AttributeError, TypeError)):
            write()


def test_states_that_were_begun_fit_the_target() -> None:
    good = Resume(boundary=2, states=torch.zeros(3, 4), stamp=1)
    found = checked(nodes([1, 2], [0, 1], resume=good))
    assert found.error is None and found.tree.resume is good
    shapes = ((4, 4), (0, 4), (3, 5), (1, 3, 4))
    states = [*(torch.zeros(shape) for shape in shapes), torch.zeros(3, 4, dtype=torch.float64)]
    for wrong in (*({"states": one} for one in states), {"boundary": 0}, {"boundary": 4}):
        found = checked(nodes([1, 2], [0, 1], resume=replace(good, **wrong)))
        assert found.tree.size == 0
        with pytest.raises(InvalidDraftError, match="resumes"):
            raise found.error or AssertionError


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

    def of(self, members: Sequence[int]) -> "Rows":
        return Rows(self[index] for index in members)


def guarded(drafter: Drafter, kind: Any = Guarded) -> Any:
    target: Any = SimpleNamespace(vocab_size=10, num_layers=2)
    return kind(drafter, "noting", DrafterSetup(target=target, tokenizer=None, rows=4, slots=64))


def context(rows: Sequence[int], fresh: int = 1, length: int = 3) -> DraftContext:
    texts = [CommittedTokens(range(length)) for _ in rows]
    return replace(contexts(texts, fresh), rows=list(rows))


def drafted(made: Guarded, rows: Sequence[int], nodes: int = 2) -> list[tuple[int, ...]]:
    """The tokens proposed for each row."""
    trees = made.propose(context(rows, fresh=0), Budget(nodes=[nodes] * len(rows), depth=[nodes] * len(rows)))
    return [tuple(tree.tokens[1:]) for tree in trees]


def observed(made: Guarded, rows: Sequence[int]) -> None:
    verdicts = [Verdict(path=(), next_token=row, kind=Source.TARGET) for row in rows]
    made.observe(context(rows), verdicts, Rows(rows))


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


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        *(("requires", [1], "a set of layer boundaries"), ("requires", {9}, "no layer boundary 9")),
        *(("requires", {"one"}, "TypeError"), ("depth", 2.5, "a number of tokens or None")),
        *(("watches", "yes", "True or False"), ("remembers", None, "True or False"), ("top_ids", "3", "a number")),
        *(("depth", RuntimeError("no"), "no"), ("requires", Panic("no"), "Panic")),
    ],
)
def test_one_that_says_nothing_valid_of_itself_is_refused(name: str, value: Any, why: str) -> None:
    def told(_self: Drafter) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    with pytest.raises(ArgumentError, match=f"drafter 'noting' cannot be used: its property {name}: .*{why}"):
        guarded(type("Telling", (Noting,), {name: property(told)})())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), GeneratorExit()])
def test_what_ends_the_process_is_not_the_drafters(error: BaseException) -> None:
    made = guarded(Noting(in_verb("extend", error)))
    with pytest.raises(type(error)):
        made.extend(context([2]))


def test_committed_tokens_are_a_list_to_read() -> None:
    tokens = CommittedTokens([3, 1, 2])
    assert tokens == [3, 1, 2] and tokens[-2:] == [1, 2] and sorted(tokens) == [1, 2, 3]
    for copied in (list(tokens), tokens.copy(), tokens[:], replace(context([0]), tokens=[tokens]).tokens[0][:]):
        copied.append(4)
        assert copied == [3, 1, 2, 4] and tokens == [3, 1, 2]
    writes: dict[str, tuple[Any, ...]] = {
        **{"append": (4,), "extend": ([1],), "insert": (0, 1), "remove": (3,), "__setitem__": (slice(0, 1), [])},
        **{"__delitem__": (0,), "__iadd__": ([1],), "__imul__": (2,)},
        **dict.fromkeys(("pop", "clear", "sort", "reverse"), ()),
    }
    for name, arguments in writes.items():
        with pytest.raises(TypeError, match="to be read"):
            getattr(tokens, name)(*arguments)


def test_states_that_are_put_aside_keep_no_others_alive() -> None:
    """Of a step they are a view, of all rows and of the longest path; a row that waits for long keeps its own."""
    made = guarded(Reading(), Deferred)
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
