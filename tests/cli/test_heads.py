"""The catalogue of public heads: found by target, honest about names that are not known in full."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from cli.conftest import Ran
from forerun.drafters.heads.catalogue import known_heads, suggest

Forerun = Callable[..., Ran]


def test_suggestions_put_loadable_heads_first_and_know_hub_ids_directories_and_case() -> None:
    found = suggest("meta-llama/Llama-3.1-8B-Instruct")
    assert found[0].model == "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B" and found[0].drafter == "eagle3"
    assert found == suggest("/models/meta-llama-3.1-8b-instruct/")
    # The paper does not say which of the two models; its head comes after those that do.
    assert [head.target for head in found] == ["Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct", "Llama-3.1-8B"]
    assert suggest("meta-llama/Llama-3.1-8B")[0].target == "Llama-3.1-8B"
    assert suggest("someone/unheard-of") == []


def test_the_catalogue_names_no_hub_id_that_is_not_known_in_full() -> None:
    heads = known_heads()
    assert {"lmsys", "AQ-MedAI", "NVIDIA", "RedHatAI", "EAGLE authors"} <= {head.publisher for head in heads}
    for head in heads:
        assert head.model is None or (head.model.count("/") == 1 and "…" not in head.model)
        assert (head.url or "https://").startswith("https://") and head.format in (
            None,
            "eagle",
            "speculators",
            "modelopt",
        )
        assert head.acceptance_length is None or (1 < head.acceptance_length < 10 and head.conditions)
    assert suggest("openai/gpt-oss-120b")[0].boundaries is not None
    assert len({(head.target, head.named) for head in heads}) == len(heads)


def test_heads_lists_all_those_of_a_target_and_those_of_a_part_of_a_name(forerun: Forerun) -> None:
    everything = json.loads(forerun("heads", "--json").out)
    assert len(everything) == len(known_heads())
    kimi = forerun("heads", "moonshotai/Kimi-K2-Instruct")
    assert kimi.code == 0 and "--drafter eagle3 --drafter-model AQ-MedAI/Kimi-K2-Instruct-eagle3" in kimi.out
    part = json.loads(forerun("heads", "coder", "--json").out)
    assert {head["target"] for head in part} == {"Qwen3-Coder-30B-A3B-Instruct", "Qwen3-Coder-480B-A35B-Instruct"}


def test_an_unknown_target_is_said_on_stderr(forerun: Forerun) -> None:
    ran = forerun("heads", "someone/unheard-of")
    assert ran.code == 0 and ran.out == "" and "no public EAGLE-3 head is known for someone/unheard-of" in ran.err
    assert json.loads(forerun("heads", "someone/unheard-of", "--json").out) == []


@pytest.mark.parametrize("module", ["forerun.cli.heads", "forerun.cli.features"])
def test_the_verbs_modules_import_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
