"""``forerun features``: store the target's hidden states for prepared data, to train heads from without the target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from forerun.cli import console
from forerun.cli.options import Flag
from forerun.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from forerun.training.data.store import PreparedData
    from forerun.training.features.manifest import FeatureManifest
    from forerun.training.features.online import ProbeReport
    from forerun.training.features.store import Source

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What was asked for, and what is known before a weight is loaded."""

    target: str
    source: str
    dtype: str
    device: str | None
    batch_tokens: int
    probing: bool
    directory: Path
    """Of the target."""
    config: Any
    num_layers: int
    longest: int
    """Tokens of the longest document."""
    boundaries: tuple[int, ...]


def features(
    *,
    target: str,
    data: Path,
    output: Path,
    boundaries: str | None = None,
    dtype: str = "bfloat16",
    source: Literal["transformers", "vllm"] = "transformers",
    shard_gib: float = 1.0,
    batch_tokens: int = 8192,
    target_dtype: str = "auto",
    device: str | None = None,
    probe: bool = True,
    yes: Annotated[bool, Parameter(negative="", alias="-y")] = False,
    json: Flag = False,
) -> int:
    """Store the target's hidden states for prepared data. The same command goes on where it was stopped.

    Parameters
    ----------
    target
        Directory, hub id or name of a shipped model.
    data
        Directory that `forerun data prepare` wrote.
    output
        Directory for the features; must be new, or hold these features unfinished.
    boundaries
        Layers after which to read, such as 2,16,29, or none; EAGLE-3's choice if not given. The last state is always
        stored, and is all that EAGLE-1 and Medusa heads read.
    dtype
        bfloat16, or float8 with half the bytes and one scale per state; also float16 and float32.
    source
        What runs the target.
    shard_gib
        Size of a shard in GiB; an interrupted run keeps whole documents, a killed one whole shards.
    batch_tokens
        Most tokens of a pass.
    target_dtype
        auto (the checkpoint's own), float32, bfloat16 or float16.
    device
        cpu, cuda, cuda:1, ...; the accelerator if there is one.
    probe
        Compare the source with the target's own hidden states first; loads the target once more for vllm.
    yes
        Do not ask before writing.
    json
        One JSON object on stdout at the end.
    """
    if shard_gib <= 0 or batch_tokens < 1:
        raise ArgumentError(f"--shard-gib and --batch-tokens must be above 0, got {shard_gib} and {batch_tokens}")
    asked = {"target": target, "source": source, "dtype": target_dtype, "device": device, "probing": probe}
    with console.telling("looking at the data and the target"):
        prepared = open_data(data)
        manifest, plan = _look(prepared, _numbers(boundaries), dtype, {**asked, "batch_tokens": batch_tokens})
    if not _agreed(manifest, output, yes=yes):
        return 0
    report = _extract(plan, prepared, manifest, output, max(1, int(shard_gib * GIB)))
    return _done(output, manifest, report, json=json)


def open_data(directory: Path) -> PreparedData:
    """The prepared data in a directory.

    Raises:
        DataError: there is none.
    """
    if not directory.is_dir():
        raise DataError(f"there is no directory {directory}: expected what forerun data prepare wrote")
    from forerun.training.data.store import PreparedData

    return PreparedData.open(directory)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if text == "none":
        return ()
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise ArgumentError(f"--boundaries takes layer numbers such as 2,16,29, or none, got {text!r}") from error


def _look(
    prepared: PreparedData, boundaries: tuple[int, ...] | None, dtype: str, asked: dict[str, Any]
) -> tuple[FeatureManifest, _Plan]:
    """Everything that can be refused before a weight is loaded."""
    from transformers import AutoTokenizer

    from forerun import demo
    from forerun.cli.session import quiet_libraries
    from forerun.drafters.heads.eagle import default_boundaries
    from forerun.model.load import LoadOptions, read_config
    from forerun.model.support import context_length
    from forerun.training.features.manifest import check_lengths, checkpoint_directory, describe
    from forerun.training.features.online import check_boundaries

    quiet_libraries()
    config = read_config(demo.resolve(asked["target"]), LoadOptions())
    text = config.get_text_config(decoder=True)
    layers: int = text.num_hidden_layers
    chosen = check_boundaries(default_boundaries(layers) if boundaries is None else boundaries, layers)
    lengths = prepared.lengths.tolist()
    # vLLM generates one token behind the prompt and keeps a slot for a speculative one.
    check_lengths(lengths, context_length(text) - (2 if asked["source"] == "vllm" else 0))
    directory = checkpoint_directory(asked["target"])
    manifest = describe(
        directory,
        asked["target"],
        AutoTokenizer.from_pretrained(directory),
        prepared,
        chosen,
        hidden_size=text.hidden_size,
        dtype=dtype,
        source=asked["source"],
    )
    plan = _Plan(
        **asked, directory=directory, config=config, num_layers=layers, longest=max(lengths), boundaries=chosen
    )
    return manifest, plan


def _agreed(manifest: FeatureManifest, output: Path, *, yes: bool) -> bool:
    """Say how much it will take, and ask where somebody can answer."""
    from forerun.training.features.manifest import check_room, human

    total = manifest.tokens * manifest.record_bytes
    present = sum(path.stat().st_size for path in output.glob("shard-*.bin")) if output.is_dir() else 0
    free = check_room(output, total - present)
    ids = ", ".join(map(str, manifest.boundaries))
    read = f"boundaries {ids} and the last state" if ids else "the last state"
    already = f", {human(present)} of it are there" if present else ""
    console.log().print(
        f"{manifest.documents} documents, {manifest.tokens} tokens x {human(manifest.record_bytes)} "
        f"({read}, {manifest.dtype}) = {human(total)}{already}; "
        f"{human(free)} free in {output}",
        soft_wrap=True,
        markup=False,
    )
    if yes or not (sys.stdin is not None and sys.stdin.isatty() and console.log().is_terminal):
        return True
    console.log().print("Write them? [y/N] ", end="", markup=False)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")


def _extract(
    plan: _Plan, prepared: PreparedData, manifest: FeatureManifest, output: Path, shard_bytes: int
) -> ProbeReport | None:
    from forerun.training.features.store import FeatureWriter, extract

    with FeatureWriter(output, manifest, shard_bytes=shard_bytes) as writer:
        if len(writer.done) == manifest.documents:
            return None
        with _source(plan, prepared) as (source, report):
            if report is not None:
                report.require()
            try:
                with console.progress_bar("tokens", manifest.tokens, writer.tokens) as update:

                    def tell(count: int) -> None:
                        update(advance=count)

                    extract(source, prepared, writer, batch_tokens=plan.batch_tokens, progress=tell)
            except KeyboardInterrupt:
                console.warn(f"stopped after {len(writer.done)} documents; the same command goes on from there")
                raise
    return report


@contextmanager
def _source(plan: _Plan, prepared: PreparedData) -> Iterator[tuple[Source, ProbeReport | None]]:
    """The loaded source and, if wished, how it compares with the target's own hidden states."""
    from forerun.training.features.online import OnlineFeatures, compare, probe, reference_states
    from forerun.training.features.store import sample

    tokens = [sample(prepared)]
    if plan.source == "transformers":
        model = _load(plan, plan.device)
        online = OnlineFeatures(model, plan.boundaries)
        yield online, probe(model, online.documents, tokens) if plan.probing else None
        return
    from forerun.training.features.vllm_source import FinalNorm, VllmFeatures, require_vllm

    require_vllm()
    # The reference is computed and forgotten before vLLM takes the device.
    reference = reference_states(_load(plan, "cpu"), tokens[0]) if plan.probing else None
    engine = VllmFeatures(
        str(plan.directory),
        plan.boundaries,
        FinalNorm(plan.directory, plan.config),
        num_layers=plan.num_layers,
        max_tokens=plan.longest,
        batch_tokens=plan.batch_tokens,
        engine_options={"dtype": plan.dtype},
    )
    with ExitStack() as stack:
        stack.callback(engine.close)
        yield engine, None if reference is None else compare(engine.documents(tokens), [reference])


def _load(plan: _Plan, device: str | None) -> Any:
    from forerun.model.load import LoadOptions, open_model

    options = LoadOptions(dtype=plan.dtype, device=device)
    with console.telling(f"loading {plan.target}"):
        return open_model(plan.directory, options, plan.config, quiet=True)


def _done(output: Path, manifest: FeatureManifest, report: ProbeReport | None, *, json: bool) -> int:
    from forerun.training.features.manifest import human
    from forerun.training.features.store import FeatureStore

    store = FeatureStore.open(output, manifest)
    if json:
        checks = None if report is None else [asdict(check) for check in report.checks]
        facts = {"directory": str(output), "bytes": store.nbytes(), **asdict(manifest), "probe": checks}
        console.write_json(facts)
        return 0
    for check in () if report is None else report.checks:
        console.log().print(check.summary, markup=False)
    console.out().print(f"{output}: {len(store)} documents, {manifest.tokens} tokens, {human(store.nbytes())}")
    return 0
