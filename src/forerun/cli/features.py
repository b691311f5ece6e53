"""``forerun features`` stores the target's hidden states for prepared data, to train heads without
the target.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from forerun.cli import console
from forerun.cli.options import Json, numbers
from forerun.errors import ArgumentError, DataError
from forerun.types import LAST_HIDDEN, Boundary

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.drafters.kinds import HeadKind
    from forerun.training.data.store import PreparedData
    from forerun.training.features.online import BoundaryCheck
    from forerun.training.features.store import Capture, FeatureManifest

GIB = 2**30


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureOptions:
    """The options that say what states are stored, of which target and data, where and how."""

    target: str = field(kw_only=False)
    """Directory, hub id or name of a shipped model."""
    data: Path
    """Directory that `forerun data prepare` wrote."""
    output: Path
    """Directory for the features; must be new, or hold these features unfinished."""
    kind: str = "eagle3"
    """Kind of the head that will be trained, which says where the target is read; as of forerun train."""
    boundaries: str | None = None
    """Layers to read behind instead, as 2,16,29 or none: where draft.options choose others."""
    dtype: str = "bfloat16"
    """bfloat16, or float8 with half the bytes and one scale per state; also float16 and float32."""
    source: Literal["transformers", "vllm"] = "transformers"
    """Library that runs the target."""
    shard_gib: float = 1.0
    """Size of a shard in GiB; an interrupted run keeps whole documents, a killed one whole shards."""
    batch_tokens: int = 8192
    """Most tokens of a pass."""
    target_dtype: str = "auto"
    """auto (the checkpoint's own), float32, bfloat16 or float16."""
    device: str | None = None
    """cpu, cuda, cuda:1, ...; the accelerator if there is one."""
    probe: bool = True
    """Compare the source with the target's own hidden states first; loads the target once more for vllm."""


def features(
    options: FeatureOptions, *, yes: Annotated[bool, Parameter(negative="", alias="-y")] = False, json: Json = False
) -> int:
    """Store the target's hidden states for prepared data. The same command goes on where it was stopped.

    Parameters
    ----------
    yes
        Do not ask before writing.
    """
    if options.shard_gib <= 0 or options.batch_tokens < 1:
        raise ArgumentError(
            f"--shard-gib and --batch-tokens must be above 0, got {options.shard_gib} and {options.batch_tokens}"
        )
    with console.telling("looking at the data and the target"):
        run = _look_at(options)
    if not _ask_consent(run, yes=yes):
        return 0
    checks = _extract(run)
    from forerun.training.features.store import FeatureStore
    from forerun.writing import format_bytes

    store = FeatureStore(options.output, run.manifest)
    size = run.manifest.tokens * run.manifest.record_bytes
    if json:
        console.write_json(
            {
                "directory": str(options.output),
                "bytes": size,
                **asdict(run.manifest),
                "probe": None if checks is None else [vars(check) for check in checks],
            }
        )
        return 0
    for check in checks or ():
        console.log().print(check.summary, markup=False)
    console.out().print(f"{options.output}: {len(store)} documents, {run.manifest.tokens} tokens, {format_bytes(size)}")
    return 0


class _FeatureRun(NamedTuple):
    """The request, and what is known before a weight is loaded."""

    options: FeatureOptions
    prepared: PreparedData
    directory: Path  # Of the target
    config: Any  # Of the target
    manifest: FeatureManifest


def _look_at(options: FeatureOptions) -> _FeatureRun:
    """Look at the data and at the target's configuration; DataError where they cannot be used."""
    if not options.data.is_dir():
        raise DataError(f"there is no directory {options.data}: expected what forerun data prepare wrote")
    from forerun.cli.session import quiet_libraries
    from forerun.drafters.kinds import kind_named
    from forerun.model.load import LoadOptions, read_config
    from forerun.model.names import load_tokenizer, resolve
    from forerun.model.support import context_length
    from forerun.training.data.store import PreparedData
    from forerun.training.features import store
    from forerun.training.features.online import distinct_boundaries

    prepared = PreparedData(options.data)
    prepared.check_written("a store of features")
    quiet_libraries()
    config = read_config(resolve(options.target), LoadOptions())
    text = config.get_text_config(decoder=True)
    read: Sequence[Boundary] = ()
    if options.boundaries is None:
        read = _read_by(kind_named(options.kind), text, str(resolve(options.target)))
    elif options.boundaries != "none":
        read = numbers(options.boundaries, "--boundaries", int)
    boundaries = distinct_boundaries(read, text.num_hidden_layers)
    # vLLM generates one token behind the prompt and keeps a slot for a speculative one.
    longest = context_length(text) - (2 if options.source == "vllm" else 0)
    store.check_lengths(prepared.lengths.tolist(), longest)
    directory = store.checkpoint_directory(options.target)
    tokenizer = load_tokenizer(directory, None)
    kinds: dict[str, Any] = {"hidden_size": text.hidden_size, "dtype": options.dtype, "source": options.source}
    manifest = store.describe(directory, options.target, tokenizer, prepared, boundaries, **kinds)
    return _FeatureRun(options, prepared, directory, config, manifest)


def _read_by(kind: HeadKind, text: Any, target: str) -> tuple[Boundary, ...]:
    """Return the boundaries that heads of the kind read in a target, when a recipe makes them
    without options.

    `text` is the target's configuration. A draft model, and the target itself, learn from its last
    state.
    """
    from forerun.drafters.kinds import import_named

    if kind.trains != "head":
        return (LAST_HIDDEN,)
    if kind.in_target is not None:
        return tuple(import_named(kind.in_target)(target).config.boundaries)
    return tuple(kind.head.Config.fields_for(kind.name, text, {})["boundaries"])


def _ask_consent(run: _FeatureRun, *, yes: bool) -> bool:
    """Report how much space it will take, and ask for consent where somebody can answer."""
    from forerun.training.features.store import check_room
    from forerun.writing import format_bytes

    manifest, output = run.manifest, run.options.output
    total = manifest.tokens * manifest.record_bytes
    present = sum(path.stat().st_size for path in output.glob("shard-*.bin")) if output.is_dir() else 0
    free = check_room(output, total - present)
    ids = ", ".join(map(str, manifest.boundaries))
    read = f"boundaries {ids} and the last state" if ids else "the last state"
    already = f", {format_bytes(present)} of it are there" if present else ""
    size = f"{manifest.documents} documents, {manifest.tokens} tokens x {format_bytes(manifest.record_bytes)}"
    console.log().print(
        f"{size} ({read}, {manifest.dtype}) = {format_bytes(total)}{already}; {format_bytes(free)} free in {output}",
        markup=False,
    )
    if yes or not (sys.stdin is not None and sys.stdin.isatty() and console.log().is_terminal):
        return True
    console.log().print("Write them? [y/N] ", end="", markup=False)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")


def _extract(run: _FeatureRun) -> list[BoundaryCheck] | None:
    """Store what is missing; return how the source compares with the target's own hidden states, if
    that was requested.
    """
    from forerun.training.features.online import compare, require
    from forerun.training.features.store import FeatureWriter, extract

    options = run.options
    manifest = run.manifest
    checks = None
    with FeatureWriter(options.output, manifest, shard_bytes=max(1, int(options.shard_gib * GIB))) as writer:
        if len(writer.done) == manifest.documents:
            return None
        # The beginning of the longest of the first documents is compared.
        longest = int(run.prepared.lengths[:16].argmax())
        tokens = run.prepared.document(longest)[0][:64].tolist()
        with _source(run, tokens) as (capture, reference):
            if reference is not None:
                checks = compare(capture([tokens]), [reference])
                require(checks)
            try:
                with console.progress_bar("tokens", manifest.tokens, writer.tokens) as update:
                    extract(capture, run.prepared, writer, batch_tokens=options.batch_tokens, progress=update)
            except KeyboardInterrupt:
                done = len(writer.done)
                raise KeyboardInterrupt(
                    f"stopped after {done} documents; the same command goes on from there"
                ) from None
    return checks


@contextmanager
def _source(run: _FeatureRun, tokens: list[int]) -> Iterator[tuple[Capture, dict[int, Tensor] | None]]:
    """Yield the function that captures states and, if requested, the target's own hidden states of
    `tokens`.
    """
    from forerun.training.features.online import OnlineFeatures, reference_states

    options, boundaries = run.options, run.manifest.boundaries
    if options.source == "transformers":
        model = _load(run, options.device)
        yield OnlineFeatures(model, boundaries).documents, reference_states(model, tokens) if options.probe else None
        return
    from forerun.model.gguf import with_weights
    from forerun.training.features.vllm_source import FinalNorm, VllmFeatures, require_vllm

    require_vllm()
    with_weights(run.directory)
    # The reference is computed and forgotten before vLLM takes the device.
    reference = reference_states(_load(run, "cpu"), tokens) if options.probe else None
    engine = VllmFeatures(
        str(run.directory),
        boundaries,
        FinalNorm(run.directory, run.config),
        num_layers=run.config.get_text_config(decoder=True).num_hidden_layers,
        max_tokens=max(run.prepared.lengths.tolist()),
        batch_tokens=options.batch_tokens,
        engine_options={"dtype": options.target_dtype},
    )
    try:
        yield engine.documents, reference
    finally:
        engine.close()


def _load(run: _FeatureRun, device: str | None) -> Any:
    from forerun.model.load import LoadOptions, open_model

    options = LoadOptions(dtype=run.options.target_dtype, device=device)
    with console.telling(f"loading {run.options.target}"):
        return open_model(run.directory, options, run.config, quiet=True)
