"""How drafters are asked in these tests: texts in rows, a budget, and what a tree holds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from forerun.core.rng import Rng
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.model import TransformersTarget
from forerun.types import Budget, SamplingParams

GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=0)
ROOMY = Budget(nodes=[64], depth=[64])


def contexts(
    texts: Sequence[Sequence[int]],
    fresh: int | Sequence[int] = 0,
    params: SamplingParams = GREEDY,
    *,
    prompt: int = 1,
    states: Mapping[int, Tensor] | None = None,
) -> DraftContext:
    """Rows 0, 1, ... with these texts, the same number of fresh tokens in each unless they are told one by one."""
    rows = len(texts)
    return DraftContext(
        **{"rows": list(range(rows)), "tokens": texts, "prompt_lengths": [prompt] * rows},
        fresh=[fresh] * rows if isinstance(fresh, int) else fresh,
        samplers=[Sampler(params, text[:prompt]) for text in texts],
        **{"rng": [Rng(row, len(text)) for row, text in enumerate(texts)], "hidden_states": states or {}},
    )


def context(tokens: Sequence[int], fresh: int = 0, row: int = 0, prompt: int = 1) -> DraftContext:
    """One row, for drafters that look at nothing but its text."""
    return DraftContext(
        rows=[row], tokens=[tokens], prompt_lengths=[prompt], fresh=[fresh], samplers=[], rng=[], hidden_states={}
    )


def setup_for(weights: Any, words: Any = None, *, rows: int = 1, slots: int = 96) -> DrafterSetup:
    """What a drafter for this target is made with."""
    target = TransformersTarget.load(weights, rows=rows, slots=slots, self_check=False)
    return DrafterSetup(target=target, tokenizer=words, rows=rows, slots=slots)


def trees_of(
    made: Drafter, texts: list[list[int]], params: SamplingParams = GREEDY, nodes: int = 64, depth: int = 64
) -> list[TokenTree]:
    """What is proposed for each text."""
    budget = Budget(nodes=[nodes] * len(texts), depth=[depth] * len(texts))
    return made.propose(contexts(texts, 0, params), budget)


def propose(made: Drafter, tokens: Sequence[int], budget: Budget = ROOMY) -> TokenTree:
    """What is proposed for row 0."""
    (tree,) = made.propose(context(tokens), budget)
    return tree


def paths(tree: TokenTree) -> list[list[int]]:
    """Every leaf's path as tokens."""
    leaves = [node for node in range(1, tree.size + 1) if node not in tree.parents]
    return [[tree.tokens[node] for node in tree.path(leaf)] for leaf in leaves]


@contextmanager
def counted(made: Any) -> Iterator[list[int]]:
    """How many tokens each pass of the drafter's own model runs."""
    passes: list[int] = []
    embedding = made.model.model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _module, args, _output: passes.append(args[0].numel()))
    yield passes
    handle.remove()
