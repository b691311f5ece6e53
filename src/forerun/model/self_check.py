"""The proof at load time that a model can be verified: trees and unequal rows are compared with
plain forwards.

Two rows of unequal length are prefilled with text, branching trees are scored, different paths are kept, and a second
tree stands on what was gathered. Every logit is compared with a plain forward through the model as it was before
anything was repacked. Catches ignored masks, wrong positions and state that does not follow the tree; knows no family.

In float32 right and wrong lie far apart (`STRUCTURE`): so a model in 16 bits is checked as a float32 copy, whole where
it is small, else its first layers of every type. In its own dtype the yardstick is the model's own noise: what
transformers itself differs by between token by token and one pass. See docs/losslessness.md.

The check passes every size that the configuration names: forerun's own windows are short while it runs; past any other
size it is run at full length where that takes seconds, else, or where it fails there, the context ends at that size.

A model that chooses (experts, entries of an index) may choose otherwise at a near tie, by the last bit of a sum, and be
sound. So where the first comparison in float32 fails, a node may differ as far as it does in plain forwards whose
embeddings were moved by such bits (`sensitivity`).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from forerun.core.tree import TokenTree
from forerun.errors import NumericError, UnsupportedModelError
from forerun.model.cache import SlotCache
from forerun.model.kernels.acceptance import nudge
from forerun.model.kernels.packing import count_weights, named_weights
from forerun.model.layers import cache_argument, device_of, is_quantised
from forerun.model.masks import WINDOWS
from forerun.model.states import keep_outside, state_layers
from forerun.model.support import most_positions, name_of, named_sizes, obstacle, refusing, text_config

_log = logging.getLogger(__name__)
_PARENTS = (0, 0, 1, 2, 3, 4, 5, 6)  # Two chains of four, interleaved: no node stands in the slot of its depth
_PATHS = ((2, 4, 6, 8), (1, 3, 5, 7))  # Kept by row; all tokens have to be moved
STRUCTURE = 1e-3
"""Largest root-mean-square error of a node's logits in float32, in units of their spread. A sound
model has 1e-5 at most, a wrong mask 0.3 and more.
"""
FACTOR = 3
"""The most that our noise may be in 16 bits, as a multiple of the model's own noise, both as mean
KL divergence. Sound ones have up to 1.6, see docs/losslessness.md.
"""
_NOISY = 0.05  # Own noise (nats) from which on a warning tells of it: some tokens in a hundred come out otherwise
_NEAR, _SHORT_WINDOW = 64, 8
"""Sizes up to `_NEAR` tokens are passed by the first check; longer windows of forerun's own masks
are shortened to `_SHORT_WINDOW`.
"""
_PROMPT = 20  # Least tokens of its longer prompt
_BEHIND = 3  # Tokens by which a prompt passes a size
_TREE, _LATER = len(_PARENTS), 4  # Drafted nodes of the first and of the second step
_COMPARED = 32  # Positions at the end of a long prompt whose logits are compared
_MOVES, _LAST_PLACES = 8, 8
"""Plain forwards that find near ties, and by how many units in its last place each moves an embedding: ours differ by
less, and a tie that they break is broken by half of these.
"""
_SINGLE = 10  # Tokens that transformers runs one by one, in four rows, to measure its own noise
_MOST_TOKENS = 4096  # A longer check would take gigabytes for attention's scores
_WORK, _CPU_WORK = 2**44, 2**40
"""Parameters times tokens of a forward that takes some seconds, on an accelerator and on a CPU."""
_WHOLE, _CPU_WHOLE = 8 * 10**9, 160 * 10**6
"""Most parameters of a model that is copied to float32 as a whole: a check of some tenths of a
second.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainReference:
    """The results of plain forwards over the check's sequences."""

    size: int  # The size that the second prompt passes; 0: all up to `_NEAR`
    prefixes: tuple[list[int], ...]  # Prompt and root, by row
    nodes: tuple[list[int], ...]  # Tokens of the tree, by row
    later: tuple[list[int], ...]  # Root of the second step and the chain behind it, by row
    start: int  # Position of the first of the S logits
    tokens: Tensor  # (4, N) by row: prompt, kept path, second step; then prompt and the other path; padded
    logits: Tensor  # (4, S, V) along these
    noise: float | None  # Mean KL divergence (nats) of token by token from one pass; None: errors are held to STRUCTURE

    @property
    def limit(self) -> float:
        """The largest error that is allowed, see `errors`."""
        return most_difference(self.noise)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The model's results before anything is repacked."""

    sizes: dict[int, str]  # Tokens -> the keys of the configuration that name them, those within the context
    near: PlainReference
    far: list[PlainReference]  # References past each size, rising
    unchecked: int | None  # The first size whose check would take too long, or would not fit the context

    @property
    def slots(self) -> int:
        """The tokens of a row that the check needs."""
        longest = max(len(prefix) for each in (self.near, *self.far) for prefix in each.prefixes)
        return longest + _TREE + _LATER


@contextmanager
def short_windows(config: Any) -> Iterator[None]:
    """Shorten long windows of forerun's own masks in a text configuration while open, so that a few
    tokens reach beyond them.
    """
    named = {key: getattr(config, key, None) for key in WINDOWS.values()}
    long = {key: size for key, size in named.items() if isinstance(size, int) and size > _NEAR}
    for key in long:
        setattr(config, key, _SHORT_WINDOW)
    try:
        yield
    finally:
        for key, size in long.items():
            setattr(config, key, size)


def whole_parameters(model: Any) -> int:
    """Return the most parameters of a model that is checked as a whole in float32 on the device of
    this one.
    """
    return _CPU_WHOLE if device_of(model.get_input_embeddings()).type == "cpu" else _WHOLE


def is_exact(model: Any) -> bool:
    """Return whether a model's errors are held to `STRUCTURE` rather than to its own noise."""
    return model.dtype.itemsize >= 4 and not is_quantised(model)


def expect(model: Any, ids: Sequence[int], *, sizes: bool = True) -> Expected:
    """Run the check's sequences, made of the text `ids`, through the model as it is, past all sizes
    that can be passed in seconds; without `sizes` only past those as short as the text. Raises
    NumericError if the logits are not finite, UnsupportedModelError if a plain forward fails or the
    model is not causal.
    """
    config, named = text_config(model), dict[int, str]()
    context = most_positions(config)
    for key, size in named_sizes(config).items():
        if size < context:
            named[size] = f"{named[size]}, {key}" if size in named else key
    room = max(1, context - _BEHIND - _TREE - _LATER)
    work = _CPU_WORK if model.device.type == "cpu" else _WORK
    reach = min(room, max(_NEAR, min(_MOST_TOKENS, work // count_weights(model))))
    near = _reference(model, ids, 0, min(room, max([_PROMPT, *(size for size in named if size <= _NEAR)])))
    _check_causal(model, near)
    if near.noise is not None and (near.noise > _NOISY or is_quantised(model)):
        why = "; its activations are quantised together" if is_quantised(model) else ""
        _log.warning(
            "%s: in %s its own distributions differ by %.2g nats between token by token and one pass%s: speculative "
            "output follows them within this noise only",
            *(name_of(model), model.dtype, near.noise, why),
        )
    if not sizes:
        return Expected(sizes=named, near=near, far=[], unchecked=None)
    return Expected(
        sizes=named,
        near=near,
        far=[_reference(model, ids, size, size) for size in sorted(named) if _NEAR < size <= reach],
        unchecked=min((size for size in named if size > reach), default=None),
    )


@torch.inference_mode()
def _reference(model: Any, ids: Sequence[int], size: int, passed: int) -> PlainReference:
    """Run plain forwards in one batch, without cache or mask; the second prompt has `_BEHIND`
    tokens more than `passed`.
    """
    vocabulary = text_config(model).vocab_size
    longer = passed + _BEHIND
    shorter, path, behind = max(2, longer - 5), len(_PATHS[0]), 1 + _LATER  # a prompt and a root, at least
    texts = [_text(ids, offset, length + path + behind) for offset, length in ((0, shorter), (len(ids) // 2, longer))]
    prefixes = tuple(text[: -path - behind] for text in texts)
    right = [text[-path - behind : -behind] for text in texts]
    # The other path takes the other row's words: text as well, and other tokens in any case.
    wrong = [
        [(other + 1) % vocabulary if other == token else other for token, other in zip(words, others, strict=True)]
        for words, others in zip(right, right[::-1], strict=True)
    ]
    nodes = tuple([0] * _TREE for _ in texts)
    for row, (tokens, path_kept, dropped) in enumerate(zip(nodes, _PATHS, _PATHS[::-1], strict=True)):
        for first, second, token, other in zip(path_kept, dropped, right[row], wrong[row], strict=True):
            tokens[first - 1], tokens[second - 1] = token, other
    later = tuple(text[-behind:] for text in texts)
    sequences = [*texts, *(prefix + other for prefix, other in zip(prefixes, wrong, strict=True))]
    most = max(map(len, sequences))
    start = max(0, most - _COMPARED) if size else 0
    device = device_of(model.get_input_embeddings())
    padded = torch.tensor([tokens + [0] * (most - len(tokens)) for tokens in sequences], device=device)
    with refusing(model, plainly=True):
        raw = _plain_logits(model, padded, start)
    for row, tokens in enumerate(sequences):
        if not raw[row, : len(tokens) - start].isfinite().all():
            raise NumericError(_not_finite(model))
    with refusing(model, plainly=True):
        noise = None if is_exact(model) else own_noise(model, _rows(ids, most, device))
    return PlainReference(
        size=size,
        prefixes=prefixes,
        nodes=nodes,
        later=later,
        start=start,
        tokens=padded,
        logits=raw.float(),
        noise=noise,
    )


def _plain_logits(model: Any, tokens: Tensor, start: int) -> Tensor:
    """Return the logits (B, N - start, V) of one plain forward over tokens (B, N)."""
    behind = tokens.shape[1] - start
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    kept = {"logits_to_keep": behind} if start and takes else {}
    logits: Tensor = model(input_ids=tokens, use_cache=False, **kept).logits[:, -behind:]
    return logits


def _rows(ids: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Return (4, length) of the text, from four offsets on."""
    return torch.tensor([_text(ids, part * len(ids) // 4, length) for part in range(4)], device=device)


def _text(ids: Sequence[int], offset: int, count: int) -> list[int]:
    """Return `count` tokens of the text from `offset` on, wrapping around, behind its first."""
    return [ids[0], *(ids[1 + (offset + index) % (len(ids) - 1)] for index in range(count - 1))]


def _not_finite(model: Any) -> str:
    """Return the message about a model whose logits are not finite, with the weight that is to
    blame if there is one.
    """
    bad = next((name for name, weight in named_weights(model) if not weight.isfinite().all()), None)
    message = f"{name_of(model)}: a plain forward gives NaN or infinite logits"
    if bad is not None:
        return f"{message}: the weight {bad} is not finite. The checkpoint is broken: copy or download it again"
    return f"{message} in {model.dtype}, although all weights are finite: its numbers are too large for it. Try float32"


def check_embeddings(model: Any) -> None:
    """Raise NumericError if a token's embedding is not finite, which a text without the token would
    not show.
    """
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.device.type != "meta":
        sums = weight.detach().sum(-1, dtype=torch.float32)
        if not sums.isfinite().all():
            raise NumericError(
                f"{name_of(model)}: the embedding of token {int((~sums.isfinite()).nonzero()[0, 0])} is not finite. "
                "The checkpoint is broken: copy or download it again"
            )


@torch.inference_mode()
def own_noise(model: Any, tokens: Tensor) -> float:
    """Return the model's own noise: the mean KL divergence (nats) of logits that transformers
    computes token by token, through a cache of its own, from those of one pass, at the last
    `_SINGLE` positions of text (B, N). It is at least the effect of moving every entry of the
    embeddings by one unit in its last place, since a small model's sums may come out alike in
    passes of any shape.
    """
    first = tokens.shape[1] - _SINGLE
    whole = model(input_ids=tokens, use_cache=False).logits[:, first:]
    with _moved_embeddings(model):
        moved = model(input_ids=tokens, use_cache=False).logits[:, first:]
    single = float(divergence(_one_by_one(model, tokens, first), whole).mean())
    least = float(divergence(moved, whole).mean())
    _log.debug("%s: own noise %.3g, of moved embeddings %.3g", name_of(model), single, least)
    return max(single, least)


@contextmanager
def _moved_embeddings(model: Any, places: int = 1, seed: int = 0) -> Iterator[None]:
    """Move every entry of the embeddings by so many units in its last place while open."""
    embeddings = model.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda _module, _args, states: nudge(states, places, seed))
    try:
        yield
    finally:
        handle.remove()


@torch.inference_mode()
def sensitivity(model: Any, expected: PlainReference) -> Tensor:
    """Return the largest `node_errors` (4, S) of plain forwards whose embeddings were moved by a few last places: 1e-4
    in float32, but at and behind a near tie of a choice that such a forward breaks.
    """
    with refusing(model, plainly=True):
        plain = _plain_logits(model, expected.tokens, expected.start)
        most = torch.zeros(plain.shape[:2], device=plain.device)
        for seed in range(_MOVES):
            with _moved_embeddings(model, _LAST_PLACES, seed):
                moved = _plain_logits(model, expected.tokens, expected.start)
            most = torch.maximum(most, node_errors(moved, plain))
    return most


def _near_ties(model: Any, expected: PlainReference) -> Tensor | None:
    """Return the `sensitivity` that excuses differences of a model without noise of its own. None: it excuses nothing,
    since the model has noise, or since a fault could hide where most nodes are near a tie.
    """
    if expected.noise is not None:
        return None
    sensitive = sensitivity(model, expected)
    return sensitive if sensitive.median() <= expected.limit else None


def _one_by_one(model: Any, tokens: Tensor, first: int) -> Tensor:
    """Return logits (B, N - first, V) of the tokens from `first` on, each in a pass of its own."""
    try:
        if keep_outside(state_layers(model)):
            raise UnsupportedModelError("it keeps its state in no cache that it is handed")
        handed: dict[str, Any] = {cache_argument(model): DynamicCache(config=text_config(model))}
        model(input_ids=tokens[:, :first], use_cache=True, **handed)
        steps = [
            model(input_ids=tokens[:, at : at + 1], use_cache=True, **handed).logits[:, -1]
            for at in range(first, tokens.shape[1])
        ]
    except Exception as error:  # a cache of another kind; how long a pass is changes its bits as well
        _log.debug("%s: passes of all lengths instead of token by token: %s", name_of(model), error)
        ends = range(first + 1, tokens.shape[1] + 1)
        steps = [model(input_ids=tokens[:, :end], use_cache=False).logits[:, -1] for end in ends]
    return torch.stack(steps, dim=1)


def divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the KL divergence (..,) in nats of the distribution of our logits (.., V) from theirs;
    a shift common to all logits counts nothing. Infinite where ours are not finite.
    """
    theirs = theirs.float().log_softmax(-1)
    ours = ours.to(theirs.device).float().log_softmax(-1)
    terms = theirs.exp() * (theirs - ours)
    return terms.masked_fill(theirs == -math.inf, 0).sum(-1).nan_to_num(nan=math.inf).clamp(min=0)


def _check_causal(model: Any, near: PlainReference) -> None:
    """Raise UnsupportedModelError if a prompt's logits change with the tokens behind it."""

    def change(sensitive: Tensor | None = None) -> float:
        def of(row: int, end: int) -> float:
            least = None if sensitive is None else sensitive[row, :end]
            return difference(near.logits[row, :end], near.logits[2 + row, :end], near.noise, least)

        return max(of(row, len(prefix)) for row, prefix in enumerate(near.prefixes))

    if change() > near.limit and change(_near_ties(model, near)) > near.limit:
        raise UnsupportedModelError(
            f"{name_of(model)} is not causal: a token's logits change with the tokens behind it. If it was trained "
            "as a decoder, say so in its config.json (is_decoder; XLM: causal); else take a causal language model"
        )


def check(target: Any, expected: Expected) -> tuple[int | None, str | None]:
    """Score the check's trees with a `Target`, whose rows must be free and at least two with
    ``expected.slots`` slots. Returns two things: the tokens up to which the model was found right,
    if it is not or may not be right beyond; and what is wrong in any case, a node's logits that
    differ from the plain forward. Raises UnsupportedModelError if the model cannot be driven this
    way.
    """
    near = [size for size in sorted(expected.sizes) if _SHORT_WINDOW < size <= _NEAR]
    wrong = _complaint(target, expected.near, ", ".join(f"{expected.sizes[size]} = {size}" for size in near))
    if wrong:
        return None, wrong
    for reference in expected.far:
        try:
            wrong = _complaint(target, reference, f"{expected.sizes[reference.size]} = {reference.size}")
        except UnsupportedModelError as error:
            wrong = str(error)
        if wrong:
            _warn_of_limit(target, reference.size, wrong)
            return reference.size, None
    beyond = expected.unchecked
    if beyond is not None:
        why = f"{name_of(target.model)} was not checked past {expected.sizes[beyond]} = {beyond}, which would take long"
        why += f" on {target.device} or leave the context. self_check=False skips all checks"
        _warn_of_limit(target, beyond, why)
    return beyond, None


def _warn_of_limit(target: Any, limit: int, why: str) -> None:
    _log.warning("The context is limited to %d of %d tokens: %s", limit, target.max_length, why)


def _complaint(target: Any, expected: PlainReference, named: str) -> str | None:
    """Describe how `target` deviates from what is expected; None if it does not. `named` are the
    sizes that it passes.
    """
    with refusing(target.model):
        worst = errors(target, expected)
        if max(worst.values()) > expected.limit and (sensitive := _near_ties(target.model, expected)) is not None:
            worst = errors(target, expected, sensitive)
    _log.debug("%s: self-check %s, limit %.3g", name_of(target.model), worst, expected.limit)
    for what, size in worst.items():
        if not size <= expected.limit:
            where = f" past {named}" if named else ""
            message = f"{name_of(target.model)} failed the self-check{where}: {what} differs from a plain forward by"
            if expected.noise is None:
                why = (
                    obstacle(target.model) or "what it computes does not follow the mask and positions that it is given"
                )
                return f"{message} {size:.2g} of the logits' spread, {STRUCTURE:g} is allowed in {target.dtype}; {why}"
            allowed = (
                f"{FACTOR} times its own noise, {expected.noise:.2g} between token by token and one pass, is allowed"
            )
            missing = obstacle(target.model)
            more = f"; {missing}" if missing else ""
            return f"{message} a KL divergence of {size:.2g} nats, {allowed} in {target.dtype}{more}"
    return None


def errors(target: Any, expected: PlainReference, sensitive: Tensor | None = None) -> dict[str, float]:
    """Return, by phase, the `difference` of a target's logits from those of plain forwards; `sensitive` (4, S) is what
    `sensitivity` returned.
    """
    rows = [0, 1]
    start = expected.start
    if start:
        target.prefill(rows, [prefix[:start] for prefix in expected.prefixes])
    prompt = target.prefill(rows, [prefix[start:-1] for prefix in expected.prefixes], all_logits=True).logits
    roots = [prefix[-1] for prefix in expected.prefixes]
    trees = [TokenTree.of(root, tokens, _PARENTS) for root, tokens in zip(roots, expected.nodes, strict=True)]
    tree = target.score(rows, trees).logits
    target.commit(rows, _PATHS)
    with _misleading(target.cache, target.max_length - 1 - _LATER):
        chains = [TokenTree.of(later[0], later[1:], range(_LATER)) for later in expected.later]
        second = target.score(rows, chains).logits
    target.truncate(rows, [0, 0])
    phases = ("a prompt in a batch of unequal lengths", "a branching tree", "a step after a gathered path")
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {phase: [] for phase in phases}  # Ours, and where theirs stand
    theirs = expected.logits.flatten(0, 1).cpu()
    numbers = torch.arange(len(theirs)).view(4, -1)
    for row, prefix in enumerate(expected.prefixes):
        on_path, dropped = numbers[row], numbers[2 + row]
        last, path = len(prefix) - 1 - start, len(_PATHS[row])  # The root's place among the expected logits
        end, other = last + 1 + path, list(_PATHS[1 - row])
        in_tree = torch.cat([on_path[last:end], dropped[last + 1 : end]])
        # In 16 bits a text's first tokens are noisier by far than those at which the noise is measured.
        first = 0 if start or expected.noise is None else min(_SHORT_WINDOW, last - 1)
        pairs[phases[0]].append((prompt[row, first:last], on_path[first:last]))
        pairs[phases[1]].append((tree[row, [0, *_PATHS[row], *other]], in_tree))
        pairs[phases[2]].append((second[row], on_path[end : end + 1 + _LATER]))
    worst = {}
    for phase, both in pairs.items():
        ours, at = (torch.cat([side.cpu() for side in sides]) for sides in zip(*both, strict=True))
        least = None if sensitive is None else sensitive.flatten().cpu()[at]
        worst[phase] = difference(ours, theirs[at], expected.noise, least)
    return worst


def most_difference(noise: float | None) -> float:
    """Return the largest `difference` allowed where the model's own noise is `noise`; None means
    that the model is exact.
    """
    return STRUCTURE if noise is None else FACTOR * noise


def difference(ours: Tensor, theirs: Tensor, noise: float | None, sensitive: Tensor | None = None) -> float:
    """Return the distance of logits (M, V) from others: their mean `divergence` (nats) where the model's own noise is
    known, else the largest of `node_errors` that is more than `FACTOR` times the node's `sensitive` (M,).
    """
    if noise is not None:
        return float(divergence(ours, theirs).mean())
    found = node_errors(ours, theirs)
    if sensitive is not None:
        found = found.masked_fill(found <= FACTOR * sensitive.to(found.device), 0)
    return float(found.max())


@contextmanager
def _misleading(cache: SlotCache, length: int) -> Iterator[None]:
    """Make the cache report `length` as its number of tokens while open. Masks and positions are
    passed explicitly, so nothing may depend on it, also not far behind the few tokens of the check
    (Llama 4 scales queries by it).
    """
    vars(cache)["get_seq_length"] = lambda *_: length
    try:
        yield
    finally:
        del vars(cache)["get_seq_length"]


def node_errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the root-mean-square difference (..,) of logits (.., V) over the standard deviation of each node's;
    infinite where one is NaN.
    """
    theirs = theirs.to(ours.device).float()
    errors = (ours.float() - theirs).square().mean(-1).sqrt()
    return (errors / theirs.std(-1).clamp(min=1e-9)).nan_to_num(nan=math.inf)
