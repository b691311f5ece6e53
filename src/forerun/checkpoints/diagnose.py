"""What every serving engine does with a head: loads it, silently degrades it, or fails; and why.

From reading vLLM 0.33, SGLang 0.5.23, TensorRT-LLM 1.3-1.4 (release candidates), llama.cpp and LMDeploy 0.18; no engine
is run. Judges the head itself, assuming that it is written in the engine's format; `layout` judges files as they lie.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts
from forerun.checkpoints.findings import ENGINES, Finding, Severity
from forerun.checkpoints.layer_ids import is_default
from forerun.types import LAST_HIDDEN

RETRAIN = "train the head without it"
DROPPED = "does not read it: the weights or the flag are dropped without a message"
UNKNOWN = "is not known to read it"
VARIANTS: dict[str, dict[str, str]] = {
    "norm_before_residual": {
        "sglang": "ignores the flag and adds the un-normed feature",
        "trtllm": "ignores the flag and adds the un-normed feature",
        "lmdeploy": "ignores the flag and adds the un-normed feature",
    },
    "qk_norm": {"sglang": DROPPED, "trtllm": DROPPED, "llama.cpp": UNKNOWN, "lmdeploy": UNKNOWN},
    "attention_bias": {"sglang": DROPPED, "trtllm": DROPPED, "llama.cpp": UNKNOWN, "lmdeploy": UNKNOWN},
    "mlp_bias": {"sglang": DROPPED, "trtllm": DROPPED, "llama.cpp": UNKNOWN, "lmdeploy": UNKNOWN},
    "norm_before_fc": {"llama.cpp": UNKNOWN, "lmdeploy": UNKNOWN},
    "fc_norm": {"llama.cpp": UNKNOWN, "lmdeploy": UNKNOWN},
    "norm_output": {"llama.cpp": UNKNOWN, "lmdeploy": UNKNOWN},
}
"""Flag of `EagleConfig` -> engine -> what it does instead; engines that are not named read it."""


def diagnose(head: HeadCheckpoint, target: TargetFacts) -> list[Finding]:
    """Everything that is known about these engines and this head; at least one finding for each engine."""
    checks = (_fits, _boundaries, _variants, _biases, _both_norms, _sharing, _depth, _vocabulary, _generation, _context)
    found = [finding for check in checks for finding in check(head, target)]
    silent = [engine for engine in ENGINES if all(finding.engine != engine for finding in found)]
    return found + [_ok(engine, "everything in this head", "read as it was trained") for engine in silent]


def _fits(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Things that no engine can survive."""
    config = head.config
    for name, ours, theirs in (
        ("hidden states", config.target_hidden_size, target.hidden_size),
        ("a vocabulary", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            yield from _all("fails", f"made for {name} of {ours}", f"the target has {theirs}", "name the right target")
    if config.hidden_size != config.target_hidden_size and not config.own_embedding:
        why = f"the head is {config.hidden_size} wide, the target's embeddings {config.target_hidden_size}"
        yield from _all("fails", "no embedding of its own", why, "store embed_tokens.weight with the head")
    broken = [name for name, tensor in head.tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        yield from _all("fails", f"NaN or infinity in {broken[0]}", "every draft becomes noise", "train it again")


def _boundaries(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config = head.config
    if config.generation == 1:
        return
    shown = list(config.boundaries)
    if max(shown) > target.num_layers:
        why = f"the target has {target.num_layers} layers"
        remedy = "name the right target; or the ids in eagle_config are boundaries, not layers counted from 0"
        yield from _all("fails", f"reads boundaries {shown}", why, remedy)
    elif LAST_HIDDEN in shown:
        why = "EAGLE-3 layer ids cannot name the state after the final norm"
        yield from _all("fails", "reads the target's normed output", why, "train on boundaries")
    elif not is_default(shown, target.num_layers):
        why = f"its converter always takes {[2, target.num_layers // 2, target.num_layers - 3]}"
        yield _fails("llama.cpp", f"reads boundaries {shown}", why, "train on the default boundaries")
        if len(shown) != 3:
            yield _degrades("lmdeploy", f"reads {len(shown)} boundaries", UNKNOWN, "train on three")
    if 0 in shown:
        what, remedy = "reads the embeddings (boundary 0)", "train on boundaries from 1"
        yield _degrades("sglang", what, "counts layers from 0, so the id -1 is written; not tried", remedy)
        yield _fails("trtllm", what, "counts layers from 0, and takes -1 for the last layer", remedy)


def _variants(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    for flag, engines in VARIANTS.items():
        if getattr(head.config, flag):
            for engine, why in engines.items():
                yield _degrades(engine, flag, why, RETRAIN)
    if head.config.qk_norm:
        why = "has no EAGLE-3 architecture with norms of queries and keys"
        yield _fails("sglang", "qk_norm", why, RETRAIN)


def _biases(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """``fc.bias``: a bias of zeros serves every engine."""
    bias = head.tensors.get("fc.bias")
    if bias is None or not bool(bias.any()):
        return
    yield _degrades("vllm", "fc.bias", "drops the tensor without a message", RETRAIN)
    for engine in ("llama.cpp", "lmdeploy"):
        yield _degrades(engine, "fc.bias", UNKNOWN, RETRAIN)


def _both_norms(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    if not (head.config.fc_norm and head.config.norm_before_fc):
        return
    what = "fc_norm together with norm_before_fc"
    for engine, why in (
        ("vllm", "applies norm_before_fc first, the head was trained the other way round"),
        ("sglang", "applies both; the order is not known to be ours"),
        ("trtllm", "applies fc_norm alone"),
    ):
        yield _degrades(engine, what, why, "train with one of them")


def _sharing(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Embeddings and output heads that an engine replaces by the target's."""
    config = head.config
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        why = "takes the target's embedding for a head of the same width; right only if both are equal"
        for engine in ("sglang", "trtllm"):
            yield _degrades(engine, "an embedding of its own", why, "train with the target's embedding frozen")
    if config.generation == 1 and config.own_lm_head:
        why = "takes the target's output head for EAGLE-1; right only if both are equal"
        yield _degrades("sglang", "an output head of its own", why, "train with the target's output head")


def _depth(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    layers = head.config.num_hidden_layers
    if layers == 1:
        return
    what = f"{layers} layers"
    yield _fails("llama.cpp", what, "its converter takes heads of one layer", "train one layer")
    yield _degrades("lmdeploy", what, "is not known to run more than one", "train one layer")
    for engine in ("sglang", "trtllm"):
        yield _ok(engine, what, "reads hidden_norm above the first layer; an export writes that norm under both names")


def _vocabulary(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config = head.config
    if config.generation == 3 and not config.own_lm_head:
        why = "needs draft_vocab_size and an output head in the checkpoint"
        yield _fails("llama.cpp", "no output head of its own", why, "copy the target's head into the checkpoint")
    if not config.reduced_vocabulary and bool(head.tensors["d2t"].any()):
        why = "reads d2t only for a reduced vocabulary; the order is lost"
        yield _degrades("trtllm", "a vocabulary in another order", why, "sort the vocabulary")
    if config.generation == 1 and config.reduced_vocabulary:
        for engine in ("vllm", "sglang", "lmdeploy"):
            yield _fails(engine, "EAGLE-1 with d2t", "reads no d2t for EAGLE-1", "train on the whole vocabulary")


def _generation(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    if head.config.generation != 1:
        return
    yield _fails("trtllm", "EAGLE-1", "the PyTorch backend loads EAGLE-3 only", "train an EAGLE-3 head")
    yield _fails("llama.cpp", "EAGLE-1", "converts EAGLE-3 only", "train an EAGLE-3 head")
    if "fc.bias" not in head.tensors:
        yield _ok("sglang", "no fc.bias", "would invent a random one; an export for SGLang writes zeros")


def _context(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    ours, theirs = head.config.max_position_embeddings, target.max_position_embeddings
    if ours < theirs:
        what = f"made for {ours} positions, the target has {theirs}"
        for engine in ENGINES:
            yield _ok(engine, what, "beyond them drafts get worse or stop; answers stay right")


def _ok(engine: str, what: str, why: str) -> Finding:
    return Finding(engine=engine, severity="ok", what=what, why=why)


def _degrades(engine: str, what: str, why: str, remedy: str) -> Finding:
    return Finding(engine=engine, severity="degrades", what=what, why=why, remedy=remedy)


def _fails(engine: str, what: str, why: str, remedy: str) -> Finding:
    return Finding(engine=engine, severity="fails", what=what, why=why, remedy=remedy)


def _all(severity: Severity, what: str, why: str, remedy: str) -> Iterator[Finding]:
    for engine in ENGINES:
        yield Finding(engine=engine, severity=severity, what=what, why=why, remedy=remedy)
