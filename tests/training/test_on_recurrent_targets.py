"""Heads for targets with recurrent states: no state flows from one packed document into the next, and what is trained
drafts."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.errors import UnsupportedModelError
from forerun.losses.objective import TokenBatch
from forerun.training.data.store import write_prepared
from forerun.training.distill import DraftStates
from forerun.training.features import online
from forerun.training.features.online import OnlineFeatures, compare, reference_states, require
from forerun.types import LAST_HIDDEN
from forerun.writing import TokenizerIdentity
from model.families import random_tokens
from model.test_families import greedy
from model.test_states import model_of
from model.tiny import build
from selection import slow
from training.conftest import line_of, logged, save_with_words

KINDS = ("qwen3_next", "bamba", "lfm2", "mamba", "jamba", "kimi_linear", "rwkv", "zaya", "bloom", "bart")
"""Two of these keep no states, and count positions themselves."""
VOCABULARY = 99
TEXTS = [[3 + token % 90 for token in random_tokens(length, length)] for length in (11, 14, 9, 20)]
NEW = 20


PLACES = ((0, 0), (0, 11), (0, 25), (1, 0))
"""Where the texts stand in two windows, of which the second ends in padding."""


def packed() -> TokenBatch:
    tokens, positions, documents = (torch.full((2, 34), value) for value in (0, 0, -1))
    for number, (text, (row, start)) in enumerate(zip(TEXTS, PLACES, strict=True)):
        here = row, slice(start, start + len(text))
        tokens[here], positions[here] = torch.tensor(text), torch.arange(len(text))
        documents[here] = 0 if row else number
    return TokenBatch(tokens=tokens, loss_mask=documents >= 0, documents=documents, positions=positions)


def is_as_alone(model: Any) -> None:
    """The features of packed documents are those that transformers gives of each alone."""
    found = OnlineFeatures(model, (0, 2)).features(packed()).features
    for text, (row, start) in zip(TEXTS, PLACES, strict=True):
        part = {boundary: states[row, start : start + len(text)] for boundary, states in found.items()}
        own = reference_states(model, text)
        require(compare([part], [own]))
        for boundary, states in part.items():
            torch.testing.assert_close(states, own[boundary], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_document_has_the_features_of_the_document_alone(kind: str) -> None:
    is_as_alone(model_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_documents_that_are_left_packed_are_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "reads_apart", lambda _model: False)
    with pytest.raises(Exception):  # noqa: B017 (a wrong number, or a layer that takes no mask of pairs)
        is_as_alone(model_of(kind))


@pytest.mark.parametrize("kind", ["deepseek_v4", "qwen4_exp_text"])
def test_streams_that_no_head_reads_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match="hands several streams on between its layers"):
        OnlineFeatures(model_of(kind), (2,)).features(packed())
    assert OnlineFeatures(model_of(kind), ()).features(packed()).features[LAST_HIDDEN].shape[2] == 64


def test_gradients_reach_what_learns_and_stay_within_a_document() -> None:
    model, batch = build("qwen3_next"), packed()
    embedded: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda *call: embedded.append(call[-1]))
    states = OnlineFeatures(model, (2,)).learning(batch).features
    embedded[0].retain_grad()
    (states[2][0, 11:25].sum() + states[LAST_HIDDEN][0, 11:25].sum()).backward()
    reached = embedded[0].grad.abs().sum(2) > 0
    assert reached.any(1).sum() == 1 and reached.sum() == 14
    assert all(weight.grad is not None for name, weight in model.model.layers.named_parameters())


def test_a_draft_model_with_states_reads_each_document_alone() -> None:
    model = model_of("mamba")
    found = DraftStates(model).states(packed())
    for text, (row, start) in zip(TEXTS, PLACES, strict=True):
        own = reference_states(model, text)[LAST_HIDDEN]
        torch.testing.assert_close(found[row, start : start + len(text)], own, atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-Next as a checkpoint, with a tokenizer of one word per token."""
    return save_with_words(certain(), tmp_path_factory.mktemp("hybrid"))


@cache
def certain() -> Any:
    """A small Qwen3-Next whose distributions are sharp, so that there is something to learn."""
    model = build("qwen3_next")
    model.lm_head.weight.data *= 8
    return model


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle3", ("draft.options={boundaries: [1, 2, 3]}", "objective.steps=3")),
        *slow(("dflash", ("draft.options={boundaries: [1, 3], num_hidden_layers: 1, block_size: 4}",))),
    ],
)
def test_a_head_learns_and_drafts(kind: str, shape: tuple[str, ...], target: Path, tmp_path: Path) -> None:
    asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    plain = LLM(str(target)).generate([{"prompt_token_ids": [token]} for token in range(3, 27)], asked)
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids[:19]] for output in plain]
    documents = [(text, [False] + [True] * (len(text) - 1)) for text in texts]
    data, output = tmp_path / "data", tmp_path / "run"
    write_prepared(data, documents, TokenizerIdentity.of(PreTrainedTokenizerFast.from_pretrained(target)))
    assert main(line_of(kind, target, data, output, 30, *shape)) == 0
    losses = logged(output, "loss")
    assert losses[-1] < 0.9 * losses[0]
    prompts = [text[:4] for text in texts[:3]]
    wanted = [greedy(certain(), prompt, NEW) for prompt in prompts]
    for more in ({"num_speculative_tokens": 3}, {"top_k": 2, "nodes": 6}):
        config = {"method": kind, "model": str(output / "head"), "adaptive": False, **more}
        llm = LLM(str(target), speculative_config=config)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert any(output.outputs[0].speculation.mean_acceptance_length > 1.1 for output in outputs)


def test_an_adapter_that_could_not_draft_is_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_with_words(model_of("bamba"), tmp_path / "bamba")
    identity = TokenizerIdentity.of(PreTrainedTokenizerFast.from_pretrained(target))
    write_prepared(tmp_path / "data", [(TEXTS[0], [True] * len(TEXTS[0]))], identity)
    assert main(line_of("kangaroo", target, tmp_path / "data", tmp_path / "run", 1)) != 0
    assert "BambaModel: its layers cannot be run in part" in capsys.readouterr().err
    assert not (tmp_path / "run" / "log.jsonl").exists()
