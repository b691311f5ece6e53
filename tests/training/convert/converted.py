"""What the tests of `forerun.modelopt.convert` share: a tiny model of one's own, a small configuration, a text."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from forerun import modelopt
from forerun.modelopt import EAGLE3_DEFAULT_CFG
from training.ttt import model

SMALL = {
    **{"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    **{"initializer_range": 0.2, "max_position_embeddings": 128},
}


def base() -> LlamaForCausalLM:
    """The tiny Llama, fresh."""
    return copy.deepcopy(model())


def config(architecture: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """EAGLE-3's preset with a head as small as its target."""
    made = copy.deepcopy(EAGLE3_DEFAULT_CFG["config"])
    made["eagle_architecture_config"].update({**SMALL, **(architecture or {})})
    return {**made, **options}


def text(rows: int = 2, length: int = 12, seed: int = 5) -> Tensor:
    """(rows, length) random token ids."""
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(seed))


def eagle(architecture: dict[str, Any] | None = None, **options: Any) -> Any:
    """The tiny Llama with such a head."""
    made = base()
    modelopt.convert(made, [("eagle", config(architecture, **options))])
    return made


def learned(model: Any, steps: int, rate: float, ids: Tensor) -> list[float]:
    """The losses of some steps; what draws anchors draws the same each time."""
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
    model.train()
    losses = []
    for _ in range(steps):
        torch.manual_seed(3)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
