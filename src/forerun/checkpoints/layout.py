"""What engines make of a head's files as they lie: keys and tensors that they look for elsewhere, or do not find.

The remedy is always the same, to write the files again with ``forerun export``. Sources as in `diagnose`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts
from forerun.checkpoints.diagnose import loading
from forerun.checkpoints.engines import LOADERS, mismatches
from forerun.checkpoints.files import TRTLLM, StoredFiles
from forerun.checkpoints.findings import Finding, Severity
from forerun.checkpoints.flat import FIRST_GENERATION, LLAMA, POST_NORM
from forerun.checkpoints.keys import NESTED
from forerun.checkpoints.layer_ids import IDS, is_default, to_outputs
from forerun.checkpoints.names import respelled
from forerun.checkpoints.registry import format_of
from forerun.checkpoints.speculators import KIND, LAYERS
from forerun.types import LAST_HIDDEN

TARGETS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "llama.cpp": "hf", "lmdeploy": "hf"}
"""Engine -> what to export for."""


def diagnose_files(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> list[Finding]:
    """What would go wrong if an engine were given these files; `head` is what they mean."""
    if format_of(stored.config).name == "speculators":
        return [*_speculators(stored.config, head), *_tensors(stored, head, target)]
    found = [*_keys(stored, head), *_tensors(stored, head, target)]
    if head.config.generation == 3:
        found += _layer_ids(stored, head, target)
    return found


def _tensors(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """What would be other if the head were written anew."""
    known = {(finding.engine, finding.what) for finding in loading(head, target)}
    engines = [name for name in LOADERS if head.config.generation == 3 or name != "trtllm"]
    keys = stored.config
    if KIND in keys:
        engines, keys = ["vllm"], {**keys[LAYERS], **keys}
    for engine in engines:
        for found in mismatches(engine, head.config, keys, respelled(stored.tensors)):
            if (engine, found.what) not in known:
                yield _finding(engine, found.severity, found.what, found.why)


def _speculators(config: Mapping[str, Any], head: HeadCheckpoint) -> Iterator[Finding]:
    for engine in ("sglang", "trtllm", "lmdeploy"):
        yield _finding(engine, "fails", "speculators format", "reads the flat format only")
    yield from _windows(config[LAYERS], head)
    if config.get("norm_before_residual") is None:
        yield _finding("vllm", "degrades", "no norm_before_residual", "takes it for true, speculators means false")


def _keys(stored: StoredFiles, head: HeadCheckpoint) -> Iterator[Finding]:
    config = stored.config
    architectures = config.get("architectures") or []
    known = LLAMA if head.config.generation == 3 else FIRST_GENERATION
    if known not in architectures and not head.config.qk_norm:
        yield _finding("sglang", "fails", f"architectures {architectures}", f"loads {known} only")
    if "draft_vocab_size" not in config and head.config.generation == 3:
        for engine in ("sglang", "llama.cpp"):
            yield _finding(engine, "fails", "no draft_vocab_size", "needs the key, if only as null")
    if config.get("tie_word_embeddings") and head.config.own_lm_head:
        for engine in ("vllm", "sglang", "lmdeploy"):
            yield _finding(
                engine, "degrades", "tie_word_embeddings", "puts the embedding in place of the head's lm_head"
            )
    yield from _windows(config, head)
    if head.config.norm_output:
        if not config.get("norm_output"):
            for engine in ("vllm", "sglang"):
                yield _finding(engine, "degrades", f"only {POST_NORM}", "looks for norm_output at the top")
        if not (config.get(NESTED) or {}).get(POST_NORM):
            yield _finding("trtllm", "degrades", "only norm_output", f"looks for {POST_NORM} in {NESTED}")


def _windows(config: Mapping[str, Any], head: HeadCheckpoint) -> Iterator[Finding]:
    if head.config.sliding_window is None or head.config.generation == 1:
        return
    if not config.get("layer_types"):
        why = "applies a window only where layer_types names it"
        yield _finding("vllm", "degrades", "sliding_window without layer_types", why)
    if config.get("model_type") == "qwen3" and not config.get("use_sliding_window"):
        why = "loses the window: Qwen3's configuration forgets it"
        yield _finding("vllm", "degrades", "no use_sliding_window", why)


def _layer_ids(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config, boundaries = stored.config, head.config.boundaries
    nested = config.get(NESTED) or {}
    if is_default(boundaries, target.num_layers) or LAST_HIDDEN in boundaries:
        return
    if not config.get(IDS):
        why = f"looks for {IDS} at the top and takes its default layers; the older runner reads them one layer early"
        yield _finding("vllm", "degrades", f"layer ids only in {NESTED}", why)
    if not nested.get(IDS):
        yield _finding("sglang", "degrades", f"no {NESTED}.{IDS}", "takes its default layers")
    if not (stored.directory / TRTLLM).is_file():
        why = f"needs eagle3_layers_to_capture: {to_outputs(boundaries)} in its YAML, or takes its default layers"
        yield _finding("trtllm", "degrades", "layer ids in config.json", why)


def _finding(engine: str, severity: Severity, what: str, why: str) -> Finding:
    remedy = f"forerun export --to {TARGETS[engine]}"
    return Finding(engine=engine, severity=severity, what=f"{what} (as the files are)", why=why, remedy=remedy)
