"""The traps of every serving engine, as findings; and exports that keep out of them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forerun.errors import ArgumentError, CheckpointError
from forerun.heads import engines
from forerun.heads.eagle import EagleConfig
from forerun.heads.engines import ENGINES, Finding, diagnose, diagnose_files, export_head, worst
from forerun.heads.files import HeadCheckpoint, differences, parse, read_files, read_head, write_head
from forerun.types import LAST_HIDDEN
from heads.samples import FIRST, LATENT, PLAIN, TARGET, VARIANTS, change, keys_of, replaced, sample, spell_out, vary

EVERYWHERE = {engine: "fails" for engine in ENGINES}


def verdicts(findings: Sequence[Finding]) -> dict[str, str]:
    """Engines that are not ok."""
    return {engine: worst(findings, engine) for engine in ENGINES if worst(findings, engine) != "ok"}


def judged(config: EagleConfig, **target: Any) -> dict[str, str]:
    return verdicts(diagnose(sample(config), dataclasses.replace(TARGET, **target)))


def test_the_safest_head_loads_everywhere() -> None:
    findings = diagnose(sample(PLAIN), TARGET)
    assert verdicts(findings) == {} and [finding.engine for finding in findings] == list(ENGINES)
    assert judged(VARIANTS["reduced"]) == {} and judged(VARIANTS["own_embedding"], hidden_size=12) == {}


def latent(**changes: Any) -> EagleConfig:
    return dataclasses.replace(LATENT, latent=dataclasses.replace(LATENT.latent, **changes))


TRAPS: dict[str, tuple[EagleConfig, str]] = {
    "B: norm_before_residual": (VARIANTS["norm_before_residual"], "degrades sglang trtllm lmdeploy, check modelopt"),
    "C: layers": (VARIANTS["two_layers"], "fails llama.cpp, degrades lmdeploy"),
    "D: embedding": (vary(own_embedding=True), "degrades sglang trtllm"),
    "D: output head": (VARIANTS["shared_lm_head"], ""),
    "E: fc.bias": (vary(fc_bias=True), "degrades vllm sglang lmdeploy, fails llama.cpp, check modelopt"),
    "qk_norm": (VARIANTS["qk_norm"], "fails sglang llama.cpp, degrades trtllm lmdeploy, check modelopt"),
    "attention bias": (vary(attention_bias=True), "degrades sglang lmdeploy, fails llama.cpp"),
    "MLP bias": (vary(mlp_bias=True), "degrades sglang lmdeploy, fails llama.cpp"),
    "Qwen3 with biases": (
        vary(qk_norm=True, attention_bias=True),
        "degrades vllm trtllm lmdeploy, fails sglang llama.cpp, check modelopt",
    ),
    "one state": (vary(boundaries=(5,)), "degrades sglang trtllm lmdeploy, fails llama.cpp"),
    "another activation": (vary(hidden_act="gelu"), "fails vllm sglang, degrades trtllm llama.cpp lmdeploy"),
    "EAGLE-3.1": (VARIANTS["eagle-3.1"], "fails llama.cpp, degrades lmdeploy, check modelopt"),
    "normed feedback": (vary(norm_output=True), "degrades llama.cpp lmdeploy, check modelopt"),
    "the last boundary": (vary(boundaries=(2, 5, 10)), "check llama.cpp"),
    "both norms": (
        vary(fc_norm=True, norm_before_fc=True),
        "degrades vllm sglang trtllm lmdeploy, fails llama.cpp, check modelopt",
    ),
    "A: other layers": (vary(boundaries=(1, 5, 7)), "check sglang"),
    "A: five layers": (VARIANTS["five"], "check sglang, fails llama.cpp, degrades lmdeploy"),
    "A: from the second": (vary(boundaries=(2, 4, 6)), ""),
    "A: another order": (vary(boundaries=(5, 2, 7)), "degrades vllm, check sglang"),
    "EAGLE-1, output head": (vary(FIRST, own_lm_head=True), "fails vllm trtllm llama.cpp modelopt, degrades sglang"),
    "A: embeddings": (vary(boundaries=(0, 5, 7)), "degrades sglang, fails trtllm"),
    "latent attention": (LATENT, "fails llama.cpp, check lmdeploy"),
    "latent attention, two layers": (VARIANTS["latent_two_layers"], "fails sglang llama.cpp, degrades lmdeploy"),
    "latent attention without q_lora_rank": (latent(q_lora_rank=None), "fails sglang trtllm llama.cpp lmdeploy"),
    "latent, halves": (latent(rope_interleave=False), "degrades vllm sglang trtllm, fails llama.cpp, check lmdeploy"),
    "latent attention, a norm before fc": (
        vary(LATENT, norm_before_fc=True),
        "fails vllm llama.cpp, degrades sglang lmdeploy, check modelopt",
    ),
    "latent attention on the last state": (
        vary(LATENT, use_aux_hidden_state=False, boundaries=(LAST_HIDDEN,)),
        "degrades vllm sglang lmdeploy, fails llama.cpp",
    ),
    "A: normed output": (vary(boundaries=(2, 5, LAST_HIDDEN)), f"fails {' '.join(ENGINES)}"),
    "EAGLE-1": (FIRST, "fails trtllm llama.cpp modelopt"),
    "EAGLE-1 with a bias": (vary(FIRST, fc_bias=True), "degrades vllm lmdeploy, fails trtllm llama.cpp modelopt"),
}


@pytest.mark.parametrize(("config", "expected"), TRAPS.values(), ids=TRAPS)
def test_traps_are_found(config: EagleConfig, expected: str) -> None:
    assert judged(config) == spell_out(expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 20}, "made for hidden states of 16"),
        ({"vocab_size": 61}, "made for a vocabulary of 60"),
        ({"num_layers": 6}, "reads boundaries [2, 5, 7]"),
    ],
)
def test_the_wrong_target_fails_everywhere(changes: dict[str, int], words: str) -> None:
    findings = diagnose(sample(PLAIN), dataclasses.replace(TARGET, **changes))
    assert verdicts(findings) == EVERYWHERE and findings[0].what == words
    assert all(finding.remedy for finding in findings if finding.severity != "ok")


def test_more_that_no_engine_survives() -> None:
    narrow = vary(target_hidden_size=12)
    assert judged(narrow, hidden_size=12) == EVERYWHERE, "an embedding of another width than the head's"
    head = sample(PLAIN)
    head.tensors["fc.weight"][0, 0] = float("nan")
    findings = diagnose(head, TARGET)
    assert verdicts(findings) == EVERYWHERE and findings[0].what == "NaN or infinity in fc.weight"


def test_less_obvious_vocabularies() -> None:
    head = sample(PLAIN)
    head.tensors["d2t"][:2] = torch.tensor([1, -1])
    assert verdicts(diagnose(head, TARGET)) == {"vllm": "fails", "trtllm": "degrades"}
    assert judged(vary(FIRST, own_lm_head=True, draft_vocab_size=24)) == EVERYWHERE


def test_a_bias_of_zeros_serves_every_engine() -> None:
    head = sample(vary(fc_bias=True))
    head.tensors["fc.bias"].zero_()
    assert verdicts(diagnose(head, TARGET)) == {}


def test_a_short_context_is_said_and_harmless() -> None:
    findings = diagnose(sample(PLAIN), dataclasses.replace(TARGET, max_position_embeddings=4096))
    assert verdicts(findings) == {} and {f.what for f in findings} == {"made for 128 positions, the target has 4096"}


# Files as they lie


def as_they_lie(directory: Path, config: EagleConfig, name: str = "flat", **keys: Any) -> dict[str, str]:
    """Verdicts on files whose keys were edited; None removes one."""
    stored = read_files(change(write_head(sample(config), directory / "head", name, TARGET), **keys))
    return verdicts(diagnose_files(stored, parse(stored, num_layers=TARGET.num_layers), TARGET))


IDS = "eagle_aux_hidden_state_layer_ids"
OTHER = vary(boundaries=(1, 5, 7))


@pytest.mark.parametrize(
    ("config", "name", "keys", "expected"),
    [
        (PLAIN, "flat", {}, ""),
        (PLAIN, "flat", {IDS: None}, ""),
        (OTHER, "flat", {}, "degrades trtllm"),
        (OTHER, "flat", {IDS: None}, "degrades vllm llama.cpp trtllm"),
        (OTHER, "flat", {"eagle_config": None}, "degrades sglang trtllm"),
        (PLAIN, "flat", {"draft_vocab_size": None}, "fails sglang llama.cpp"),
        (PLAIN, "flat", {"architectures": ["Eagle3LlamaForCausalLM"]}, "fails sglang"),
        (PLAIN, "flat", {"architectures": ["LlamaForCausalLM"]}, "fails sglang"),
        (PLAIN, "flat", {"architectures": ["Qwen3ForCausalLMEagle3"]}, "fails vllm sglang"),
        (PLAIN, "flat", {"architectures": []}, "fails vllm sglang"),
        (PLAIN, "flat", {"tie_word_embeddings": True}, "degrades sglang lmdeploy"),
        (
            VARIANTS["five"],
            "flat",
            {"num_aux_hidden_states": None, "eagle_config": None},
            "fails vllm sglang, degrades trtllm",
        ),
        (FIRST, "flat", {}, "fails vllm, degrades sglang"),
        (FIRST, "flat", {"architectures": ["EagleLlamaForCausalLM"]}, "fails sglang"),
        (PLAIN, "modelopt", {}, ""),
        (PLAIN, "speculators", {}, "fails sglang trtllm lmdeploy"),
        (PLAIN, "speculators", {"norm_before_residual": None}, "degrades vllm, fails sglang trtllm lmdeploy"),
    ],
)
def test_keys_that_an_engine_looks_for_elsewhere(
    tmp_path: Path, config: EagleConfig, name: str, keys: dict[str, Any], expected: str
) -> None:
    assert as_they_lie(tmp_path, config, name, **keys) == spell_out(expected)


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [("hidden_norm", "degrades sglang trtllm"), ("input_layernorm", "degrades vllm, fails llama.cpp")],
)
def test_a_norm_under_one_name_only(tmp_path: Path, dropped: str, expected: str) -> None:
    head = write_head(sample(VARIANTS["two_layers"]), tmp_path / "head", "flat", TARGET)
    stored = read_files(change(head, {f"layers.1.{dropped}.weight": None}))
    assert verdicts(diagnose_files(stored, parse(stored), TARGET)) == spell_out(expected)


# Export


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_head(sample(VARIANTS["reduced"]), tmp_path / "source", "modelopt", TARGET)


LINES = {
    "vllm": "vllm serve owner/target --speculative-config "
    """'{"method": "eagle3", "model": "OUT", "num_speculative_tokens": 5}'""",
    "sglang": "python -m sglang.launch_server --model-path owner/target --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path OUT --speculative-num-steps 5 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 6",
    "trtllm": "trtllm-serve owner/target --config OUT/trtllm.yaml",
    "speculators": "vllm serve OUT",
    "hf": "forerun generate owner/target --drafter eagle3 --drafter-model OUT --prompt 'def '",
}


@pytest.mark.parametrize("to", LINES)
def test_exports_say_how_to_start_the_engine(to: str, source: Path, tmp_path: Path) -> None:
    done = export_head(source, TARGET, to, tmp_path / "out")
    assert done.command == LINES[to].replace("OUT", str(tmp_path / "out"))
    assert done.command in (done.directory / "README.md").read_text()
    assert differences(read_head(source), read_head(done.directory)) == []
    stored = read_files(done.directory)
    engine = {"hf": "vllm", "speculators": "vllm"}.get(to, to)
    assert worst(diagnose_files(stored, parse(stored), TARGET), engine) == "ok"
    assert (done.directory / "trtllm.yaml").exists() == (to == "trtllm")
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in done.directory.iterdir())


def test_trtllm_gets_its_layers_counted_from_0(tmp_path: Path) -> None:
    source = write_head(sample(VARIANTS["five"]), tmp_path / "source", "flat", TARGET)
    done = export_head(source, TARGET, "trtllm", tmp_path / "my head")
    assert (done.directory / "trtllm.yaml").read_text() == (
        "speculative_config:\n"
        "  decoding_type: Eagle3\n"
        "  max_draft_len: 5\n"
        f'  speculative_model: "{done.directory}"\n'
        "  eagle3_layers_to_capture: [0, 2, 4, 6, 9]\n"
    )
    assert f"'{done.directory}/trtllm.yaml'" in done.command


@pytest.mark.parametrize(
    ("variant", "to", "words"),
    [
        ("norm_before_residual", "sglang", "norm_before_residual: SGLang ignores the flag"),
        ("norm_before_residual", "trtllm", "norm_before_residual: TensorRT-LLM ignores the flag"),
        ("qk_norm", "sglang", "qk_norm: SGLang"),
        ("biases", "vllm", r"fc\.bias: vLLM does not use it"),
        ("biases", "sglang", r"fc\.bias, layers.*: SGLang does not use it"),
        ("first", "trtllm", "EAGLE-1: TensorRT-LLM"),
        ("five", "llama.cpp", r"reads 5 boundaries: llama.cpp stops at any other number than three \(train on three\)"),
        ("eagle-3.1", "llama.cpp", r"fc_norm\.0\.weight, .*: llama.cpp has no place for it and stops"),
        ("two_layers", "llama.cpp", "its converter takes heads of one layer"),
        ("window", "llama.cpp", "a sliding window of 6 positions"),
        ("first", "llama.cpp", "EAGLE-1: llama.cpp converts EAGLE-3 only"),
    ],
)
def test_what_an_engine_degrades_is_refused_unless_forced(variant: str, to: str, words: str, tmp_path: Path) -> None:
    source = write_head(sample(VARIANTS[variant]), tmp_path / "source", "flat", TARGET)
    with pytest.raises(CheckpointError, match=words):
        export_head(source, TARGET, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = export_head(source, TARGET, to, tmp_path / "out", force=True)
    assert any(finding.severity != "ok" for finding in done.findings)
    assert export_head(source, TARGET, "hf", tmp_path / "own").findings == (), "forerun serves every variant"


def test_llama_cpp_gets_the_flat_head_and_its_converters_command(tmp_path: Path) -> None:
    head = sample(VARIANTS["reduced"])
    source = write_head(head, tmp_path / "source", "flat", TARGET)
    done = export_head(source, TARGET, "llama.cpp", tmp_path / "my head")
    assert done.format_name == "flat" and not differences(head, read_head(done.directory))
    name, made = TARGET.name_or_path, f"'{tmp_path}/my head.gguf'"
    convert, kept = "python convert_hf_to_gguf.py", "--outtype bf16 --outfile"
    assert done.command.splitlines() == [
        f"{convert} {name} {kept} {tmp_path}/target.gguf",
        f"{convert} '{tmp_path}/my head' --target-model-dir {name} {kept} {made}",
        f"llama-server -m {tmp_path}/target.gguf -md {made} --spec-type draft-eagle3 --spec-draft-n-max 5",
    ]
    # What the converter looks for: a class that it registers, its mark of an EAGLE-3 head, one layer, these names.
    keys, tensors = keys_of(done.directory), load_file(done.directory / "model.safetensors")
    assert keys["architectures"] == ["LlamaForCausalLMEagle3"] and keys["draft_vocab_size"] == 24
    assert keys["num_hidden_layers"] == 1 and keys["target_hidden_size"] == TARGET.hidden_size
    assert {"fc.weight", "d2t", "t2d", "midlayer.hidden_norm.weight", "lm_head.weight"} <= tensors.keys()
    ids = torch.arange(24) + tensors["d2t"]
    assert int(ids.min()) >= 0 and int(ids.max()) < TARGET.vocab_size and len(set(ids.tolist())) == 24
    assert done.command in (done.directory / "README.md").read_text()


def test_modelopt_gets_its_own_layout(tmp_path: Path) -> None:
    head = sample(VARIANTS["reduced"])
    source = write_head(head, tmp_path / "source", "flat", TARGET)
    done = export_head(source, TARGET, "modelopt", tmp_path / "out")
    assert done.format_name == "modelopt" and not differences(head, read_head(done.directory))
    keys = keys_of(done.directory)
    assert keys["eagle_config"]["use_last_layernorm"] is True
    assert "layers.0.hidden_norm.weight" in load_file(done.directory / "model.safetensors")
    assert done.command.startswith("forerun generate ")
    norms = write_head(sample(VARIANTS["eagle-3.1"]), tmp_path / "norms", "flat", TARGET)
    told = export_head(norms, TARGET, "modelopt", tmp_path / "other").findings
    assert {(finding.severity, finding.what) for finding in told} == {("check", "fc_norm"), ("check", "norm_output")}
    first = write_head(sample(FIRST), tmp_path / "first", "flat", TARGET)
    with pytest.raises(CheckpointError, match="EAGLE-1: ModelOpt gets EAGLE-3 heads only"):
        export_head(first, TARGET, "modelopt", tmp_path / "third")


def test_engines_get_what_they_want_of_the_first_generation(tmp_path: Path) -> None:
    """SGLang a bias of zeros, vLLM its own architecture."""
    source = write_head(sample(FIRST), tmp_path / "source", "flat", TARGET)
    done = export_head(source, TARGET, "sglang", tmp_path / "sglang")
    tensors, keys = load_file(done.directory / "model.safetensors"), keys_of(done.directory)
    assert tensors["fc.bias"].shape == (16,) and not tensors["fc.bias"].any()
    assert "--speculative-algorithm EAGLE " in done.command
    assert keys["architectures"] == ["LlamaForCausalLMEagle"] and "bias" not in keys
    done = export_head(source, TARGET, "vllm", tmp_path / "vllm")
    assert keys_of(done.directory)["architectures"] == ["EagleLlamaForCausalLM"]
    assert '"method": "eagle"' in done.command


def test_default_layers_are_written_out_for_the_targets_depth(source: Path, tmp_path: Path) -> None:
    nested = keys_of(source)["eagle_config"]
    del nested[IDS]
    change(source, **{IDS: None, "eagle_config": nested})
    done = export_head(source, dataclasses.replace(TARGET, num_layers=32), "vllm", tmp_path / "out")
    keys = keys_of(done.directory)
    assert keys[IDS] == [2, 16, 29] and keys["eagle_config"][IDS] == [1, 15, 28]


def test_bad_exports(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="'sglang'"):
        export_head(source, TARGET, "sglan", tmp_path / "out")
    with pytest.raises(ArgumentError, match="is the head itself"):
        export_head(source, TARGET, "vllm", source)

    def spoiling(head: HeadCheckpoint, *arguments: Any, **options: Any) -> Path:
        return write_head(replaced(head, norm_output=True), *arguments, **options)

    monkeypatch.setattr(engines, "write_head", spoiling)
    with pytest.raises(CheckpointError, match=r"does not hold what was to be written: config\.norm_output"):
        export_head(source, TARGET, "vllm", tmp_path / "out")
