"""What engines' loaders leave unfilled, lose or stop at: of what we write, and of files with one fault each."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from forerun.errors import CheckpointError
from forerun.heads.decoders import canonical_names, to_file
from forerun.heads.eagle import EagleConfig
from forerun.heads.eagle_engines import DESTINATIONS, FIRST_TOO, LOADERS, UNFILLED, adapt_head, mismatches
from forerun.heads.eagle_files import write_flat
from forerun.heads.engines import ENGINES, Finding, diagnose, diagnose_files, export_head, worst
from forerun.heads.files import HeadCheckpoint, differences, format_named, parse, read_files, read_head, write_head
from heads.samples import FIRST, PLAIN, TARGET, VARIANTS, change, keys_of, sample, spell_out, vary, written_as
from selection import one_in

LAYER = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
THIRD = {"fc.weight", "norm.weight"} | {f"layers.0.{name}.weight" for name in LAYER + NORMS}
"""Of EAGLE-3 without anything that is optional."""
ATTEND = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
LATENT = {"fc.weight", "norm.weight"} | {f"layers.0.{name}.weight" for name in LAYER[4:] + NORMS}
LATENT |= {f"layers.0.self_attn.{name}.weight" for name in ATTEND}
"""Of a head with latent attention; vLLM's deepseek_eagle3.py and SGLang's kimi_k25_eagle3.py join some of them."""
FIRST_LAYER = {f"layers.0.{name}.weight" for name in [*LAYER, "post_attention_layernorm"]}
BIASES = {f"layers.0.{name}.bias" for name in LAYER}
ATTENTION = {f"layers.0.{name}.bias" for name in LAYER[:4]}
OUTPUT = {"layers.0.self_attn.o_proj.bias"}
READ: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("vllm", "plain", {}, THIRD),
    ("sglang", "plain", {}, THIRD | {"lm_head.weight"}),
    ("trtllm", "plain", {}, THIRD),
    ("llama.cpp", "plain", {}, THIRD),
    ("llama.cpp", "norm_before_fc", {}, THIRD | {"input_norm.weight"}),
    ("llama.cpp", "eagle-3.1", {}, THIRD),
    ("llama.cpp", "biases", {}, THIRD),
    ("vllm", "plain", {"bias": True}, THIRD | OUTPUT),
    ("sglang", "plain", {"bias": True}, THIRD | OUTPUT | {"fc.bias", "lm_head.weight"}),
    ("trtllm", "plain", {"bias": True}, THIRD | {"fc.bias"}),
    ("vllm", "biases", {}, THIRD | BIASES),
    ("sglang", "biases", {}, THIRD | OUTPUT | {"lm_head.weight"}),
    ("trtllm", "biases", {}, THIRD | BIASES),
    ("sglang", "shared_lm_head", {}, THIRD),
    ("sglang", "one_boundary", {}, THIRD - {"fc.weight"} | {"lm_head.weight"}),
    ("trtllm", "one_boundary", {}, THIRD - {"fc.weight"}),
    ("trtllm", "norm_before_fc", {}, THIRD | {"input_norm.weight"}),
    ("trtllm", "norm_before_fc", {"eagle_config": {}}, THIRD),
    ("vllm", "qk_norm", {}, THIRD | {f"layers.0.self_attn.{name}_norm.weight" for name in "qk"}),
    ("vllm", "latent-3.1", {}, LATENT | {f"fc_norm.{index}.weight" for index in range(3)}),
    ("sglang", "latent-3.1", {}, LATENT | {f"fc_norm.{index}.weight" for index in range(3)} | {"lm_head.weight"}),
    ("trtllm", "latent", {}, LATENT),
    ("vllm", "latent", {"norm_before_fc": True, "bias": True, "attention_bias": True}, LATENT),
    ("sglang", "latent", {"norm_before_fc": True, "bias": True}, LATENT | {"fc.bias", "lm_head.weight"}),
    ("vllm", "first", {}, FIRST_LAYER | {"fc.weight"}),
    ("sglang", "first", {}, FIRST_LAYER | {"fc.weight", "fc.bias"}),
    ("vllm", "first", {"bias": True}, FIRST_LAYER | ATTENTION | {"fc.weight"}),
    ("sglang", "first", {"bias": True}, FIRST_LAYER | ATTENTION | {"fc.weight", "fc.bias"}),
]
"""Engine, head, changed keys -> every tensor that the engine wants; written out from its source."""


def read_by(engine: str) -> list[str]:
    return [name for name, config in VARIANTS.items() if config.generation == 3 or engine in FIRST_TOO]


CASES = [(engine, variant) for engine in LOADERS for variant in read_by(engine)]


@pytest.mark.parametrize(("engine", "variant", "changes", "expected"), READ)
def test_the_table_of_an_engines_wants(engine: str, variant: str, changes: dict[str, Any], expected: set[str]) -> None:
    head = sample(VARIANTS[variant])
    wanted = LOADERS[engine](head.config, write_flat(head) | changes)
    assert wanted.keys() == expected
    tensors = head.tensors
    assert all(wanted[name] == tuple(tensors[name].shape) for name in wanted.keys() & tensors.keys())


def as_written(engine: str, config: EagleConfig) -> tuple[HeadCheckpoint, dict[str, Any], dict[str, torch.Tensor]]:
    """The head, keys and tensors that an export for the engine writes."""
    head, overrides = adapt_head(sample(config), engine)
    return head, write_flat(head) | overrides, canonical_names(to_file(head))


def found(engine: str, config: EagleConfig, keys: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Words of the findings -> severity."""
    return {f"{f.what}: {f.why}": f.severity for f in mismatches(engine, config, keys, tensors)}


LOSES: dict[str, set[str]] = {
    "vllm": {"biases", "first_bias", "embedding_everywhere"},
    "sglang": {"biases", "qk_norm", "window_qwen3", "one_boundary", "embedding_everywhere"},
    "trtllm": {"qk_norm", "window_qwen3", "one_boundary"},
    "llama.cpp": {"biases", "eagle-3.1", "latent-3.1", "qk_norm", "window_qwen3"},
}
"""Engine -> heads that it cannot serve as they are, whatever is written."""


@pytest.mark.parametrize(("engine", "variant"), CASES)
def test_nothing_that_we_write_is_left_unfilled_or_lost(engine: str, variant: str) -> None:
    head, keys, tensors = as_written(engine, VARIANTS[variant])
    complaints = list(mismatches(engine, head.config, keys, tensors))
    assert bool(complaints) == (variant in LOSES[engine]), complaints
    why = "expects layers.1.self_attn" if variant == "embedding_everywhere" else "does not use it"
    why = "has no place for it and stops" if engine == "llama.cpp" else why
    assert all(why in finding.why for finding in complaints), "nothing is unfilled, nothing else stops it"


@pytest.mark.parametrize(("engine", "variant"), one_in(5, ((e, v) for e, v in CASES if v not in LOSES[e])))
def test_each_fault_in_a_file_is_found_by_name(engine: str, variant: str) -> None:
    """Without each tensor in turn, with each in another shape, with one too many."""
    head, keys, tensors = as_written(engine, VARIANTS[variant])
    wanted = LOADERS[engine](head.config, keys)
    for name in wanted:
        less = {other: tensor for other, tensor in tensors.items() if other != name}
        strict = engine == "llama.cpp"
        unfilled = (f"{name}: stops without it", "fails") if strict else (f"{name}: {UNFILLED}", "degrades")
        assert found(engine, head.config, keys, less) == dict([unfilled])
        ((words, severity),) = found(engine, head.config, keys, tensors | {name: torch.ones(5, 3)}).items()
        assert words.startswith(f"{name}: expects {name} {wanted[name]}") and severity == "fails"
    for name in ("layers.0.mlp.gate.weight", "layers.0.self_attn.q_proj.bias"):
        if name not in wanted:
            ((words, severity),) = found(engine, head.config, keys, tensors | {name: torch.ones(4)}).items()
            stops = engine == "llama.cpp" or (engine == "vllm" and name.endswith(".weight"))
            assert words.startswith(f"{name}: ") and severity == ("fails" if stops else "degrades")
    zeros = found(engine, head.config, keys, tensors | {"fc.bias": torch.zeros(16)})
    assert (zeros == {}) == (engine != "llama.cpp"), "zeros change nothing, but llama.cpp has no name for them"


@pytest.mark.parametrize(
    ("to", "variant"), one_in(4, ((to, variant) for to in DESTINATIONS for variant in written_as(to)))
)
def test_every_export_is_read_back_and_its_engine_finds_what_it_wants(to: str, variant: str, tmp_path: Path) -> None:
    """Forced, so that everything is written; what is wrong with the files is no more than what was said of the head."""
    config, engine = VARIANTS[variant], DESTINATIONS[to].engine
    target = dataclasses.replace(TARGET, hidden_size=config.target_hidden_size)
    source = write_head(sample(config), tmp_path / "source", "flat", target)
    done = export_head(source, target, to, tmp_path / "out", force=True)
    stored = read_files(done.directory)
    assert differences(adapt_head(read_head(source), engine)[0], parse(stored)) == []
    files = [f for f in diagnose_files(stored, parse(stored), target) if f.engine == engine]
    assert files == []
    said = worst(done.findings, engine) if engine else "ok"
    if said in ("degrades", "fails"):
        with pytest.raises(CheckpointError, match="would not serve this head as it was trained"):
            export_head(source, target, to, tmp_path / "again")
    else:
        assert export_head(source, target, to, tmp_path / "again").command.replace("again", "out") == done.command


def edited(head: Path, **keys: Any) -> list[Finding]:
    """Findings on the files as they lie, once keys are changed; None removes one."""
    stored = read_files(change(head, **keys))
    return diagnose_files(stored, parse(stored, num_layers=TARGET.num_layers), TARGET)


@pytest.mark.parametrize(
    ("variant", "keys", "expected"),
    [
        # The files that were exported for SGLang until now.
        ("first_bias", {"bias": True}, {"vllm", "sglang"}),
        ("biases", {"bias": True}, {"sglang"}),
        ("eagle-3.1", {"norm_output": None}, {"vllm", "sglang"}),
        ("eagle-3.1", {"eagle_config": None}, {"trtllm"}),
        ("eagle-3.1", {"fc_norm": None, "use_aux_norm": True}, {"vllm", "trtllm"}),
        ("norm_before_fc", {"eagle_config": None}, {"trtllm"}),
        ("five", {"eagle_config": None, "num_aux_hidden_states": None}, {"vllm", "sglang"}),
        ("shared_lm_head", {"draft_vocab_size": 60}, {"sglang"}),
    ],
)
def test_files_as_others_write_them(variant: str, keys: dict[str, Any], expected: set[str], tmp_path: Path) -> None:
    head = write_head(sample(VARIANTS[variant]), tmp_path / "head", "flat", TARGET)
    before = {(f.engine, f.what) for f in edited(head)}
    new = [f for f in edited(head, **keys) if (f.engine, f.what) not in before]
    assert {f.engine for f in new} == expected
    assert all(f.severity in ("degrades", "fails") and f.remedy.startswith("forerun export --to") for f in new)


def test_trtllm_hears_of_a_bias_after_fc_and_nobody_else(tmp_path: Path) -> None:
    source = write_head(sample(vary(fc_bias=True)), tmp_path / "source", "flat", TARGET)
    done = export_head(source, TARGET, "trtllm", tmp_path / "out")
    assert keys_of(done.directory)["bias"] is True
    assert worst(done.findings, "trtllm") == "ok"
    stored = read_files(done.directory)
    (files,) = [f for f in diagnose_files(stored, parse(stored), TARGET) if f.engine == "sglang"]
    assert "o_proj.bias" in files.what and "nothing in the file fills it" in files.why


# What transformers' configuration classes, through which vLLM and SGLang read the file, make of our keys


KINDS = [(name, kind) for name in ("flat", "modelopt", "speculators") for kind in written_as(name)]


@pytest.mark.parametrize(("name", "variant"), [(name, kind) for name, kind in KINDS if VARIANTS[kind].generation == 3])
def test_a_configuration_class_keeps_every_key(name: str, variant: str) -> None:
    keys = format_named(name).write(sample(VARIANTS[variant]), TARGET)[0]
    layers = keys.get("transformer_layer_config", keys)
    if layers["model_type"] == "kimi_k2":
        layers = {**layers, "model_type": "deepseek_v3"}  # as vLLM, SGLang and TensorRT-LLM have it
    read = AutoConfig.for_model(**{**layers, "architectures": None})
    spelled_anew = {"architectures", "torch_dtype", "rope_theta", "rope_scaling", "transformers_version"}
    lost = {key: getattr(read, key, None) for key in set(layers) - spelled_anew if getattr(read, key, 0) != layers[key]}
    assert lost == {}
    assert read.rope_parameters["rope_theta"] == layers["rope_theta"]


# Sliding windows


LONG = dataclasses.replace(TARGET, max_position_embeddings=4096)
LACKING = "degrades trtllm llama.cpp lmdeploy"
OLDER: dict[str, Any] = {"generation": 1, "boundaries": FIRST.boundaries}
WINDOWS: list[tuple[dict[str, Any], str]] = [
    ({}, f"check sglang modelopt, {LACKING}"),
    ({"sliding_window": 1}, f"degrades sglang, {LACKING}, check modelopt"),
    ({"num_hidden_layers": 2, "full_layers": (0,)}, f"degrades sglang, {LACKING}, fails llama.cpp, check modelopt"),
    (OLDER, "fails vllm trtllm llama.cpp modelopt, degrades sglang lmdeploy"),
]


@pytest.mark.parametrize(("changes", "expected"), WINDOWS, ids=str)
def test_engines_without_a_window_are_not_ok(changes: dict[str, Any], expected: str) -> None:
    config = vary(**{"sliding_window": 64, **changes})
    judged = diagnose(sample(config), LONG)
    assert {engine: worst(judged, engine) for engine in ENGINES if worst(judged, engine) != "ok"} == spell_out(expected)
    assert all(finding.remedy for finding in judged if finding.severity != "ok")


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    plain, windowed = sample(PLAIN), sample(vary(sliding_window=128))
    assert diagnose(plain, TARGET) == diagnose(windowed, TARGET)
    assert diagnose(plain, LONG) != diagnose(windowed, LONG)


def test_an_export_gives_each_engine_its_window(tmp_path: Path) -> None:
    source = write_head(sample(vary(sliding_window=64)), tmp_path / "source", "flat", LONG)
    done = export_head(source, LONG, "sglang", tmp_path / "sglang")
    assert done.command.endswith(" --speculative-draft-window-size 63"), "SGLang does not count the token itself"
    assert done.command in (done.directory / "README.md").read_text()
    for to in ("vllm", "speculators", "hf"):
        done = export_head(source, LONG, to, tmp_path / to)
        keys = keys_of(done.directory)
        layers = keys.get("transformer_layer_config", keys)
        assert layers["sliding_window"] == 64 and layers["layer_types"] == ["sliding_attention"]
        assert "window" not in done.command
    with pytest.raises(CheckpointError, match="a sliding window of 64 positions: TensorRT-LLM has no window"):
        export_head(source, LONG, "trtllm", tmp_path / "trtllm")


def windowed(name: str, **keys: Any) -> HeadCheckpoint:
    """A head of two layers whose file says so."""
    config = vary(num_hidden_layers=2)
    written, tensors = format_named(name).write(sample(config), TARGET)
    written.get("transformer_layer_config", written).update(keys)
    return format_named(name).read(written, tensors)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("name", ["flat", "modelopt", "speculators"])
@pytest.mark.parametrize(
    ("keys", "expected", "noted"),
    [
        ({"sliding_window": 64, "layer_types": [SLIDING, SLIDING]}, (64, ()), False),
        ({"sliding_window": 64, "layer_types": [FULL, SLIDING]}, (64, (0,)), False),
        ({"sliding_window": 64, "use_sliding_window": True, "layer_types": [SLIDING, FULL]}, (64, (1,)), False),
        ({"sliding_window": 64, "layer_types": [FULL, FULL]}, (None, ()), False),
        ({"sliding_window": 64}, (64, ()), True),
        ({"sliding_window": 64, "use_sliding_window": True}, (64, ()), True),
        ({"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 28}, (None, ()), False),
        ({"sliding_window": None, "max_window_layers": 28, "layer_types": None}, (None, ()), False),
        ({"sliding_window": 64, "max_window_layers": 0}, (64, ()), True),
    ],
)
def test_windows_are_read(name: str, keys: dict[str, Any], expected: tuple[Any, Any], noted: bool) -> None:
    head = windowed(name, **keys)
    assert (head.config.sliding_window, head.config.full_layers) == expected and head.unknown == []
    assert any("sliding_window without layer_types" in note for note in head.notes) == noted
    again = format_named(name).read(*format_named(name).write(head, TARGET))
    assert differences(head, again) == [] and not again.notes


@pytest.mark.parametrize("name", ["flat", "speculators"])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layer_types": [SLIDING, SLIDING]}, "sliding_window is None"),
        ({"sliding_window": 64, "use_sliding_window": False, "layer_types": [SLIDING, FULL]}, "_sliding_window False"),
        ({"sliding_window": 64, "layer_types": [SLIDING]}, "layer_types must be 2 of"),
        ({"layer_types": ["chunked_attention", FULL]}, "layer_types must be 2 of"),
        ({"layer_types": "sliding_attention"}, "layer_types must be 2 of"),
        ({"sliding_window": 64, "max_window_layers": 1}, "say which of the 2 layers slide"),
        ({"sliding_window": 0}, "at least 1 position"),
        ({"sliding_window": "64"}, "sliding_window of .* must be a whole number"),
    ],
)
def test_windows_that_say_two_things_are_refused(name: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        windowed(name, **keys)


@pytest.mark.parametrize(
    ("variant", "keys", "words"),
    [
        ("window", {"layer_types": None}, "applies a window only where layer_types names it"),
        ("window_qwen3", {"use_sliding_window": None}, "Qwen3's configuration forgets it"),
    ],
)
def test_windows_that_vllm_would_lose(variant: str, keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    head = write_head(sample(VARIANTS[variant]), tmp_path / "head", "flat", TARGET)
    assert not [f for f in edited(head) if f.engine == "vllm"]
    assert [f for f in edited(head, **keys) if f.engine == "vllm" and words in f.why and f.severity == "degrades"]
