"""Lookahead and Jacobi: the published mask and positions, the published update, the pool's bounds, what is copied."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from contract.harness import PROMPT, Variant, as_prompts, llm
from drafters.asking import context
from forerun import SamplingParams
from forerun.core.tree import TokenTree, ancestor_mask
from forerun.drafters.self_drafting.lookahead import (
    JacobiConfig,
    JacobiDrafter,
    LookaheadConfig,
    LookaheadDrafter,
    Pool,
    Window,
)
from forerun.types import Budget, Source, Verdict

ROOMY = Budget(nodes=[200], depth=[64])
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


def lookahead(tokens: Sequence[int] = (), **options: Any) -> LookaheadDrafter:
    """A drafter that has read `tokens` in row 0."""
    made = LookaheadDrafter(LookaheadConfig(**options), setup=None)
    made.extend(context(tokens, len(tokens)))
    return made


def choice(path: Sequence[int]) -> int:
    """A stand-in for the target: some token for every path."""
    return hash(tuple(path)) % 997


@dataclass
class Choices:
    """A stand-in for `Scores`: what `choice` says after each node."""

    trees: list[TokenTree]

    def raw_argmax(self, index: int, node: int) -> int:
        tree = self.trees[index]
        return choice([tree.tokens[0], *(tree.tokens[step] for step in tree.path(node))])


def taught(
    made: LookaheadDrafter | JacobiDrafter, text: list[int], trees: list[TokenTree], emitted: Sequence[int]
) -> None:
    """The step that scored `trees` commits `emitted` to `text`."""
    text.extend(emitted)
    verdict = Verdict(path=tuple(range(len(emitted) - 1)), next_token=emitted[-1], kind=Source.BONUS)
    made.observe(context(text), [verdict], Choices(trees))
    made.extend(context(text, len(emitted)))


# --- mask and positions ---------------------------------------------------------------------------------------------

Cell = tuple[str, int, int]
"""("window", row, column) or ("guess", place in the guess, number of the guess); the last token is window (0, 0)."""


def sees(viewer: Cell, seen: Cell) -> bool:
    """The published mask, in the words of the sheet, for what stands behind the prompt."""
    kind, row, column = viewer
    other, other_row, other_column = seen
    if seen == ("window", 0, 0):
        return True
    if kind == "guess":
        return other == "guess" and other_column == column and other_row <= row
    if other == "guess":
        return False
    if other_row == 0:
        return other_column <= column
    return other_column == column and other_row <= row


def cells(window: int, level: int, guesses: int) -> list[Cell]:
    """The nodes in the order in which they are drafted, guesses first; no two guesses share a beginning here."""
    found: list[Cell] = [("window", 0, 0)]
    found += [("guess", place, guess) for guess in range(guesses) for place in range(level - 1)]
    found += [("window", 0, column) for column in range(1, window)]
    found += [("window", row, column) for column in range(window) for row in range(1, level - 1)]
    return found


@pytest.mark.parametrize("sizes", [(7, 5, 7), (3, 3, 3), (1, 4, 2), (5, 2, 1), (4, 6, 0)])
def test_mask_and_positions_are_the_published_ones(sizes: tuple[int, int, int]) -> None:
    window, level, guesses = sizes
    text = [5] * 20
    made = lookahead(text, window=window, level=level, guesses=max(guesses, 1), copy_text=False)
    for guess in range(guesses):
        made._rows[0].pool.add(5, tuple(100 + 10 * guess + place for place in range(level - 1)))
    (tree,) = made.propose(context(text), ROOMY)
    found = cells(window, level, guesses)
    wanted = torch.tensor([[sees(viewer, seen) for seen in found] for viewer in found])
    mask = ancestor_mask(torch.tensor([tree.parents[1:]]))[0]
    assert torch.equal(mask, wanted)
    positions = [row + column if kind == "window" else row + 1 for kind, row, column in found]
    assert (mask.sum(-1) - 1).tolist() == positions == tree.depths
    assert tree.probes == {node for node, (kind, _, _) in enumerate(found) if kind == "window" and node}


def test_guesses_share_their_beginnings_and_no_node_of_the_window() -> None:
    made = lookahead([5, 1, 2, 3], window=3, level=3, guesses=3, copy_text=False)
    for rest in ((1, 2), (1, 4), (6, 2)):
        made._rows[0].pool.add(3, rest)
    (tree,) = made.propose(context([5, 1, 2, 3]), ROOMY)
    accepted = [[tree.tokens[n] for n in tree.path(end)] for end in range(1, tree.size + 1) if end not in tree.probes]
    assert accepted == [[6], [6, 2], [1], [1, 4], [1, 2]], "the most recent n-gram first"


def test_the_window_shrinks_before_the_guesses() -> None:
    text = [1, 2, 3, 4, 5, 6] * 4
    counts = {}
    for nodes in (31, 15, 6):
        (tree,) = lookahead(text).propose(context(text), Budget(nodes=[nodes], depth=[64]))
        counts[nodes] = (tree.size - len(tree.probes), len(tree.probes))
    assert counts == {31: (4, 27), 15: (4, 11), 6: (3, 3)}, "(guesses, probes); a column is left room for"


# --- the window's update --------------------------------------------------------------------------------------------


class Naive:
    """The window as a table (row, absolute position), updated as the paper's figure shows it, new cells left out."""

    def __init__(self, columns: Sequence[Sequence[int]], base: int) -> None:
        self.base, self.level = base, len(columns[0]) + 1
        self.table = {(row, base + row + j): token for j, col in enumerate(columns) for row, token in enumerate(col)}

    def step(self, width: int, emitted: Sequence[int]) -> list[tuple[int, ...]]:
        """Score row N - 2, collect the n-grams along the diagonals, drop the oldest row; the n-grams."""
        newest, grams = self.level - 2, list[tuple[int, ...]]()
        for column in range(width):
            row_0 = [self.table[0, self.base + other] for other in range(column + 1)]
            own = [self.table[row, self.base + column + row] for row in range(1, newest + 1)]
            token = choice([*row_0, *own])
            self.table[newest + 1, self.base + column + newest + 1] = token
            grams.append((row_0[-1], *own, token))
        self.base += len(emitted)
        self.table = {(row - 1, place): token for (row, place), token in self.table.items() if row >= 1}
        self.table[0, self.base] = emitted[-1]
        return grams

    def agrees(self, columns: Sequence[Sequence[int]], kept: int) -> bool:
        """Whether the first `kept` columns hold what the table says."""
        cells = ((row, j, token) for j, column in enumerate(columns[:kept]) for row, token in enumerate(column))
        return all(self.table[row, self.base + row + j] == token for row, j, token in cells)

    def fill(self, columns: Sequence[Sequence[int]]) -> None:
        """Take over the columns that were begun anew."""
        for j, column in enumerate(columns):
            for row, token in enumerate(column):
                self.table.setdefault((row, self.base + row + j), token)


@pytest.mark.parametrize(("width", "level"), [(7, 5), (3, 3), (4, 2), (5, 7)])
def test_the_window_moves_as_published(width: int, level: int) -> None:
    rng, text = random.Random(width), [9, 8, 7, 6, 5, 4]
    made = lookahead(text, window=width, level=level, guesses=64, copy_text=False)
    trees = made.propose(context(text), ROOMY)
    window = made._rows[0].window
    naive, collected = Naive(window.columns, len(text)), set[tuple[int, ...]]()
    for _ in range(12):
        emitted = [rng.randrange(900) for _ in range(rng.choice([1, 1, 2, 3]))]
        collected |= set(naive.step(width, emitted))
        taught(made, text, trees, emitted)
        kept = width - len(emitted) + 1
        trees = made.propose(context(text), ROOMY)
        assert naive.agrees(window.columns, kept)
        naive.fill(window.columns)
    pool = made._rows[0].pool
    assert {(first, *rest) for first in pool._grams for rest in pool.after(first)} == collected


def test_a_tree_that_was_numbered_anew_or_cut_is_read_by_its_tokens() -> None:
    window = Window(level=3)
    window.fit([4, 5, 6], 3)
    planted, tree = TokenTree(6), TokenTree(6)
    window.plant(planted)
    tree.add(77, tree.add(99, 0))
    shift = tree.size
    for node in range(1, planted.size + 1):
        token, parent = planted.tokens[node], planted.parents[node]
        tree.add(token, parent + shift if parent else 0, probe=node in planted.probes)
    columns = [list(column) for column in window.columns]
    heads = [column[0] for column in columns]
    wanted = [choice([*heads[: j + 1], *column[1:]]) for j, column in enumerate(columns)]
    assert window.read(tree, lambda node: Choices([tree]).raw_argmax(0, node)) == wanted
    cut = tree.only(range(1, tree.size))
    assert window.read(cut, lambda node: Choices([cut]).raw_argmax(0, node)) == wanted[:2]


def test_a_window_that_was_not_scored_keeps_its_place() -> None:
    window = Window(level=3)
    window.fit([4, 5, 6], 5)
    before = [list(column) for column in window.columns]
    window.roll([], emitted=2)
    window.fit([4, 5, 6, 0, 1], 5)
    assert window.columns[0] == [1, before[2][1]]
    assert window.columns[1:3] == before[3:]


# --- the pool -------------------------------------------------------------------------------------------------------


def test_the_pool_forgets_what_was_seen_longest_ago() -> None:
    pool = Pool(per_key=2, keys=2)
    for first, rest in [(1, 10), (1, 11), (1, 10), (1, 12), (2, 20), (1, 12), (3, 30)]:
        pool.add(first, (rest,))
    assert pool.after(1) == [(12,), (10,)], "11 was the oldest"
    assert pool.after(2) == [], "2 was the oldest first token"
    assert pool.after(3) == [(30,)]


def test_the_pool_of_a_long_text_stays_within_its_bounds() -> None:
    rng = random.Random(0)
    text = [rng.randrange(60) for _ in range(5000)]
    made = lookahead(level=3, guesses=4, pool_keys=20)
    for end in range(50, len(text) + 1, 50):
        made.extend(context(text[:end], 50))
        assert sum(map(len, made._rows[0].pool._grams.values())) <= 20 * 4
    assert len(made._rows[0].pool._grams) == 20


def test_the_texts_own_n_grams_are_guessed_once_each() -> None:
    text = [1, 2, 3, 9, 9, 1]
    made = lookahead(text[:4], level=3)
    made.extend(context(text, 2))
    (tree,) = made.propose(context(text), ROOMY)
    assert [tree.tokens[node] for node in range(1, tree.size + 1) if node not in tree.probes] == [2, 3]
    assert sum(map(len, made._rows[0].pool._grams.values())) == 4


@pytest.mark.parametrize("shared", [False, True])
def test_a_freed_row_remembers_nothing_but_what_is_shared(shared: bool) -> None:
    made = lookahead([1, 2, 3, 4, 5, 1], level=3, shared_pool=shared)
    made.truncate([0], [0])
    assert not made._rows
    made.extend(context([1], 1))
    (tree,) = made.propose(context([1]), ROOMY)
    assert tree.size - len(tree.probes) == (2 if shared else 0)


# --- on a model -----------------------------------------------------------------------------------------------------


def test_scouts_count_neither_as_drafted_nor_as_depth() -> None:
    answer = llm(Variant("lookahead", "first", {"copy_text": False})).generate(as_prompts([PROMPT]), GREEDY, trace=True)
    first = answer[0].outputs[0].trace[0]
    assert first.kind is Source.TARGET, "nothing was guessed before the first pass"
    stats = answer[0].outputs[0].speculation
    assert stats.num_plain_steps >= 1
    assert len(stats.drafted_per_depth) <= 4


# --- Jacobi ---------------------------------------------------------------------------------------------------------


def test_a_jacobi_chain_is_the_targets_choice_after_the_last_one_moved_up() -> None:
    made = JacobiDrafter(JacobiConfig(num_speculative_tokens=4), setup=None)
    text = [3, 1, 4, 1, 5]
    trees = made.propose(context(text), ROOMY)
    chain = trees[0].tokens
    taught(made, text, trees, [chain[1], 70])
    refined = [choice(chain[: length + 1]) for length in range(len(chain))]
    assert made.propose(context(text), ROOMY)[0].tokens[1:4] == refined[2:]
