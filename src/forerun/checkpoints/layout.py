"""What engines make of a head's files as they lie: keys that they look for elsewhere, or do not find. Reads no tensor.

The remedy is always the same, to write the files again with ``forerun export``. Sources as in `diagnose`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts
from forerun.checkpoints.files import TRTLLM, StoredFiles
from forerun.checkpoints.findings import Finding, Severity
from forerun.checkpoints.flat import FIRST_GENERATION, LLAMA
from forerun.checkpoints.layer_ids import IDS, NESTED, is_default, to_outputs
from forerun.checkpoints.registry import format_of
from forerun.checkpoints.speculators import LAYERS
from forerun.types import LAST_HIDDEN

TARGETS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "llama.cpp": "hf", "lmdeploy": "hf"}
"""Engine -> what to export for."""


def diagnose_files(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> list[Finding]:
    """What would go wrong if an engine were given these files; `head` is what they mean."""
    if format_of(stored.config).name == "speculators":
        return list(_speculators(stored.config, head))
    found = [*_keys(stored, head)]
    if head.config.generation == 3:
        found += [*_layer_ids(stored, head, target), *_upper_norms(stored, head)]
    return found


def _speculators(config: Mapping[str, Any], head: HeadCheckpoint) -> Iterator[Finding]:
    for engine in ("sglang", "trtllm", "lmdeploy"):
        yield _finding(engine, "fails", "speculators format", "reads the flat format only")
    if len(head.config.boundaries) != 3 and "num_aux_hidden_states" not in config[LAYERS]:
        why = f"sizes fc for three hidden states, it has {len(head.config.boundaries)}"
        yield _finding("vllm", "fails", f"no num_aux_hidden_states in {LAYERS}", why)
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
    if head.config.generation == 1 and "fc.bias" not in stored.tensors:
        yield _finding("sglang", "degrades", "no fc.bias", "keeps a random one")


def _layer_ids(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config, boundaries = stored.config, head.config.boundaries
    nested = config.get(NESTED) or {}
    if len(boundaries) != 3 and not config.get("num_aux_hidden_states") and not nested.get(IDS):
        for engine in ("vllm", "sglang"):
            why = f"sizes fc for three hidden states, it has {len(boundaries)}"
            yield _finding(engine, "fails", "no num_aux_hidden_states", why)
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


def _upper_norms(stored: StoredFiles, head: HeadCheckpoint) -> Iterator[Finding]:
    for layer in range(1, head.config.num_hidden_layers):
        for name, engines in (("input_layernorm", ("vllm",)), ("hidden_norm", ("sglang", "trtllm"))):
            tensor = f"layers.{layer}.{name}.weight"
            if tensor not in stored.tensors:
                for engine in engines:
                    yield _finding(engine, "degrades", f"no {tensor}", "keeps a fresh norm there without a message")


def _finding(engine: str, severity: Severity, what: str, why: str) -> Finding:
    remedy = f"forerun export --to {TARGETS[engine]}"
    return Finding(engine=engine, severity=severity, what=f"{what} (as the files are)", why=why, remedy=remedy)
