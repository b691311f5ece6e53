"""EAGLE-3 heads for scale models: a small head made as dear as the large target's own head, with the same drafts.

The head grows with its target (`scale`): hidden states are padded with zeros, boundaries move with the layers that they
stood behind. As there, norms divide by a mean square that is `hidden_factor` times smaller, so epsilon is divided by
that factor and the norm weights by its square root. Queries and keys that are normed per head are not padded but share
the epsilon, so their projections shrink by the same square root. All these are powers of two, hence exact.

What a head that was trained for a target of this size costs: one pass reads one decoder layer of the target's width
(its query, key and value matrices twice as wide, for embedding and feature) and the output head over the draft
vocabulary; a committed token also needs the fusion, boundaries x width x width. The enlarged head has these shapes: the
target's hidden size, heads and MLP width, the small head's number of layers and draft vocabulary. So a pass multiplies
as often and reads as many bytes; only its acceptance is that of the small head on the small target.

Knows heads as checkpoints. Does not enlarge targets, time anything, or know EAGLE-1, whose output head is the target's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor

from forerun.checkpoints import HeadCheckpoint, TargetFacts, format_of, write_head
from forerun.checkpoints.files import parse, read_files
from forerun.checkpoints.tensors import expected_shapes
from forerun.demo import resolve
from forerun.demo.scale import ScaledModel, cache_folder, content_hash, remap_boundary
from forerun.drafters.heads.eagle import EagleConfig
from forerun.errors import ArgumentError

_WRITERS = ("fc", "o_proj", "down_proj", "embed_tokens")
"""What writes into the hidden state: its padding must stay zero."""


def scale_head(head: HeadCheckpoint, scaled: ScaledModel) -> HeadCheckpoint:
    """The head of `scaled` that gives, on the states of `scaled`, the logits that `head` gives on those of its source.

    Args:
        head: EAGLE-3, trained for the source of `scaled`; any variant.
        scaled: the enlarged target.

    Returns:
        a head of the dtypes of `head`; logits differ by the order of summation at most.

    Raises:
        ArgumentError: another generation, or a head that reads layers which the source does not have.
    """
    wide = scale_config(head.config, scaled)
    shapes = expected_shapes(wide)
    tensors = {name: _enlarged(name, tensor, shapes[name], head.config, wide) for name, tensor in head.tensors.items()}
    return HeadCheckpoint(config=wide, tensors=tensors, notes=head.notes)


def scaled_head_folder(source: str | Path, scaled: ScaledModel) -> Path:
    """The head `source` enlarged as a checkpoint of the same format; reuses what it wrote before.

    Args:
        source: directory, hub id or shipped name of an EAGLE-3 head that was trained for the source of `scaled`.
        scaled: the enlarged target.

    Raises:
        CheckpointError: `source` is missing, or no head.
        ArgumentError: a head that is not enlarged, see `scale_head`.
    """
    stored = read_files(resolve(source))
    made = content_hash(stored.directory, dataclasses.asdict(scaled.plan), scaled.source_layers)
    folder = cache_folder() / f"{scaled.path.name}-head-{made[:12]}"
    if not folder.is_dir():
        head = scale_head(parse(stored, num_layers=scaled.source_layers), scaled)
        write_head(head, folder, format_of(stored.config).name, TargetFacts.read(scaled.path))
    return folder


def scale_config(config: EagleConfig, scaled: ScaledModel) -> EagleConfig:
    """The shape of the enlarged head; errors as `scale_head`."""
    if config.generation != 3:
        raise ArgumentError(f"only EAGLE-3 heads are enlarged, this one is of generation {config.generation}")
    plan = scaled.plan
    return dataclasses.replace(
        config,
        hidden_size=config.hidden_size * plan.hidden_factor,
        target_hidden_size=config.target_hidden_size * plan.hidden_factor,
        intermediate_size=max(plan.intermediate_size, config.intermediate_size),
        num_attention_heads=config.num_attention_heads * plan.head_factor,
        num_key_value_heads=config.num_key_value_heads * plan.head_factor,
        boundaries=tuple(remap_boundary(boundary, scaled) for boundary in config.boundaries),
        rms_norm_eps=config.rms_norm_eps / plan.hidden_factor,
    )


def multiplications(config: EagleConfig) -> int:
    """Of one drafted token: the layers and the output head, attention over the context and the fusion left out."""
    shapes = expected_shapes(config)
    skipped = ("fc.weight", "embed_tokens.weight")
    return sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in skipped)


def _enlarged(name: str, old: Tensor, shape: tuple[int, ...], config: EagleConfig, wide: EagleConfig) -> Tensor:
    """`old`, cut into the hidden states that it reads, each at the start of the wide one that takes its place."""
    if old.shape == shape:
        new = old.clone()
    else:
        blocks = _blocks(name, config)
        new = _padding(name, shape, old.dtype)
        narrow, broad = old.shape[-1] // blocks, shape[-1] // blocks
        for block in range(blocks):
            part = old[..., block * narrow : (block + 1) * narrow]
            new[..., block * broad : block * broad + narrow][: len(old) if old.dim() == 2 else None] = part
    root = math.isqrt(wide.hidden_size // config.hidden_size)
    shrinks = old.shape != shape and _is_norm(name)
    normed_later = config.qk_norm and any(f".{part}_proj." in name for part in ("q", "k"))
    return new / root if shrinks or normed_later else new


def _blocks(name: str, config: EagleConfig) -> int:
    """How many hidden states lie side by side in what a tensor reads."""
    if name in ("fc.weight", "input_norm.weight"):
        return len(config.boundaries)
    reads_both = name.startswith("layers.0.") and any(f".{part}_proj.weight" in name for part in ("q", "k", "v"))
    return 2 if reads_both else 1


def _padding(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros where the hidden state is written, ones in norms, else noise: a processor may multiply zeros faster."""
    if _is_norm(name):
        return torch.ones(shape, dtype=dtype)
    if len(shape) == 1 or any(name.split(".")[-2] == writer for writer in _WRITERS):
        return torch.zeros(shape, dtype=dtype)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    noise = torch.empty(shape).uniform_(-0.03, 0.03, generator=torch.Generator().manual_seed(seed))
    return noise.to(dtype)


def _is_norm(name: str) -> bool:
    return any("norm" in part for part in name.split("."))
