"""Proves that a model's layers may be run in part: the first layers, completed by the others, equal
the whole pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forerun.core.tree import Resume, TokenTree
from forerun.errors import UnsupportedModelError
from forerun.model import TransformersTarget
from forerun.model.layers import LayerRange
from forerun.model.self_check import difference, is_exact, most_difference, own_noise
from forerun.types import Drawn

Begin = Callable[[TransformersTarget, TokenTree], Resume]  # (target, tree) -> what has begun of that tree in row 0
_TEXT = 32  # Tokens on which a model in 16 bits shows its own noise


@torch.inference_mode()
def renumber(target: TransformersTarget, rows: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
    """Keep the nodes ``kept[i]`` (rising ids) of those run in this step, as nodes 1, 2, ... of row
    ``rows[i]``.
    """
    sources = [[target.lengths[row] + node for node in nodes] for row, nodes in zip(rows, kept, strict=True)]
    target.cache.move(rows, sources, [target.lengths[row] + 1 for row in rows])


def prove(target: TransformersTarget, boundary: int) -> None:
    """Check that the first layers up to `boundary` followed by the others make the whole model.
    Raises as `compare` does.
    """

    def root_only(trial: TransformersTarget, tree: TokenTree) -> Resume:
        states = trial.run([0], [TokenTree(tree.tokens[0])], LayerRange(stop=boundary))
        return Resume(boundary=boundary, states=states[0], stamp=trial.writes[0])

    compare(target, root_only, (0, 0, 1))


def compare(target: TransformersTarget, begin: Begin, parents: Sequence[int]) -> None:
    """Score a small tree whole, and resumed after `begin`, on a cache of its own, and compare the
    logits by the limits of the self-check. Raises UnsupportedModelError if the layers cannot be run
    in part, or the parts do not make the whole.
    """
    name = type(target.model).__name__
    noise = (
        None
        if is_exact(target.model)
        else own_noise(target.model, torch.tensor([_ids(target, min(_TEXT, target.max_length))]).to(target.device))
    )
    worst = _difference(type(target)(target.model, rows=1, slots=8), begin, parents, noise)
    limit = most_difference(noise)
    if not worst <= limit:
        unit = "of their spread" if noise is None else "nats"
        raise UnsupportedModelError(
            f"{name}: its layers cannot be run in part: logits differ from a whole pass by {worst:.2g} {unit}, "
            f"{limit:.2g} is allowed in {target.dtype}"
        )


@torch.inference_mode()
def _difference(target: TransformersTarget, begin: Begin, parents: Sequence[int], noise: float | None) -> float:
    ids = _ids(target, 3 + len(parents))
    tree = TokenTree(ids[2])
    for token, parent in zip(ids[3:], parents, strict=True):
        tree.add(token, parent, drawn=Drawn.IID)
    target.prefill([0], [ids[:2]])
    whole = target.score([0], [tree]).logits.float()
    tree.resume = begin(target, tree)
    return difference(target.score([0], [tree]).logits, whole, noise)


def _ids(target: TransformersTarget, count: int) -> list[int]:
    return [(7919 * index + 13) % target.vocab_size for index in range(count)]
