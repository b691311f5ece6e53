"""Heads of every kind in llama.cpp, converted by its own converter and drafted with by its own server: the text is ours
without speculation, and step by step as much is accepted as here. Where it refuses a head, the doctor knew."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.deploy.trials.trial import EngineTrial, RefusedError
from forerun.deploy.trials.try_llama_cpp import convert_to_gguf
from forerun.heads.engines import diagnose, worst
from forerun.heads.files import TargetFacts, read_head
from tests_llama.conftest import BLOCK, DFLASH, TARGET, Case, head_of, in_llama_cpp, target_of

EAGLE = Case(kind="eagle3", steps=80)
DSPARK = replace(DFLASH, kind="dspark", options={**BLOCK, "markov_rank": 32})
CASES: dict[str, Case] = {
    "draft_model": Case(kind="draft_model"),
    "eagle3": EAGLE,
    "eagle3_other_boundaries": replace(EAGLE, options={"boundaries": [1, 4, 7]}),
    "eagle3_norms": replace(EAGLE, options={"norm_before_fc": True, "norm_before_residual": True}),
    "dflash": DFLASH,
    "dflash2": replace(DFLASH, kind="dflash2"),
    "dflash_window": replace(DFLASH, options={**BLOCK, "sliding_window": 64}),
    "dspark": DSPARK,
    # GLM's converter wants tokens of GLM's tokenizer, which nothing shipped has.
    "mtp, MiMo's kind": Case(kind="mtp", target="mimo", k=1, refused="MiMoForCausalLM is not supported"),
    "mtp, DeepSeek's kind": Case(kind="mtp", target="deepseek", k=1, refused="failed to create MTP context"),
    "draft_model, four at once": Case(kind="draft_model", rows=4),
    "dflash, four at once": replace(DFLASH, rows=4),
    "dspark, four at once": replace(DSPARK, rows=4),
    "eagle3_fc_norm": Case(kind="eagle3", steps=0, options={"fc_norm": True}, refused="Can not map tensor 'fc_norm"),
    "eagle3_two_layers": Case(kind="eagle3", steps=0, options={"num_hidden_layers": 2}, refused="Can not map tensor"),
}


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_drafts_what_forerun_drafts(
    name: str, trials: dict[str, EngineTrial], work: Path, sources: Path, prompts: Sequence[str]
) -> None:
    case = CASES[name]
    found = trials[name] = in_llama_cpp(case, name, work, sources, prompts)
    if case.kind != "draft_model":
        facts = TargetFacts.read(target_of(case, work))
        verdict = worst(diagnose(read_head(head_of(case, work), num_layers=facts.num_layers), facts), "llama.cpp")
        assert (verdict == "fails") == bool(case.refused), verdict
    if case.refused:
        assert re.search(case.refused, found.refused), found.refused or "it drafts with it now"
        return
    assert not found.refused, found.refused
    assert not found.parted, "float32: the text is the target's own"
    assert found.steps.agree and found.steps.compared > 40, found.steps
    assert found.good and found.lengths[1] > 1.1


def test_eagle3_loses_beside_other_requests(
    trials: dict[str, EngineTrial], work: Path, sources: Path, prompts: Sequence[str]
) -> None:
    """What `ONE_AT_A_TIME` warns of. If this fails, llama.cpp is mended: remove the warning."""
    name = "eagle3, four at once"
    found = trials[name] = in_llama_cpp(replace(EAGLE, rows=4), name, work, sources, prompts)
    assert not found.parted and found.worse and found.worse[0].index == 0


def test_what_the_converter_has_no_names_for(work: Path, sources: Path, tmp_path: Path) -> None:
    head = head_of(Case(kind="domino", steps=0, options=BLOCK), work)
    found = diagnose(read_head(head), TargetFacts.read(TARGET))
    assert worst(found, "llama.cpp") == "fails"
    with pytest.raises(RefusedError, match="Can not map tensor"):
        convert_to_gguf(sources, Path(sys.executable), head, tmp_path / "x.gguf", dtype="float32", target=str(TARGET))
