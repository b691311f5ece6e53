"""Kangaroo: no layer runs twice for a token, the second exit, trees, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from contract.harness import PROMPTS, SAMPLED, as_prompts
from drafters.test_early_exit import resumes
from forerun import LLM, SamplingParams
from forerun.decode.drafter import DrafterSetup
from forerun.drafters import build
from forerun.errors import ArgumentError
from forerun.heads.kangaroo import KangarooConfig, KangarooHead
from forerun.model import Target
from model.families import make, random_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)


def adapter(weights: Any, **options: Any) -> KangarooHead:
    """After two of the four layers of `weights`; it changes nothing, and its norm is the target's."""
    config = KangarooConfig.for_target("kangaroo", weights, options={"initializer_range": 0.0, **options})
    return KangarooHead.initial(weights, config).eval()


def shallow() -> Any:
    """A Llama whose layers behind the second add nothing, so that the adapter is always right."""
    weights = make("llama")
    with torch.no_grad():
        for layer in weights.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return weights


def engine(weights: Any, **options: Any) -> LLM:
    config = {"method": "kangaroo", "model": adapter(weights), "adaptive": False, **options}
    return LLM(weights, tokenizer=False, speculative_config=config, max_num_seqs=4, max_model_len=64, self_check=False)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("options", "length", "run"), [
    ({"num_speculative_tokens": 3}, 4, 1 + 2),
    ({"shape": (2, 2, 1)}, 4, 1 + 2 + 4),
    ({"num_speculative_tokens": 3, "top_k": 2, "nodes": 10, "draw": "deterministic"}, None, None),
])  # fmt: skip
def test_an_adapter_that_is_always_right_is_kept_and_no_layer_runs_twice(
    options: dict[str, Any], length: float | None, run: int | None, temperature: float
) -> None:
    """Of chains and fixed trees all but the leaves have run; a dynamic tree runs whole when it is scored."""
    params = replace(GREEDY, temperature=temperature, seed=1 if temperature else None, max_tokens=13)
    llm = engine(shallow(), exit_below=0, **options)
    with resumes() as seen:
        output = llm.generate(as_prompts([random_tokens(9, 1)]), params)[0].outputs[0]
    assert output.speculation.drafter_errors == 0
    if run is None:
        assert not seen and (temperature or output.speculation.mean_acceptance_length == 4)
        return
    assert output.speculation.mean_acceptance_length == length
    assert {count for counts in seen for count in counts} == {run}


def test_the_second_exit_ends_a_draft_whose_tokens_are_not_likely() -> None:
    """Nodes up to the level at which nothing was likely are submitted; at 0 everything is."""
    prompts, weights = as_prompts([random_tokens(count, count) for count in (5, 9)]), make("llama")
    plain = [o.outputs[0].token_ids for o in engine(weights).generate(prompts, GREEDY, speculative=False)]
    drafted = []
    for below in (0.0, 0.02, 0.999):
        outputs = engine(weights, exit_below=below, num_speculative_tokens=4).generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        stats = [output.outputs[0].speculation for output in outputs]
        drafted.append(sum(one.num_draft_tokens for one in stats) / sum(one.num_spec_steps for one in stats))
    assert drafted[0] > 3.5 and drafted[2] == 1 and drafted[0] >= drafted[1] >= drafted[2]


def test_where_distributions_have_few_tokens_the_nodes_move_up() -> None:
    params = replace(SAMPLED, top_k=2, max_tokens=20, seed=1, allowed_token_ids=None, logit_bias=None)
    params = replace(params, logits_processors=())
    llm = engine(make("llama"), shape=(3, 2, 1), exit_below=0, rule="sample_walk")
    prompts = as_prompts(PROMPTS)
    with resumes() as seen:
        walked = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert walked == [o.outputs[0].token_ids for o in llm.generate(prompts, params, speculative=False)]
    assert max(max(counts) for counts in seen) == 1 + 2 + 4, "root, its two children, their two children each"


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 6}, {"top_k": 3, "nodes": 8}], ids=["chain", "dynamic"])
def test_texts_that_fill_their_slots(options: dict[str, Any]) -> None:
    """At the end of the context there is no room for what would be drafted."""
    prompts = as_prompts([random_tokens(40, 1), random_tokens(50, 2)])
    llm, params = engine(make("llama"), exit_below=0, **options), replace(GREEDY, max_tokens=64)
    outputs = llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24, 14]
    assert not any(output.outputs[0].speculation.drafter_errors for output in outputs)
    plain = llm.generate(prompts, params, speculative=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]


def test_what_does_not_fit_is_refused() -> None:
    weights = make("llama")

    def made(**options: Any) -> None:
        target = Target(weights, rows=1, slots=64)
        build("kangaroo", options, DrafterSetup(target=target, tokenizer=None, rows=1, slots=64))

    with pytest.raises(ArgumentError, match=r"kangaroo needs a head: .* forerun train kangaroo"):
        made()
    with pytest.raises(ArgumentError, match="exits after 4 layers, the target has 4"):
        made(model=adapter(weights, boundaries=[4]))
    with pytest.raises(ArgumentError, match=r"exit_below must be in \[0, 1\), got 1.5"):
        made(model=adapter(weights), exit_below=1.5)
