"""Faster forwards for norms, gated MLPs and attentions whose projections are packed: fewer operations, same answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.model.cache import SlotCache
from forerun.model.kernels import attention, fused, streamed
from forerun.model.kernels.acceptance import ModuleForward
from forerun.model.kernels.native import Heads
from forerun.model.kernels.packing import PackedLinear, PackedWeight
from forerun.model.layers import cache_argument

ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Classes of transformers that only project, perhaps normalise heads, rotate, attend and project.
"""
SMALL = 1e-3  # States are tried at this scale too, where a norm's epsilon counts


class NormForward(ModuleForward):
    """A root-mean-square norm computed in float32 whose weight is applied in bf16."""

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

    @property
    def weight(self) -> Tensor:
        """(width,) the module's current weight."""
        found = self.module._parameters["weight"]
        assert found is not None, "suits() is asked first"
        return found

    def __call__(self, states: Tensor) -> Tensor:
        takes = self.ops.takes_states(states)
        return self.ops.rms_norm(states, self.weight, self.epsilon) if takes else self.plain(states)

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        return [forward((states * scale).contiguous(), **kwargs) for scale in (1.0, SMALL)]


class _JointForward(ModuleForward):
    """A forward for a module whose `PARTS` are computed as one product."""

    PARTS: ClassVar[tuple[str, ...]]

    def __init__(self, module: nn.Module) -> None:
        joint = self.joint_of(module)
        assert joint is not None, "suits() is asked first"
        super().__init__(module, joint)
        self.joint = joint

    @classmethod
    def joint_of(cls, module: nn.Module) -> PackedWeight | None:
        """Return the weight of that product, or None unless the parts are exactly its parts in this
        order.
        """
        children = [module._modules.get(name) for name in cls.PARTS]
        parts = [(child.packed_weight, child.index) for child in children if isinstance(child, PackedLinear)]
        weight = parts[0][0] if parts else None
        if weight is None or parts != [(weight, index) for index in range(len(children))]:
            return None
        return weight if len(weight.sizes) == len(children) else None


class GatedForward(_JointForward):
    """Computes ``down(silu(gate(x)) * up(x))`` with one joint product for gate and up."""

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
            and _takes(joint, joint.sizes[0])
        )

    def __call__(self, states: Tensor) -> Tensor:
        if not self.ops.takes_states(states) or not self.inside.intact():
            mixed: Tensor = self.plain(states)
        else:
            down: Any = self.module._modules["down_proj"]
            mixed = down(self.ops.silu_and_mul(self.joint.apply(states)))
        return mixed


class AttentionForward(_JointForward):
    """Attention over a `SlotCache` that rotates queries and writes keys and values in one step."""

    PARTS = ("q_proj", "k_proj", "v_proj")

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.cache_argument = cache_argument(module)
        depth = module.head_dim
        queries, keys = self.joint.sizes[0] // depth, self.joint.sizes[1] // depth
        norms = [module._modules.get(name) for name in ("q_norm", "k_norm")]
        query, key = (None if norm is None else NormForward(norm) for norm in norms)
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
            and attention.is_installed(module)
            and _takes(joint)
            and depth in fused(joint.device).ROTATED  # type: ignore[union-attr]
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
            return self.plain(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        heads, layer = self.heads, module.layer_idx
        states = self.joint.apply(hidden_states)
        [stores] = cache.stores_for((layer,), (heads.keys, heads.depth), like=states)
        places = cache.places(states.device)
        assert position_embeddings is not None and attention_mask is not None
        query = self.ops.rope_and_write(states, position_embeddings, heads, stores, places)
        return module.o_proj(self.attend(query, cache, attention_mask)), None

    def attend(self, query: Tensor, cache: SlotCache, mask: Tensor) -> Tensor:
        """Attend with queries (B, N, heads, D) over the cache: (B, N, heads * D)."""
        module: Any = self.module
        keys, values = cache.seen(module.layer_idx)
        query = query.transpose(1, 2)
        attended, _ = attention.fold_attention(module, query, keys, values, mask, scaling=module.scaling)
        return attended.flatten(2)

    def fits(self, states: Tensor, angles: tuple[Tensor, Tensor] | None, mask: Any, cache: Any) -> bool:
        """Return whether the kernels can run this pass."""
        angle = (*states.shape[:-1], self.heads.depth)  # for every token, in the form in which the kernel reads them
        return (
            type(cache) is SlotCache
            and angles is not None
            and mask is not None
            and self.ops.takes_states(states)
            and self.inside.intact()
            and attention.is_installed(self.module)
            and all(part.shape == angle and part.dtype == states.dtype and part.is_contiguous() for part in angles)
        )

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the attention output of causal rows on a cache of its own, and the keys and values
        written there. The module's own forward attends as it did before attention was folded.
        """
        with attention.unfold(self.module) if forward is self.plain else nullcontext():
            return run_on_a_cache(self, forward, states, kwargs, lambda found: found[0])


class RotaryForward(ModuleForward):
    """Cosines and sines of positions in one kernel, for frequencies that no pass changes."""

    KINDS = ("default", "linear", "llama3", "yarn")

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.inv_freq)

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        family = type(module).__name__.removesuffix("RotaryEmbedding")
        frequencies: Any = module._buffers.get("inv_freq")
        return (
            f"{family}Attention" in ATTENTIONS
            and getattr(module, "rope_type", None) in cls.KINDS
            and frequencies is not None
            and frequencies.dim() == 1
            and frequencies.dtype == torch.float32
            and streamed(frequencies.device) is not None
        )

    def __call__(self, x: Tensor, position_ids: Tensor) -> Any:
        module: Any = self.module
        if x.dtype not in self.tools.DTYPES or torch.is_grad_enabled() or position_ids.device != self.device:
            return self.plain(x, position_ids)
        return self.tools.turn(position_ids.contiguous(), module.inv_freq, module.attention_scaling, x.dtype)

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        positions = 61 * torch.arange(states.shape[1], device=states.device).unsqueeze(0)  # Far ones, too
        return list(forward(states, positions))


class HeadForward(ModuleForward):
    """The output head of few tokens, whose bits do not depend on how many they are."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.weight)

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        """Return whether a module, an output head, can be replaced."""
        if type(module) is not nn.Linear:
            return False
        tools = streamed(module.weight.device)
        return tools is not None and tools.takes_weight(module.weight)

    def __call__(self, states: Tensor) -> Tensor:
        module: Any = self.module
        few = 0 < states.shape[:-1].numel() <= self.tools.ROWS
        if not few or not self.ops.takes_states(states) or states.dtype != module.weight.dtype:
            return self.plain(states)
        return self.tools.multiply(states, module.weight, module.bias)[0]

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        return super().answers(forward, states[:, : self.tools.ROWS], kwargs)


def run_on_a_cache(
    forward_of: AttentionForward, forward: Any, states: Tensor, kwargs: dict[str, Any], chosen: Callable[[Any], Tensor]
) -> list[Tensor]:
    """Run a forward on causal rows (B, N, width) with a cache of its own. Returns what `chosen`
    picks from its result, and the keys and values that it wrote.
    """
    batch, count = states.shape[:2]
    cache = SlotCache(batch, count)
    module = forward_of.module
    cache.begin(range(batch), torch.arange(count, device=states.device).expand(batch, -1), count)
    mask = states.new_full((count, count), torch.finfo(states.dtype).min).triu(1)
    angles = [part.expand(batch, -1, -1).contiguous() for part in kwargs["position_embeddings"]]
    result = forward(
        hidden_states=states.contiguous(),
        position_embeddings=tuple(angles),
        attention_mask=mask.expand(batch, 1, -1, -1),
        **{forward_of.cache_argument: cache},
    )
    layer: Any = module.layer_idx
    return [chosen(result), *(part for row in range(batch) for part in cache.read(layer, row, count))]


def _epsilon(module: Any) -> float:
    """Return a norm's epsilon, or 0 if it states none."""
    return float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0)


def _takes(weight: Tensor | PackedWeight, size: int = 0) -> bool:
    """Return whether the device of `weight` has operations for states of its dtype with `size`
    values.
    """
    ops = fused(weight.device)
    if ops is None or weight.dtype not in ops.DTYPES or size % ops.LANES:
        return False
    return bool(ops.ready(weight.device, weight.dtype))
