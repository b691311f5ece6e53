"""Tells from a configuration which models can be verified losslessly and how far, and by running a
model why it cannot.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import UNSERVED, ForerunError, UnsupportedModelError
from forerun.model.cache import SlotCache
from forerun.model.compression import compresses
from forerun.model.layers import base_of, device_of
from forerun.model.masks import MaskStyle
from forerun.model.positions import counts_positions
from forerun.model.states import KEPT, KINDS, StateLayers, of_classes, state_layers
from forerun.model.switches import names_of

_log = logging.getLogger(__name__)
_SIZE = re.compile(r"window|chunk|block|top_?k|compress|stride|sparse|local|span|segment|budget|mem_len|dense_len")
"""Matches keys of a configuration whose value may be a number of tokens behind which attention
changes.
"""
_NO_SIZE = re.compile(r"expert|moe|group|layer|head|num_|_num|feed_forward|ffn|multiple_of|conv|mamba|ssm|norm|logits")
"""Matches those of these keys that mean something else after all."""
_ELSEWHERE = re.compile(r"vision|audio|image|quant")  # Matches parts of a key's path that are not about a text's tokens
_PICKED, _UNIT = re.compile(r"top_?k"), re.compile(r"block|compress|stride|chunk")
"""Match keys of a count of blocks, and of a block's size: together they make a number of tokens."""


def text_config(model: Any) -> Any:
    """Return the configuration of a model's decoder."""
    return model.config.get_text_config(decoder=True)


def auto_class(config: Any) -> Any:
    """Return the class of transformers that opens a checkpoint: that of causal LMs or, where a family has none, that of
    models for images and texts, which answer texts alone as well.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    both = (AutoModelForCausalLM, AutoModelForImageTextToText)
    classes = [each for each in both if type(config) in each._model_mapping]
    return classes[0] if classes and not getattr(config, "auto_map", None) else AutoModelForCausalLM


def refuse_config(config: Any, model_class: Any = None) -> None:
    """Raise UnsupportedModelError for an encoder-decoder, what is no causal LM, or recurrent state,
    before any weight is loaded. `model_class` is that of a model that is loaded already; None: what
    transformers would load.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; forerun verifies causal language models only")
    model_class = model_class or auto_class(config)._model_mapping.get(type(config), None)
    if model_class is not None:
        code = vars(sys.modules.get(model_class.__module__, object))
        wraps = config.get_text_config(decoder=True) is not config  # Its layers are of another file
        layers = [each for each in code.values() if isinstance(each, type) and issubclass(each, nn.Module)]
        states_known = any(of_classes(layers).values()) or compresses(layers)
        if getattr(model_class, "_is_stateful", False) and not wraps and not states_known:
            raise _unknown_states(kind)
    elif not getattr(config, "auto_map", None):
        raise UnsupportedModelError(f"{kind} is no causal language model: transformers has no AutoModelForCausalLM")
    MaskStyle.of(config.get_text_config(decoder=True))


_HOW = (
    "docs/hybrids.md#another-kind-of-layer says how to write the file in forerun/model/states that serves it. "
    f"{UNSERVED}"
)


def _unknown_states(kind: str) -> UnsupportedModelError:
    """Return the error of a family whose recurrent state no file of `states` knows."""
    return UnsupportedModelError(
        f"{kind} keeps a recurrent state of a kind of its own, in no way by which forerun could take it back: none of "
        f"its layers has one of {', '.join(KINDS)}. {_HOW}"
    )


def keeps_states(model: Any) -> bool:
    """Return whether a model has layers with recurrent states, which no mask keeps from the tokens behind."""
    return bool(state_layers(model)) or getattr(type(model), "_is_stateful", False)


def reads_apart(model: Any) -> bool:
    """Return whether no mask and no positions keep texts apart in one row: each has to be a row of its own."""
    return keeps_states(model) or counts_positions(model)


def refuse_stateful(model: Any, why: str) -> None:
    """Raise UnsupportedModelError, which says `why`, for a model with recurrent states."""
    if keeps_states(model):
        raise UnsupportedModelError(f"{model.config.model_type} keeps recurrent states: {why}")


def known_states(model: Any) -> StateLayers:
    """Return the layers of a loaded model that keep states. Raises UnsupportedModelError for one whose state no file
    of `states` knows.
    """
    layers = state_layers(model)
    if getattr(type(model), "_is_stateful", False) and not layers and not compresses(map(type, model.modules())):
        raise _unknown_states(model.config.model_type)
    unknown = {kind.__name__: sorted(KEPT.intersection(names_of(kind))) for kind, names in layers.items() if not names}
    if unknown:
        classes = ", ".join(f"{name} ({', '.join(methods)})" for name, methods in sorted(unknown.items()))
        raise UnsupportedModelError(
            f"{model.config.model_type}: layers of the class {classes} keep a state in the cache by code of their own, "
            f"with none of {', '.join(KINDS)}. {_HOW}"
        )
    return layers


def named_sizes(config: Any) -> dict[str, int]:
    """Return key -> tokens: the windows, chunks, blocks and top-k that a text configuration names,
    its own parts included. Keys are chosen by the words in them. A key that names something else
    costs a longer self-check, nothing more.
    """
    named = dict(_integers(config.to_dict()))
    sizes = {
        key: value
        for key, value in named.items()
        if _SIZE.search(key) and not _NO_SIZE.search(key.rpartition(".")[2]) and not _ELSEWHERE.search(key)
    }
    products = {
        f"{picked} x {unit}": sizes[picked] * sizes[unit]
        for picked in sizes
        for unit in sizes
        if _PICKED.search(picked) and _UNIT.search(unit) and not _PICKED.search(unit)
    }
    return {**sizes, **products}


def _integers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield dotted key and value of every integer above 1; those of a list share its key, of which
    the largest remains.
    """
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _integers(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        whole = [part for part in value if isinstance(part, int) and not isinstance(part, bool)]
        yield from _integers(max(whole), key) if whole else ()
        for part in value:
            yield from _integers(part, key) if isinstance(part, (dict, list, tuple)) else ()
    elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
        yield key, value


def context_length(config: Any) -> int:
    """Return the positions that a text configuration allows. A rope that switches its frequencies
    on the batch's largest position (dynamic, longrope) would let one row change another's logits;
    below the original length it never switches, so the context ends there, and a warning says so.
    So does that of a model that scales queries by the number of tokens in the cache (Llama 4's
    temperature tuning).
    """
    announced, limit = _read_announced(config), most_positions(config)
    if limit < announced:
        _log.warning(
            "%s: %s; the context is limited to %d of %d tokens",
            config.model_type,
            f"behind position {limit} its rope, or the scale of its attention, changes for every row of a batch",
            limit,
            announced,
        )
    return limit


def most_positions(config: Any) -> int:
    """Return `context_length` without the warning."""
    announced = _read_announced(config)
    return min([announced, *_switch_points(config, announced)])


def _read_announced(config: Any) -> int:
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 0
    return int(most) if most > 0 else 2**20  # XLNet says -1


def _switch_points(config: Any, announced: int) -> list[int]:
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    points = [config.floor_scale - 1] if getattr(config, "attn_temperature_tuning", None) else []
    for rope in nested or [ropes]:
        kind = rope.get("rope_type") or ""
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            points.append(int(original or getattr(config, "original_max_position_embeddings", None) or announced))
        elif "dynamic" in kind:
            points.append(announced)
    return points


_CLASH = "its layers fail on what forerun's KV cache gives them, views of one tensor that holds all rows"
_PLACED = (
    "it ignores the positions that it is given and counts a token's position, or its ALiBi bias, from its place in the "
    "cache; siblings of a tree stand in different places at the same position"
)
_HIDDEN = 1  # The token that the probe's second mask hides


def name_of(model: Any) -> str:
    """Return the name of a model for messages: the one the user gave, not a folder of our cache
    that they do not know.
    """
    named = getattr(model, "named_by_user", "") or getattr(model, "name_or_path", "")
    return str(named) or type(model).__name__


@contextmanager
def refusing(model: Any, *, plainly: bool = False) -> Iterator[None]:
    """Turn any error of a model's own code into an UnsupportedModelError that says what is missing,
    while open. `plainly` means that it runs without cache and mask, so that nothing of forerun's
    can be missing.
    """
    try:
        yield
    except (ForerunError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if plainly:
            raise UnsupportedModelError(f"{name_of(model)}: even a plain forward fails: {reason}") from error
        needs = "forerun needs 4D attention masks, explicit positions and a KV cache"
        raise UnsupportedModelError(
            f"{name_of(model)} cannot score a token tree: {obstacle(model, error) or _CLASH}. {needs}. {UNSERVED}"
        ) from error


@torch.inference_mode()
def obstacle(model: Any, error: Exception | None = None) -> str | None:
    """Return what `model`, whose plain forward works, does not follow of a mask, positions and a
    cache; None if that is not what is wrong. `error` is what it raised under forerun.
    """
    if isinstance(error, AttributeError) and isinstance(error.obj, SlotCache):
        if error.name in ("get_mask_sizes", "get_query_offset"):
            return _PLACED
        return f"its layers ask the KV cache for {error.name!r}, for a state that forerun cannot roll back"
    steps, mask = torch.arange(4).unsqueeze(0), "a 4D attention mask, one entry for each pair of tokens"
    try:
        plain, hidden = _states(model, steps, hide=False), _states(model, steps, hide=True)
    except Exception:
        return f"it does not take {mask}"
    if torch.equal(plain, hidden):
        return f"it ignores {mask}"
    if torch.equal(plain, _states(model, 3 * steps, hide=False)):
        return _PLACED
    return None


def _states(model: Any, positions: Tensor, *, hide: bool) -> Tensor:
    config, device = text_config(model), device_of(model.get_input_embeddings())
    lowest, style = torch.finfo(model.dtype).min, MaskStyle.of(config)
    mask = torch.full((1, 1, 4, 4), lowest, dtype=model.dtype, device=device).triu(1)
    if hide:
        mask[..., _HIDDEN + 1 :, _HIDDEN] = lowest
    return base_of(model)(
        input_ids=torch.arange(4, device=device).unsqueeze(0) % config.vocab_size,
        position_ids=positions.to(device),
        attention_mask=style.hand_over(dict.fromkeys(style.types, mask)),
        use_cache=False,
    ).last_hidden_state
