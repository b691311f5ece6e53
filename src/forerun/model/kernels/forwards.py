"""Faster forwards for the norms, gated MLPs, attentions and whole decoder layers of a packed model:
the same modules in fewer operations.

Only `forward` of a module is replaced, on the object; where a pass is not what the kernels take (gradients, another
cache, a compiler that traces) the module's own runs. A module gets one if it answers the states of a plain pass as
before, see `acceptance`. The operations are those of its device, see `fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from forerun.model.cache import SlotCache
from forerun.model.kernels import acceptance, products
from forerun.model.kernels.module_forwards import (
    AttentionForward,
    GatedForward,
    ModuleForward,
    NormForward,
    run_on_a_cache,
)
from forerun.model.kernels.native import Attention, LayerParts, LayerRoom, Layers
from forerun.model.kernels.packing import PackedLinear, PanelWeight
from forerun.model.layers import Capture, cache_argument, captures_on
from forerun.model.padding import current

MODELS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
"""Classes that only embed, run their layers and norm."""
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Classes that only norm, attend and add, then norm, mix and add."""


class _Rooms:
    """Scratch buffers that all layers of a model share, since they run one at a time."""

    KEPT = 64  # Tokens for which there is always room; that of larger passes is let go by the next smaller one

    def __init__(self) -> None:
        self.last: LayerRoom | None = None

    def of(self, parts: LayerParts, tokens: int, dtype: torch.dtype, kind: int) -> LayerRoom:
        """Return buffers for so many tokens in such layers."""
        room = self.last
        if room is None or (room.sizes, room.dtype) != (parts.sizes, dtype) or not self._fits(room.tokens, tokens):
            room = self.last = LayerRoom(parts.sizes, max(tokens, self.KEPT), dtype, kind)
        return room

    def _fits(self, held: int, tokens: int) -> bool:
        return tokens <= held <= max(tokens, self.KEPT)

    def __deepcopy__(self, memo: dict[int, object]) -> _Rooms:
        memo[id(self)] = found = _Rooms()
        return found


@dataclass(frozen=True, slots=True)
class _Inside:
    """The submodules and hooks found inside layers, to tell later whether anything was exchanged."""

    places: tuple[list[dict[str, Any]], list[str]]  # The children of an owner, and a name among them
    held: list[Any]
    replaced: list[dict[str, Any]]  # Attributes of those that have a faster forward
    by: list[Any]
    hooks: list[dict[int, Any]]

    @classmethod
    def at(cls, places: Sequence[tuple[nn.Module, str]]) -> _Inside:
        """Record what is there now."""
        found = [owner._modules for owner, _ in places], [name for _, name in places]
        held: list[Any] = [*map(dict.get, *found)]
        replaced = [part.__dict__ for part in held if "forward" in part.__dict__]
        hooks = [hooks for part in held for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        return cls(found, held, replaced, [attributes["forward"] for attributes in replaced], hooks)

    @classmethod
    def of(cls, layers: Sequence[LayerForward]) -> _Inside:
        """Join the records of several layers."""
        every = [layer.inside for layer in layers]
        places = [one for each in every for one in each.places[0]], [one for each in every for one in each.places[1]]
        others = ([one for each in every for one in getattr(each, field.name)] for field in fields(cls)[1:])
        return cls(places, *others)

    def intact(self) -> bool:
        """Return whether nothing has been exchanged and nothing is hooked."""
        return (
            not any(self.hooks)
            and [*map(dict.get, *self.places)] == self.held
            and [*map(dict.get, self.replaced, repeat("forward"))] == self.by
        )


class _LayerRun:
    """Consecutive whole layers that run in one call."""

    def __init__(self, layers: Sequence[LayerForward]) -> None:
        self.layers, self.first, self.rooms = layers, layers[0], layers[0].rooms
        self.inside = _Inside.of(layers)
        self.parts = [layer.parts() for layer in layers]
        self.numbers = tuple(layer.attention.module.layer_idx for layer in layers)
        self.kind = products.kind_of(self.first.dtype)
        self.calls = Layers(self.parts, self.kind, products.address())

    def fits(self, states: Tensor, angles: tuple[Tensor, Tensor] | None, mask: Any, cache: Any) -> bool:
        """Return whether the kernels can run this pass."""
        return self.inside.intact() and self.first.attention.fits(states, angles, mask, cache)

    def __call__(
        self,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: SlotCache,
        wanted: Sequence[int],
    ) -> list[Tensor]:
        """Run the layers on states (B, N, width) that fit, and return the outputs of those that are
        `wanted`, by number in this run.
        """
        heads = self.first.attention.heads
        stores = cache.stores_for(self.numbers, (heads.keys, heads.depth), like=states)
        places = cache.places(states.device)
        tokens = states.shape[:-1].numel()
        room = self.rooms.of(self.parts[0], tokens, states.dtype, self.kind)
        self.calls.begin(room, tokens, angles, places, stores)
        asked = self._asked(states, stores[0], cache, mask)
        if asked is not None:
            return self.calls.run(states, asked, wanted)
        outputs = list[Tensor]()
        for number, layer in enumerate(self.layers):
            query = self.calls.enter(number, states)
            attended = layer.attention.attend(query, cache, mask)
            states = self.calls.leave(number, attended.contiguous(), states)
            outputs.append(states)
        return [outputs[number] for number in wanted]

    def _asked(self, states: Tensor, first: tuple[Tensor, Tensor], cache: SlotCache, mask: Tensor) -> Attention | None:
        """Return the attention problem that all layers give to the C kernel, or None if attention
        runs elsewhere or on other tokens.
        """
        this, module = current(), self.first.attention.module
        seen = cache.seen(module.layer_idx)
        aliased = all(
            one.untyped_storage().data_ptr() == store.untyped_storage().data_ptr()
            for one, store in zip(seen, first, strict=True)
        )  # scattered rows may have been copied
        query = self.calls.query(states.shape[:-1]).transpose(1, 2)
        if not aliased or mask.shape[1] != 1:
            return None
        if not self.first.ops.takes_attention(query, *seen, mask):
            return None
        return Attention(query, *seen, mask, module.scaling, this.rows, paths=this.paths, flat=this.flat)


class _LayerRuns(dict[tuple[int, int], _LayerRun]):
    """The runs that were needed so far, by first layer and end. A copied model makes its own."""

    def __deepcopy__(self, memo: dict[int, object]) -> _LayerRuns:
        return _LayerRuns()


class LayerForward(ModuleForward):
    """A decoder layer on a CPU in one call, or in two with its attention between them. Its parts
    must have their own faster forwards already; the bits are those of the parts.
    """

    PARTS: ClassVar = {
        "input_layernorm": NormForward,
        "self_attn": AttentionForward,
        "post_attention_layernorm": NormForward,
        "mlp": GatedForward,
    }

    def __init__(self, module: Any, rooms: _Rooms) -> None:
        super().__init__(module, module.input_layernorm.weight)
        self.cache_argument = cache_argument(module.self_attn)
        self.rooms = rooms
        self.before, self.attention, self.behind, self.mlp = (
            module._modules[name].__dict__["forward"] for name in self.PARTS
        )
        self.last = (module.self_attn.o_proj.packed_weight, module.mlp.down_proj.packed_weight)
        inside = [(module, name) for name in self.PARTS] + _projections(module)
        self.inside = _Inside.at(
            inside + [(each.module, name) for each in (self.attention, self.mlp) for name in each.PARTS]
        )
        self.runs = _LayerRuns()  # Runs of this layer alone
        self.key = (self.parts().sizes, module.self_attn.scaling)  # Layers with one key can be one run

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        """Return whether a module can be replaced; asked once its parts have their forwards."""
        if type(module).__name__ not in LAYERS or not type(module).__module__.startswith("transformers.models."):
            return False
        parts = [(module._modules.get(name), kind) for name, kind in cls.PARTS.items()]
        if any(part is None or type(part.__dict__.get("forward")) is not kind for part, kind in parts):
            return False
        last = [owner._modules.get(name) for owner, name in _projections(module)]
        layer: Any = module
        attention, mlp = layer.self_attn.forward, layer.mlp.forward
        weights = [attention.joint, mlp.joint, *(one.packed_weight for one in last if _alone(one))]
        width, inner = attention.joint.in_features, mlp.joint.sizes[0]
        return (
            len(weights) == 4
            and all(isinstance(one, PanelWeight) and one.in_features % products.STEP == 0 for one in weights)
            and [one.in_features for one in weights] == [width, width, attention.joint.sizes[0], inner]
            and weights[2].sizes == weights[3].sizes == [width]
        )

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        cache: Any = kwargs.get(self.cache_argument)
        if not self.runs:
            self.runs[0, 1] = _LayerRun([self])
        if not self.runs[0, 1].fits(hidden_states, position_embeddings, attention_mask, cache):
            return self.plain(
                hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
            )
        assert position_embeddings is not None and attention_mask is not None
        [states] = self.runs[0, 1](hidden_states, position_embeddings, attention_mask, cache, [0])
        return states

    def parts(self) -> LayerParts:
        """Return the weights and sizes of the layer."""
        mix, down = self.last
        return LayerParts(
            first=self.before,
            second=self.behind,
            joint=self.attention.joint,
            mix=mix,
            gates=self.mlp.joint,
            down=down,
            heads=self.attention.heads,
        )

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the layer's output for causal rows on a cache of its own, and what it writes
        there.
        """
        return run_on_a_cache(self.attention, forward, states, kwargs, lambda found: found)


class ModelForward(ModuleForward):
    """A base model whose whole layers run in one call where none of them is hooked, but to capture
    the states at boundaries. Embedding, rotary angles, last norm and other layers are called as its
    own forward calls them.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.layers[0].forward.attention.joint)
        self.cache_argument = cache_argument(module)
        self.layers = list(module.layers)
        self.runs = _LayerRuns()

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        """Return whether a module can be replaced; asked once its layers have their forwards."""
        if type(module).__name__ not in MODELS or not type(module).__module__.startswith("transformers.models."):
            return False
        layers: Any = module._modules.get("layers")
        return bool(len(layers)) and type(layers[0].__dict__.get("forward")) is LayerForward

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        module: Any = self.module
        if not self._fits(input_ids, attention_mask, position_ids, kwargs):
            return self.plain(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        cache = kwargs[self.cache_argument]
        states = module.embed_tokens(input_ids)
        angles = module.rotary_emb(states, position_ids=position_ids)
        at = 0
        while at < len(self.layers):
            end, captures = self._whole_until(at)
            if end > at and (run := self._run(at, end)).fits(states, angles, attention_mask, cache):
                boundaries = sorted({capture.boundary for capture in captures} - {at} | {end})
                found = run(states, angles, attention_mask, cache, [boundary - at - 1 for boundary in boundaries])
                by_boundary = {at: states, **dict(zip(boundaries, found, strict=True))}
                for capture in captures:
                    capture.keep(by_boundary[capture.boundary])
                states, at = by_boundary[end], end
                continue
            given = {"attention_mask": attention_mask, "position_embeddings": angles, "position_ids": position_ids}
            states, at = self.layers[at](states, **given, **kwargs), at + 1
        return BaseModelOutputWithPast(last_hidden_state=module.norm(states), **{self.cache_argument: cache})

    def _fits(self, ids: Tensor | None, mask: Any, positions: Tensor | None, kwargs: dict[str, Any]) -> bool:
        """Return whether this is a plain pass of ids over a `SlotCache`."""
        module: Any = self.module
        return (
            ids is not None
            and positions is not None
            and isinstance(mask, Tensor)
            and mask.dim() == 4
            and kwargs.keys() == {self.cache_argument, "use_cache"}
            and type(kwargs[self.cache_argument]) is SlotCache
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and list(module.layers._modules.values()) == self.layers
        )

    def _whole_until(self, start: int) -> tuple[int, list[Capture]]:
        """Return the end of the run of whole layers of one kind that begins at `start`, and the hooks
        on them, which capture their states and do nothing else.
        """
        end, key, captures = start, None, list[Capture]()
        for layer in self.layers[start:]:
            forward = layer.__dict__.get("forward")
            if type(forward) is not LayerForward or (key is not None and forward.key != key):
                break
            if layer._forward_hooks or layer._forward_pre_hooks:
                found = captures_on(layer)
                if found is None:
                    break
                captures += found
            end, key = end + 1, forward.key
        return end, captures

    def _run(self, start: int, end: int) -> _LayerRun:
        if (start, end) not in self.runs:
            self.runs[start, end] = _LayerRun([layer.forward for layer in self.layers[start:end]])
        return self.runs[start, end]

    @torch.inference_mode()
    def agrees(self, ids: Tensor) -> bool:
        """Return whether it computes from ids (B, N), on a cache of its own, exactly what the
        module's own forward computes.
        """
        batch, count = ids.shape
        cache, positions = SlotCache(batch, count), torch.arange(count).expand(batch, -1)
        cache.begin(range(batch), positions, count)
        mask = torch.full((count, count), torch.finfo(self.dtype).min, dtype=self.dtype).triu(1)
        given = {"input_ids": ids, "attention_mask": mask.expand(batch, 1, -1, -1), "position_ids": positions}
        others: dict[str, Any] = {self.cache_argument: cache, "use_cache": True}
        own, found = (forward(**given, **others).last_hidden_state for forward in (self.plain, self))
        return torch.equal(own, found)


def _projections(layer: Any) -> list[tuple[Any, str]]:
    """Return owners and names of the projections that are not part of a joint product."""
    return [(layer._modules["self_attn"], "o_proj"), (layer._modules["mlp"], "down_proj")]


def _alone(part: Any) -> bool:
    return type(part) is PackedLinear and part.group is None


KINDS: tuple[type[NormForward | GatedForward | AttentionForward], ...] = (NormForward, GatedForward, AttentionForward)


def install(model: nn.Module, ids: Tensor | None, accepted: Collection[str] | None = None) -> int:
    """Give every module of `model` that suits and answers as before a faster forward, and return
    how many got one.

    Args:
        ids: (B, N) tokens, text of the model's own kind, over which the modules are compared. None: `model` takes no
            tokens (a head); norms and MLPs are compared on random states, and no attention gets one.
        accepted: names of modules that were compared before: they alone get one, and nothing is compared.
    """
    found = _install_tried(
        model, ids, accepted, lambda module: next((kind for kind in KINDS if kind.suits(module)), None)
    )
    if ids is None and accepted is None:
        return len(found)
    rooms = _Rooms()  # Whole layers, of modules that have faster forwards by now
    one = partial(LayerForward, rooms=rooms)
    found += _install_tried(model, ids, accepted, lambda module: one if LayerForward.suits(module) else None)
    for name, module in model.named_modules():
        if ModelForward.suits(module):
            whole = ModelForward(module)
            if (ids is not None and whole.agrees(ids)) if accepted is None else name in accepted:
                module.forward = whole
                found.append(whole)
    return len(found)


def _install_tried(
    model: nn.Module,
    ids: Tensor | None,
    accepted: Collection[str] | None,
    kind_of: Callable[[nn.Module], Callable[[Any], Any] | None],
) -> list[Any]:
    """Install faster forwards on the modules that `kind_of` suits and that answer as before, and
    return them.
    """
    named = [(name, module, kind_of(module)) for name, module in model.named_modules()]
    made = {name: kind(module) for name, module, kind in named if kind is not None and "forward" not in module.__dict__}
    if accepted is not None:
        found = [replacement for name, replacement in made.items() if name in accepted]
    elif ids is not None:
        found = acceptance.accept(model, list(made.values()), ids) if made else []
    else:
        found = acceptance.accept_alone([(each, each.random_states()) for each in made.values() if each.width])
    for replacement in found:
        replacement.module.forward = replacement
    return found


def list_installed(model: nn.Module) -> list[str]:
    """Return the names of the modules that have a faster forward."""
    return [name for name, module in model.named_modules() if isinstance(module.__dict__.get("forward"), ModuleForward)]


def remove(model: nn.Module) -> int:
    """Undo `install`, and return how many modules have their own forward again."""
    replaced = [module for module in model.modules() if isinstance(module.__dict__.get("forward"), ModuleForward)]
    for module in replaced:
        del module.forward
    return len(replaced)
