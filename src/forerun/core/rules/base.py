"""What a verification rule is, which rules there are, and which one verifies a draft by default.

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
    """What a rule asks the target about a node. On a device that is formed beforehand, and nothing else."""

    argmax: bool = False  # Only the token of largest processed logit
    rungs: int | None = 0  # Most children of a node that are rejected one after the other; None: all. 0: it only draws.
    weighted: bool = False  # Whether children are rejected with the weight of block and traversal verification, not 1
    entropy: bool = False  # Also the entropy, and the probability of each child's token


class Rule(ABC):
    """Keeps a path of the tree and names the token after it."""

    name: ClassVar[str]
    reads: ClassVar[Reads]
    lossless: ClassVar[bool] = True  # Whether the emitted distribution is exactly the target's

    def verifies(self, kind: DraftKind) -> bool:
        """Whether the rule uses all nodes of such drafts. Of others it leaves some out, which is lossless, too."""
        return True

    @abstractmethod
    def verify(self, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        """Verify the tree. Asks `target` only for what `reads` names; draws only from `rng`."""


def check_named(name: str) -> None:
    """Raise ArgumentError unless there is a rule of that name; imports nothing."""
    if name not in RULES:
        raise ArgumentError(f"unknown verification rule {name!r}.{choices(name, RULES)}")


@cache
def rule_named(name: str) -> Rule:
    """The rule of that name; one of each will do, for rules keep nothing from one tree to the next. ArgumentError:
    there is none; the message names the nearest."""
    check_named(name)
    module, _, attribute = RULES[name].partition(":")
    rule: Rule = getattr(importlib.import_module(module), attribute)()
    return rule


def ending(tree: TokenTree, node: int) -> Source:
    """What the token after `node` is, if `node` is the last one accepted: TARGET, BONUS or RECOVERED."""
    if tree.size == len(tree.probes):
        return Source.TARGET
    return Source.RECOVERED if tree.children[node] else Source.BONUS


def walk(tree: TokenTree, choose: Callable[[int], int]) -> Verdict:
    """Follow the target's own choices for as long as they were drafted: ``choose(node)`` names the next token.

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
    """The best lossless rule for drafts of a kind (docs/losslessness.md)."""
    if greedy:
        return "argmax_walk"
    if not kind.sampled:
        return "sample_walk"
    if kind.chain:
        return "block"
    return "greedy_k" if kind.multipath else "traversal"


def check_fits(name: str, kind: DraftKind, drafter: str) -> None:
    """Refuse a rule that was asked for by name and cannot verify everything that a drafter may draft. ArgumentError:
    there is no such rule, or it is one for other drafts."""
    if rule_named(name).verifies(kind):
        return
    one = rule_named(name).verifies(DraftKind(sampled=True, multipath=True))
    wanted = "trees with at most one sampled child a node" if one else "chains"
    raise ArgumentError(
        f"rule {name!r} verifies {wanted}, drafter {drafter!r} as configured drafts other trees; leave the rule out, "
        f"which takes {default_rule(kind, greedy=False)!r}, or configure the drafter for {wanted}"
    )
