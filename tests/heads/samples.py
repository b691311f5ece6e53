"""Small EAGLE heads of every variant, the target that they fit, and what a head computes."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from forerun import heads
from forerun.heads.eagle import EagleConfig, EagleHead
from forerun.heads.files import HeadCheckpoint, TargetFacts
from forerun.heads.layers import LatentConfig
from forerun.types import LAST_HIDDEN
from training.ttt import HIDDEN, VOCABULARY

FORMATS = [name for name, entry in heads.FORMATS.items() if "eagle3" in entry.kinds]
"""Those that carry EAGLE-3 heads."""
PLAIN = EagleConfig(
    **{"hidden_size": 16, "target_hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60, "draft_vocab_size": 60, "boundaries": (2, 5, 7)},
    max_position_embeddings=128,
)
"""The default boundaries of the target below."""
FIRST = dataclasses.replace(PLAIN, generation=1, boundaries=(LAST_HIDDEN,), own_lm_head=False)
LATENT = dataclasses.replace(
    PLAIN,
    num_key_value_heads=4,
    head_dim=4,
    latent=LatentConfig(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, q_lora_rank=12),
)
"""As Kimi-K2's heads."""
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 1.0},
    **{"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
TARGET = TargetFacts(
    **{"name_or_path": "owner/target", "architectures": ("LlamaForCausalLM",), "num_layers": 10, "hidden_size": 16},
    **{"vocab_size": 60, "max_position_embeddings": 128},
)
FACTS = dataclasses.replace(TARGET, num_layers=4, hidden_size=HIDDEN, vocab_size=VOCABULARY)
"""Of `training.ttt.model()`, for whose heads the other formats are."""


def vary(config: EagleConfig = PLAIN, /, **changes: Any) -> EagleConfig:
    """The same shape but for these fields."""
    return dataclasses.replace(config, **changes)


VARIANTS: dict[str, EagleConfig] = {
    "plain": PLAIN,
    "eagle-3.1": vary(fc_norm=True, norm_output=True),
    "norm_before_fc": vary(norm_before_fc=True),
    "norm_before_residual": vary(norm_before_residual=True),
    "qk_norm": vary(qk_norm=True),
    "biases": vary(attention_bias=True, mlp_bias=True, fc_bias=True),
    "reduced": vary(draft_vocab_size=24),
    "own_embedding": vary(own_embedding=True, target_hidden_size=12),
    "shared_lm_head": vary(own_lm_head=False),
    "five": vary(boundaries=(1, 3, 5, 7, 10)),
    "two_layers": vary(num_hidden_layers=2),
    "embedding_everywhere": vary(num_hidden_layers=2, next_layer_regular=False),
    "scaled_rope": vary(rope_theta=5e5, rope_scaling=LLAMA3, rms_norm_eps=1e-6),
    "extra": vary(extra={"bos_token_id": 1, "transformers_version": "5.0.0"}),
    "window": vary(sliding_window=6),
    "window_qwen3": vary(sliding_window=6, qk_norm=True),
    "window_mixed": vary(sliding_window=3, num_hidden_layers=2, full_layers=(1,)),
    "one_boundary": vary(boundaries=(5,)),
    "unfused": vary(use_aux_hidden_state=False, boundaries=(LAST_HIDDEN,)),
    "latent": LATENT,
    "latent-3.1": vary(LATENT, fc_norm=True, norm_output=True, draft_vocab_size=24),
    "latent_two_layers": vary(LATENT, num_hidden_layers=2, rope_theta=5e4, rope_scaling=YARN),
    "first": FIRST,
    "first_two_layers": vary(FIRST, num_hidden_layers=2, sliding_window=4),
    "first_bias": vary(FIRST, fc_bias=True, own_embedding=True),
}


def spell_out(verdicts: str) -> dict[str, str]:
    """Engine -> what becomes of a head there, of words like ``fails vllm sglang, check modelopt``."""
    found = dict[str, str]()
    for part in filter(None, verdicts.split(", ")):
        severity, *engines = part.split()
        found |= dict.fromkeys(engines, severity)
    return found


def written_as(name: str) -> list[str]:
    """Those of `VARIANTS` that a format, or a destination, has words for."""
    if name == "speculators":
        wordless = [kind for kind, config in VARIANTS.items() if config.latent or not config.next_layer_regular]
        return [kind for kind, own in VARIANTS.items() if kind not in wordless and own.boundaries != FIRST.boundaries]
    return [kind for kind, config in VARIANTS.items() if config.generation == 3 or name != "modelopt"]


def sample(config: EagleConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> HeadCheckpoint:
    """A head whose weights, norms and biases too, are all random; its draft vocabulary is shuffled."""
    generator = torch.Generator().manual_seed(seed)
    head = EagleHead(config)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    if config.reduced_vocabulary:
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
        head.set_vocabulary(ids)
    made = HeadCheckpoint.of(head)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in made.tensors.items()}
    return HeadCheckpoint(config=config, tensors=tensors)


Written = tuple[dict[str, Any], dict[str, Tensor]]
"""A head's config.json and its tensors."""


def written(config: EagleConfig = PLAIN, name: str = "flat") -> Written:
    """A sample as a format writes it; the keys as they come back from JSON."""
    keys, tensors = heads.format_named(name).write(sample(config), TARGET)
    return json.loads(json.dumps(keys)), tensors


def keys_of(folder: Path) -> dict[str, Any]:
    """What a head's config.json holds."""
    return json.loads((folder / "config.json").read_text())


def change(folder: Path, tensors: Mapping[str, Tensor | None] | None = None, /, **keys: Any) -> Path:
    """A head's directory with other tensors and keys; None: without."""
    kept = {name: value for name, value in (keys_of(folder) | keys).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    if tensors:
        [file] = folder.glob("*.safetensors")
        whole = {**load_file(file), **tensors}
        save_file({name: t for name, t in whole.items() if t is not None}, file, {"format": "pt"})
    return folder


def replaced(head: HeadCheckpoint, **changes: Any) -> HeadCheckpoint:
    """The same weights under another configuration."""
    return HeadCheckpoint(config=dataclasses.replace(head.config, **changes), tensors=head.tensors)


@torch.no_grad()
def logits(head: EagleHead) -> Tensor:
    """(1, 5, .) what the head makes of five fixed tokens and features in two chained steps."""
    config, count = head.config, 5
    generator = torch.Generator().manual_seed(99)
    features = [torch.randn(1, count, config.target_hidden_size, generator=generator) for _ in config.boundaries]
    tokens = torch.randint(config.vocab_size, (1, count), generator=generator)
    shared = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    embeds = head.embed_tokens(tokens) if config.own_embedding else shared[tokens]
    states = head.fuse(features)
    for _ in range(2):
        step = head.advance(embeds, states, head.angles(torch.arange(count)[None], embeds), _attend)
        states = step.feature
    return head.lm_head(step.output) if config.own_lm_head else step.output @ shared.T


def _attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2)
