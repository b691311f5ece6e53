"""Drafters that draw from distributions as wrong as can be; those that break their contract: `misbehaving`."""

from dataclasses import dataclass

import torch

from contract.harness import NEVER, VOCABULARY, model
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.types import Budget, DraftKind, Drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """Nothing to choose."""


class Wrong(Drafter):
    """Draws the same sort of chain for every row, whatever was read."""

    name = "wrong"
    Config = NoOptions

    def __init__(self, config: NoOptions, setup: DrafterSetup) -> None:
        self.calls, self.vocabulary = 0, setup.target.vocab_size

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(sampled=not sampler.greedy, chain=True)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        self.calls += 1
        return [self.chain(context, row, depth) for row, depth in enumerate(budget.depth)]

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        """One row's draft."""
        raise NotImplementedError


def _sampled_chain(context: DraftContext, row: int, depth: int, probs: torch.Tensor) -> TokenTree:
    tree = context.trees()[row]
    for node in range(min(depth, 3)):
        tree.set_probs(node, probs)
        tree.add(context.rng[row].drafted(probs, node), node, drawn=Drawn.IID)
    return tree


class Uniform(Wrong):
    """Every token is as likely as any other."""

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        return _sampled_chain(context, row, depth, torch.full((VOCABULARY,), 1 / VOCABULARY))


class OffSupport(Wrong):
    """Certain of a token that the target never gives."""

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        return _sampled_chain(context, row, depth, torch.nn.functional.one_hot(torch.tensor(NEVER), VOCABULARY).float())


class Whimsical(Wrong):
    """Half of the vocabulary, the half depending on the last token."""

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        probs = torch.zeros(self.vocabulary)
        probs[context.tokens[row][-1] % 2 :: 2] = 1.0
        return _sampled_chain(context, row, depth, probs / probs.sum())


class Twins(Wrong):
    """Siblings from a distribution on two tokens, an impossible one and the target's favourite: duplicates are the
    rule."""

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        tree, probs = context.trees()[row], torch.zeros(VOCABULARY)
        text, prompt = list(context.tokens[row]), context.prompt_lengths[row]
        logits = context.samplers[row].process(model()(torch.tensor([text])).logits[0, -1], text[prompt:])
        probs[NEVER], probs[int(logits.argmax())] = 0.7, 0.3
        tree.set_probs(0, probs)
        for index in range(3 if depth > 0 else 0):
            tree.add(context.rng[row].drafted(probs, 0, index), 0, drawn=Drawn.IID)
        return tree

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(sampled=not sampler.greedy)


class Undeclared(Uniform):
    """Samples and does not say so."""

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind()


class Misdeclared(Twins):
    """Draws trees and says that they are chains."""

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(sampled=True, chain=True)


WRONG: dict[str, type[Wrong]] = {
    cls.__name__.lower(): cls for cls in (Uniform, OffSupport, Whimsical, Twins, Undeclared, Misdeclared)
}
