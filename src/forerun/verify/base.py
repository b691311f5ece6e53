"""What a verification rule is, which rules there are, and which one judges a draft by default.

A rule sees one row's tree, the target's laws at its nodes, and coins. It never sees a drafter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import ClassVar, Protocol

from forerun.errors import ArgumentError, nearest
from forerun.sampling import Coins
from forerun.tree import TokenTree
from forerun.types import Drawn, NodeLaws, Source, Verdict

RULES: dict[str, str] = {
    "argmax_walk": "forerun.verify.argmax_walk:ArgmaxWalk",
    "sample_walk": "forerun.verify.sample_walk:SampleWalk",
    "token_rejection": "forerun.verify.token_rejection:TokenRejection",
    "block": "forerun.verify.block:BlockVerification",
    "recursive_rejection": "forerun.verify.recursive_rejection:RecursiveRejection",
    "traversal": "forerun.verify.traversal:TraversalVerification",
    "greedy_k": "forerun.verify.greedy_k:GreedyK",
    "typical": "forerun.verify.typical:TypicalAcceptance",
}


class Rule(Protocol):
    """Keeps a path of the tree and names the token after it."""

    name: ClassVar[str]
    lossless: ClassVar[bool]
    """True if the emitted law is exactly the target's."""
    summary: ClassVar[str]
    """One line, with the paper."""

    def accepts(self, tree: TokenTree) -> bool:
        """Whether the rule may judge a tree drawn this way."""
        ...

    def verify(self, tree: TokenTree, target: NodeLaws, coins: Coins) -> Verdict:
        """Judge the tree. Asks `target` only for the laws it needs; draws only from `coins`."""
        ...


def rule_named(name: str) -> Rule:
    """The rule of that name.

    Raises:
        ArgumentError: there is none; the message names the nearest.
    """
    if name not in RULES:
        raise ArgumentError(f"unknown verification rule {name!r}; there are {', '.join(RULES)}.{nearest(name, RULES)}")
    return _loaded(RULES[name])


@cache
def _loaded(where: str) -> Rule:
    """Rules keep nothing from one tree to the next, so one of each will do."""
    module, _, attribute = where.partition(":")
    rule: Rule = getattr(importlib.import_module(module), attribute)()
    return rule


def ending(tree: TokenTree, node: int) -> Source:
    """What the token after `node` is, if `node` is the last one kept: TARGET, BONUS or RECOVERED."""
    if tree.size == len(tree.scouts):
        return Source.TARGET
    return Source.RECOVERED if tree.children[node] else Source.BONUS


def walk(tree: TokenTree, choose: Callable[[int, int], int]) -> Verdict:
    """Follow the target's own choices for as long as they were drafted: ``choose(node, depth)`` names the next token.

    Nodes that hold the same tokens from the root on (a token that was sampled twice) are followed side by side.
    """
    nodes, depth = [0], 0
    while True:
        token = choose(nodes[0], depth)
        below = [child for node in nodes for child in tree.children[node] if tree.tokens[child] == token]
        if not below:
            last = next((node for node in nodes if tree.children[node]), nodes[0])
            return Verdict(path=tree.path(last), next_token=token, kind=ending(tree, last))
        nodes, depth = below, depth + 1


def default_rule(tree: TokenTree, *, greedy: bool) -> str:
    """The best lossless rule for how the tree was drawn (DESIGN section 5).

    Scouts do not count. A chain that mixes given and sampled nodes goes to block verification and a tree with more than
    one sampled sibling beside given ones to traversal: both judge a given node as a draw from a point mass. A tree that
    no law-reading rule may judge (a sampled scout, a law that was not recorded) is walked, which is exact for anything.
    """
    if greedy:
        return "argmax_walk"
    drawn = {tree.drawn[child] for children in tree.children for child in children}
    if drawn <= {Drawn.GIVEN}:
        return "sample_walk"
    for name in ("block", "greedy_k", "traversal"):
        if (name != "greedy_k" or Drawn.GIVEN in drawn) and rule_named(name).accepts(tree):
            return name
    return "sample_walk"
