"""Heads on the command line: the catalogue of public ones, ``forerun export`` and ``forerun doctor HEAD``."""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from cli.conftest import Forerun
from forerun.drafters.kinds import KINDS
from forerun.heads.catalogue import known_heads, suggest
from forerun.heads.engines import ENGINES
from forerun.heads.files import read_head, write_head
from forerun.shipped import resolve
from heads.samples import PLAIN, TARGET, sample
from model.test_families import SERVED, WITH_IMAGES

FORMATS = (None, "eagle", "speculators", "modelopt", "dflash", "transformers", "pickle")


def test_suggestions_know_hub_ids_directories_and_case() -> None:
    found = suggest("meta-llama/Llama-3.1-8B-Instruct")
    assert found[0].model == "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B" and found[0].drafter == "eagle3"
    assert found == suggest("/models/meta-llama-3.1-8b-instruct/")
    assert [head.target for head in found] == ["Llama-3.1-8B-Instruct"] * 7
    assert suggest("meta-llama/Llama-3.1-8B") == found  # whose reports may have left "Instruct" out
    assert suggest("someone/unheard-of") == []


def test_every_entry_of_the_catalogue_has_a_hub_id_in_full_and_the_page_that_it_was_found_on() -> None:
    heads = known_heads()
    assert {"lmsys", "AQ-MedAI", "NVIDIA", "RedHatAI", "EAGLE authors"} <= {head.publisher for head in heads}
    for head in heads:
        assert head.model.count("/") == 1 and "…" not in head.model
        assert head.url.startswith("https://") and head.format in FORMATS
        assert head.acceptance_length is None or (1 < head.acceptance_length < 10 and head.conditions)
    assert any(head.boundaries for head in suggest("openai/gpt-oss-120b"))
    assert len({(head.target, head.model) for head in heads}) == len(heads)


def test_the_demo_models_head_is_known(forerun: Forerun) -> None:
    """By the target's name, and by its folder, which is what a loaded model is called."""
    for name in ("demo", str(resolve("demo"))):
        assert [head.model for head in suggest(name)] == ["demo-eagle3"]
    assert "--drafter eagle3 --drafter-model demo-eagle3" in forerun("heads", "demo").out
    refused = forerun("generate", "demo", "--prompt", "x", "--drafter", "eagle3")
    assert refused.code == 2 and "demo-eagle3. To train one" in refused.err


def test_heads_lists_all_those_of_a_target_and_those_of_a_part_of_a_name(forerun: Forerun) -> None:
    everything = json.loads(forerun("heads", "--json").out)
    assert len(everything) == len(known_heads())
    kimi = forerun("heads", "moonshotai/Kimi-K2-Instruct")
    assert kimi.code == 0 and "--drafter eagle3 --drafter-model AQ-MedAI/Kimi-K2-Instruct-eagle3" in kimi.out
    part = json.loads(forerun("heads", "coder", "--json").out)
    coders = ("30B-A3B", "30B-A3B-Instruct", "480B-A35B-Instruct", "Next")
    assert {head["target"] for head in part} == {f"Qwen3-Coder-{name}" for name in coders}


def test_every_kind_is_listed_and_the_first_loadable_head_of_each_can_be_passed_on(forerun: Forerun) -> None:
    assert {head.drafter for head in known_heads()} == {
        *(
            "eagle3",
            "dflash",
            "dspark",
            "domino",
            "dflash2",
            "peagle",
            "medusa",
            "hydra",
            "mlp_speculator",
            "pard",
            "gemma4_assistant",
        )
    }
    ran = forerun("heads", "Qwen/Qwen3-8B")
    options = [line for line in ran.out.splitlines() if line.startswith("--drafter")]
    assert "--drafter dflash --drafter-model z-lab/Qwen3-8B-DFlash-b16" in options
    assert "--drafter dspark --drafter-model deepseek-ai/dspark_qwen3_8b_block7" in options
    assert "--drafter pard --drafter-model amd/PARD-Qwen3-0.6B" in options
    kinds = [line.split()[1] for line in options]
    assert len(set(kinds)) == len(kinds) and set(kinds) <= set(KINDS)


def test_pickles_are_listed_and_not_passed_on(forerun: Forerun) -> None:
    ran = forerun("heads", "lmsys/vicuna-7b-v1.3")
    assert "FasterDecoding/medusa-vicuna-7b-v1.3" in ran.out and "--drafter medusa" not in ran.out
    assert not any(head.loadable for head in known_heads() if head.drafter == "medusa")


def test_an_unknown_target_is_said_on_stderr(forerun: Forerun) -> None:
    ran = forerun("heads", "someone/unheard-of")
    assert ran.code == 0 and ran.out == "" and "no public head is known for someone/unheard-of" in ran.err
    assert json.loads(forerun("heads", "someone/unheard-of", "--json").out) == []


FAMILIES = {
    "deepseek-r1-distill-llama|llama-3|llama2|llama3|llama-13b|vicuna|codellama|granite-(3b|7b|8b)": "llama",
    "deepseek-r1-distill-qwen|qwen2.5": "qwen2",
    "qwen3-(1.7b|4b|8b|14b|32b)": "qwen3",
    "qwen3-(30b|235b)|qwen3-coder-(30b|480b)": "qwen3_moe",
    "qwen3-next|qwen3-coder-next": "qwen3_next",
    "qwen3.(5-(4b|9b|27b)|6-27b|8-27b)": "qwen3_5",
    "qwen3.(5-(35b|122b)|6-35b)": "qwen3_5_moe",
    "llama-4": "llama4",
    "gpt-oss": "gpt_oss",
    "granite-20b": "gpt_bigcode",
    "gemma-4": "gemma4",
    "glm-5": "glm_moe_dsa",
    "kimi-k3": "kimi_linear",
    "kimi-k2-": "deepseek_v3",
    "kimi-k2.[56]": "kimi_k25",
    "qwen3-vl": "qwen3_vl_moe",
    "mistral-small-4": "mistral4",
    "nvidia-nemotron-3": "nemotron_h",
    "step-3.7": "step3p7",
}
"""Families of the catalogue's targets. Kimi-K2's own code is DeepSeek-V3's, Kimi-K3's layers are Kimi-Linear's."""
UNSERVED = {"Ling-flash-2.0": 1}
"""Ling 2.0 has no class in transformers."""


def test_the_heads_whose_target_is_served_are_counted() -> None:
    """As docs/heads.md says."""
    lacking = Counter[str]()
    for head in known_heads():
        name = head.target.casefold()
        family = [kind for pattern, kind in FAMILIES.items() if re.match(pattern, name)]
        if head.target in UNSERVED:
            lacking[head.target] += 1
        else:
            assert len(family) == 1 and family[0] in (*SERVED.split(), *WITH_IMAGES), head.target
    assert lacking == UNSERVED and len(known_heads()) - lacking.total() == 135


FOR_DEMO = dataclasses.replace(
    PLAIN, target_hidden_size=384, own_embedding=True, vocab_size=8192, draft_vocab_size=64, boundaries=(2, 4, 5)
)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_head(sample(FOR_DEMO), tmp_path / "head", "flat", TARGET)


def test_export_prints_the_launch_line_and_nothing_else(forerun: Forerun, head: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = forerun("export", head, "--to", "vllm", "--target", "demo", "--output", out)
    assert ran.code == 0 and ran.out.startswith("vllm serve ") and ran.out.count("\n") == 1
    assert "read back bit for bit" in ran.err and read_head(out).config.boundaries == (2, 4, 5)
    ran = forerun("export", head, "--to", "speculators", "--target", "demo", "--output", out, "--json")
    found = json.loads(ran.out)
    assert found["format"] == "speculators" and found["directory"] == str(out) and found["notes"] == []
    assert found["command"] == f"vllm serve {out}" and {f["engine"] for f in found["findings"]} == {"vllm"}


def test_the_shipped_head_goes_by_its_name(forerun: Forerun, tmp_path: Path) -> None:
    ran = forerun("export", "demo-eagle3", "--to", "hf", "--target", "demo", "--output", tmp_path / "out")
    assert ran.code == 0 and read_head(tmp_path / "out").config.fc_norm


def test_export_refuses_and_can_be_forced(forerun: Forerun, tmp_path: Path) -> None:
    config = dataclasses.replace(FOR_DEMO, norm_before_residual=True)
    head = write_head(sample(config), tmp_path / "head", "flat", TARGET)
    arguments = ("export", head, "--to", "sglang", "--target", "demo", "--output", tmp_path / "out")
    ran = forerun(*arguments)
    assert ran.code == 2 and ran.out == "" and "norm_before_residual" in ran.err and "--force" in ran.err
    ran = forerun(*arguments, "--force")
    assert ran.code == 0 and "norm_before_residual" in ran.err


def test_doctor_judges_a_head(forerun: Forerun, head: Path) -> None:
    ran = forerun("doctor", head, "--target", "demo", "--json")
    found = json.loads(ran.out)
    assert ran.code == 0 and list(found["engines"]) == list(ENGINES)
    assert set(found["engines"].values()) == {"ok"} and len(found["findings"]) >= len(ENGINES)
    table = forerun("doctor", head, "--target", "demo")
    assert table.code == 0 and all(engine in table.out for engine in ENGINES) and "finding" in table.out
    assert len(table.out.split("fix")[1].split("made for")) <= 2, "what several engines have in common is told once"


def test_doctor_fails_for_the_engines_that_were_asked_for(forerun: Forerun, tmp_path: Path) -> None:
    head = write_head(sample(dataclasses.replace(FOR_DEMO, num_hidden_layers=2)), tmp_path / "head", "flat", TARGET)
    ran = forerun("doctor", head, "--target", "demo")
    assert ran.code == 1 and "fails" in ran.out
    ran = forerun("doctor", head, "--target", "demo", "--engine", "vllm", "--engine", "sglang")
    assert ran.code == 0 and "llama.cpp" not in ran.out


def test_what_must_be_seen_to_is_said_and_does_not_stop(forerun: Forerun, tmp_path: Path) -> None:
    """A key of which nothing is known, and a window that SGLang takes from its command line alone."""
    config = dataclasses.replace(FOR_DEMO, sliding_window=64, extra={"depth_gain": 2})
    head = write_head(sample(config), tmp_path / "head", "flat", TARGET)
    found = json.loads(forerun("doctor", head, "--target", "demo", "--json").out)
    assert found["engines"] == {
        "vllm": "check",
        "sglang": "check",
        **dict.fromkeys(("trtllm", "llama.cpp", "lmdeploy"), "degrades"),
        "modelopt": "check",
    }
    table = forerun("doctor", head, "--target", "demo", "--engine", "vllm")
    assert table.code == 0 and "check" in table.out and "depth_gain" in table.out
    ran = forerun("export", head, "--to", "sglang", "--target", "demo", "--output", tmp_path / "out")
    assert ran.code == 0 and ran.out.endswith("--speculative-draft-window-size 63\n") and "depth_gain" in ran.err
    assert json.loads((tmp_path / "out/config.json").read_text())["depth_gain"] == 2
    ran = forerun("export", head, "--to", "trtllm", "--target", "demo", "--output", tmp_path / "other")
    assert ran.code == 2 and "a sliding window of 64 positions" in ran.err
