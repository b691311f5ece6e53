"""Faster forwards for the norms, gated MLPs and attentions of a packed model: the same modules, fewer operations.

Only `forward` of a module is replaced, on the object; where a pass is not what the kernels take (gradients, another
cache, a compiler that traces) the module's own runs. A module gets one if it answers random states as before. The
operations are those of its device, see `fused`.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.model.cache import SlotCache
from forerun.model.kernels import attention, fused
from forerun.model.kernels.native import HeadNorm, Heads
from forerun.model.kernels.packing import PackedLinear, PackedWeight
from forerun.model.layers import cache_argument

log = logging.getLogger(__name__)

ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Classes of transformers that do nothing but project, perhaps normalise heads, rotate, attend and project."""
_ROUNDING = 2.0**-6  # Relative difference that two orders of summation may make in bf16


class _Forward:
    """Stands where a module's own forward stood."""

    def __init__(self, module: nn.Module, weight: Tensor) -> None:
        self.module = module
        self.plain = module.forward
        self.device = weight.device

    @property
    def ops(self) -> Any:
        """The operations of the module's device."""
        return fused(self.device)


class NormForward(_Forward):
    """A root-mean-square norm in float32 whose weight is applied in bf16."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.weight)
        self.epsilon = _epsilon(module)

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

    def answers(self, forward: Any) -> list[Tensor]:
        """What `forward` makes of random states: this and the module's own have to agree."""
        weight: Any = self.module.weight
        return [forward(_random(weight, 1, 3, weight.shape[0]) * scale) for scale in (1.0, 1e-3)]


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

    def answers(self, forward: Any) -> list[Tensor]:
        return [forward(_random(self.joint.packed, 1, 3, self.joint.in_features))]


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

    def answers(self, forward: Any) -> list[Tensor]:
        """A pass over two prompts, and what it writes to the cache; scores near one, so that rotations show."""
        module: Any = self.module
        batch, count = 2, 3
        cache, device = SlotCache(batch, count), self.joint.packed.device
        cache.begin(range(batch), torch.arange(count, device=device).expand(batch, -1), count)
        states = _random(self.joint.packed, batch, count, self.joint.in_features)
        queries, keys, _ = torch.split(self.joint.apply(states).float(), self.joint.sizes, dim=-1)
        turns = 6 * torch.rand(batch, count, self.heads.depth // 2, generator=_generator()).repeat(1, 1, 2)
        mask = torch.full((count, count), torch.finfo(states.dtype).min).triu(1).to(states)
        attended = forward(
            hidden_states=states / (queries.std() * keys.std()).sqrt().to(states.dtype),
            position_embeddings=(turns.cos().to(states), turns.sin().to(states)),
            attention_mask=mask.expand(batch, 1, -1, -1),
            **{self.cache_argument: cache},
        )[0]
        return [attended, *(part for row in range(batch) for part in cache.read(module.layer_idx, row, count))]


KINDS: tuple[type[NormForward | GatedForward | AttentionForward], ...] = (NormForward, GatedForward, AttentionForward)


@torch.inference_mode()
def install(model: nn.Module) -> int:
    """Give every module of `model` that suits a faster forward; how many got one."""
    return sum(_install(module) for module in list(model.modules()))


def _install(module: nn.Module) -> bool:
    kind = next((kind for kind in KINDS if kind.suits(module)), None)
    if kind is None or "forward" in module.__dict__:
        return False
    made = kind(module)
    if not all(map(_alike, made.answers(made), made.answers(made.plain))):
        log.debug("%s keeps its forward: the faster one differs", type(module).__name__)
        return False
    module.forward = made
    return True


def _alike(found: Tensor, expected: Tensor) -> bool:
    limit = _ROUNDING * float(expected.abs().max())
    return found.shape == expected.shape and bool(((found - expected).abs() <= limit).all())


def _epsilon(module: Any) -> float:
    """Of a norm; 0 where it does not say."""
    return float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0)


def _takes(weight: Tensor, size: int = 0) -> bool:
    """Whether its device has operations for states of its dtype, of so many values."""
    ops = fused(weight.device)
    return ops is not None and ops.ready(weight.device) and weight.dtype in ops.DTYPES and size % ops.LANES == 0


def _random(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator()).to(like.device, like.dtype)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
