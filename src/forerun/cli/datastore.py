"""``forerun datastore build`` and ``forerun datastore info`` make a corpus for the drafter `rest`,
and describe one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from forerun.cli import console, session
from forerun.cli.options import Flag, Json, SkipBad
from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from forerun.drafters.lookup.rest import Manifest

datastore = App(name="datastore", help="Make a corpus searchable for the drafter `rest`, or say what is in one.")


@datastore.command
def build(
    *files: Path,
    target: str | None = None,
    tokenizer: str | None = None,
    output: Path,
    skip_bad: SkipBad = False,
    json: Json = False,
) -> int:
    """Tokenize data files and sort them, so that what followed any words is found at once.

    Parameters
    ----------
    files
        JSONL, JSON or parquet with `text`, `messages`, ShareGPT `conversations`, or `prompt` and `completion`;
        any other file is plain text.
    target
        Directory or hub id of the model that shall be drafted for; `demo` is the demo model.
    tokenizer
        Directory or hub id of its tokenizer instead.
    output
        Directory to write; must not hold anything yet.
    """
    from forerun.training.data import datastore as stores
    from forerun.training.data.records import BadRecords

    name = tokenizer or target
    if name is None or (tokenizer and target):
        raise ArgumentError("whose token ids? give either --target MODEL or --tokenizer MODEL")
    loaded = session.load_tokenizer(name)
    bad = BadRecords(skip=skip_bad)
    with console.telling("building a datastore") as tell:
        manifest = stores.build(files, loaded, output, name=name, bad=bad, tell=tell)
    for complaint in bad.examples:
        console.warn(f"skipped: {complaint}")
    _show(output, manifest, json=json, skipped=bad.count)
    if bad.count and not json:
        console.out().print(f"{bad.count:,} records skipped")
    return 0


@datastore.command
def info(directory: Path, /, *, verify: Flag = False, json: Json = False) -> int:
    """Say what is in a datastore and whose token ids it holds.

    Parameters
    ----------
    directory
        What `forerun datastore build` wrote.
    verify
        Read everything and compare it with the checksums.
    """
    from forerun.drafters.lookup.rest import Datastore

    store = Datastore.open(directory)
    if verify:
        with console.telling("comparing checksums"):
            store.verify()
    _show(directory, store.manifest, json=json)
    return 0


def _show(folder: Path, manifest: Manifest, *, json: bool, **more: int) -> None:
    size = sum(file.bytes for file in manifest.files.values())
    if not json:
        console.out().print(
            f"{folder}: {manifest.documents:,} documents, {manifest.tokens:,} tokens of {manifest.tokenizer.name}, "
            f"{size / 2**20:,.1f} MiB"
        )
        return
    summary = {
        "directory": str(folder),
        "tokenizer": manifest.tokenizer.name,
        "tokenizer_sha256": manifest.tokenizer.vocabulary,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "places": manifest.places,
        "longest_match": manifest.sorted_tokens,
        "bytes": size,
        "sources": len(manifest.sources),
    }
    console.write_json(summary | more)
