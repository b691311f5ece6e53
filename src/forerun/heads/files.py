"""Head checkpoints inside forerun: `HeadCheckpoint`, the checks of its tensors, `TargetFacts`, and `Format`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forerun.drafters.kinds import kind_named
from forerun.errors import CheckpointError
from forerun.heads.base import Head, HeadConfig
from forerun.heads.keys import unknown_keys
from forerun.model.load import SINGLE

Shape = tuple[int, ...]
Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Written = tuple[dict[str, Any], dict[str, Tensor]]  # Keys of ``config.json``, and tensors
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadCheckpoint:
    """A head as it is stored. Raises CheckpointError if tensors are missing, unknown or misshapen,
    or ``d2t`` is no map into the target's vocabulary.
    """

    config: Any
    tensors: Mapping[str, Tensor]
    """The tensors by the names of the kind's module, on the CPU, each in the dtype it was stored
    in.
    """
    notes: tuple[str, ...] = ()  # Doubts of the reader, as sentences for the user

    def __post_init__(self) -> None:
        check_tensors(self.config, self.tensors)

    @classmethod
    def of(cls, head: Head) -> HeadCheckpoint:
        """Copy a head's weights as they are now."""
        return cls(
            config=head.config,
            tensors={name: tensor.detach().cpu().clone() for name, tensor in head.state_dict().items()},
        )

    @property
    def unknown(self) -> list[str]:
        """Keys of the source file that are unknown here and may change what engines compute."""
        return unknown_keys({**self.config.extra, "rope_scaling": getattr(self.config, "rope_scaling", None) or {}})

    def build(self, dtype: torch.dtype | None = None) -> Any:
        """Build a module of the head's kind with copies of these weights, in `dtype` or each as it
        was stored.
        """
        with torch.random.fork_rng(devices=[]), _Unfilled():  # what is drawn all the same must disturb nobody's seed
            head = kind_named(self.config.kind).head(self.config)
        # Assigned one by one: Module.to() would also round the rotary frequencies.
        weights = {
            name: tensor.to(dtype if tensor.is_floating_point() else None, copy=True)
            for name, tensor in self.tensors.items()
        }
        head.load_state_dict(weights, strict=True, assign=True)
        return head


def differences(first: HeadCheckpoint, second: HeadCheckpoint) -> list[str]:
    """Return the names of configuration fields and tensors that differ, tensors compared bit for
    bit.
    """
    if type(first.config) is not type(second.config):
        return ["config.kind"]
    fields = [
        f"config.{field.name}"
        for field in dataclasses.fields(first.config)
        if getattr(first.config, field.name) != getattr(second.config, field.name)
    ]
    names = sorted(first.tensors.keys() | second.tensors.keys())
    return fields + [name for name in names if not _same(first.tensors.get(name), second.tensors.get(name))]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """The facts about a target that writing and checking a head needs."""

    name_or_path: str
    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int

    @classmethod
    def of(cls, config: Any, name_or_path: str | Path) -> TargetFacts:
        """Read the facts from a transformers configuration, of a multimodal model from its text
        part.
        """
        text = config.get_text_config(decoder=True)
        return cls(
            name_or_path=str(name_or_path),
            architectures=tuple(getattr(config, "architectures", None) or ()),
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
        )

    @classmethod
    def read(cls, name: str | Path) -> TargetFacts:
        """Read the facts of a directory, a hub id or a shipped model's name; the weights are not
        opened. Raises as `read_config` does.
        """
        from forerun.model.load import LoadOptions, read_config
        from forerun.model.names import resolve

        found = resolve(name)
        return cls.of(read_config(found, LoadOptions()), found)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFiles:
    """The configuration and tensors of a directory, before a format has read them."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]  # Tensors of all shards, under the names on disk


class Format(ABC):
    """One public format: where its keys and tensors differ from ours."""

    name: ClassVar[str]
    mark: ClassVar[str]
    """A word, in lower case, that every ``config.json`` of this format holds: a directory without
    it belongs to somebody else.
    """
    weights: ClassVar[str] = SINGLE

    @abstractmethod
    def recognises(self, config: Config) -> bool:
        """Return whether a ``config.json`` is written in this format."""

    def keeps(self, config: Config, name: str) -> bool:
        """Return whether a tensor of the files is read; all are, where they hold nothing but a
        head.
        """
        return True

    @abstractmethod
    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        """Return the head in a file. Raises CheckpointError if it is incomplete, contradictory or
        none of this kind. `num_layers` of the target is needed where the file names no layers.
        """

    @abstractmethod
    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        """Return the contents of the files to write. Raises CheckpointError if the format cannot
        express this head.
        """


class _Unfilled(TorchFunctionMode):
    """Skip the initialisation of new layers while open, for a file's weights take their place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def expected_shapes(config: HeadConfig) -> dict[str, Shape]:
    """Return name -> shape of every tensor of such a head, ``d2t`` included."""
    with torch.device("meta"), _Unfilled():
        head = kind_named(config.kind).head(config)
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def check_tensors(config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, naming them, for tensors that are missing, unknown, misshapen or of a
    wrong dtype.
    """
    expected = expected_shapes(config)
    common = sorted(expected.keys() & tensors.keys())
    misshapen = [name for name in common if tuple(tensors[name].shape) != expected[name]]
    odd = [name for name in common if tensors[name].dtype not in ((torch.int64,) if name == "d2t" else FLOATS)]
    complaints = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - expected.keys()),
        "of the wrong shape": [f"{name} {tuple(tensors[name].shape)}, expected {expected[name]}" for name in misshapen],
        "of the wrong dtype": [f"{name} ({str(tensors[name].dtype).removeprefix('torch.')})" for name in odd],
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
    """Return (Vd,) the target's id of each draft token, from the offsets ``d2t`` (Vd,). Raises
    CheckpointError for wrong offsets.
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
    """Return ``t2d`` (V,) bool: which tokens of the target the head can propose. Raises as
    `token_ids` does.
    """
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[token_ids(d2t, vocab_size)] = True
    return mask


def with_vocabulary(tensors: Mapping[str, Tensor], vocab_size: int, draft_vocab_size: int) -> dict[str, Tensor]:
    """Return the tensors with ``d2t`` as int64 (the identity if an unreduced head has none) and
    without ``t2d``, which must agree with it.
    """
    found = dict(tensors)
    t2d = found.pop("t2d", None)
    if "d2t" not in found and draft_vocab_size == vocab_size:
        found["d2t"] = torch.zeros(vocab_size, dtype=torch.int64)
    d2t = found.get("d2t")
    if d2t is None or d2t.dim() != 1 or d2t.dtype not in (torch.int64, torch.int32, torch.int16):
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
    """Join the first few names, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    # Compare as bytes: a NaN equals itself, and 0.0 is not -0.0.
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
