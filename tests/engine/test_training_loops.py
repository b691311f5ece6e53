"""``forerun.hf`` where a model is trained between the calls: one engine, weights as they stand, modes put back."""

import copy
import io
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import GenerationConfig

import forerun
from forerun import LLM
from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.model import prepare
from forerun.model.kernels import attention
from forerun.types import SpeculationStats
from model.families import make, random_tokens

# peft 0.21 still reads an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
PROMPT = torch.tensor([random_tokens(6, 1) * 2, random_tokens(6, 2) * 2])
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def model() -> Any:
    return make("llama", attention_dropout=0.5)


def loop() -> Any:
    return forerun.hf("suffix", num_speculative_tokens=4)


def answers(model: Any, custom: Any = None, **more: Any) -> list[list[int]]:
    given = {"input_ids": PROMPT, **GREEDY, **more}
    found: list[list[int]] = model.generate(custom_generate=custom, **given).tolist()
    return found


def train(model: Any, rate: float = 0.05) -> None:
    """One step of an optimiser that changes weights in place."""
    optimiser = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    optimiser.step()
    optimiser.zero_grad()


def test_one_engine_serves_more_rows_and_longer_texts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, own = list[int](), forerun.hf("suffix", num_speculative_tokens=4, adaptive=False)
    proof = prepare.prove_model
    monkeypatch.setattr(prepare, "prove_model", lambda *given: checked.append(1) or proof(*given))
    engines = list[LLM]()
    for prompt, length in ((PROMPT[:1], 8), (PROMPT, 24), (PROMPT.repeat(3, 1), 500), (PROMPT[:1], 8)):
        keywords = {**GREEDY, "max_new_tokens": length}
        expected = model.generate(prompt, **keywords)
        assert model.generate(prompt, **keywords, custom_generate=own).tolist() == expected.tolist()
        engines.append(own._engines[model].llm)
    assert len(checked) == 1
    assert all(engine is engines[0] for engine in engines)
    [(_, suffix)] = next(iter(engines[0].engine.drafting._active.values())).drafters
    [domain] = suffix.drafter._domains.all()
    assert domain.store.held > 3000, "the answers of all calls"


def test_weights_that_an_optimiser_changes_are_seen(model: Any) -> None:
    own, twin = loop(), copy.deepcopy(model)
    assert answers(model, own) == answers(twin)
    weights = dict(model.named_parameters())
    for _ in range(2):
        train(model.eval())
        assert dict(model.named_parameters()) == weights, "the optimiser's weights are the model's"
        twin.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
        before, after = answers(model, own), answers(twin)
        assert before == after


def test_the_gradient_of_a_step_is_the_same_with_drafts_bit_for_bit(model: Any) -> None:
    """Two steps of GRPO from one seed: in the second, weights have moved and drafts come from the first's texts."""
    gradients, counts = list[dict[str, torch.Tensor]](), SpeculationStats()
    for own in (forerun.hf(None), forerun.hf("suffix", adaptive=False)):
        policy = copy.deepcopy(model).eval()
        optimiser = torch.optim.SGD(policy.parameters(), lr=0.05)
        torch.manual_seed(7)
        for _ in range(2):
            optimiser.zero_grad()
            sampling = {**GREEDY, "do_sample": True, "top_k": 2, "num_return_sequences": 4}
            texts = policy.generate(PROMPT, custom_generate=own, **sampling)
            rewards = (texts % 5 == 0).float().mean(1).view(2, 4)
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
            laws = policy(texts[:, :-1]).logits.log_softmax(-1)
            chosen = laws.gather(-1, texts[:, 1:].unsqueeze(-1)).squeeze(-1)[:, PROMPT.shape[1] - 1 :]
            (-advantages * chosen).mean().backward()
            optimiser.step()
            counts.add(own.speculation)
        gradients.append({name: weight.grad for name, weight in policy.named_parameters()})
    assert counts.num_accepted_draft_tokens > 20
    plain, drafted = gradients
    assert all(bool(gradient.any()) for gradient in plain.values())
    assert not [name for name, gradient in plain.items() if not torch.equal(gradient, drafted[name])]


def test_dropout_is_off_and_every_mode_is_put_back(model: Any) -> None:
    own, expected = loop(), answers(model)
    model.train()
    model.lm_head.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert answers(model, own) == expected
    assert {name: module.training for name, module in model.named_modules()} == modes
    with pytest.raises(RuntimeError, match="a processor"):
        answers(model, own, logits_processor=[_failing])
    assert {name: module.training for name, module in model.named_modules()} == modes
    train(model)
    assert answers(model, own) == answers(model.eval())


def _failing(_ids: Any, _scores: Any) -> Any:
    raise RuntimeError("a processor")


def test_attention_is_the_models_own_before_and_after(model: Any) -> None:
    own, kinds = loop(), list[str]()
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda *_: kinds.append(model.config._attn_implementation)
    )
    answers(model, own)
    hook.remove()
    assert kinds[-1] == attention.NAME, "keys of grouped heads are read without copies"
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="a processor"):
        answers(model, own, logits_processor=[_failing])
    assert model.config._attn_implementation == "sdpa"
    eager = make("llama", attn_implementation="eager")
    assert answers(eager, own) == answers(eager)


def test_a_forward_that_a_trainer_wraps(model: Any) -> None:
    model = make("llama", dtype=torch.bfloat16)
    original, own = model.forward, loop()

    def wrapped(self: Any, *args: Any, **keywords: Any) -> Any:
        return original(*args, **keywords)

    model.forward = types.MethodType(wrapped, model)
    assert len(answers(model, own)[0]) == 36, "it is not refused"


def test_gradient_checkpointing_without_a_cache(model: Any) -> None:
    own, expected = loop(), answers(model)
    model.activation_checkpointing_enable()
    model.enable_input_require_grads()
    model.config.use_cache = model.generation_config.use_cache = False
    model.train()
    for _ in range(2):
        assert answers(model, own) == expected
        train(model)
        expected = answers(model.eval())
        model.train()


def test_as_verls_rollout_in_transformers_calls_it(model: Any) -> None:
    """`verl.workers.rollout.hf_rollout.HFRollout` (0.9.1): padded on the left, with positions, under autocast."""
    mask = torch.ones_like(PROMPT)
    mask[0, :4] = 0
    given = {"input_ids": PROMPT, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    settings = {"do_sample": False, "num_beams": 1, "top_p": 1.0, "top_k": 0, "num_return_sequences": 1}
    given |= {"generation_config": GenerationConfig(**settings), "do_sample": False, "max_new_tokens": 16}
    given |= {"eos_token_id": None, "pad_token_id": 0, "output_scores": False, "return_dict_in_generate": True}
    expected = model.generate(**given, use_cache=True)
    assert model.generate(**given, use_cache=True, custom_generate=loop()).sequences.equal(expected.sequences)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.generate(**given, use_cache=True, custom_generate=loop())
    assert found.sequences.shape == (2, PROMPT.shape[1] + 16) and bool(found.logprobs.isfinite().all())


def adapted(model: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.5)
    return peft.get_peft_model(model, config)


def test_adapters_trained_disabled_merged_and_swapped(model: Any) -> None:
    own, base = loop(), answers(model)
    wrapped = adapted(model)

    def both() -> list[list[int]]:
        wrapped.train()
        found = answers(wrapped, own)
        assert found == answers(wrapped.eval())
        return found

    seen = [both()]
    train(wrapped.train(), rate=1.0)
    seen.append(both())
    with wrapped.disable_adapter():
        assert both() == base
    wrapped.merge_adapter()
    assert both() == seen[-1]
    wrapped.unmerge_adapter()
    wrapped.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    wrapped.set_adapter("other")
    seen.append(both())
    assert len({str(one) for one in (base, *seen)}) == 4, "each has answers of its own"
    assert len(own._engines) == 1
    merged = wrapped.merge_and_unload()
    assert answers(merged, own) == seen[-1]


@pytest.mark.parametrize("config", [peft.PromptTuningConfig, peft.PromptEncoderConfig, peft.PrefixTuningConfig])
def test_virtual_tokens_are_refused_and_not_left_out(model: Any, config: Any) -> None:
    own, base = loop(), answers(model)
    wrapped = peft.get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedModelError, match=r"the adapter \([A-Z_]+\) adds virtual tokens"):
        answers(wrapped, own)
    with wrapped.disable_adapter():
        assert answers(wrapped, own) == base
    assert answers(wrapped.get_base_model(), own) == base


@pytest.mark.parametrize("name", ["prepare_inputs_for_generation", "_update_model_kwargs_for_generation"])
def test_a_method_that_prepares_passes_may_not_be_replaced(model: Any, name: str) -> None:
    setattr(model, name, partial(getattr(model, name)))
    with pytest.raises(ArgumentError, match=f"does not call {name}, which was replaced on this LlamaForCausalLM"):
        answers(model, loop())


def test_adapters_by_row_or_position_are_refused(model: Any) -> None:
    targets: dict[str, Any] = {"target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**targets)).eval()
    with pytest.raises(ArgumentError, match="PEFT's adapter_names"):
        answers(wrapped, loop(), adapter_names=["default", "__base__"])
    late = peft.LoraConfig(alora_invocation_tokens=PROMPT[0, 2:4].tolist(), **targets)
    wrapped = peft.get_peft_model(make("llama"), late).eval()
    with pytest.raises(ArgumentError, match="PEFT's alora_offsets"):
        answers(wrapped, loop())
    with pytest.raises(UnsupportedModelError, match="aLoRA"):
        LLM(wrapped, tokenizer=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hooks_and_patches_between_calls_count(dtype: torch.dtype) -> None:
    """On every part of a layer, and of modules that kernels took over in the call before."""
    model, own = make("qwen3", dtype=dtype, num_hidden_layers=2), forerun.hf(None)
    names = {name for name, _ in model.named_modules() if name.startswith("model.")} - {"model.layers"}
    plain, seen = answers(model, own), list[str]()

    def note(module: Any, *_: Any) -> None:
        seen.extend(name for name, each in model.named_modules() if each is module)

    with register_module_forward_hook(note):
        assert answers(model, own) == plain
        assert names <= set(seen), "a hook on all modules sees each of them, as itself"
    for name in ("mlp.act_fn", "mlp.gate_proj", "self_attn.q_norm"):
        module = model.model.layers[1].get_submodule(name)
        with module.register_forward_hook(lambda *given: given[-1] * -2):
            hooked = answers(model, own)
        real = module.forward
        module.forward = lambda states, real=real: real(states) * -2
        patched = answers(model, own)
        if dtype == torch.float32:
            assert hooked == answers(model)
        assert hooked == patched != plain, name
        del module.forward
    assert answers(model, own) == plain
    model.model.layers[1].mlp.act_fn = nn.GELU()
    assert answers(model, own) != plain


@pytest.mark.parametrize("late", ["hook", "forward"])
def test_what_changes_the_whole_models_inputs_after_a_call_is_refused(model: Any, late: str) -> None:
    """An engine runs the base model and the head. The self-check of a new one sees that this is not all."""
    own, real = loop(), model.forward
    answers(model, own)
    if late == "hook":
        model.register_forward_pre_hook(lambda _, args, given: (args, changed(given)), with_kwargs=True)
    else:
        model.forward = lambda input_ids=None, **given: real(**changed({"input_ids": input_ids, **given}))
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="failed the self-check"):
            answers(model, own)


def changed(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward with other tokens."""
    return {**given, "input_ids": given["input_ids"] // 2}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: torch.load(_saved(model), weights_only=False)])
def test_a_model_with_the_loop_may_be_copied_and_saved(model: Any, copied: Any) -> None:
    model.generate = partial(model.generate, custom_generate=forerun.hf("suffix", num_speculative_tokens=4))
    expected = model.generate(PROMPT, **GREEDY).tolist()
    twin = copied(model)
    assert twin.generate(PROMPT, **GREEDY).tolist() == expected
    assert list(twin.generate.keywords["custom_generate"]._engines) == [twin]


def _saved(model: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_an_output_head_that_is_replaced_and_another_dtype_are_seen(model: Any) -> None:
    own = loop()
    answers(model, own)
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    assert answers(model, own) == answers(model)
    assert len(answers(model.bfloat16(), own)[0]) == 36
    assert own._engines[model].llm.target.dtype == torch.bfloat16


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_weights_in_parts_are_refused_with_what_to_do(model: Any, process_group: None) -> None:
    whole = model.lm_head.weight
    part = nn.Parameter(torch.empty(0))
    part.ds_id = 1  # As DeepSpeed leaves a weight that is not gathered
    model.lm_head.weight = part
    with pytest.raises(ArgumentError, match=r"ZeRO-3 holds a part of lm_head.weight.*unwrap_model_for_generation"):
        answers(model, loop())
    whole.ds_id = 1
    model.lm_head.weight = whole
    answers(model, loop())
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    with pytest.raises(ArgumentError, match="FSDP gathers weights in every pass"):
        answers(fully_shard(model, mesh=mesh), loop())


class _StepsAfter:
    """A stopping criterion that ends nothing and, at the third token, changes a weight as an optimiser does."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __call__(self, ids: Any, _scores: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            with torch.no_grad():
                self.model.lm_head.weight.add_(0.1)
        return torch.zeros(len(ids), dtype=torch.bool)


def test_a_step_while_it_generates_ends_the_rollout_and_names_both(model: Any) -> None:
    own, criterion = loop(), _StepsAfter(model)
    with pytest.raises(ArgumentError, match=r"optimiser's step.*lm_head\.weight.*rollout of 2 rows"):
        answers(model, own, stopping_criteria=[criterion])
    assert criterion.calls < 2 * 24
    assert answers(model, own) == answers(model), "the next call reads the weights as they are now"


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_lossy_rule_is_refused_unless_the_bias_is_accepted(model: Any, mode: str) -> None:
    with pytest.raises(ArgumentError, match=r"'typical' is lossy.*allow_biased=True"):
        forerun.hf("ngram", rule="typical", logprobs_mode=mode)
    own = forerun.hf("ngram", rule="typical", logprobs_mode=mode, allow_biased=True)
    sampled = {**GREEDY, "do_sample": True, "return_dict_in_generate": True}
    assert model.generate(PROMPT, custom_generate=own, **sampled).logprobs.shape == (2, 24)


def test_neighbouring_seeds_of_a_call_give_other_answers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, found = {**GREEDY, "do_sample": True, "num_return_sequences": 4, "custom_generate": loop()}, list[Any]()
    model.generate(PROMPT[:1], **sampled)
    for seed in range(4):
        monkeypatch.setattr(torch, "randint", lambda *_, seed=seed: torch.tensor([seed]))
        found += map(tuple, model.generate(PROMPT[:1], **sampled).tolist())
    assert len(set(found)) == 16
