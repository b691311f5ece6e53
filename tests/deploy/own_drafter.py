"""Drafters as somebody might write them outside of forerun."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.types import Boundary, Budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Of both."""

    num_speculative_tokens: int = 8
    period: int = 7


class Periodic(Drafter):
    """What stood a period earlier."""

    name: ClassVar[str] = "periodic"
    Config: ClassVar[type[Options]] = Options

    def __init__(self, config: Options, setup: DrafterSetup) -> None:
        self.config = config

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for tree, text, nodes, depth in zip(trees, context.tokens, budget.nodes, budget.depth, strict=True):
            known = list(text[-self.config.period :])
            for _ in range(min(self.config.num_speculative_tokens, nodes, depth)):
                known.append(known[-self.config.period])
            tree.add_path(known[self.config.period :], confidence=0.9)
        return trees


class Learning(Periodic):
    """Waits for what the target says."""

    def observe(self, context: DraftContext, verdicts: Sequence[Any], scores: Any) -> None:
        raise AssertionError("no plug-in calls this")


class Reading(Periodic):
    """Reads hidden states."""

    @property
    def requires(self) -> frozenset[Boundary]:
        return frozenset({0})
