"""Recurrent draft models, and drafters of recurrent targets: answers are the target's own, or a refusal says why."""

from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import UnsupportedModelError
from forerun.training.layerskip import LayerSkipObjective
from forerun.training.pard import PardObjective
from model.families import random_tokens
from model.test_families import greedy
from model.test_states import model_of
from selection import slow

NEW = 16
DRAFTED: dict[str, dict[str, Any]] = {
    "chain": {"method": "draft_model", "num_speculative_tokens": 4},
    "tree": {"method": "draft_model", "shape": [2, 2, 1]},
    "ended early": {"method": "draft_model", "num_speculative_tokens": 4, "stop": "confidence"},
    "one token": {"method": "draft_model", "num_speculative_tokens": 1},
}


def answers(target: Any, config: dict[str, Any], prompts: list[list[int]]) -> list[Any]:
    """What two rows answer to the prompts one after the other, twice: the second time the first ones are cached."""
    llm = LLM(target, speculative_config={"adaptive": False, **config}, max_num_seqs=2, max_model_len=192)
    asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for _ in range(2) for output in llm.generate(given, asked)]


QUICK = [("mamba", "tree"), ("mamba", "ended early"), ("lfm2", "tree")]


@pytest.mark.parametrize(("target", "name"), [*QUICK, *slow(("mamba", "chain"), ("mamba", "one token"))])
def test_a_recurrent_draft_model_writes_for_the_target(target: str, name: str) -> None:
    """For itself, so that all is accepted, and for another, which accepts hardly anything."""
    text = [3 + token % 90 for token in random_tokens(100, 7)]
    prompts = [text[:90], text, text[20:50]]
    found = answers(model_of(target), {**DRAFTED[name], "model": model_of("mamba")}, prompts)
    assert [one.token_ids for one in found] == 2 * [greedy(model_of(target), prompt, NEW) for prompt in prompts]
    assert all(one.speculation.num_spec_steps for one in found)
    if target == "mamba" and name != "ended early":
        assert all(one.speculation.mean_acceptance_length > 1.8 for one in found)


def test_a_recurrent_draft_model_is_drafted_for() -> None:
    prompt = [3 + token % 90 for token in random_tokens(30, 7)]
    config = {"method": "cascade", "model": model_of("mamba"), "num_speculative_tokens": 3, "inner": "ngram"}
    [found, _] = answers(model_of("mamba"), config, [prompt])
    assert found.token_ids == greedy(model_of("mamba"), prompt, NEW)
    assert found.speculation.mean_acceptance_length > 1.8


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3_next", {"method": "quantized_self"}),
        ("qwen3_next", {"method": "skip_layers", "skip": ["0.mlp", "3.attn"]}),
        ("qwen3_next", {"method": "early_exit", "exit_layer": 3}),
        *slow(*((kind, {"method": "early_exit", "exit_layer": 2}) for kind in ("jamba", "recurrent_gemma"))),
    ],
)
def test_a_target_with_states_drafts_for_itself(kind: str, config: dict[str, Any]) -> None:
    prompt = [3 + token % 90 for token in random_tokens(30, 7)]
    [found, _] = answers(model_of(kind), {**config, "num_speculative_tokens": 3}, [prompt])
    assert found.token_ids == greedy(model_of(kind), prompt, NEW)
    assert found.speculation.mean_acceptance_length > 1.2


def test_what_cannot_run_layers_in_part_is_refused() -> None:
    for config in ({"method": "early_exit", "exit_layer": 2}, {"method": "skip_layers", "skip": ["1.mlp"]}):
        with pytest.raises(UnsupportedModelError, match="ZayaModel: its layers cannot be run in part: ValueError"):
            answers(model_of("zaya"), config, [[5, 6]])
    with pytest.raises(UnsupportedModelError, match=r"has no sublayer named self_attn .* cannot skip \(0, 'attn'\)"):
        answers(model_of("qwen3_next"), {"method": "skip_layers", "skip": ["0.attn"]}, [[5, 6]])


@pytest.mark.parametrize(
    ("objective", "why"), [(PardObjective, "masks of many entries"), (LayerSkipObjective, "cannot draft with such a")]
)
def test_objectives_that_no_state_follows_are_refused(objective: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        objective(model_of("mamba"), None)
