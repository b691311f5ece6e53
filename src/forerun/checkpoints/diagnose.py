"""What every serving engine does with a head: loads it, silently degrades it, or fails; and why.

What holds for heads of any kind is here; what is known of a kind is its `Engines`. No engine is run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from forerun.checkpoints.base import HeadCheckpoint, StoredFiles, TargetFacts
from forerun.checkpoints.engines import engines_for
from forerun.checkpoints.findings import ENGINES, Finding, all_engines, ok


def diagnose(head: HeadCheckpoint, target: TargetFacts) -> list[Finding]:
    """Everything that is known about these engines and this head; at least one finding for each engine."""
    known = engines_for(head.config.kind).findings(head, target)
    found = [*_fits(head, target), *known, *_unknown_keys(head)]
    silent = [engine for engine in ENGINES if all(finding.engine != engine for finding in found)]
    return found + [ok(engine, "everything in this head", "read as it was trained") for engine in silent]


def diagnose_files(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> list[Finding]:
    """What would go wrong if an engine were given these files; `head` is what they mean."""
    return list(engines_for(head.config.kind).file_findings(stored, head, target))


def _fits(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Things that no engine can survive."""
    config = head.config
    for name, ours, theirs in (
        ("hidden states", config.target_hidden_size, target.hidden_size),
        ("a vocabulary", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            what, why = f"made for {name} of {ours}", f"the target has {theirs}"
            yield from all_engines("fails", what, why, "name the right target")
    broken = [name for name, tensor in head.tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        yield from all_engines(
            "fails", f"NaN or infinity in {broken[0]}", "every draft becomes noise", "train it again"
        )


def _unknown_keys(head: HeadCheckpoint) -> Iterator[Finding]:
    for key in head.unknown:
        why = "nothing is known of it: the engine may compute something else by it"
        yield from all_engines("check", f"the key {key}", why, "find out what it means; remove it if it means nothing")
