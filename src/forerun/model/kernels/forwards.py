"""Faster forwards for the norms, gated MLPs and attentions of a packed model: the same modules, fewer operations; and
for whole decoder layers made of them.

Only `forward` of a module is replaced, on the object; where a pass is not what the kernels take (gradients, another
cache, a compiler that traces) the module's own runs. A module gets one if it answers the states of a plain pass as
before, see `acceptance`. The operations are those of its device, see `fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.model.cache import SlotCache
from forerun.model.kernels import acceptance, attention, fused, products
from forerun.model.kernels.native import Attention, HeadNorm, Heads, LayerCalls, LayerParts, LayerRoom
from forerun.model.kernels.packing import PackedLinear, PackedWeight, PanelWeight
from forerun.model.layers import cache_argument
from forerun.model.padding import current

ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Classes of transformers that do nothing but project, perhaps normalise heads, rotate, attend and project."""
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Classes that do nothing but norm, attend and add, norm, mix and add."""
SMALL = 1e-3  # States are tried at this scale too, where a norm's epsilon counts


class _Forward:
    """A `Replacement`: stands where a module's own forward stood."""

    def __init__(self, module: nn.Module, weight: Tensor) -> None:
        self.module = module
        self.plain = module.forward
        self.device, self.dtype = weight.device, weight.dtype
        self.width = 0  # Of its states, where it can be tried on nothing but states

    def random_states(self) -> Tensor:
        """Return states (1, 24, width) of a normal distribution, always the same."""
        states = torch.randn(1, 24, self.width, generator=torch.Generator().manual_seed(0))
        return states.to(self.device, self.dtype)

    @property
    def ops(self) -> Any:
        """The operations of the module's device."""
        return fused(self.device)

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return what `forward`, this or the module's own, makes of states (.., size)."""
        return [forward(states.contiguous(), **kwargs)]


class NormForward(_Forward):
    """A root-mean-square norm in float32 whose weight is applied in bf16."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.weight)
        self.epsilon, self.width = _epsilon(module), module.weight.shape[0]

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        if not type(module).__name__.endswith("RMSNorm"):  # Asked for its weight, a packed layer unpacks it
            return False
        weight = getattr(module, "weight", None)
        return (
            _epsilon(module) > 0
            and isinstance(weight, Tensor)
            and weight.dim() == 1
            and weight.is_contiguous()
            and _takes(weight, weight.shape[0])
        )

    def __call__(self, states: Tensor) -> Tensor:
        takes = self.ops.takes_states(states)
        result: Tensor = (
            self.ops.rms_norm(states, self.module._parameters["weight"], self.epsilon) if takes else self.plain(states)
        )
        return result

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        return [forward((states * scale).contiguous(), **kwargs) for scale in (1.0, SMALL)]


class _JointForward(_Forward):
    """Of a module whose `PARTS` are computed as one product."""

    PARTS: ClassVar[tuple[str, ...]]

    def __init__(self, module: nn.Module) -> None:
        joint = self.joint_of(module)
        assert joint is not None, "suits() is asked first"
        super().__init__(module, joint.packed)
        self.parts = [(name, module._modules[name]) for name in self.PARTS]
        self.joint = joint

    @classmethod
    def joint_of(cls, module: nn.Module) -> PackedWeight | None:
        """The weight of that product; None where the parts are not its parts, all and in this order."""
        children = [module._modules.get(name) for name in cls.PARTS]
        parts = [(child.packed_weight, child.index) for child in children if isinstance(child, PackedLinear)]
        weight = parts[0][0] if parts else None
        if weight is None or parts != [(weight, index) for index in range(len(children))]:
            return None
        return weight if len(weight.sizes) == len(children) else None

    def intact(self) -> bool:
        """Whether the parts are still those of the joint product: adapters and quantisation put others there."""
        children = self.module._modules
        return all(children[name] is part for name, part in self.parts)


class GatedForward(_JointForward):
    """``down(silu(gate(x)) * up(x))`` with a joint product for gate and up."""

    PARTS = ("gate_proj", "up_proj")

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.width = self.joint.in_features

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        joint, activation = cls.joint_of(module), getattr(module, "act_fn", None) or getattr(module, "activation", None)
        return (
            joint is not None
            and "down_proj" in module._modules
            and "silu" in type(activation).__name__.lower()
            and joint.sizes[0] == joint.sizes[1]
            and _takes(joint.packed, joint.sizes[0])
        )

    def __call__(self, states: Tensor) -> Tensor:
        if not self.ops.takes_states(states) or not self.intact():
            mixed: Tensor = self.plain(states)
        else:
            down: Any = self.module._modules["down_proj"]
            mixed = down(self.ops.silu_and_mul(self.joint.apply(states)))
        return mixed


class AttentionForward(_JointForward):
    """Attention over a `SlotCache`; queries are rotated and keys and values written in one step."""

    PARTS = ("q_proj", "k_proj", "v_proj")

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.cache_argument = cache_argument(module)
        depth = module.head_dim
        queries, keys = self.joint.sizes[0] // depth, self.joint.sizes[1] // depth
        norms = [module._modules.get(name) for name in ("q_norm", "k_norm")]
        query, key = (None if norm is None else HeadNorm(norm.weight, _epsilon(norm)) for norm in norms)
        self.heads = Heads(queries=queries, keys=keys, depth=depth, query_norm=query, key_norm=key)

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        if type(module).__name__ not in ATTENTIONS or not type(module).__module__.startswith("transformers.models."):
            return False
        joint = cls.joint_of(module)
        depth = getattr(module, "head_dim", 0)
        norms = [module._modules[name] for name in ("q_norm", "k_norm") if name in module._modules]
        return (
            joint is not None
            and attention.installed(module)
            and _takes(joint.packed)
            and depth in fused(joint.packed.device).ROTATED  # type: ignore[union-attr]
            and joint.sizes[1] == joint.sizes[2]
            and all(NormForward.suits(norm) for norm in norms)  # type: ignore[arg-type]
        )

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self.module
        cache: Any = kwargs.get(self.cache_argument)
        if not self.fits(hidden_states, position_embeddings, attention_mask, cache):
            return self.plain(  # type: ignore[no-any-return]
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        heads, layer = self.heads, module.layer_idx
        states = self.joint.apply(hidden_states)
        stores, places = cache.opened(layer, (heads.keys, heads.depth), like=states)
        assert position_embeddings is not None and attention_mask is not None
        query = self.ops.rope_and_write(states, position_embeddings, heads, stores, places)
        return module.o_proj(self.attend(query, cache, attention_mask)), None

    def attend(self, query: Tensor, cache: SlotCache, mask: Tensor) -> Tensor:
        """What queries (B, N, heads, D) find in the cache: (B, N, heads * D)."""
        module: Any = self.module
        keys, values = cache.seen(module.layer_idx)
        query = query.transpose(1, 2)
        attended, _ = attention.fold_attention(module, query, keys, values, mask, scaling=module.scaling)
        return attended.flatten(2)

    def fits(self, states: Tensor, angles: tuple[Tensor, Tensor] | None, mask: Any, cache: Any) -> bool:
        """Whether a pass is one that the kernels take."""
        angle = (*states.shape[:-1], self.heads.depth)  # for every token, in the form in which the kernel reads them
        return (
            type(cache) is SlotCache
            and angles is not None
            and mask is not None
            and self.ops.takes_states(states)
            and self.intact()
            and attention.installed(self.module)
            and all(part.shape == angle and part.dtype == states.dtype and part.is_contiguous() for part in angles)
        )

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        """What attention makes of causal rows on a cache of its own, and the keys and values that it writes there. The
        module's own forward attends as it did before attention was folded."""
        with attention.unfolded(self.module) if forward is self.plain else nullcontext():
            return _on_a_cache(self, forward, states, kwargs, lambda found: found[0])


def _on_a_cache(
    own: AttentionForward, forward: Any, states: Tensor, kwargs: dict[str, Any], chosen: Callable[[Any], Tensor]
) -> list[Tensor]:
    """What is `chosen` of what a forward makes of causal rows (B, N, width) on a cache of its own, and the keys and
    values that it writes there."""
    batch, count = states.shape[:2]
    cache, module = SlotCache(batch, count), own.module
    cache.begin(range(batch), torch.arange(count, device=states.device).expand(batch, -1), count)
    mask = torch.full((count, count), torch.finfo(states.dtype).min).triu(1).to(states)
    angles = [part.expand(batch, -1, -1).contiguous() for part in kwargs["position_embeddings"]]
    found = forward(
        hidden_states=states.contiguous(),
        position_embeddings=tuple(angles),
        attention_mask=mask.expand(batch, 1, -1, -1),
        **{own.cache_argument: cache},
    )
    layer: Any = module.layer_idx
    return [chosen(found), *(part for row in range(batch) for part in cache.read(layer, row, count))]


class _Shared:
    """What the layers of a model know of the pass that they run in, found out by the first: they run one at a time."""

    def __init__(self) -> None:
        self.given: tuple[Any, ...] = (None, None, None)  # Mask, angles and cache of a pass that the kernels take
        self.room: LayerRoom | None = None
        self.this = object()  # Stands for the pass
        self.asked: _Asked | None = None  # Of attention, by the first layer of a pass

    def __deepcopy__(self, memo: dict[int, object]) -> _Shared:
        memo[id(self)] = found = _Shared()
        return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a layer asked of attention. Others whose stores lie alike ask the same of theirs."""

    call: Attention
    query: int  # Where its queries lie; layers of another width have theirs elsewhere
    during: object  # Stands for the pass
    stores: tuple[Tensor, Tensor]  # Whole, of which the layer may read a window
    offsets: tuple[int, int]  # Bytes from a store to its window

    def fits(self, query: Tensor, stores: tuple[Tensor, Tensor], scale: float) -> bool:
        """Whether a layer whose queries lie there, with these stores, asks the same."""
        key, value = self.stores
        return (
            scale == self.call.scale
            and query.data_ptr() == self.query
            and stores[0].shape == key.shape
            and stores[1].shape == value.shape
        )

    def again(self, stores: tuple[Tensor, Tensor]) -> Tensor:
        """The answer for these stores; it lies where the last one lay."""
        found = self.call.run_on(stores[0].data_ptr() + self.offsets[0], stores[1].data_ptr() + self.offsets[1])
        return found.flatten(2)


class LayerForward(_Forward):
    """A decoder layer on a CPU in two calls, and its attention between them. Its parts have got their own faster
    forwards before; the bits are those of the parts."""

    PARTS: ClassVar = {
        "input_layernorm": NormForward,
        "self_attn": AttentionForward,
        "post_attention_layernorm": NormForward,
        "mlp": GatedForward,
    }

    def __init__(self, module: Any, shared: _Shared) -> None:
        super().__init__(module, module.input_layernorm.weight)
        self.cache_argument = cache_argument(module.self_attn)
        self.shared, self.calls, self.begun = shared, LayerCalls(), object()
        self.places: Tensor | None = None  # Of the pass that was begun
        self.made: LayerParts | None = None
        before, self.attention, behind, mlp = (module._modules[name].__dict__["forward"] for name in self.PARTS)
        self.norms = (before, behind)
        self.weights = [self.attention.joint, module.self_attn.o_proj.packed_weight]
        self.weights += [mlp.joint, module.mlp.down_proj.packed_weight]
        inside = [(module, name) for name in self.PARTS] + _projections(module)
        inside += [(each.module, name) for each in (self.attention, mlp) for name in each.PARTS]
        self.inside = [(owner._modules, name) for owner, name in inside]
        self.held = [children[name] for children, name in self.inside]
        self.replaced = [part.__dict__ for part in self.held if "forward" in part.__dict__]
        self.by = [attributes["forward"] for attributes in self.replaced]
        self.hooks = [hooks for part in self.held for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        """Asked once the parts have their forwards."""
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
            and all(type(one) is PanelWeight and one.in_features % products.STEP == 0 for one in weights)
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
        given = (attention_mask, position_embeddings, cache)
        if not self._intact() or not self._fits(hidden_states, *given):
            return self.plain(
                hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
            )
        attention = self.attention
        heads, layer = attention.heads, attention.module.layer_idx
        stores, places = cache.opened(layer, (heads.keys, heads.depth), like=hidden_states)
        if self.begun is not self.shared.this or self.places is not places:
            assert position_embeddings is not None
            self._begin(hidden_states, position_embeddings, places)
        query = self.calls.enter(hidden_states, stores, stores[0].shape[0] * stores[0].shape[1])
        attended = self._attend(query, stores, cache, attention_mask)
        answer: Tensor = self.calls.leave(attended, hidden_states)
        return answer

    def _attend(self, query: Tensor, stores: tuple[Tensor, Tensor], cache: SlotCache, mask: Any) -> Tensor:
        """What queries (B, N, heads, D) find: (B, N, heads * D), contiguous."""
        shared, scale = self.shared, self.attention.module.scaling
        asked = shared.asked
        if asked is None or asked.during is not shared.this:
            asked = shared.asked = self._asked(query, stores, cache, mask)
        if asked is not None and asked.fits(query, stores, scale):
            return asked.again(stores)
        found: Tensor = self.attention.attend(query, cache, mask)
        return found.contiguous()

    def _asked(self, query: Tensor, stores: tuple[Tensor, Tensor], cache: SlotCache, mask: Tensor) -> _Asked | None:
        """The problem that attention would be given in C; None where it runs elsewhere or on other tokens."""
        this, module = current(), self.attention.module
        keys, values = cache.seen(module.layer_idx)
        rows = query.transpose(1, 2)
        aliased = all(
            one.untyped_storage().data_ptr() == store.untyped_storage().data_ptr()
            for one, store in zip((keys, values), stores, strict=True)
        )  # scattered rows may have been copied
        if this.flat is not None or not aliased or not self.ops.takes_attention(rows, keys, values, mask):
            return None
        if mask.shape[1] != 1:
            return None
        call = Attention(rows, keys, values, mask, module.scaling, this.rows, paths=this.paths)
        offsets = keys.data_ptr() - stores[0].data_ptr(), values.data_ptr() - stores[1].data_ptr()
        return _Asked(call, query.data_ptr(), self.shared.this, stores, offsets)

    def _fits(self, states: Tensor, mask: Any, angles: Any, cache: Any) -> bool:
        """Whether the kernels take this pass; what all layers share is looked at once."""
        shared = self.shared
        if all(one is other for one, other in zip(shared.given, (mask, angles, cache), strict=True)):
            same = shared.room is not None and states.shape == shared.room.shape and states.is_contiguous()
            if same and states.dtype is self.dtype and not torch.is_grad_enabled():
                return True
        shared.this, shared.given = object(), (None, None, None)
        if not self.attention.fits(states, angles, mask, cache):
            return False
        shared.given = (mask, angles, cache)
        return True

    def _begin(self, states: Tensor, angles: tuple[Tensor, Tensor], places: Tensor) -> None:
        """The first time in a pass: say where everything lies."""
        before, behind = (norm.module._parameters["weight"] for norm in self.norms)
        parts = self.made
        if parts is None or parts.first[0] is not before or parts.second[0] is not behind:
            parts = self.made = self._parts(before, behind)
        shared = self.shared
        if shared.room is None or not shared.room.fits(parts, states):
            shared.room = LayerRoom(parts, states)
        self.calls.begin(parts, shared.room, angles, places)
        self.begun, self.places = shared.this, places

    def _parts(self, before: Tensor, behind: Tensor) -> LayerParts:
        joint, mix, gates, down = self.weights
        return LayerParts(
            first=(before, self.norms[0].epsilon),
            second=(behind, self.norms[1].epsilon),
            joint=joint,
            mix=mix,
            gates=gates,
            down=down,
            heads=self.attention.heads,
            kind=products.kind_of(self.dtype),
            multiply=products.address(),
        )

    def _intact(self) -> bool:
        """Whether nothing inside has been exchanged or is watched."""
        return (
            not any(self.hooks)
            and [children.get(name) for children, name in self.inside] == self.held
            and [attributes.get("forward") for attributes in self.replaced] == self.by
        )

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        """What the layer makes of causal rows on a cache of its own, and what it writes there."""
        return _on_a_cache(self.attention, forward, states, kwargs, lambda found: found)


def _projections(layer: Any) -> list[tuple[Any, str]]:
    """Where the projections that nothing is joined with stand: their owners and names."""
    return [(layer._modules["self_attn"], "o_proj"), (layer._modules["mlp"], "down_proj")]


def _alone(part: Any) -> bool:
    return type(part) is PackedLinear and part.group is None


KINDS: tuple[type[NormForward | GatedForward | AttentionForward], ...] = (NormForward, GatedForward, AttentionForward)


def install(model: nn.Module, ids: Tensor | None, accepted: Collection[str] | None = None) -> int:
    """Give every module of `model` that suits and answers as before a faster forward; how many got one.

    Args:
        ids: (B, N) tokens, text of the model's own kind, over which the modules are compared. None: `model` takes no
            tokens (a head); norms and MLPs are compared on random states, and no attention gets one.
        accepted: names of modules that were compared before: they alone get one, and nothing is compared.
    """
    found = _tried(model, ids, accepted, lambda module: next((kind for kind in KINDS if kind.suits(module)), None))
    if ids is None and accepted is None:
        return len(found)
    shared = _Shared()  # Whole layers, of modules that have faster forwards by now
    one = partial(LayerForward, shared=shared)
    return len(found) + len(_tried(model, ids, accepted, lambda module: one if LayerForward.suits(module) else None))


def _tried(
    model: nn.Module,
    ids: Tensor | None,
    accepted: Collection[str] | None,
    kind_of: Callable[[nn.Module], Callable[[Any], Any] | None],
) -> list[Any]:
    """The faster forwards that modules get now, of the kind that suits each, where it answers as before."""
    named = [(name, module, kind_of(module)) for name, module in model.named_modules()]
    made = {name: kind(module) for name, module, kind in named if kind is not None and "forward" not in module.__dict__}
    if accepted is not None:
        found = [replacement for name, replacement in made.items() if name in accepted]
    elif ids is not None:
        found = acceptance.accepted(model, list(made.values()), ids) if made else []
    else:
        found = acceptance.accepted_alone([(each, each.random_states()) for each in made.values() if each.width])
    for replacement in found:
        replacement.module.forward = replacement
    return found


def installed(model: nn.Module) -> list[str]:
    """Return the names of the modules that have a faster forward."""
    return [name for name, module in model.named_modules() if isinstance(module.__dict__.get("forward"), _Forward)]


def remove(model: nn.Module) -> int:
    """Undo `install`; how many modules have their own forward again."""
    replaced = [module for module in model.modules() if isinstance(module.__dict__.get("forward"), _Forward)]
    for module in replaced:
        del module.forward
    return len(replaced)


def _epsilon(module: Any) -> float:
    """Of a norm; 0 where it does not say."""
    return float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0)


def _takes(weight: Tensor, size: int = 0) -> bool:
    """Whether its device has operations for states of its dtype, of so many values."""
    ops = fused(weight.device)
    if ops is None or weight.dtype not in ops.DTYPES or size % ops.LANES:
        return False
    return bool(ops.ready(weight.device, weight.dtype))
