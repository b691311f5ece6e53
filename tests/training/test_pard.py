"""PARD: what its objective computes is what it drafts; its loss, PARD-2's weights, its format, and that it helps."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch.nn.functional import log_softmax
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from drafters.asking import setup_for
from forerun.control.config import method_of
from forerun.drafters.draft_models.pard import PardConfig, PardDrafter, mark, mask_token
from forerun.errors import ArgumentError
from forerun.losses.objective import FrozenTarget
from forerun.training.pard import PardObjective, PardSettings
from forerun.types import LAST_HIDDEN
from llamas import tiny_llama
from training.conftest import Trainer, drafts, evaluated
from training.test_distill import draft
from training.ttt import VOCABULARY, batch_of, model, tokens

MASK = VOCABULARY - 1
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.3}


def pard(kind: str = "llama") -> Any:
    """A small random causal LM with a mask token."""
    torch.manual_seed(2)
    if kind == "llama":
        made: Any = draft(num_hidden_layers=2)
    elif kind == "windows":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
        made = MistralForCausalLM(MistralConfig(**SIZES, **sizes, num_hidden_layers=2, sliding_window=4)).eval()
    else:
        made = GPT2LMHeadModel(GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
    made.config.pard_token = MASK
    return made


def objective(lm: Any, **settings: Any) -> PardObjective:
    return PardObjective(lm, FrozenTarget.of(model()), PardSettings(**settings))


def drafter(lm: Any, **options: Any) -> PardDrafter:
    return PardDrafter(PardConfig(model=lm, **options), setup_for(model(), rows=2, slots=64))


@pytest.mark.parametrize("kind", ["llama", "windows", "gpt2"])
def test_every_depth_equals_drafting(kind: str) -> None:
    """Of the second of two documents, behind every token, committed in two steps; the first must not be seen."""
    lm, first, text = pard(kind), tokens(6, seed=9), tokens(14)
    of = objective(lm, depths=4, keep=1.0)
    masked, states = of.masked(batch_of([first, text], (), padding=2))
    hidden, weight = of.draft.linear(states, VOCABULARY)
    logits = (hidden @ weight.T).view(1, -1, VOCABULARY)[0].detach()
    drafts, compared = drafter(lm), 0
    for entry in range(len(text)):
        drafts.truncate([1], [0])
        if entry > 2:
            drafts._levels([1], [text[: entry - 1]], [4])
        every = drafts._levels([1], [text[: entry + 1]], [4])[0]
        for depth, own in enumerate(every):
            here = (masked.entries[0] == len(first) + entry) & (masked.depths == depth)
            if depth and entry >= len(text) - 2:
                assert not bool((here & masked.counted[0]).any())  # it would predict what stands behind the text
                continue
            torch.testing.assert_close(own.detach(), logits[here][0], atol=2e-5, rtol=1e-4)
            compared += 1
    assert compared == len(text) + 3 * (len(text) - 2)


PARD2 = {"data_weight": 0.1, "target_weight": 1.0, "confidence": True}


@pytest.mark.parametrize("settings", [{}, PARD2, {"data_weight": 0.0, "target_weight": 2.0}], ids=str)
@pytest.mark.parametrize("few", [False, True], ids=["all", "dropped"])
def test_loss_and_gradient_equal_a_written_out_reference(few: bool, settings: dict[str, Any]) -> None:
    """Each prediction alone, through transformers' own forward: a beginning of a document, and masks behind it."""
    lm, texts, start = pard().requires_grad_(True), [tokens(12), tokens(9, seed=5)], 5
    batch = batch_of(texts, (), padding=3)
    batch.batch.loss_mask[0, :start] = False
    of = objective(lm, depths=3, keep=0.5 if few else 1.0, **settings)
    (masked, _), report = of.masked(batch), of(batch)
    report.loss.backward()
    ours = {name: weight.grad.clone() for name, weight in lm.named_parameters()}
    lm.zero_grad()
    teacher = model().get_output_embeddings()(batch.features[LAST_HIDDEN][0]).softmax(-1).detach()
    kept = [set(masked.entries[0][(masked.depths == depth) & masked.counted[0]].tolist()) for depth in range(3)]
    losses, weights, overlap, right, chains, first = [], [], [0.0] * 3, [0] * 3, [0] * 3, 0
    for text in texts:
        for at, entry in enumerate(range(first, first + len(text))):
            drafted = agreed = True
            for depth in range(3):
                wanted = at + 1 + depth
                counts = start <= first + wanted < first + len(text)
                if not few and (depth == 0 or start <= entry + 2 < first + len(text)):
                    assert (entry in kept[depth]) == counts
                drafted = drafted and entry in kept[depth]
                if entry not in kept[depth]:
                    continue
                own = log_softmax(lm(torch.tensor([[*text[: at + 1], *[MASK] * depth]])).logits[0, -1], -1)
                target = teacher[entry + depth]
                weight = 1.0
                if settings.get("confidence"):
                    for before in range(depth):
                        weight *= float(teacher[entry + before][text[at + 1 + before]])
                loss = settings.get("data_weight", 1.0) * -own[text[wanted]]
                losses.append(weight * (loss + settings.get("target_weight", 0.0) * -(target * own).sum()))
                weights.append(weight)
                overlap[depth] += float(torch.minimum(own.detach().exp(), target).sum())
                agreed = agreed and int(own.argmax()) == int(target.argmax())
                chains[depth] += drafted
                right[depth] += drafted and agreed
        first += len(text)
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(report.loss, torch.stack(losses).sum(), atol=1e-3, rtol=1e-5)
    assert float(report.weight) == pytest.approx(sum(weights), rel=1e-5)
    assert len(set(weights)) > 5 or not settings.get("confidence")
    for name, weight in lm.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, atol=2e-5, rtol=1e-3, msg=name)
    for depth in range(3):
        assert [int(part) for part in report.metrics[f"acceptance_{depth}"]] == [right[depth], chains[depth]]
        assert float(report.metrics[f"overlap_{depth}"][0]) == pytest.approx(overlap[depth], rel=1e-4)


def words() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_the_mask_is_a_token_that_texts_do_not_hold() -> None:
    """The first that the tokenizer does not use, as in AMD's models; the padding token or the last one without such."""
    padded, full = tiny_llama(VOCABULARY + 4), tiny_llama(VOCABULARY)
    for made, token, expected in (
        (padded, None, VOCABULARY),
        (padded, 3, 3),
        (padded, None, 3),  # it brings one
        (copy.deepcopy(full), None, VOCABULARY - 1),
    ):
        mark(made, words(), token)
        assert mask_token(made) == expected and made.config.spd_type == "pard"
    full.config.pad_token_id = 5
    mark(full, words())
    assert mask_token(full) == 5
    with pytest.raises(ArgumentError, match=r"pard_token 44 in its config.json; expected one of its 44 tokens"):
        mark(padded, words(), 44)


def test_a_model_without_a_mask_token_is_refused_with_what_to_do() -> None:
    with pytest.raises(ArgumentError, match=r"no pard_token .* method draft_model, .* forerun train pard --draft"):
        drafter(draft())
    odd = draft()
    odd.config.pard_token = [3]
    with pytest.raises(ArgumentError, match=r"pard_token \[3\]"):
        drafter(odd)


@pytest.mark.parametrize(
    "settings", [{"depths": 0}, {"keep": 0.0}, {"floor": 1.5}, {"data_weight": 0.0}], ids=lambda one: next(iter(one))
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        PardSettings(**settings)


def test_it_trains_from_the_command_line_and_writes_the_public_format(train: Trainer) -> None:
    """A transformers directory with two keys more; read back bit for bit; in 80 steps it drafts 1.4 times as much."""
    start, untrained = (train.folder / name for name in ("start", "untrained"))
    draft(max_position_embeddings=128).save_pretrained(start)
    AutoTokenizer.from_pretrained(train.target).save_pretrained(start)
    assert method_of(start) == "draft_model"
    more = ["--draft", str(start), "training.log_every_steps=1", "objective.depths=3", "training.eval_every_steps=80"]
    more += evaluated(train.prepared, "max_tokens: 16, nodes: 10")
    folder = Path(train(train.line("pard", 80, *more))["draft"])
    for depth in range(3):
        figures = train.log(f"acceptance_{depth}")
        assert sum(figures[-10:]) / 10 > sum(figures[:3]) / 3 + 0.1, (depth, figures[:3], figures[-10:])
    assert len(train.log("eval/tree_t0")) == len(train.log("eval/chain_t1")) == 1
    written = json.loads((folder / "config.json").read_text())
    assert (written["pard_token"], written["spd_type"]) == (MASK, "pard") and written["model_type"] == "llama"
    assert method_of(folder) == "pard"
    stored, loaded = load_file(folder / "model.safetensors"), AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(loaded, LlamaForCausalLM) and loaded.config.pard_token == MASK
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in stored.items())
    lm = AutoModelForCausalLM.from_pretrained(start)
    lm.config.pard_token = MASK
    lm.save_pretrained(untrained)
    AutoTokenizer.from_pretrained(train.target).save_pretrained(untrained)
    lengths = [drafts(train.target, "pard", one, shape=(1, 1, 1)) for one in (folder, untrained)]
    assert lengths[0] > 1.4 * lengths[1]
