"""Kangaroo: what its objective computes is what it drafts, no layer runs twice for a token, the second exit, trees."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from contract.harness import PROMPTS, SAMPLED, as_prompts
from drafters.test_early_exit import resumes
from forerun import LLM, SamplingParams
from forerun.decode.drafter import DrafterSetup
from forerun.drafters import build
from forerun.drafters.drawing import Shape
from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.heads.kangaroo import KangarooConfig, KangarooHead, KangarooObjective, KangarooSettings
from forerun.heads.runner import AdapterRunner
from forerun.losses.objective import FrozenTarget
from forerun.model import TransformersTarget
from forerun.types import LAST_HIDDEN
from model.families import make, random_tokens
from training.ttt import VOCABULARY, all_learn, batch_of, features, kangaroo, model, reads, tokens

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
        target = TransformersTarget(weights, rows=1, slots=64)
        build("kangaroo", options, DrafterSetup(target=target, tokenizer=None, rows=1, slots=64))

    with pytest.raises(ArgumentError, match=r"kangaroo needs a head: .* forerun train kangaroo"):
        made()
    with pytest.raises(ArgumentError, match="exits after 4 layers, the target has 4"):
        made(model=adapter(weights, boundaries=[4]))
    with pytest.raises(ArgumentError, match=r"exit_below must be in \[0, 1\), got 1.5"):
        made(model=adapter(weights), exit_below=1.5)


def objective(made: KangarooHead, **settings: Any) -> KangarooObjective:
    return KangarooObjective(made, FrozenTarget.of(model()), KangarooSettings(**settings))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("options", [{}, {"boundaries": [3], "attention_bias": True}, {"sliding_window": 4}], ids=str)
def test_every_position_equals_drafting(options: dict[str, Any], checkpointed: bool) -> None:
    """Of the second of two documents; a prompt, what was committed, then a chain, and the same chain beside twins of
    other tokens whose places are known on the device alone."""
    made, first, text = kangaroo(**options), tokens(6, seed=9), tokens(14)
    [boundary] = made.config.boundaries
    outputs = objective(made, gradient_checkpointing=checkpointed).outputs(batch_of([first, text], (boundary,), 2))
    trained = model().lm_head(outputs)[0, len(first) :].detach()
    seen = {boundary: features(text, (boundary,))[boundary]}
    for index in (0, 4, 8):
        target = TransformersTarget(model(), rows=2, slots=64)
        target.prefill([1], [text[: index + 1]])
        runner = AdapterRunner(made, target, rows=2, slots=64, max_run_nodes=6)
        reads(runner, 1, text, index + 1, seen)
        assert runner.lengths == [0, index + 1]

        def chain(logits: torch.Tensor, index: int = index, runner: AdapterRunner = runner) -> list[torch.Tensor]:
            following = (torch.tensor([[token]]) for token in text[index + 2 : index + 5])
            none = torch.zeros(1, 1, dtype=torch.int64)
            return [logits[0, 0], *(runner.descend(token, none)[0, 0] for token in following)]

        def twins(logits: torch.Tensor, index: int = index, runner: AdapterRunner = runner) -> list[torch.Tensor]:
            found, parents = [logits[0, 0]], torch.tensor([[0, 0]])
            for token in text[index + 2 : index + 5]:
                logits = runner.descend(torch.tensor([[(token + 1) % VOCABULARY, token]]), parents)
                assert not torch.allclose(logits[0, 0], logits[0, 1])
                found, parents = [*found, logits[0, 1]], torch.tensor([[1, 1]])
            return found

        for grow, shape in ((chain, Shape.regular((1, 1, 1, 1))), (twins, None)):
            runner.shape = shape
            for step, own in enumerate(runner.unroll([1], 6, grow)):
                torch.testing.assert_close(own, trained[index + 1 + step], atol=2e-5, rtol=1e-4)
            assert [states.shape[1] for states in runner.ran] == ([1, 1, 1, 1] if shape else [1, 2, 2, 2])


def test_the_adapter_is_what_the_published_code_computes() -> None:
    """``h + Attention(norm(h))``, then the second norm; no feed-forward part, and no norm of the target's."""
    made, text = kangaroo(), tokens(9)
    states, size = features(text, (2,))[2], made.config.head_dim
    weights = dict(made.named_parameters())

    def normed(values: torch.Tensor, name: str) -> torch.Tensor:
        return weights[name] * values * torch.rsqrt(values.square().mean(-1, keepdim=True) + made.config.rms_norm_eps)

    def projected(name: str) -> torch.Tensor:
        flat = normed(states, "layers.0.input_layernorm.weight") @ weights[f"layers.0.self_attn.{name}_proj.weight"].T
        return flat.view(1, len(text), -1, size).transpose(1, 2)

    angles = made.angles(torch.arange(len(text)).unsqueeze(0), states)
    query, key = apply_rotary_pos_emb(projected("q"), projected("k"), *angles)
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) / size**0.5
    hidden = torch.ones(len(text), len(text)).triu(1).bool()
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ projected("v").repeat_interleave(groups, 1)
    whole = states + mixed.transpose(1, 2).flatten(2) @ weights["layers.0.self_attn.o_proj.weight"].T
    found = objective(made).outputs(batch_of([text], (2,)))
    torch.testing.assert_close(found, normed(whole, "norm.weight"), atol=1e-5, rtol=1e-4)


def test_the_loss_equals_a_written_out_reference() -> None:
    made, texts, start = kangaroo(), [tokens(12), tokens(9, seed=5)], 4
    batch = batch_of(texts, (2,), padding=3)
    batch.batch.loss_mask[0, :start] = False
    of = objective(made)
    report, logits = of(batch), model().lm_head(of.outputs(batch))[0].detach()
    teacher = model().lm_head(batch.features[LAST_HIDDEN])[0].softmax(-1).detach()
    total, seen, right, overlap, first = torch.zeros(()), 0, 0, 0.0, 0
    for text in texts:
        for place in range(first, first + len(text) - 1):
            if place + 1 < start:
                continue
            total -= (teacher[place] * log_softmax(logits[place], -1)).sum()
            right += int(logits[place].argmax()) == int(teacher[place].argmax())
            overlap += float(torch.minimum(teacher[place], logits[place].softmax(-1)).sum())
            seen += 1
        first += len(text)
    torch.testing.assert_close(report.loss.detach(), total, atol=1e-4, rtol=1e-5)
    assert float(report.weight) == seen and int(report.metrics["acceptance_0"][0]) == right
    assert float(report.metrics["overlap_0"][0]) == pytest.approx(overlap, rel=1e-4)
    assert all_learn(report, made)


def test_it_starts_as_the_targets_own_exit() -> None:
    given: dict[str, Any] = {"initializer_range": 0.0}
    fresh = KangarooHead.initial(model(), KangarooConfig.for_target("kangaroo", model(), options=given))
    batch = batch_of([tokens(60)], (2,))
    exits = model().model.norm(batch.features[2])
    torch.testing.assert_close(objective(fresh).outputs(batch), exits, atol=1e-5, rtol=1e-4)


def test_capped_logits_are_refused() -> None:
    frozen = FrozenTarget.of(model())
    capped = FrozenTarget(embedding=frozen.embedding, lm_head=frozen.lm_head, softcap=30.0)
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping: 30"):
        KangarooObjective(kangaroo(), capped)
