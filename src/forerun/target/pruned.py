"""An output head that computes the logits of some token ids only. Knows linear heads; any other is left as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forerun.target.fast.packing import PackedLinear, packable
from forerun.target.parts import OutputHead

if TYPE_CHECKING:
    from forerun.target.model import Target

_TOLERANCE = 0.02
"""Share of the largest logit: what sums in another order may differ by in bfloat16."""


class PrunedHead(OutputHead):
    """hidden states after the final norm (.., H) -> raw logits (.., V'), as the model computes those of `ids` (V',)."""

    def __init__(self, model: nn.Module, name: str, ids: Tensor) -> None:
        super().__init__(model)
        output = self._model._modules[name]
        assert output is not None
        weight, bias = output.weight, output.bias
        assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
        weight = weight.detach()
        rows = ids.to(weight.device)
        kept = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
        kept.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            kept.bias = nn.Parameter(bias.detach()[rows], requires_grad=False)
        packed = isinstance(output, PackedLinear) and packable(kept)
        self._model._modules[name] = PackedLinear(kept) if packed else kept
        self.nbytes = sum(parameter.nbytes for parameter in kept.parameters())
        """Of the rows that were copied."""


@torch.inference_mode()
def prune_head(target: Target, ids: Tensor) -> int | None:
    """Let `target` compute the logits of these token ids only, in their order; the model itself is not changed.

    Returns:
        bytes of the copied rows; None, with nothing changed, where the head is no linear layer, or where the model does
        more with its logits than what it does to each of them alone.
    """
    output = target.model.get_output_embeddings()
    name = next((name for name, child in target.model._modules.items() if child is output), None)
    if name is None or not (type(output) is nn.Linear or isinstance(output, PackedLinear)):
        return None
    pruned = PrunedHead(target.model, name, ids)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 4, target.hidden_size, generator=generator).to(target.device, target.dtype)
    whole, part = target.head(states).float(), pruned(states).float()
    if part.shape[-1] != len(ids) or not bool(whole.isfinite().all()):
        return None
    wanted = whole[..., ids.to(whole.device)]
    if not torch.allclose(part, wanted, rtol=0, atol=_TOLERANCE * float(whole.abs().max())):
        return None
    target.head = pruned
    return pruned.nbytes
