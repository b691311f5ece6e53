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
from heads.samples import FIRST, LATENT, PLAIN, TARGET, VARIANTS, change, keys_of, replaced, sample

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


BOTH_BY_HALF = {"llama.cpp": "degrades", "lmdeploy": "degrades"}
LAST_TWO = {"llama.cpp": "fails", "lmdeploy": "degrades"}


def latent(**changes: Any) -> EagleConfig:
    return dataclasses.replace(LATENT, latent=dataclasses.replace(LATENT.latent, **changes))


TRAPS: list[tuple[str, EagleConfig, dict[str, str]]] = [
    (
        "B: norm_before_residual",
        VARIANTS["norm_before_residual"],
        {"sglang": "degrades", "trtllm": "degrades", "lmdeploy": "degrades", "modelopt": "check"},
    ),
    ("C: layers", VARIANTS["two_layers"], LAST_TWO),
    ("D: embedding", dataclasses.replace(PLAIN, own_embedding=True), {"sglang": "degrades", "trtllm": "degrades"}),
    ("D: output head", VARIANTS["shared_lm_head"], {}),
    (
        "E: fc.bias",
        dataclasses.replace(PLAIN, fc_bias=True),
        {"vllm": "degrades", "sglang": "degrades", **LAST_TWO, "modelopt": "check"},
    ),
    ("qk_norm", VARIANTS["qk_norm"], {"sglang": "fails", "trtllm": "degrades", **LAST_TWO, "modelopt": "check"}),
    ("attention bias", dataclasses.replace(PLAIN, attention_bias=True), {"sglang": "degrades", **LAST_TWO}),
    ("MLP bias", dataclasses.replace(PLAIN, mlp_bias=True), {"sglang": "degrades", **LAST_TWO}),
    (
        "Qwen3 with biases",
        dataclasses.replace(PLAIN, qk_norm=True, attention_bias=True),
        {"vllm": "degrades", "sglang": "fails", "trtllm": "degrades", **LAST_TWO, "modelopt": "check"},
    ),
    (
        "one state",
        dataclasses.replace(PLAIN, boundaries=(5,)),
        {"sglang": "degrades", "trtllm": "degrades", "llama.cpp": "fails", "lmdeploy": "degrades"},
    ),
    (
        "another activation",
        dataclasses.replace(PLAIN, hidden_act="gelu"),
        {"vllm": "fails", "sglang": "fails", "trtllm": "degrades", **BOTH_BY_HALF},
    ),
    ("EAGLE-3.1", VARIANTS["eagle-3.1"], {**LAST_TWO, "modelopt": "check"}),
    ("normed feedback", dataclasses.replace(PLAIN, norm_output=True), {**BOTH_BY_HALF, "modelopt": "check"}),
    ("the last boundary", dataclasses.replace(PLAIN, boundaries=(2, 5, 10)), {"llama.cpp": "check"}),
    (
        "both norms",
        dataclasses.replace(PLAIN, fc_norm=True, norm_before_fc=True),
        {**{engine: "degrades" for engine in ENGINES}, "llama.cpp": "fails", "modelopt": "check"},
    ),
    ("A: other layers", dataclasses.replace(PLAIN, boundaries=(1, 5, 7)), {"sglang": "check"}),
    ("A: five layers", VARIANTS["five"], {"sglang": "check", **LAST_TWO}),
    ("A: from the second", dataclasses.replace(PLAIN, boundaries=(2, 4, 6)), {}),
    ("A: another order", dataclasses.replace(PLAIN, boundaries=(5, 2, 7)), {"vllm": "degrades", "sglang": "check"}),
    (
        "EAGLE-1 with an output head",
        dataclasses.replace(FIRST, own_lm_head=True),
        {"vllm": "fails", "sglang": "degrades", "trtllm": "fails", "llama.cpp": "fails", "modelopt": "fails"},
    ),
    ("A: embeddings", dataclasses.replace(PLAIN, boundaries=(0, 5, 7)), {"sglang": "degrades", "trtllm": "fails"}),
    ("latent attention", LATENT, {"llama.cpp": "fails", "lmdeploy": "check"}),
    ("latent attention, two layers", VARIANTS["latent_two_layers"], {"sglang": "fails", **LAST_TWO}),
    (
        "latent attention without q_lora_rank",
        latent(q_lora_rank=None),
        {"sglang": "fails", "trtllm": "fails", "llama.cpp": "fails", "lmdeploy": "fails"},
    ),
    (
        "latent attention by halves",
        latent(rope_interleave=False),
        {"vllm": "degrades", "sglang": "degrades", "trtllm": "degrades", "llama.cpp": "fails", "lmdeploy": "check"},
    ),
    (
        "latent attention, a norm before fc",
        dataclasses.replace(LATENT, norm_before_fc=True),
        {"vllm": "fails", "sglang": "degrades", **LAST_TWO, "modelopt": "check"},
    ),
    (
        "latent attention on the last state",
        dataclasses.replace(LATENT, use_aux_hidden_state=False, boundaries=(LAST_HIDDEN,)),
        {"vllm": "degrades", "sglang": "degrades", **LAST_TWO},
    ),
    ("A: normed output", dataclasses.replace(PLAIN, boundaries=(2, 5, LAST_HIDDEN)), EVERYWHERE),
    ("EAGLE-1", FIRST, {"trtllm": "fails", "llama.cpp": "fails", "modelopt": "fails"}),
    (
        "EAGLE-1 with a bias",
        dataclasses.replace(FIRST, fc_bias=True),
        {"vllm": "degrades", "trtllm": "fails", "llama.cpp": "fails", "lmdeploy": "degrades", "modelopt": "fails"},
    ),
]


@pytest.mark.parametrize(("config", "expected"), [trap[1:] for trap in TRAPS], ids=[trap[0] for trap in TRAPS])
def test_traps_are_found(config: EagleConfig, expected: dict[str, str]) -> None:
    assert judged(config) == expected


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
    narrow = dataclasses.replace(PLAIN, target_hidden_size=12)
    assert judged(narrow, hidden_size=12) == EVERYWHERE, "an embedding of another width than the head's"
    head = sample(PLAIN)
    head.tensors["fc.weight"][0, 0] = float("nan")
    findings = diagnose(head, TARGET)
    assert verdicts(findings) == EVERYWHERE and findings[0].what == "NaN or infinity in fc.weight"


def test_less_obvious_vocabularies() -> None:
    head = sample(PLAIN)
    head.tensors["d2t"][:2] = torch.tensor([1, -1])
    assert verdicts(diagnose(head, TARGET)) == {"vllm": "fails", "trtllm": "degrades"}
    assert judged(dataclasses.replace(FIRST, own_lm_head=True, draft_vocab_size=24)) == {
        "vllm": "fails",
        "sglang": "fails",
        "trtllm": "fails",
        "llama.cpp": "fails",
        "lmdeploy": "fails",
        "modelopt": "fails",
    }


def test_a_bias_of_zeros_serves_every_engine() -> None:
    head = sample(dataclasses.replace(PLAIN, fc_bias=True))
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
OTHER = dataclasses.replace(PLAIN, boundaries=(1, 5, 7))


@pytest.mark.parametrize(
    ("config", "name", "keys", "expected"),
    [
        (PLAIN, "flat", {}, {}),
        (PLAIN, "flat", {IDS: None}, {}),
        (OTHER, "flat", {}, {"trtllm": "degrades"}),
        (OTHER, "flat", {IDS: None}, {"vllm": "degrades", "llama.cpp": "degrades", "trtllm": "degrades"}),
        (OTHER, "flat", {"eagle_config": None}, {"sglang": "degrades", "trtllm": "degrades"}),
        (PLAIN, "flat", {"draft_vocab_size": None}, {"sglang": "fails", "llama.cpp": "fails"}),
        (PLAIN, "flat", {"architectures": ["Eagle3LlamaForCausalLM"]}, {"sglang": "fails"}),
        (PLAIN, "flat", {"architectures": ["LlamaForCausalLM"]}, {"sglang": "fails"}),
        (PLAIN, "flat", {"architectures": ["Qwen3ForCausalLMEagle3"]}, {"vllm": "fails", "sglang": "fails"}),
        (PLAIN, "flat", {"architectures": []}, {"vllm": "fails", "sglang": "fails"}),
        (PLAIN, "flat", {"tie_word_embeddings": True}, {"sglang": "degrades", "lmdeploy": "degrades"}),
        (
            VARIANTS["five"],
            "flat",
            {"num_aux_hidden_states": None, "eagle_config": None},
            {"vllm": "fails", "sglang": "fails", "trtllm": "degrades"},
        ),
        (FIRST, "flat", {}, {"vllm": "fails", "sglang": "degrades"}),
        (FIRST, "flat", {"architectures": ["EagleLlamaForCausalLM"]}, {"sglang": "fails"}),
        (PLAIN, "modelopt", {}, {}),
        (PLAIN, "speculators", {}, {"sglang": "fails", "trtllm": "fails", "lmdeploy": "fails"}),
        (
            PLAIN,
            "speculators",
            {"norm_before_residual": None},
            {"vllm": "degrades", "sglang": "fails", "trtllm": "fails", "lmdeploy": "fails"},
        ),
    ],
)
def test_keys_that_an_engine_looks_for_elsewhere(
    tmp_path: Path, config: EagleConfig, name: str, keys: dict[str, Any], expected: dict[str, str]
) -> None:
    assert as_they_lie(tmp_path, config, name, **keys) == expected


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        ("hidden_norm", {"sglang": "degrades", "trtllm": "degrades"}),
        ("input_layernorm", {"vllm": "degrades", "llama.cpp": "fails"}),
    ],
)
def test_a_norm_under_one_name_only(tmp_path: Path, dropped: str, expected: dict[str, str]) -> None:
    head = write_head(sample(VARIANTS["two_layers"]), tmp_path / "head", "flat", TARGET)
    stored = read_files(change(head, {f"layers.1.{dropped}.weight": None}))
    assert verdicts(diagnose_files(stored, parse(stored), TARGET)) == expected


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
def test_what_an_engine_would_degrade_is_refused_unless_forced(
    variant: str, to: str, words: str, tmp_path: Path
) -> None:
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
