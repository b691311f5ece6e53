"""The base class of verification rules, the registry of rules, and the default rule for a kind of
draft.

A rule sees one row's tree, the target's distributions at its nodes, and rng. It never sees a drafter. Imports no torch.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from forerun.errors import ArgumentError, choices
from forerun.types import DraftKind, Source, Verdict

if TYPE_CHECKING:
    from forerun.core.probs import NodeProbs
    from forerun.core.sampling import Rng
    from forerun.core.tree import TokenTree

RULES: dict[str, str] = {
    "argmax_walk": "forerun.core.rules.argmax_walk:ArgmaxWalk",
    "sample_walk": "forerun.core.rules.sample_walk:SampleWalk",
    "token_rejection": "forerun.core.rules.token_rejection:TokenRejection",
    "block": "forerun.core.rules.block:BlockVerification",
    "recursive_rejection": "forerun.core.rules.recursive_rejection:RecursiveRejection",
    "traversal": "forerun.core.rules.traversal:TraversalVerification",
    "greedy_k": "forerun.core.rules.greedy_k:GreedyK",
    "typical": "forerun.core.rules.typical:TypicalAcceptance",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """The numbers that a rule reads at a node. On an accelerator these are computed before the rule
    runs, and no others.
    """

    argmax: bool = False  # Only the token of largest processed logit
    rejections: int | None = 0  # Most children of a node rejected in a row; None: all, 0: it only draws
    weighted: bool = False  # Whether children are rejected with the weight of block and traversal verification, not 1
    entropy: bool = False  # Also the entropy, and the probability of each child's token


class Rule(ABC):
    """A verification rule: it accepts a path of the tree and chooses the token after it."""

    name: ClassVar[str]
    reads: ClassVar[Reads]
    lossless: ClassVar[bool] = True  # Whether the emitted distribution is exactly the target's

    def verifies(self, kind: DraftKind) -> bool:
        """Return whether the rule uses all nodes of such drafts. It ignores some nodes of other
        drafts, which is lossless too.
        """
        return True

    @abstractmethod
    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Verify the tree. The rule asks `target` only for what `reads` names, and draws only from
        `rng`.
        """


def check_named(name: str) -> None:
    """Raise ArgumentError unless there is a rule of that name. Imports nothing."""
    if name not in RULES:
        raise ArgumentError(f"unknown verification rule {name!r}.{choices(name, RULES)}")


@cache
def rule_named(name: str) -> Rule:
    """Return the rule of that name; rules are stateless, so one instance serves all. Raises
    ArgumentError if there is none, naming the nearest.
    """
    check_named(name)
    module, _, attribute = RULES[name].partition(":")
    rule: Rule = getattr(importlib.import_module(module), attribute)()
    return rule


def ending(tree: TokenTree, node: int) -> Source:
    """Return the kind of the token after `node`, the last accepted node: TARGET, BONUS or
    RECOVERED.
    """
    if tree.size == len(tree.probes):
        return Source.TARGET
    return Source.RECOVERED if tree.children[node] else Source.BONUS


def walk(tree: TokenTree, choose: Callable[[int], int]) -> Verdict:
    """Follow the target's own choices for as long as they were drafted; ``choose(node)`` returns
    the next token.

    Nodes that hold the same tokens from the root on (a token that was sampled twice) are followed side by side.
    """
    nodes = [0]
    while True:
        token = choose(nodes[0])
        below = [child for node in nodes for child in tree.children[node] if tree.tokens[child] == token]
        if not below:
            last = next((node for node in nodes if tree.children[node]), nodes[0])
            return Verdict(path=tree.path(last), next_token=token, kind=ending(tree, last))
        nodes = below


def default_rule(kind: DraftKind, *, greedy: bool) -> str:
    """Return the name of the best lossless rule for drafts of a kind (docs/losslessness.md)."""
    if greedy:
        return "argmax_walk"
    if not kind.sampled:
        return "sample_walk"
    if kind.chain:
        return "block"
    return "greedy_k" if kind.multipath else "traversal"


def check_fits(name: str, kind: DraftKind, drafter: str) -> None:
    """Raise ArgumentError if a rule that was asked for by name cannot verify everything that a
    drafter may draft, or if there is no such rule.
    """
    if rule_named(name).verifies(kind):
        return
    one = rule_named(name).verifies(DraftKind(sampled=True, multipath=True))
    wanted = "trees with at most one sampled child a node" if one else "chains"
    raise ArgumentError(
        f"rule {name!r} verifies {wanted}, drafter {drafter!r} as configured drafts other trees; leave the rule out, "
        f"which takes {default_rule(kind, greedy=False)!r}, or configure the drafter for {wanted}"
    )
