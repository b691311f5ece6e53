"""Proof in vLLM: the same targets, heads and drafts here and there. `make test-vllm` runs this.

vLLM's text must be ours without speculation, token for token, with every kind that it drafts with, and it must accept
what we accept. Where it refuses a kind, the test knows its words, and so does `forerun doctor`. Features that vLLM
captures must be the target's own hidden states.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import features
import pytest
from both import ENVIRONMENT, LENGTH, Arm, Lab, counters
from rich.console import Console

from forerun.certify.reference import first_difference
from forerun.deploy.trials.trial import TrialAnswer, bound
from forerun.deploy.trials.try_vllm import ENVIRONMENT as VLLM
from forerun.shipped import FOLDER

DRAFT = {"method": "draft_model", "model": str(FOLDER / "draft")}
LOOKUP = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
PLAIN = {"follow_edits": False, "min_token_prob": 0.0}  # Prompt lookup as vLLM does it
MEMBERS = [{"method": method, "num_speculative_tokens": LENGTH} for method in ("suffix", "ngram")]
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 42}
"""Room for the prompts of all rows, 10 blocks each, but not for their answers: vLLM preempts."""
CHAIN = {"shape": [1] * 5}
"""Of kinds that draft a tree by default, which vLLM does not."""
ARMS: dict[str, Arm] = {
    "plain": Arm(),
    # vLLM copies behind the first of several earlier occurrences, and no further than to the end of the text.
    "ngram": Arm(vllm=LOOKUP, forerun={"match": "first", **PLAIN}, compared="rates"),
    # forerun's own drafters inside vLLM; what they have learned when a row asks depends on the rows beside it, but for
    # plain prompt lookup.
    "plugged_ngram": Arm(plugged={"method": "ngram", "prompt_lookup_min": 2, **PLAIN}),
    "plugged_ngram_follows": Arm(plugged={"method": "ngram", "prompt_lookup_min": 2}, compared="rates"),
    "plugged_suffix": Arm(plugged={"method": "suffix"}, compared="rates"),
    "plugged_first_of": Arm(plugged={"method": "first_of", "drafters": MEMBERS}, compared="rates"),
    "plugged_own": Arm(plugged={"method": "tests.deploy.own_drafter:Periodic", "period": 1}),
    "crowded_plain": Arm(engine=CROWDED),
    "crowded_ngram": Arm(plugged={"method": "ngram", "prompt_lookup_min": 2, **PLAIN}, engine=CROWDED),
    "crowded_suffix": Arm(plugged={"method": "suffix"}, engine=CROWDED, compared="rates"),
    # vLLM gives a draft model the target's number format, forerun the one of its checkpoint.
    "draft_model": Arm(vllm=DRAFT, forerun={"dtype": "float32"}),
    "eagle3": Arm(kind="eagle3"),
    "eagle": Arm(kind="eagle", steps=20),
    "peagle": Arm(kind="peagle", steps=24, options={"num_hidden_layers": 2}, forerun=CHAIN),
    "dflash": Arm(
        kind="dflash", steps=120, rate=2e-3, options={"num_hidden_layers": 2, "block_size": 6}, forerun=CHAIN
    ),
    "medusa": Arm(kind="medusa", steps=20, forerun=CHAIN, doctor="up to 0.32, with model runner V1"),
    # vLLM puts zeros in the place of a text's first embedding: a step in many accepts another number.
    "mtp_mimo": Arm(kind="mtp", target="mimo", steps=12, length=1, doctor="hands another state on"),
    "mtp_glm": Arm(kind="mtp", target="glm", steps=24, length=1, doctor="hands the state on before its norm"),
    "mtp_glm_3": Arm(
        kind="mtp", target="glm", steps=24, length=3, compared="first", doctor="hands the state on before its norm"
    ),
    # vLLM's text of this random target on the CPU is not transformers', and another with drafts than without: nobody
    # knows here why.
    "mtp_deepseek": Arm(kind="mtp", target="deepseek", length=3, compared="loads"),
    "dspark": Arm(
        kind="dspark",
        options={"num_hidden_layers": 1, "block_size": 5, "markov_rank": 16},
        refused="Model Runner V1 does not support: dspark speculative decoding",
        doctor="Model Runner V1 does not support: dspark speculative decoding",
    ),
    "mlp_speculator": Arm(
        kind="mlp_speculator",
        options={"n_predict": 3, "inner_dim": 64},
        length=3,
        refused=r"Model architectures \['MLPSpeculatorPreTrainedModel'\] are not supported for now",
        doctor="no drafter for it since its V1 engine",
    ),
}


NO_FLOAT32 = "expect weight to be bfloat16"


@pytest.mark.parametrize("name", ARMS)
def test_vllm_drafts_what_forerun_drafts(name: str, lab: Lab) -> None:
    arm, row = ARMS[name], lab.rows[name]
    assert name in lab.found, f"vLLM died; its logs are {lab.work}/{name}.log and vllm.log"
    if arm.kind is not None:
        said = lab.heads[name].findings()
        assert any(arm.doctor in finding for finding in said) if arm.doctor else not said, said
    if arm.refused:
        known = re.search(arm.refused, row.refused)
        assert known, row.refused or "vLLM drafts with it now"
        row.refused = known[0]
        return
    if NO_FLOAT32 in row.refused:
        pytest.skip("vLLM's experts take no float32 on a CPU with AMX")
    assert not row.refused, row.refused
    if arm.engine:
        assert lab.found[name]["counters"]["vllm:num_preemptions"] > 0
    parted = differences(lab.plain[arm.target], row.theirs) + differences(lab.plain[arm.target], row.ours)
    row.texts = not parted
    if not arm.plain:
        assert counters(row, lab.found[name]) == ""
    if arm.compared == "loads":
        return
    assert not parted
    if arm.plain:
        return
    lines = row.lines[: 1 if arm.compared == "first" else None]
    far = [line for line in lines if line.chance < bound(lines)]
    assert not far, "a difference that is no noise"
    if arm.compared == "steps":
        assert row.steps.agree, row.steps


def differences(plain: Sequence[TrialAnswer], others: Sequence[TrialAnswer]) -> list[tuple[int, int | None]]:
    """Prompts whose answers are not our plain ones, and the first token that differs; None: the text alone does."""
    return [
        (prompt, first_difference(one.token_ids, other.token_ids))
        for prompt, (one, other) in enumerate(zip(plain, others, strict=True))
        if (one.token_ids, one.text) != (other.token_ids, other.text)
    ]


def test_features_are_the_targets_own_states(lab: Lab) -> None:
    assert features.differences(lab.python, lab.work / "features", {**VLLM, **ENVIRONMENT}, Console()) == []
