"""The doors to the engine with a real model behind them: the server, `forerun.hf`, the proof, training."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError
from transformers import LlamaForCausalLM

import forerun
from forerun import LLM, AsyncLLM, SamplingParams
from forerun.certify import CertifyPlan
from forerun.certify.checks import certify
from forerun.certify.reference import TransformersReference
from forerun.cli import main
from forerun.control.config import SpeculativeConfig
from forerun.demo import QUESTIONS
from forerun.engine import async_llm
from forerun.training.data.store import write_prepared
from forerun.writing import TokenizerIdentity
from real.conftest import ASKED, GREEDY, TOKENS, Ask
from serve.conftest import NAME, Live, serving

ONLY_FLOAT32 = pytest.mark.parametrize("llm", ["float32"], indirect=True)
Plain = Callable[[SamplingParams], list[list[int]]]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How warm it is in a city",
            "parameters": {
                **{"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}},
                **{"required": ["city", "unit"], "additionalProperties": False},
            },
        },
    }
]
"""The model's own template knows no tools; this is its template with their list in the system's words."""
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\nYou may call these functions: {{ tools | tojson }}\nA call is written as "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def live(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A server of the engine that all tests share."""
    monkeypatch.setattr(async_llm, "LLM", lambda *_, **__: llm)
    monkeypatch.setattr(llm, "close", lambda: None)  # the others go on with it
    monkeypatch.setattr(llm, "speculative", SpeculativeConfig.parse({"method": "suffix", "adaptive": False}))
    with serving(lambda: AsyncLLM("the shared one")) as running:
        yield running


@pytest.mark.parametrize("llm", ["bfloat16"], indirect=True)
def test_the_server_answers_as_the_engine_does(live: Live, llm: LLM, plain: Plain) -> None:
    expected = [llm.tokenizer.decode(answer, skip_special_tokens=True) for answer in plain(GREEDY)]
    with live.client().with_options(timeout=600) as client:
        for messages, text in zip(ASKED, expected, strict=True):
            asked: Any = {"model": NAME, "messages": messages, "temperature": 0, "max_completion_tokens": TOKENS}
            assert client.chat.completions.create(**asked).choices[0].message.content == text
        streamed = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**asked, stream=True)]
        assert "".join(filter(None, streamed)) == expected[-1] and len(streamed) > 2
        usage = client.chat.completions.create(**asked, extra_body={"speculative": {"drafter": "ngram"}}).usage
        assert usage is not None and usage.completion_tokens == len(plain(GREEDY)[-1])


@ONLY_FLOAT32
def test_a_chat_with_tools(live: Live, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "How warm is it in Oslo?"}], "tools": TOOLS}
    with live.client().with_options(timeout=600) as client:
        with pytest.raises(BadRequestError, match="takes no tools"):
            client.chat.completions.create(**asked)
        monkeypatch.setattr(llm.tokenizer, "chat_template", WITH_TOOLS)
        asked |= {"temperature": 0, "max_tokens": 64}
        forced = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
        message = forced.choices[0].message
        [call] = message.tool_calls or []
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather" and arguments.keys() == {"city", "unit"}
        assert "oslo" in arguments["city"].lower(), "a real model reads the question"
        result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees"}
        asked["messages"] = [*asked["messages"], message, result]
        last = client.chat.completions.create(**asked, tool_choice="none", extra_body={"speculative": {}})
        assert last.choices[0].message.content and not last.choices[0].message.tool_calls


@ONLY_FLOAT32
def test_inside_transformers_generate(llm: LLM, small: LlamaForCausalLM) -> None:
    """In the model's first layers, which are checked and packed sooner than all."""
    prompt = torch.tensor([llm.chat_prompt(ASKED[1])["prompt_token_ids"]])
    loop = forerun.hf("suffix", adaptive=False)
    plain, drafted = (
        small.generate(prompt, max_new_tokens=TOKENS, do_sample=False, custom_generate=own) for own in (None, loop)
    )
    assert torch.equal(drafted, plain)


@pytest.mark.slow
def test_the_proof_holds(llm: LLM, original: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "speculative", SpeculativeConfig.parse({"method": "recycling", "nodes": 8}))
    plan = CertifyPlan(prompts=3, prompt_tokens=64, max_tokens=TOKENS, detect=0.5, sample_tokens=3, cells=6)
    report = certify(llm, [question.text for question in QUESTIONS], plan, reference=TransformersReference(original))
    assert report.passed, [check.summary for check in report.checks if not check.passed]
    assert {check.name.partition(",")[0] for check in report.checks} >= {"greedy equality", "sampled distribution"}


@pytest.fixture(scope="session")
def head(llm: LLM, path: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head that learned from the model's own answers, as far as that goes in ten steps."""
    folder = tmp_path_factory.mktemp("training")
    prompts = [llm.chat_prompt(messages)["prompt_token_ids"] for messages in ASKED]
    texts = [(len(prompt), [*prompt, *answer]) for prompt, answer in zip(prompts, plain(GREEDY), strict=True)]
    documents = [(tokens, [place >= start for place in range(len(tokens))]) for start, tokens in texts]
    write_prepared(folder / "prepared", documents, TokenizerIdentity.of(llm.tokenizer))
    words = [
        *("train", "eagle3", "--json", "--target", str(path), "--data", str(folder / "prepared")),
        *("--output", str(folder / "run"), "training.steps=10", "training.learning_rate=1e-3"),
        *("windows.length=128", "windows.rows=1", "objective.steps=2", "draft.vocab_size=64"),
    ]
    assert main(words) == 0
    return folder / "run" / "head"


@pytest.mark.slow
@ONLY_FLOAT32
def test_a_head_that_was_trained_for_it_drafts(head: Path, ask: Ask, plain: Plain) -> None:
    for shape in ({"num_speculative_tokens": 2}, {"top_k": 2, "nodes": 6}):
        answers = ask(GREEDY, speculative={"method": "eagle3", "model": str(head), "adaptive": False, **shape})
        assert [answer.token_ids for answer in answers] == plain(GREEDY)
        assert all(answer.speculation.num_draft_tokens for answer in answers)
