"""The official client drives every feature, and what comes back is what the engine says."""

from typing import Any

import pytest
from openai import OpenAI

from forerun import SamplingParams
from serve.conftest import NAME, Live, both

ASK: list[Any] = [{"role": "user", "content": "the cat sat on"}]
GREEDY: Any = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}


def plain_text(live: Live, prompt: str, tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine = live.session.engine
    # In the engine's own thread, behind what the request before it left to be done.
    asked = engine._worker.submit(lambda: engine.llm.generate([prompt], params, speculative=False)[0])
    return asked.result().outputs[0].text


class TestChat:
    def test_an_answer_is_the_models_own(self, live: Live, client: OpenAI) -> None:
        answer = client.chat.completions.create(**GREEDY, messages=ASK, max_completion_tokens=12)
        prompt = live.llm.chat_prompt(ASK)["prompt"]
        assert answer.choices[0].message.content == plain_text(live, prompt, 12)
        assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.role == "assistant"
        assert answer.usage is not None and answer.usage.completion_tokens == 12
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
        counts = answer.model_extra["metrics"]["speculative_decoding"]
        assert counts["num_spec_steps"] > 0 and sum(counts["acceptance_histogram"]) == counts["num_spec_steps"]
        assert len(counts["acceptance_histogram"]) == counts["num_spec_tokens"] + 1, "what AIPerf asks for"

    def test_a_stream_says_the_same(self, live: Live) -> None:
        more = {"ignore_eos": True}
        whole = both(live, messages=ASK, temperature=0.9, seed=5, n=2, max_tokens=10, extra_body=more)
        assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
        assert whole.usage.completion_tokens == 20

    def test_log_probabilities(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(**GREEDY, messages=ASK, max_tokens=5, logprobs=True, top_logprobs=2)
        found = answer.choices[0].logprobs
        assert found is not None and found.content is not None and len(found.content) == 5
        for token in found.content:
            assert token.logprob == pytest.approx(token.top_logprobs[0].logprob), "greedy takes the likeliest"
            assert len(token.top_logprobs) == 2 and token.bytes
            assert bytes(token.bytes).decode(errors="replace") == token.token, "the token's own, a part of a character"

    def test_speculation_by_request(self, client: OpenAI) -> None:
        def ask(**speculative: Any) -> Any:
            more = {"extra_body": {"speculative": speculative, "ignore_eos": True}}
            return client.chat.completions.create(**GREEDY | more, messages=ASK, max_tokens=16)

        off, short, other = ask(enabled=False), ask(num_speculative_tokens=1), ask(drafter="ngram")
        texts = {answer.choices[0].message.content for answer in (off, short, other)}
        assert len(texts) == 1
        counts = [answer.model_extra["metrics"]["speculative_decoding"] for answer in (off, short, other)]
        assert counts[0]["num_spec_steps"] == 0
        assert counts[1]["num_draft_tokens"] == counts[1]["num_spec_steps"] > 0

    def test_the_servers_own_drafter_adapts_if_the_server_was_told_so(self, live: Live, client: OpenAI) -> None:
        """This one was told not to, and requests with fewer tokens are served by the same; other drafters adapt."""
        for wish in ({"num_speculative_tokens": 2}, {"drafter": "draft_model"}, {"drafter": "ngram"}):
            client.completions.create(model=NAME, prompt="the cat", max_tokens=4, extra_body={"speculative": wish})
        active = live.llm.engine.drafting._active.values()
        found = {(one.config.method, one.policy is not None) for one in active}
        assert found >= {("draft_model", False), ("ngram", True)} and ("draft_model", True) not in found


class TestCompletions:
    def test_several_prompts_and_answers(self, live: Live, client: OpenAI) -> None:
        prompts = ["the cat", "the dog sat"]
        answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=8, n=2)
        expected = [plain_text(live, prompt, 8) for prompt in prompts for _ in range(2)]
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
