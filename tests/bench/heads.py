"""What the tests of heads in the benchmark share: a head for `lively_llama`."""

from typing import Any

import torch

from forerun.heads.eagle import EagleConfig, EagleHead

SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "initializer_range": 0.2,
}


def head(**options: Any) -> EagleHead:
    """A random head for `lively_llama`, every weight large enough to matter."""
    torch.manual_seed(1)
    target = {"target_hidden_size": 48, "vocab_size": 256, "draft_vocab_size": 100, "boundaries": (1, 2, 3)}
    given = SIZES | target | {"rms_norm_eps": 1e-3, "max_position_embeddings": 128} | options
    made = EagleHead(EagleConfig(**given)).eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.uniform_(weight, -0.5, 0.5)
    if made.config.reduced_vocabulary:
        made.set_vocabulary(torch.randperm(256, generator=torch.Generator().manual_seed(2))[:100].sort().values)
    return made
