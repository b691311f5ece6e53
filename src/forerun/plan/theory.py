"""These formulas give what speculation brings: tokens per pass, speed-up, best draft length, best
tree, break-even batch.

They are those of Leviathan et al. (arXiv 2211.17192), where a pass over several nodes costs v(n)
passes over one, acceptance may differ by depth, and drafts may be trees. The token that the target
adds itself counts, so plain decoding is 1. **Survival** of a node is the probability that it is
accepted; of a chain, ``survival[d]`` is that of depth ``d + 1``.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.control.costs import DraftCost, PassCost
from forerun.core.acceptance import RankAcceptance, TreeNode, best_tree
from forerun.errors import ArgumentError

WORTH = 1.02  # Speed-ups below this are within what a measurement cannot tell from 1


def expected_tokens_per_pass(alpha: float, k: int) -> float:
    """Return Leviathan's E, (1 - alpha^(k+1)) / (1 - alpha): tokens per pass if `k` are drafted."""
    return tokens_of(geometric(alpha, k))


def geometric(alpha: float, k: int) -> list[float]:
    """Return the survival of a chain of `k` where every token is accepted with probability `alpha`:
    alpha, alpha^2, ...
    """
    _check_probabilities([alpha])
    if k < 1:
        raise ArgumentError(f"at least one token must be drafted (k >= 1), got k = {k}")
    return [alpha**depth for depth in range(1, k + 1)]


def survival_of(acceptance: Sequence[float]) -> list[float]:
    """Return survival from conditional acceptance by depth: the probability that depth d + 1 is
    accepted if depth d was.
    """
    _check_probabilities(acceptance)
    return list(itertools.accumulate(acceptance, lambda survival, rate: survival * rate))


def conditional_of(survival: Sequence[float]) -> list[float]:
    """Return conditional acceptance by depth from survival; 0 behind a depth that nothing survives."""
    before = [1.0, *survival[:-1]]
    return [now / then if then > 0 else 0.0 for now, then in zip(survival, before, strict=True)]


def stretch(survival: Sequence[float], k: int) -> list[float]:
    """Return the survival of the first `k` depths; beyond the known ones the last conditional
    acceptance rate goes on.
    """
    last, rate = (survival[-1], conditional_of(survival)[-1]) if survival else (0.0, 0.0)
    return [*survival, *(last * rate**step for step in range(1, k + 1))][:k]


def tokens_of(survival: Sequence[float]) -> float:
    """Return the expected tokens per pass: 1 (bonus or recovered token) + the survival of all nodes
    of a chain or tree.
    """
    return 1.0 + math.fsum(survival)


def alpha_of(tokens: float, k: int) -> float:
    """Return the alpha whose `expected_tokens_per_pass` is `tokens`; ArgumentError if `tokens` is
    not in 1 .. k + 1.
    """
    if k < 1 or not 1 <= tokens <= k + 1:
        raise ArgumentError(f"{k} drafted tokens give between 1 and {k + 1} tokens per pass, got {tokens}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens_per_pass(middle, k) < tokens else (low, middle)
    return (low + high) / 2


def break_even_batch(speedup: Callable[[int], float], *, most: int = 1024, worth: float = WORTH) -> int | None:
    """Return the largest batch at which `speedup` is at least `worth`; 0 where none gains, None
    where `most` still does.

    Powers of two are tried first, because a mixture of experts gains most at moderate batches.
    """
    powers = [1 << power for power in range(most.bit_length())]
    good = [batch for batch in powers if speedup(batch) >= worth]
    if not good:
        return 0
    if good[-1] == powers[-1]:
        return None
    low, high = good[-1], 2 * good[-1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if speedup(middle) >= worth else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeChoice:
    """A tree with its expected tokens and speed-up."""

    parents: tuple[int, ...]  # (K,) of each drafted node, numbered level by level; 0 is the root
    depth: int
    tokens: float
    speedup: float


def best_tree_size(
    acceptance: RankAcceptance,
    *,
    level_cost: float,
    verify: Callable[[int], float],
    nodes: int,
    depth: int,
    fixed_cost: float = 0.0,
) -> TreeChoice:
    """Return the fastest tree of up to `nodes` nodes and `depth` levels, empty for plain decoding.

    `verify` is v(n), root included. `fixed_cost` (of every draft) and `level_cost` (of each level)
    are in plain passes.
    """
    check_ranks(acceptance)
    best = TreeChoice(parents=(), depth=0, tokens=1.0, speedup=1.0)
    for levels in range(1, depth + 1):
        tree = best_tree(acceptance, nodes=nodes, depth=levels)
        tokens = 1.0
        reached = 0
        for size, node in enumerate(tree, start=1):
            tokens, reached = tokens + node.survival, max(reached, node.level)
            speedup = tokens / (fixed_cost + reached * level_cost + verify(size + 1) / verify(1))
            if speedup > best.speedup:
                best = TreeChoice(parents=_by_level(tree[:size]), depth=reached, tokens=tokens, speedup=speedup)
    return best


def _by_level(tree: Sequence[TreeNode]) -> tuple[int, ...]:
    """Return the (K,) parents of the nodes, renumbered level by level, siblings side by side, as
    drafters take them.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for node, entry in enumerate(tree, start=1):
        children[entry.parent].append(node)
    parents = list[int]()
    order = [0]
    for number, node in enumerate(order):  # which grows
        parents += [number] * len(children[node])
        order += children[node]
    return tuple(parents)


def check_ranks(acceptance: RankAcceptance) -> None:
    """Raise ArgumentError unless each depth's ranks are probabilities that do not rise and sum to at most 1."""
    if not acceptance or not all(acceptance):
        raise ArgumentError("acceptance by rank needs at least one rank at each depth")
    for line in acceptance:
        _check_probabilities(line)
        if list(line) != sorted(line, reverse=True) or math.fsum(line) > 1 + 1e-9:
            raise ArgumentError(f"acceptance by rank must not rise and sum to at most 1, got {list(line)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedPrediction:
    """Tokens per pass, speed-up and step times of one configuration."""

    tokens_per_pass: float  # Mean over all passes, those without a draft included; plain decoding is 1
    speedup: float  # Over plain decoding of the same rows
    step_ms: float  # Mean wall time of a step
    plain_ms: float  # Wall time of a plain step


def predict(
    cost: PassCost,
    *,
    acceptance_per_depth: Sequence[float],
    draft: DraftCost,
    depth: float,
    nodes: float,
    rows: int = 1,
    context: int = 0,
    coverage: float = 1.0,
) -> SpeedPrediction:
    """Predict the speed-up from measured acceptance and measured costs. ArgumentError: a rate or
    share is outside 0..1, or something is negative.

    Args:
        acceptance_per_depth: ``[d]``: share of the drafting steps that accepted a node at depth d + 1.
        draft: the drafter's cost for the batch.
        depth: mean levels of a draft; `nodes`: mean drafted nodes of a row, root not counted.
        context: committed tokens of each row.
        coverage: share of the steps in which something is drafted; the others cost a plain pass and `draft.fixed_ms`.
    """
    _check_probabilities([*acceptance_per_depth, coverage])
    if depth < 0 or nodes < 0:
        raise ArgumentError(f"depth and nodes cannot be negative, got {depth} and {nodes}")
    plain = cost.pass_ms(1, rows, context)
    low = math.floor(nodes)
    verify = cost.pass_ms(low + 1, rows, context)
    if nodes > low:
        verify += (nodes - low) * (cost.pass_ms(low + 2, rows, context) - verify)
    step = coverage * (verify + draft.level_ms * depth) + (1 - coverage) * plain + draft.fixed_ms
    tokens = 1.0 + coverage * math.fsum(acceptance_per_depth)
    return SpeedPrediction(tokens_per_pass=tokens, speedup=tokens * plain / step, step_ms=step, plain_ms=plain)


def _check_probabilities(values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value <= 1:
            raise ArgumentError(f"an acceptance rate is a probability in 0..1, got {value}")
