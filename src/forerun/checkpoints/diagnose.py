"""What every serving engine does with a head: loads it, silently degrades it, or fails; and why.

From reading vLLM 0.33, SGLang 0.5.23, TensorRT-LLM 1.3-1.4 (release candidates), llama.cpp and LMDeploy 0.18; no engine
is run. Judges the head itself, assuming that it is written in the engine's format; `layout` judges files as they lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts
from forerun.checkpoints.engines import LOADERS, RETRAIN, adapted, mismatches, sglang_window
from forerun.checkpoints.findings import ENGINES, Finding, Severity
from forerun.checkpoints.flat import write_flat
from forerun.checkpoints.layer_ids import is_default
from forerun.checkpoints.names import respelled, to_file
from forerun.types import LAST_HIDDEN

UNKNOWN = "is not known to read it"
UNKNOWN_VARIANTS = ("qk_norm", "attention_bias", "mlp_bias", "norm_before_fc", "fc_norm", "norm_output")
"""Flags of `EagleConfig` of which it is not known whether llama.cpp and LMDeploy read them."""


def diagnose(head: HeadCheckpoint, target: TargetFacts) -> list[Finding]:
    """Everything that is known about these engines and this head; at least one finding for each engine."""
    found = [finding for check in CHECKS for finding in check(head, target)]
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


def loading(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """What engines do with each tensor of the head, written in the flat format as each wants it."""
    config = head.config
    if config.generation == 3 and LAST_HIDDEN in config.boundaries:
        return  # nothing can be written
    for engine in LOADERS if config.generation == 3 else ("vllm", "sglang"):
        wanted, overrides = adapted(head, engine)
        keys = {**write_flat(wanted), **overrides}
        yield from mismatches(engine, wanted.config, keys, respelled(to_file(wanted)))


def _variants(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config = head.config
    unread = [flag for flag in UNKNOWN_VARIANTS if getattr(config, flag)]
    bias = head.tensors.get("fc.bias")
    unread += ["fc.bias"] if bias is not None and bool(bias.any()) else []
    for engine, what in itertools.product(("llama.cpp", "lmdeploy"), unread):
        yield _degrades(engine, what, UNKNOWN, RETRAIN)
    if config.norm_before_residual:
        for engine in ("sglang", "trtllm", "lmdeploy"):
            why = "ignores the flag and adds the un-normed feature"
            yield _degrades(engine, "norm_before_residual", why, RETRAIN)
    if config.qk_norm:
        why = "has no EAGLE-3 architecture with norms of queries and keys"
        yield _fails("sglang", "qk_norm", why, RETRAIN)
    if config.hidden_act != "silu":
        what, remedy = f"the activation {config.hidden_act}", "train the head with silu"
        for engine in ("vllm", "sglang"):
            yield _fails(engine, what, "has heads with silu only", remedy)
        yield _degrades("trtllm", what, "computes silu in its place", remedy)
        for engine in ("llama.cpp", "lmdeploy"):
            yield _degrades(engine, what, UNKNOWN, remedy)


def _window(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """A sliding window that a sequence of the target can outgrow."""
    config = head.config
    window = config.sliding_window
    if window is None or window >= target.max_position_embeddings:
        return
    what, remedy = f"a sliding window of {window} positions", "train the head without a window"
    everything = "has no window for draft heads: each layer looks back to the beginning"
    for engine in ("trtllm", "llama.cpp"):
        yield _degrades(engine, what, everything, remedy)
    yield _degrades("lmdeploy", what, UNKNOWN, remedy)
    if config.generation == 1:
        yield _fails("vllm", what, "looks for layer_types behind those of the target, and stops", remedy)
    option = sglang_window(config)
    if option:
        why = f"reads no window from the file: its command line must have {option}"
        yield Finding(engine="sglang", severity="check", what=what, why=why, remedy="forerun export --to sglang")
    else:
        yield _degrades("sglang", what, "has one window, of at least 2, for all layers, of EAGLE-3 heads only", remedy)


def _unknown_keys(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    for key in head.unknown:
        why = "nothing is known of it: the engine may compute something else by it"
        yield from _all("check", f"the key {key}", why, "find out what it means; remove it if it means nothing")


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


CHECKS: tuple[Callable[[HeadCheckpoint, TargetFacts], Iterator[Finding]], ...] = (
    _fits,
    _boundaries,
    loading,
    _variants,
    _window,
    _both_norms,
    _sharing,
    _depth,
    _vocabulary,
    _generation,
    _context,
    _unknown_keys,
)
