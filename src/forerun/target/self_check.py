"""The proof at load time that a model can be verified: a small tree and unequal rows against plain forwards.

Two rows of unequal length are prefilled, a branching tree is scored, different paths are kept, and a second tree
stands on what was gathered. Every logit is compared with a forward of the same tokens without cache and mask through
the model as it was before anything was repacked. Catches ignored masks, wrong positions, state that does not follow
the tree, and broken repacking; knows no family. Contexts longer than a few dozen tokens
are not tried; a longer sliding window is shortened for the check.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import NumericError, UnsupportedModelError
from forerun.target.masks import MaskStyle
from forerun.target.parts import is_quantised
from forerun.tree import TreeBuilder, stack

if TYPE_CHECKING:
    from forerun.target.model import Target

_log = logging.getLogger(__name__)
_PARENTS = (0, 0, 1, 2)
"""Root with two children, each with one child."""
_PATHS = ((2, 4), (1, 3))
"""Kept by row; both need tokens moved."""
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest root-mean-square error of a node's logits, in units of their spread. A wrong mask gives 0.3 and more."""
_QUANTISED_LIMIT = 2.5e-1
SLOTS = 96
"""Cache slots of a row that the check needs."""
_LONGEST_WINDOW, _SHORT_WINDOW = 64, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What plain forwards of the check's sequences say."""

    prefixes: tuple[list[int], ...]
    """By row: prompt and root."""
    nodes: tuple[list[int], ...]
    """By row: tokens of the tree."""
    later: tuple[list[int], ...]
    """By row: the root of the second step and its one child."""
    kept: Tensor
    """(2, S, V) logits along prompt, kept path, second step."""
    dropped: Tensor
    """(2, S, V) logits along prompt and the other path."""


@contextmanager
def short_window(config: Any) -> Iterator[int | None]:
    """While open, a long sliding window in a text configuration is short, so that a few tokens reach beyond it."""
    window = MaskStyle.of(config).window
    if window is None or window <= _LONGEST_WINDOW:
        yield window
        return
    original = config.sliding_window
    config.sliding_window = _SHORT_WINDOW
    try:
        yield _SHORT_WINDOW
    finally:
        config.sliding_window = original


@torch.inference_mode()
def reference(model: Any, window: int | None, device: torch.device) -> Reference:
    """Run the check's sequences through the model as it is: one batch, no cache, no mask.

    Raises:
        NumericError: the logits are not finite.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    longer = window + 3 if window is not None else 9
    ids = [(7919 * index + 13) % vocabulary for index in range(2 * longer + 20)]
    prefixes = (ids[:4], ids[4 : 4 + longer])
    rest = ids[4 + longer :]
    nodes, later = (rest[:4], rest[4:8]), (rest[8:10], rest[10:12])
    sequences = [
        prefix + [tree[node - 1] for node in path] + end
        for paths, ends in ((_PATHS, later), (_PATHS[::-1], ([], [])))
        for prefix, tree, path, end in zip(prefixes, nodes, paths, ends, strict=True)
    ]
    size = max(map(len, sequences))
    padded = torch.tensor([tokens + [0] * (size - len(tokens)) for tokens in sequences], device=device)
    try:
        logits = model(input_ids=padded, use_cache=False).logits.float()
    except (NotImplementedError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UnsupportedModelError(f"{_name(model)}: even a plain forward fails: {error}") from error
    for row, tokens in enumerate(sequences):
        if not logits[row, : len(tokens)].isfinite().all():
            raise NumericError(f"{_name(model)}: a plain forward gives NaN or infinite logits")
    return Reference(prefixes=prefixes, nodes=nodes, later=later, kept=logits[:2], dropped=logits[2:])


def check(target: Target, expected: Reference) -> None:
    """Score the check's trees with `target`, whose rows must be free and at least two with `SLOTS` slots.

    Raises:
        UnsupportedModelError: a node's logits differ from the plain forward, or the model cannot be driven this way.
    """
    try:
        worst = _errors(target, expected)
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UnsupportedModelError(
            f"{_name(target.model)} cannot score a token tree: its forward failed with "
            f"{type(error).__name__}: {error}. forerun needs 4D attention masks, explicit positions and a KV cache."
        ) from error
    exact = _LIMITS.get(target.dtype, 1e-1)
    limit = _QUANTISED_LIMIT if is_quantised(target.model) else exact
    if exact < max(worst.values()) <= limit:
        _log.warning(
            "%s: a token's logits depend on what else is in the pass, by %.2g of their spread: its activations are "
            "quantised together. Speculative output follows the model's law within this noise only",
            _name(target.model),
            max(worst.values()),
        )
    for what, size in worst.items():
        if not size <= limit:
            raise UnsupportedModelError(
                f"{_name(target.model)} failed the self-check: {what} differs from a "
                f"plain forward by {size:.2g} of the logits' spread, {limit:g} is allowed in {target.dtype}. Its "
                "attention or cache does not follow the mask and the positions that forerun gives; speculation would "
                "not be lossless."
            )


def _name(model: Any) -> str:
    return str(model.name_or_path) or type(model).__name__


def _errors(target: Target, expected: Reference) -> dict[str, float]:
    """Worst error of each phase."""
    rows = [0, 1]
    roots = [prefix[-1] for prefix in expected.prefixes]
    lengths = [len(prefix) for prefix in expected.prefixes]
    prompt = target.prefill(rows, [prefix[:-1] for prefix in expected.prefixes], all_logits=True).logits
    tree = target.score(rows, roots, _draft(expected.nodes, _PARENTS)).logits
    target.commit(rows, _PATHS)
    second = target.score(
        rows, [end[0] for end in expected.later], _draft([end[1:] for end in expected.later], (0,))
    ).logits
    target.truncate(rows, [0, 0])
    worst = {
        "a prompt in a batch of unequal lengths": 0.0,
        "a branching tree": 0.0,
        "a step after a gathered path": 0.0,
    }
    for row, length in enumerate(lengths):
        kept, dropped = expected.kept[row], expected.dropped[row]
        other = _PATHS[1 - row]
        pairs = (
            (prompt[row, : length - 1], kept[: length - 1]),
            (
                tree[row, [0, *_PATHS[row], *other]],
                torch.cat([kept[length - 1 : length + 2], dropped[length : length + 2]]),
            ),
            (second[row], kept[length + 2 : length + 4]),
        )
        for what, (ours, theirs) in zip(worst, pairs, strict=True):
            worst[what] = max(worst[what], _spread_error(ours, theirs), key=_nan_last)
    return worst


def _draft(nodes: Sequence[list[int]], parents: tuple[int, ...]) -> Any:
    builders = []
    for tokens in nodes:
        builder = TreeBuilder()
        for token, parent in zip(tokens, parents, strict=True):
            builder.add(token, parent)
        builders.append(builder)
    return stack(builders)


def _spread_error(ours: Tensor, theirs: Tensor) -> float:
    """Worst node's root-mean-square difference over the standard deviation of its logits."""
    theirs = theirs.to(ours.device)
    difference = (ours.float() - theirs).square().mean(-1).sqrt()
    return float((difference / theirs.std(-1).clamp(min=1e-9)).max())


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
