"""Faster forwards for the norms, gated MLPs and attentions of a packed model: the same modules, fewer operations.

Only `forward` of a module is replaced, on the object; where a pass is not what the kernels take (gradients, another
cache, a compiler that traces) the module's own runs. A module gets one if it answers the states of a plain pass as
before, see `acceptance`. The operations are those of its device, see `fused`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.model.cache import SlotCache
from forerun.model.kernels import acceptance, attention, fused
from forerun.model.kernels.native import HeadNorm, Heads
from forerun.model.kernels.packing import PackedLinear, PackedWeight
from forerun.model.layers import cache_argument

ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Classes of transformers that do nothing but project, perhaps normalise heads, rotate, attend and project."""
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
        weight = getattr(module, "weight", None)
        return (
            type(module).__name__.endswith("RMSNorm")
            and _epsilon(module) > 0
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
        if not self._fits(hidden_states, position_embeddings, attention_mask, cache):
            return self.plain(  # type: ignore[no-any-return]
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        heads, layer = self.heads, module.layer_idx
        states = self.joint.apply(hidden_states)
        stores, places = cache.opened(layer, (heads.keys, heads.depth), like=states)
        assert position_embeddings is not None
        query = self.ops.rope_and_write(states, position_embeddings, heads, stores, places).transpose(1, 2)
        keys, values = cache.seen(layer)
        attended, _ = attention.fold_attention(module, query, keys, values, attention_mask, scaling=module.scaling)
        return module.o_proj(attended.flatten(2)), None

    def _fits(self, states: Tensor, angles: tuple[Tensor, Tensor] | None, mask: Any, cache: Any) -> bool:
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
        module: Any = self.module
        batch, count = states.shape[:2]
        cache = SlotCache(batch, count)
        cache.begin(range(batch), torch.arange(count, device=states.device).expand(batch, -1), count)
        mask = torch.full((count, count), torch.finfo(states.dtype).min).triu(1).to(states)
        angles = [part.expand(batch, -1, -1).contiguous() for part in kwargs["position_embeddings"]]
        with attention.unfolded(module) if forward is self.plain else nullcontext():
            attended = forward(
                hidden_states=states.contiguous(),
                position_embeddings=tuple(angles),
                attention_mask=mask.expand(batch, 1, -1, -1),
                **{self.cache_argument: cache},
            )[0]
        return [attended, *(part for row in range(batch) for part in cache.read(module.layer_idx, row, count))]


KINDS: tuple[type[NormForward | GatedForward | AttentionForward], ...] = (NormForward, GatedForward, AttentionForward)


def install(model: nn.Module, ids: Tensor | None) -> int:
    """Give every module of `model` that suits and answers as before a faster forward; how many got one.

    Args:
        ids: (B, N) tokens, text of the model's own kind, over which the modules are compared. None: `model` takes no
            tokens (a head); norms and MLPs are compared on random states, and no attention gets one.
    """
    kinds = ((module, next((kind for kind in KINDS if kind.suits(module)), None)) for module in model.modules())
    made = [kind(module) for module, kind in kinds if kind is not None and "forward" not in module.__dict__]
    if ids is not None:
        found = acceptance.accepted(model, made, ids)
    else:
        found = acceptance.accepted_alone([(each, each.random_states()) for each in made if each.width])
    for replacement in found:
        replacement.module.forward = replacement
    return len(found)


def remove(model: nn.Module) -> int:
    """Undo `install`; how many modules have their own forward again."""
    replaced = [module for module in model.modules() if isinstance(module.__dict__.get("forward"), KINDS)]
    for module in replaced:
        del module.forward
    return len(replaced)


def _epsilon(module: Any) -> float:
    """Of a norm; 0 where it does not say."""
    return float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0)


def _takes(weight: Tensor, size: int = 0) -> bool:
    """Whether its device has operations for states of its dtype, of so many values."""
    ops = fused(weight.device)
    return ops is not None and ops.ready(weight.device) and weight.dtype in ops.DTYPES and size % ops.LANES == 0
