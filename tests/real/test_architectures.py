"""Trained weights in other architectures than their own: each loads by plain defaults in bf16, keeps the kernels that
suit it and no others, and writes with trees what it writes without."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from forerun import LLM
from forerun.model.kernels import accelerate
from forerun.model.load import LoadOptions
from forerun.model.names import load_tokenizer
from forerun.model.prepare import open_named
from real.conftest import ASKED, GREEDY
from real.expressed import NEAR, SAME, Form, Source, expressed

LAYERS = 5  # The first of the model's, so that a test takes seconds; its answers are poor ones of trained weights
TREE = {"method": "recycling", "nodes": 24, "adaptive": False}
ALWAYS = {"gemma_spiked"}
KEPT = {"gemma": "norm", "gemma_spiked": "norm", "vaultgemma": "norm", "gemma2": "norm"}
"""Modules, by a part of their names, that have to keep their own forwards: norms of 1 + w."""


def some(forms: dict[str, Form]) -> list[Any]:
    return [pytest.param(form, id=n, marks=[] if n in ALWAYS else pytest.mark.slow) for n, form in forms.items()]


@pytest.fixture(scope="module")
def source(path: Path) -> Source:
    whole = open_named(path, LoadOptions(dtype="bfloat16", device="cpu")).float()
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = LAYERS
    cut = LlamaForCausalLM(config)
    cut.load_state_dict({name: whole.state_dict()[name] for name in cut.state_dict()})
    return Source(cut.eval())


@pytest.mark.parametrize("form", [*some(dict(SAME)), *some(dict(NEAR))])
def test_it_loads_and_trees_change_nothing(
    form: Form, source: Source, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, name = expressed(form, source), form.__name__
    if name in SAME:
        ids = torch.arange(300, 364).unsqueeze(0)
        with torch.inference_mode():
            own, other = source.model(ids).logits, model(ids).logits[..., : source.config.vocab_size]
        assert torch.allclose(own, other, atol=1e-2) and (own.argmax(-1) == other.argmax(-1)).all()
    with caplog.at_level(logging.WARNING, "forerun"):
        llm = LLM(
            model.bfloat16(), tokenizer=load_tokenizer(path, None), repack=True, max_num_seqs=1, max_model_len=512
        )
    assert "runs without" not in caplog.text
    replaced = accelerate.list_replaced(model)
    assert not [module for module in replaced if KEPT.get(name, "nothing") in module]
    prompt = llm.chat_prompt(ASKED[0])
    plain, drafted = (llm.generate(prompt, GREEDY, speculative=one)[0].outputs[0] for one in (False, TREE))
    assert plain.token_ids == drafted.token_ids and drafted.speculation.num_draft_tokens
