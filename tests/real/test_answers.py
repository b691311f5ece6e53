"""What every drafter answers on a real model is what the model answers without it, and what transformers answers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from forerun import LLM
from forerun.core.rules import rule_named
from forerun.training.data.datastore import write as write_datastore
from forerun.writing import TokenizerIdentity
from real.conftest import ASKED, GREEDY, SAMPLED, TOKENS, Ask
from selection import in_turn, slow

ONLY_FLOAT32 = pytest.mark.parametrize("llm", ["float32"], indirect=True)
PAIR: list[dict[str, Any]] = [{"method": "ngram"}, {"method": "recycling", "nodes": 6}]
SHAPE = (2, 2, 1)

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "ngram, tree": {"method": "ngram", "max_branches": 3},
    "suffix": {"method": "suffix"},
    "suffix, tree": {"method": "suffix", "nodes": 12},
    "prediction": {"method": "prediction"},
    "recycling, tree": {"method": "recycling", "nodes": 16},
    "lookahead, tree": {"method": "lookahead", "window": 4, "level": 3, "guesses": 3},
    "jacobi": {"method": "jacobi"},
    "rest, tree": {"method": "rest", "datastore": "corpus"},
    "early_exit": {"method": "early_exit", "exit_layer": 10, "num_speculative_tokens": 3},
    "early_exit, tree": {"method": "early_exit", "exit_layer": 10, "shape": SHAPE},
    "skip_layers": {"method": "skip_layers", "skip": ["12.attn", "13.mlp", "17.attn"], "num_speculative_tokens": 3},
    "skip_layers, tree": {"method": "skip_layers", "skip": ["12.attn", "13.mlp", "17.attn"], "shape": SHAPE},
    "quantized_self": {"method": "quantized_self", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "model": "small", "num_speculative_tokens": 3},
    "draft_model, tree": {"method": "draft_model", "model": "small", "shape": SHAPE},
    "draft_model, itself": {"method": "draft_model", "model": "original", "num_speculative_tokens": 3},
    "tli": {"method": "tli", "model": "demo-draft", "num_speculative_tokens": 3},
    "slem": {"method": "slem", "model": "demo-draft"},
    "first_of": {"method": "first_of", "drafters": PAIR},
    "merge, tree": {"method": "merge", "drafters": PAIR},
    "cascade": {"method": "cascade", "model": "small", "inner": {"method": "ngram"}},
    "auto": {"method": "auto", "adaptive": True},
}
"""What fits on a model without a head of its own. Of those with trees the chain comes first."""
SEEDED = ("suffix", "auto", "recycling, tree")


@pytest.fixture(scope="session")
def corpus(llm: LLM, plain: Callable[..., list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datastore of the model's own answers."""
    folder = tmp_path_factory.mktemp("corpus") / "store"
    write_datastore(plain(GREEDY), TokenizerIdentity.of(llm.tokenizer), folder)
    return folder


@pytest.fixture
def configured(request: pytest.FixtureRequest) -> Callable[[str], dict[str, Any]]:
    """A drafter's configuration by its name here, with the models and folders that its values name."""

    def named(value: Any) -> Any:
        return request.getfixturevalue(value) if value in ("small", "original", "corpus") else value

    def made(name: str) -> dict[str, Any]:
        config: Mapping[str, Any] = {"adaptive": False, **DRAFTERS[name]}
        return {key: named(value) if isinstance(value, str) else value for key, value in config.items()}

    return made


@ONLY_FLOAT32
def test_plain_answers_are_transformers_own(
    llm: LLM, original: LlamaForCausalLM, plain: Callable[..., list[list[int]]]
) -> None:
    for messages, answer in zip(ASKED, plain(GREEDY), strict=True):
        prompt = torch.tensor([llm.chat_prompt(messages)["prompt_token_ids"]])
        with torch.inference_mode():
            found = original.generate(prompt, max_new_tokens=TOKENS, do_sample=False)[0, prompt.shape[1] :].tolist()
        assert answer == found


QUICK = {
    "float32": ("suffix, tree",),
    "bfloat16": ("suffix, tree", "lookahead, tree", "early_exit, tree", "draft_model, tree", "slem", "auto"),
}
"""Of drafters that draft by the same code one is quick."""
CASES = [
    (dtype, name) if name in names else slow((dtype, name))[0] for dtype, names in QUICK.items() for name in DRAFTERS
]


@pytest.mark.parametrize(("llm", "name"), CASES, indirect=["llm"])
def test_greedy_answers_are_plain_decodings(
    ask: Ask, plain: Callable[..., list[list[int]]], configured: Callable[[str], dict[str, Any]], name: str
) -> None:
    more = [{"prediction": answer} for answer in plain(GREEDY)] if name == "prediction" else None
    answers = ask(GREEDY, speculative=configured(name), more=more)
    assert [answer.token_ids for answer in answers] == plain(GREEDY)
    drafted = sum(answer.speculation.num_draft_tokens for answer in answers)
    assert drafted or name == "auto", "auto may find that nothing pays"


@pytest.mark.parametrize(("name", "llm"), in_turn(SEEDED, ["bfloat16", "float32"]), indirect=["llm"])
def test_answers_drawn_for_a_seed_are_plain_decodings(
    ask: Ask, plain: Callable[..., list[list[int]]], configured: Callable[[str], dict[str, Any]], name: str
) -> None:
    answers = ask(SAMPLED, speculative=configured(name))
    assert [answer.token_ids for answer in answers] == plain(SAMPLED)
    assert all(rule_named(rule).lossless for answer in answers for rule in answer.speculation.steps_per_rule)
