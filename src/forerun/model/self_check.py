"""The proof at load time that a model can be verified: trees and unequal rows against plain forwards.

Two rows of unequal length are prefilled, a branching tree is scored, different paths are kept, and a second tree
stands on what was gathered. Every logit is compared with a plain forward through the model as it was before anything
was repacked. Catches ignored masks, wrong positions and state that does not follow the tree; knows no family.

The check passes every size that the configuration names: forerun's own windows are short while it runs; past any other
size it is run at full length where that takes seconds, else, or where it fails there, the context ends at that size.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.core.tree import TokenTree
from forerun.errors import UNSERVED, NumericError, UnsupportedModelError
from forerun.model.cache import SlotCache
from forerun.model.layers import device_of, is_quantised
from forerun.model.masks import WINDOWS
from forerun.model.support import most_positions, name_of, named_sizes, obstacle, refusing, text_config

_log = logging.getLogger(__name__)
_PARENTS = (0, 0, 1, 2)  # Root with two children, each with one child
_PATHS = ((2, 4), (1, 3))  # Kept by row; both need tokens moved
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2}
"""Largest root-mean-square error of a node's logits, in units of their spread. A wrong mask gives 0.3 and more."""
_ROUGH = 1e-1  # The same of bfloat16 and of whatever else there is
_JUMPING_LIMIT = 2.5e-1  # Where rounding errors decide: quantised activations, 16-bit routers of experts
_NEAR, _SHORT_WINDOW = 64, 8
"""Sizes up to `_NEAR` tokens are passed by the first check; longer windows of forerun's own masks are shortened."""
_BEHIND = 3  # Tokens by which a prompt passes a size
_TREE = 8  # Slots behind a prompt: the tree, and what was kept of it
_COMPARED = 24  # Positions at the end of a long prompt whose logits are compared
_MOST_TOKENS = 4096  # A longer check would take gigabytes for attention's scores
_WORK, _CPU_WORK = 2**44, 2**40
"""Parameters times tokens of a forward that takes about a second on an accelerator, and on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What plain forwards of the check's sequences say."""

    size: int  # The size that the second prompt passes; 0: all up to `_NEAR`
    prefixes: tuple[list[int], ...]  # By row: prompt and root
    nodes: tuple[list[int], ...]  # By row: tokens of the tree
    later: tuple[list[int], ...]  # By row: the root of the second step and its one child
    start: int  # Position of the first of the S logits
    kept: Tensor  # (2, S, V) logits along prompt, kept path, second step
    dropped: Tensor  # (2, S, V) logits along prompt and the other path


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What the model says before anything is repacked."""

    sizes: dict[int, str]  # Tokens -> the keys of the configuration that name them, those within the context
    near: Reference
    far: list[Reference]  # By size, rising
    unchecked: int | None  # The first size whose check would take too long, or would not fit the context

    @property
    def slots(self) -> int:
        return max(len(prefix) for each in (self.near, *self.far) for prefix in each.prefixes) + _TREE


@contextmanager
def short_windows(config: Any) -> Iterator[None]:
    """While open, long windows of forerun's own masks are short in a text configuration: a few tokens reach beyond."""
    named = {key: getattr(config, key, None) for key in WINDOWS.values()}
    long = {key: size for key, size in named.items() if isinstance(size, int) and size > _NEAR}
    for key in long:
        setattr(config, key, _SHORT_WINDOW)
    try:
        yield
    finally:
        for key, size in long.items():
            setattr(config, key, size)


def expect(model: Any) -> Expected:
    """Run the check's sequences through the model as it is, past all sizes that can be passed in seconds. NumericError:
    the logits are not finite. UnsupportedModelError: a plain forward fails, or the model is not causal."""
    config, sizes = text_config(model), dict[int, str]()
    context = most_positions(config)
    for key, size in named_sizes(config).items():
        if size < context:
            sizes[size] = f"{sizes[size]}, {key}" if size in sizes else key
    room = max(1, context - _BEHIND - _TREE)
    work = _CPU_WORK if model.device.type == "cpu" else _WORK
    reach = min(room, max(_NEAR, min(_MOST_TOKENS, work // model.num_parameters())))
    near = _reference(model, 0, min(room, max([_SHORT_WINDOW, *(size for size in sizes if size <= _NEAR)])))
    _check_causal(model, near)
    far = [_reference(model, size, size) for size in sorted(sizes) if _NEAR < size <= reach]
    unchecked = min((size for size in sizes if size > reach), default=None)
    return Expected(sizes=sizes, near=near, far=far, unchecked=unchecked)


@torch.inference_mode()
def _reference(model: Any, size: int, passed: int) -> Reference:
    """One batch, no cache, no mask; the second prompt has `_BEHIND` tokens more than `passed`."""
    device, vocabulary = device_of(model.get_input_embeddings()), text_config(model).vocab_size
    longer = passed + _BEHIND
    shorter = longer - 2 if size else 4
    ids = [(7919 * index + 13) % vocabulary for index in range(shorter + longer + 12)]
    prefixes, rest = (ids[:shorter], ids[shorter : shorter + longer]), ids[shorter + longer :]
    nodes, later = (rest[:4], rest[4:8]), (rest[8:10], rest[10:12])
    sequences = [
        prefix + [tree[node - 1] for node in path] + end
        for paths, ends in ((_PATHS, later), (_PATHS[::-1], ([], [])))
        for prefix, tree, path, end in zip(prefixes, nodes, paths, ends, strict=True)
    ]
    most = max(map(len, sequences))
    start = max(0, most - _COMPARED) if size else 0
    padded = torch.tensor([tokens + [0] * (most - len(tokens)) for tokens in sequences], device=device)
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    with refusing(model, plainly=True):
        kept = {"logits_to_keep": most - start} if start and takes else {}
        logits = model(input_ids=padded, use_cache=False, **kept).logits[:, start - most :].float()
    for row, tokens in enumerate(sequences):
        if not logits[row, : len(tokens) - start].isfinite().all():
            raise NumericError(f"{name_of(model)}: a plain forward gives NaN or infinite logits")
    return Reference(
        size=size, prefixes=prefixes, nodes=nodes, later=later, start=start, kept=logits[:2], dropped=logits[2:]
    )


def _check_causal(model: Any, near: Reference) -> None:
    """Raise UnsupportedModelError if a prompt's logits change with the tokens behind it."""
    limit = _JUMPING_LIMIT if _jumps(model) else _LIMITS.get(model.dtype, _ROUGH)
    for row, prefix in enumerate(near.prefixes):
        alike = slice(len(prefix))
        if spread_error(near.kept[row, alike], near.dropped[row, alike]) > limit:
            raise UnsupportedModelError(
                f"{name_of(model)} is not causal: a token's logits change with the tokens behind it. If it was trained "
                "as a decoder, say so in its config.json (is_decoder; XLM: causal); else take a causal language model"
            )


def _jumps(model: Any) -> str | None:
    """Why rounding errors can move a token's logits by far more than themselves; None where they cannot."""
    if is_quantised(model):
        return "its activations are quantised together"
    experts = [size for key, size in vars(text_config(model)).items() if "experts" in key and isinstance(size, int)]
    if max(experts, default=0) > 1 and model.dtype.itemsize < 4:
        return f"its routers decide near ties between experts in {model.dtype}"
    return None


def check(target: Any, expected: Expected) -> int | None:
    """Score the check's trees with a `Target`, whose rows must be free and at least two with ``expected.slots`` slots.
    Returns the tokens up to which the model was found right, where it is not, or may not be, right beyond; else None.
    UnsupportedModelError: a node's logits differ from the plain forward, or the model cannot be driven this way."""
    near = [size for size in sorted(expected.sizes) if _SHORT_WINDOW < size <= _NEAR]
    wrong = _complaint(target, expected.near, ", ".join(f"{expected.sizes[size]} = {size}" for size in near))
    if wrong:
        raise UnsupportedModelError(f"{wrong}. Speculation would not be lossless. {UNSERVED}")
    for reference in expected.far:
        try:
            wrong = _complaint(target, reference, f"{expected.sizes[reference.size]} = {reference.size}")
        except UnsupportedModelError as error:
            wrong = str(error)
        if wrong:
            _warn_of_limit(target, reference.size, wrong)
            return reference.size
    beyond = expected.unchecked
    if beyond is not None:
        why = f"{name_of(target.model)} was not checked past {expected.sizes[beyond]} = {beyond}, which would take long"
        why += f" on {target.device} or leave the context. self_check=False skips all checks"
        _warn_of_limit(target, beyond, why)
    return beyond


def _warn_of_limit(target: Any, limit: int, why: str) -> None:
    _log.warning("The context is limited to %d of %d tokens: %s", limit, target.max_length, why)


def _complaint(target: Any, expected: Reference, named: str) -> str | None:
    """What `target` says other than expected; `named` are the sizes that it passes."""
    with refusing(target.model):
        worst = _errors(target, expected)
    exact, jumps = _LIMITS.get(target.dtype, _ROUGH), _jumps(target.model)
    limit = _JUMPING_LIMIT if jumps else exact
    name, most = name_of(target.model), max(worst.values())
    if exact < most <= limit:
        depends = f"a token's logits depend on what else is in the pass, by {most:.2g} of their spread: {jumps}"
        _log.warning(
            "%s: %s. Speculative output follows the model's distribution within this noise only", name, depends
        )
    for what, size in worst.items():
        if not size <= limit:
            why = obstacle(target.model) or "its attention or cache does not follow the mask that forerun gives"
            where = f" past {named}" if named else ""
            return (
                f"{name} failed the self-check{where}: {what} differs from a plain forward by {size:.2g} of the "
                f"logits' spread, {limit:g} is allowed in {target.dtype}; {why}"
            )
    return None


def _errors(target: Any, expected: Reference) -> dict[str, float]:
    rows, start = [0, 1], expected.start
    if start:
        target.prefill(rows, [prefix[:start] for prefix in expected.prefixes])
    prompt = target.prefill(rows, [prefix[start:-1] for prefix in expected.prefixes], all_logits=True).logits
    roots = [prefix[-1] for prefix in expected.prefixes]
    trees = [TokenTree.of(root, tokens, _PARENTS) for root, tokens in zip(roots, expected.nodes, strict=True)]
    tree = target.score(rows, trees).logits
    target.commit(rows, _PATHS)
    with _misleading(target.cache, target.max_length - len(expected.later)):
        chains = [TokenTree.of(root, [child], [0]) for root, child in expected.later]
        second = target.score(rows, chains).logits
    target.truncate(rows, [0, 0])
    phases = ("a prompt in a batch of unequal lengths", "a branching tree", "a step after a gathered path")
    worst = dict.fromkeys(phases, 0.0)
    for row, prefix in enumerate(expected.prefixes):
        kept, dropped = expected.kept[row], expected.dropped[row]
        last = len(prefix) - 1 - start  # Of the root, among the expected logits
        other = _PATHS[1 - row]
        pairs = (
            (prompt[row, :last], kept[:last]),
            (tree[row, [0, *_PATHS[row], *other]], torch.cat([kept[last : last + 3], dropped[last + 1 : last + 3]])),
            (second[row], kept[last + 3 : last + 5]),
        )
        for what, (ours, theirs) in zip(worst, pairs, strict=True):
            worst[what] = max(worst[what], spread_error(ours, theirs))
    return worst


@contextmanager
def _misleading(cache: SlotCache, length: int) -> Iterator[None]:
    """While open, the cache gives `length` as its number of tokens: a mask and positions are handed over, so that
    nothing may depend on it, also not far behind the few tokens of the check (Llama 4 scales queries by it)."""
    vars(cache)["get_seq_length"] = lambda *_: length
    try:
        yield
    finally:
        del vars(cache)["get_seq_length"]


def spread_error(ours: Tensor, theirs: Tensor) -> float:
    """Worst node's root-mean-square difference over the standard deviation of its logits; infinite where one is NaN."""
    theirs = theirs.to(ours.device)
    difference = (ours.float() - theirs).square().mean(-1).sqrt()
    return float((difference / theirs.std(-1).clamp(min=1e-9)).nan_to_num(nan=math.inf).max())
