"""``forerun export HEAD --to ENGINE`` writes a draft head as a serving engine reads it."""

from __future__ import annotations

import dataclasses

from rich.text import Text

from forerun.cli import console
from forerun.cli.options import Flag, Json


def export(head: str, /, *, to: str, target: str, output: str, force: Flag = False, json: Json = False) -> int:
    """Write a draft head, or a PARD model, as a serving engine reads it, and check what was written.

    Parameters
    ----------
    head
        Directory or hub id of a draft head in any format, or of a PARD draft model.
    to
        hf, or what reads such heads: of EAGLE's, vllm, sglang, trtllm, llama.cpp, speculators or modelopt.
    target
        Directory or hub id of the model that the head drafts for.
    output
        Directory to write; new, empty, or a former export of a head.
    force
        Write it even if the engine would serve it worse than it was trained.
    """
    with console.telling("exporting"):
        from forerun import shipped
        from forerun.heads.engines import export_head
        from forerun.heads.files import TargetFacts
        from forerun.heads.pard_files import PardModel, export_pard
        from forerun.model.gguf import with_weights
        from forerun.model.names import resolve

        head = str(shipped.resolve(head))
        facts = TargetFacts.read(with_weights(resolve(target)))
        model = PardModel.at(head)
        done = (
            export_head(head, facts, to, output, force=force)
            if model is None
            else export_pard(model, facts, to, output, force=force)
        )
    if json:
        written = {"directory": str(done.directory), "format": done.format_name, "command": done.command}
        console.write_json(
            {
                **written,
                "findings": [dataclasses.asdict(finding) for finding in done.findings],
                "notes": list(done.notes),
            }
        )
        return 0
    for finding in done.findings:
        if finding.severity != "ok":
            console.warn(f"{finding.what}: {finding.engine} {finding.why}")
    for note in done.notes:
        console.warn(note)
    console.log().print(Text(f"written and read back bit for bit: {done.directory}"))
    console.out().print(done.command)
    return 0
