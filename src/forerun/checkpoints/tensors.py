"""Which tensors a head of a given shape has, and whether these are they. Names are those of its module.

Knows no format, no file and no kind of head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from forerun.drafters.heads.base import HeadConfig
from forerun.drafters.heads.kinds import kind_named
from forerun.errors import CheckpointError

Shape = tuple[int, ...]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16)


def expected_shapes(config: HeadConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor of such a head, ``d2t`` included."""
    with torch.device("meta"):
        head = kind_named(config.kind).head(config)
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def check_tensors(config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, naming them, for tensors that are missing, unknown, misshapen or of a wrong dtype."""
    expected = expected_shapes(config)
    common = sorted(expected.keys() & tensors.keys())
    complaints = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - expected.keys()),
        "of the wrong shape": [
            f"{name} {tuple(tensors[name].shape)}, expected {expected[name]}"
            for name in common
            if tuple(tensors[name].shape) != expected[name]
        ],
        "of the wrong dtype": [
            f"{name} ({str(tensors[name].dtype).removeprefix('torch.')})"
            for name in common
            if tensors[name].dtype not in ((torch.int64,) if name == "d2t" else FLOATS)
        ],
    }
    found = [f"{what}: {some(names)}" for what, names in complaints.items() if names]
    if found:
        raise CheckpointError(
            f"the head's tensors are not those that its config.json announces. {'. '.join(found)}. "
            "The checkpoint is incomplete, quantised, or of another kind than its config.json says."
        )
    if "d2t" in tensors:
        token_ids(tensors["d2t"], config.vocab_size)


def token_ids(d2t: Tensor, vocab_size: int) -> Tensor:
    """(Vd,) the target's id of each draft token, from the offsets ``d2t`` (Vd,); sorted or not.

    Raises:
        CheckpointError: an id lies outside the target's vocabulary, or two draft tokens mean the same one.
    """
    ids = torch.arange(len(d2t)) + d2t
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()
    if len(outside):
        entry = int(outside[0])
        raise CheckpointError(
            f"d2t is out of range: entry {entry} is the offset {int(d2t[entry])}, so token {int(ids[entry])} of a "
            f"vocabulary of {vocab_size}; d2t holds offsets (target id = entry + offset), not ids"
        )
    ordered = ids.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        token = int(repeated[0])
        entries = (ids == token).nonzero().flatten().tolist()
        raise CheckpointError(f"d2t maps entries {entries[0]} and {entries[1]} to the same token {token}")
    return ids


def target_mask(d2t: Tensor, vocab_size: int) -> Tensor:
    """``t2d`` (V,) bool: which tokens of the target the head can propose. Errors as `token_ids`."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[token_ids(d2t, vocab_size)] = True
    return mask


def with_vocabulary(tensors: Mapping[str, Tensor], vocab_size: int, draft_vocab_size: int) -> dict[str, Tensor]:
    """With ``d2t`` as int64 (the identity if an unreduced head has none) and without ``t2d``, once both agree.

    Raises:
        CheckpointError: ``t2d`` names other tokens than ``d2t``.
    """
    found = dict(tensors)
    t2d = found.pop("t2d", None)
    if "d2t" not in found and draft_vocab_size == vocab_size:
        found["d2t"] = torch.zeros(vocab_size, dtype=torch.int64)
    d2t = found.get("d2t")
    if d2t is None or d2t.dim() != 1 or d2t.dtype not in INTEGERS:
        return found  # check_tensors will say so
    found["d2t"] = d2t = d2t.long()
    if t2d is None:
        return found
    if tuple(t2d.shape) != (vocab_size,):
        raise CheckpointError(f"t2d {tuple(t2d.shape)} is of the wrong shape, expected {(vocab_size,)}")
    wrong = (t2d.bool() != target_mask(d2t, vocab_size)).nonzero().flatten()
    if len(wrong):
        raise CheckpointError(
            f"t2d and d2t disagree about {len(wrong)} tokens, first about token {int(wrong[0])}; they are from "
            "different vocabularies: write t2d again from d2t, or export the head again"
        )
    return found


def some(names: list[str], most: int = 6) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
