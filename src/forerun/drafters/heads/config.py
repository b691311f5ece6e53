"""What an EAGLE head looks like, in forerun's own words. Every file format is converted to and from this.

Knows no file format and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ArgumentError
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """Shape and variant of an EAGLE head; the defaults are those of the first EAGLE-3 checkpoints.

    ``generation`` 3 fuses several boundaries and predicts tokens (arXiv 2503.01840); 1 continues the target's last
    hidden state and reads its output head (EAGLE-1 and EAGLE-2, arXiv 2401.15077 and 2406.16858).
    """

    generation: int = 3
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    """Tokens that the head can propose; the same as `vocab_size` where it is not reduced."""
    boundaries: tuple[int, ...]
    """Where the target's hidden states are read: after this many layers. ``(LAST_HIDDEN,)`` for generation 1."""
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    """As in transformers (``rope_type`` and its parameters), without ``rope_theta``."""
    max_position_embeddings: int = 2048
    """Most positions of a sequence."""
    hidden_act: str = "silu"
    sliding_window: int | None = None
    """Positions that a layer looks back, itself included; None: to the beginning."""
    full_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that look back to the beginning although the head has a window."""
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    """Original EAGLE-1 heads have one; vLLM drops it without a word."""
    qk_norm: bool = False
    """Normalise queries and keys per head (Qwen3-style layers)."""
    norm_before_residual: bool = False
    """The residual stream of the first layer is the normed feature (speculators) instead of the feature (EAGLE)."""
    norm_before_fc: bool = False
    """One norm over the concatenated features before they are fused (stored as ``input_norm``)."""
    fc_norm: bool = False
    """One norm for each boundary's features before they are fused (EAGLE-3.1)."""
    norm_output: bool = False
    """The next step reads the normed output (EAGLE-3.1) instead of the residual stream (EAGLE-3)."""
    own_embedding: bool = False
    """The checkpoint brings an embedding table; otherwise the target's is used."""
    own_lm_head: bool = True
    """The checkpoint brings an output head; otherwise the target's is used."""
    initializer_range: float = 0.02
    """Standard deviation of fresh weights."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the file it came from that mean nothing to drafting (names, versions), or of which nothing is known;
    written back."""

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ArgumentError(f"EAGLE head: {problem}")

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether token ids of the head differ from the target's."""
        return self.draft_vocab_size != self.vocab_size

    def window(self, layer: int) -> int | None:
        """Positions that this layer looks back, itself included; None: to the beginning."""
        return None if layer in self.full_layers else self.sliding_window


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice for a target of that many layers: after 2 layers, half, and all but 3; distinct, in 1..n.

    Raises:
        ArgumentError: the target has fewer than three layers.
    """
    if num_layers < 3:
        raise ArgumentError(f"EAGLE-3 reads three boundaries; a target of {num_layers} layers has too few")
    chosen: list[int] = []
    for wanted in (2, num_layers // 2, num_layers - 3):
        free = [(abs(boundary - wanted), boundary) for boundary in range(1, num_layers + 1) if boundary not in chosen]
        chosen.append(min(free)[1])
    return tuple(sorted(chosen))


def _problem(config: EagleConfig) -> str | None:
    if config.generation not in (1, 3):
        return f"generation is 1 or 3, got {config.generation}"
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        return (
            f"draft_vocab_size must be in 1..{config.vocab_size} (the target's vocabulary), "
            f"got {config.draft_vocab_size}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        return (
            f"{config.num_attention_heads} query heads cannot share {config.num_key_value_heads} key-value heads evenly"
        )
    if not config.boundaries or len(set(config.boundaries)) != len(config.boundaries):
        return f"boundaries must be distinct and at least one, got {config.boundaries}"
    if config.generation == 1 and config.boundaries != (LAST_HIDDEN,):
        return f"an EAGLE-1 head reads the last hidden state alone, got boundaries {config.boundaries}"
    if any(boundary < 0 and boundary != LAST_HIDDEN for boundary in config.boundaries):
        return f"boundaries count layers from 0, got {config.boundaries}"
    if config.sliding_window is not None and config.sliding_window < 1:
        return f"sliding_window must be at least 1 position, got {config.sliding_window}"
    if config.full_layers and not (
        config.sliding_window is not None
        and list(config.full_layers) == sorted(set(config.full_layers) & set(range(config.num_hidden_layers)))
        and len(config.full_layers) < config.num_hidden_layers
    ):
        return (
            f"full_layers are some, not all, of the {config.num_hidden_layers} layers of a head with a sliding_window, "
            f"in order and counted from 0; got {config.full_layers} with the window {config.sliding_window}"
        )
    if not config.own_lm_head and config.reduced_vocabulary:
        return "a reduced draft vocabulary needs its own lm_head"
    if config.generation == 3 and not config.own_lm_head and config.hidden_size != config.target_hidden_size:
        return "a head of another hidden size than the target's needs its own lm_head"
    return None
