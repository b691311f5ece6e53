"""Head checkpoints: `HeadCheckpoint`, the checks of its tensors, the registry of formats, and directories in any of
them: `read_head`, `write_head`.

Safetensors and ``config.json`` in, a complete new directory or nothing out. No pickle is ever loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forerun.drafters.kinds import KINDS, import_named, kind_named
from forerun.errors import ArgumentError, CheckpointError, UnsupportedModelError, list_some, refuse, refuse_unknown
from forerun.heads.base import Head, HeadConfig
from forerun.heads.keys import unknown_keys
from forerun.model.load import INDEX, SINGLE, LoadOptions, read_config, read_header, weight_files
from forerun.writing import read_object, replace_folder

Shape = tuple[int, ...]
Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Written = tuple[dict[str, Any], dict[str, Tensor]]  # Keys of ``config.json``, and tensors
INTEGERS = ("d2t", "token_ordering")  # Names of tensors that hold ids of tokens
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


Made = TypeVar("Made", bound=HeadConfig)


def make_config(made: type[Made], **fields: Any) -> Made:
    """Build a head's configuration from what its file says. Raises CheckpointError if that describes none."""
    try:
        return made(**fields)
    except (ArgumentError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"config.json describes no head that can be built: {error}") from error


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
    target: str | None = None  # `fingerprint` of the weights that it was trained for, where the file says it

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
        from forerun.model.names import resolve

        path = resolve(name)
        return cls.of(read_config(path, LoadOptions()), path)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFiles:
    """The configuration and tensors of a directory, before a format has read them."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]  # Tensors of all shards, under the names on disk
    target: str | None = None  # `HeadCheckpoint.target`, from the metadata of the weights' file


class Format(ABC):
    """One public format: where its keys and tensors differ from ours."""

    name: ClassVar[str]
    weights: ClassVar[str] = SINGLE

    @abstractmethod
    def recognises(self, config: Config) -> bool:
        """Return whether a ``config.json`` is written in this format."""

    def is_head(self, config: Config, names: Collection[str]) -> bool:
        """Return whether files that the format recognises are a head's, and not a whole model's. `names` are those of
        the stored tensors, none where they are in no safetensors file. Override it where whole models have such a
        ``config.json``, too.
        """
        return True

    def keeps(self, config: Config, name: str) -> bool:
        """Return whether a tensor of the files is read; all are, where they hold nothing but a
        head.
        """
        return True

    def dequantise(self, config: Config, tensors: dict[str, Tensor]) -> tuple[Config, dict[str, Tensor]]:
        """Return a configuration and its tensors without quantisation, where the format reads such; as they are, where
        not.
        """
        return config, tensors

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
    odd = [name for name in common if tensors[name].dtype not in ((torch.int64,) if name in INTEGERS else FLOATS)]
    complaints = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - expected.keys()),
        "of the wrong shape": [f"{name} {tuple(tensors[name].shape)}, expected {expected[name]}" for name in misshapen],
        "of the wrong dtype": [f"{name} ({str(tensors[name].dtype).removeprefix('torch.')})" for name in odd],
    }
    sentences = [f"{what}: {list_some(names)}" for what, names in complaints.items() if names]
    if sentences:
        raise CheckpointError(
            f"the head's tensors are not those that its config.json announces. {'. '.join(sentences)}. "
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
    completed = dict(tensors)
    t2d = completed.pop("t2d", None)
    if "d2t" not in completed and draft_vocab_size == vocab_size:
        completed["d2t"] = torch.zeros(vocab_size, dtype=torch.int64)
    d2t = completed.get("d2t")
    if d2t is None or d2t.dim() != 1 or d2t.dtype not in (torch.int64, torch.int32, torch.int16):
        return completed  # check_tensors will say so
    completed["d2t"] = d2t = d2t.long()
    if t2d is None:
        return completed
    if tuple(t2d.shape) != (vocab_size,):
        raise CheckpointError(f"t2d {tuple(t2d.shape)} is of the wrong shape, expected {(vocab_size,)}")
    wrong = (t2d.bool() != target_mask(d2t, vocab_size)).nonzero().flatten()
    if len(wrong):
        raise CheckpointError(
            f"t2d and d2t disagree about {len(wrong)} tokens, first about token {int(wrong[0])}; they are from "
            "different vocabularies: write t2d again from d2t, or export the head again"
        )
    return completed


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    # Compare as bytes: a NaN equals itself, and 0.0 is not -0.0.
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatEntry:
    """One line of the registry."""

    path: str  # ``module:Class``, imported when the format is used
    kinds: tuple[str, ...]


FORMATS: dict[str, FormatEntry] = {
    "speculators": FormatEntry(
        path="forerun.heads.speculators_files:SpeculatorsFormat", kinds=("eagle3", "peagle", "dflash", "dspark")
    ),
    "modelopt": FormatEntry(path="forerun.heads.eagle_files:ModelOptFormat", kinds=("eagle3",)),
    **{kind.name: FormatEntry(path=kind.format, kinds=(kind.name,)) for kind in KINDS.values() if kind.format},
    "dflash": FormatEntry(
        path="forerun.heads.block_files:DFlashFormat", kinds=("dflash", "dspark", "domino", "dflash2")
    ),
    "flat": FormatEntry(path="forerun.heads.eagle_files:FlatFormat", kinds=("eagle3", "eagle")),
}
"""The first format that recognises a configuration reads it, so the most particular come first."""


def format_named(name: str) -> Format:
    """Return the format behind a registered name. Raises ArgumentError, naming the nearest, if
    there is none.
    """
    refuse_unknown("unknown format", name, FORMATS)
    return import_named(FORMATS[name].path)()


def format_for(kind: str) -> str:
    """Return the name of the format in which heads of a kind are written: the least particular,
    which most engines read.
    """
    carriers = [name for name, entry in FORMATS.items() if kind in entry.kinds]
    if not carriers:
        raise ArgumentError(f"no checkpoint format carries heads of the kind {kind}")
    return carriers[-1]


OTHERS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "vLLM's own layout of a Medusa head (model_type medusa, tensors blocks.0.layers.0.weight)": lambda config: (
        config.get("model_type") == "medusa" and "medusa_num_heads" not in config
    ),
    "vLLM's own layout of an EAGLE head (model_type eagle, the layers' keys inside model)": lambda config: (
        config.get("model_type") == "eagle" and isinstance(config.get("model"), Mapping)
    ),
    "TensorRT-LLM's converted checkpoint (architecture, mapping, tensors of each rank)": lambda config: (
        isinstance(config.get("architecture"), str) and "mapping" in config
    ),
}
"""Descriptions of heads that no format here reads, and how to tell them by their ``config.json``.
"""


def format_of(config: Mapping[str, Any]) -> Format:
    """Return the format that a ``config.json`` is written in. Raises CheckpointError if it is none
    of ours.
    """
    if whose := next((whose for whose, tells in OTHERS.items() if tells(config)), None):
        raise CheckpointError(
            f"config.json is {whose}, which is not supported; take the head as its "
            f"authors published it, in one of the formats {', '.join(FORMATS)}"
        )
    for name in FORMATS:
        candidate = format_named(name)
        if candidate.recognises(config):
            return candidate
    raise CheckpointError(
        f"config.json is no head's in any known format ({', '.join(FORMATS)}); it has the keys "
        f"{', '.join(sorted(config)[:12]) or 'none'}"
    )


def head_format(directory: Path) -> Format | None:
    """Return the format of the head in a directory; None if it holds a whole model, or no model. Raises CheckpointError
    for a file that is broken.
    """
    if not (directory / CONFIG).is_file():
        return None
    config = read_object(directory / CONFIG, "expected a head's configuration", CheckpointError)
    try:
        recognised = format_of(config)
    except CheckpointError:
        return None
    names = {name for file in sorted(directory.glob("*.safetensors")) for name in read_header(file)}
    return recognised if recognised.is_head(config, names) else None


def is_head(directory: Path) -> bool:
    """Return whether a directory holds a head, see `head_format`."""
    return head_format(directory) is not None


log = logging.getLogger(__name__)
CONFIG, README, TRTLLM = "config.json", "README.md", "trtllm.yaml"
TARGET = "forerun.target"
"""The entry of safetensors' metadata with the fingerprint of the target; engines read no entry but ``format``."""
OURS = {CONFIG, INDEX, README, TRTLLM, ".gitattributes"}
"""Files that a directory may hold, beside weights, to be replaced by a new export."""
UNKNOWN_NOTE = (
    "Nothing is known of these keys of config.json, so the head is drafted with as if they were not there: {}. They "
    "are written back; if they change what the head computes, its drafts are worse than they could be."
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_head(path: str | Path, *, num_layers: int | None = None) -> HeadCheckpoint:
    """Read the head in a directory or under a hub id (``owner/name``), in any format of `FORMATS`.

    `num_layers` of the target is needed where the file does not say which layers the head reads. CheckpointError for
    what is missing, truncated, pickled, incomplete, contradictory, or no head that we know.
    """
    head = parse(read_files(path), num_layers=num_layers)
    if head.unknown:
        log.warning("%s: %s", path, head.notes[-1])
    return head


def parse(stored: StoredFiles, *, num_layers: int | None = None) -> HeadCheckpoint:
    """Parse the head that the files hold; doubts are in its notes. Raises as `read_head` does,
    naming the directory.
    """
    try:
        _refuse_quantised(stored)
        head = format_of(stored.config).read(stored.config, stored.tensors, num_layers=num_layers)
    except Exception as error:
        raise locate_error(stored.directory, error) from error
    notes_on_keys = (UNKNOWN_NOTE.format(", ".join(head.unknown)),) if head.unknown else ()
    return dataclasses.replace(head, notes=(*head.notes, *notes_on_keys), target=stored.target)


def locate_error(directory: Path, error: Exception) -> CheckpointError:
    """Turn an error while a configuration was read into one that names the directory. Any other
    than a `CheckpointError` comes from a value that no reader foresaw.
    """
    if isinstance(error, CheckpointError):
        return CheckpointError(f"{directory}: {error}")
    return CheckpointError(
        f"{directory}: a value of config.json is of another type or size than its format has "
        f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); compare it with the publisher's "
        "config.json"
    )


def _refuse_quantised(stored: StoredFiles) -> None:
    """Raise CheckpointError for weights in eight bits or fewer: scales would be taken for tensors
    of another head.
    """
    small = [
        name for name, tensor in stored.tensors.items() if tensor.dtype.itemsize == 1 and name not in ("d2t", "t2d")
    ]
    what = "config.json has a quantization_config" if stored.config.get("quantization_config") else ""
    if small:
        what = f"the tensor {small[0]} is stored as {str(stored.tensors[small[0]].dtype).removeprefix('torch.')}"
    if what:
        raise CheckpointError(f"{what}; only heads in floating point of 16 or 32 bits are supported: take that one")


def read_files(path: str | Path) -> StoredFiles:
    """Read the configuration and tensors of a directory or hub id, as stored. Raises as `read_head`
    does.
    """
    directory = folder_of(path)
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} holds no {CONFIG}: expected a head's directory")
    config: Config = read_object(directory / CONFIG, "expected a head's configuration", CheckpointError)
    try:
        file_format = format_of(config)
    except Exception as error:
        raise locate_error(directory, error) from error
    weights = file_format.weights
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLES)
    refuse(
        (
            pickles and not any((directory / name).is_file() for name in (weights, INDEX)),
            f"{directory} holds {', '.join(pickles)}: a pickle can run any code when it is opened, so forerun never "
            f"does. Convert it to {weights} where you trust it: tensors = torch.load(file, weights_only=True); "
            f"safetensors.torch.save_file({{name: tensor.clone() for name, tensor in tensors.items()}}, '{weights}')",
        ),
        (
            weights != SINGLE and not (directory / weights).is_file(),
            f"{directory} holds no {weights}, where its config.json says that the weights are",
        ),
        error=CheckpointError,
    )
    tensors: dict[str, Tensor] = {}
    target = None
    for file in weight_files(directory) if weights == SINGLE else [directory / weights]:
        twice = sorted(tensors.keys() & read_header(file).keys())
        if twice:
            raise CheckpointError(f"{directory}: {', '.join(twice)} is stored in two shards, once in {file.name}")
        with safe_open(file, "pt") as stored:
            target = target or (stored.metadata() or {}).get(TARGET)
            tensors |= {name: stored.get_tensor(name) for name in stored.keys() if file_format.keeps(config, name)}  # noqa: SIM118
    try:
        config, tensors = file_format.dequantise(config, tensors)
    except UnsupportedModelError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    return StoredFiles(directory=directory, config=config, tensors=tensors, target=target)


def write_head(
    checkpoint: HeadCheckpoint,
    directory: str | Path,
    format_name: str,
    target: TargetFacts,
    *,
    overrides: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write a head in one of the `FORMATS`, readable by everybody; a reader never sees half of it.

    A former head in `directory` is replaced. `overrides` take the place of the format's own keys in ``config.json``;
    `texts` are further files, name -> content. ArgumentError for no such format, or if `directory` holds other things;
    CheckpointError if the format has no words for this head.
    """
    destination = Path(directory).expanduser().absolute()
    file_format = format_named(format_name)
    refuse_foreign(destination)
    config, tensors = file_format.write(checkpoint, target)
    with replace_folder(destination) as folder:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        metadata = {} if checkpoint.target is None else {TARGET: checkpoint.target}
        save_file(contiguous, folder / file_format.weights, {"format": "pt", **metadata})
        written = {CONFIG: json.dumps({**config, **(overrides or {})}, indent=2) + "\n", **(texts or {})}
        for name, text in written.items():
            (folder / name).write_text(text, encoding="utf-8")
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors writes files that only their owner may read
    return destination


def folder_of(path: str | Path) -> Path:
    """Return the directory of that name, or download the one of a hub id."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if isinstance(path, Path) or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise CheckpointError(
            f"there is no directory {directory}: expected a head's directory or a hub id (owner/name)"
        )
    from huggingface_hub import snapshot_download

    from forerun.model.checks import explain_load_error

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*"]))
    except Exception as error:
        raise explain_load_error(path, error) from error


def refuse_foreign(directory: Path) -> None:
    """Raise ArgumentError if replacing `directory` would delete anything that is not a head's."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ArgumentError(f"{directory} is a file; name a directory for the head")
    former = head_format(directory)
    if former is None and (directory / CONFIG).exists():
        raise ArgumentError(f"{directory} holds another model, which would be deleted; name a new or empty directory")
    replaceable = OURS if former is None else OURS | {former.weights}
    foreign = sorted(file.name for file in directory.iterdir() if file.name not in replaceable)
    if foreign:
        raise ArgumentError(
            f"{directory} holds {', '.join(foreign[:4])}, which would be deleted; name a new or empty directory"
        )
