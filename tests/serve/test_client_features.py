"""What the answers to special parameters hold: log-probabilities of prompts, token ids, counts as they grow,
prompts cut or continued, calls that are named. With the official client where it knows the parameter."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openai import OpenAI
from tokenizers import processors
from transformers import AutoModelForCausalLM

from engine.conftest import tiny_tokenizer
from forerun.serve.completing import CompletionWriter
from forerun.serve.handling import chat_format_of
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest
from forerun.types import OutputToken, Source, TokenLogprob
from serve.conftest import NAME, Live, sent, stream_chunk
from serve.test_probes import ASK, OTHER, TOOL, allowed

PROMPT = "the cat sat on the mat and the dog"


def ids_of(live: Live, text: str) -> list[int]:
    return list(live.llm.tokenizer.encode(text))


def probs(live: Live, ids: list[int]) -> torch.Tensor:
    """transformers' own log-probabilities in float32."""
    model = AutoModelForCausalLM.from_pretrained(live.llm.target.name_or_path, dtype=torch.float32)
    found: torch.Tensor = model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
    return found


class TestPromptLogprobs:
    def test_echo_gives_those_of_the_prompt_and_of_the_answer(self, live: Live, client: OpenAI) -> None:
        text = PROMPT * 4
        asked: dict[str, Any] = {"model": NAME, "prompt": text, "temperature": 0, "max_tokens": 3}
        asked["extra_body"] = {"cache_salt": "mine"}
        hits = live.llm.engine.prefix_hits
        for _ in range(2):
            client.completions.create(**asked)
        assert live.llm.engine.prefix_hits > hits, "the prompt is in the prefix cache"
        answer = client.completions.create(**asked, echo=True, logprobs=2).choices[0]
        found, prompt = answer.logprobs, ids_of(live, text)
        assert found is not None and found.token_logprobs and found.top_logprobs and found.tokens and found.text_offset
        assert answer.text.startswith(text) and len(found.tokens) == len(prompt) + 3
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        whole = prompt + ids_of(live, answer.text)[len(prompt) :]
        expected = probs(live, whole)
        for place, value in enumerate(found.token_logprobs[1 : len(prompt)]):
            assert value == pytest.approx(float(expected[place, whole[place + 1]]), abs=1e-4)
            best = found.top_logprobs[place + 1]
            assert max(best.values()) == pytest.approx(float(expected[place].max()), abs=1e-4)
            assert len(best) in (2, 3) and found.tokens[place + 1] in best
        ends = [*found.text_offset[1:], len(answer.text)]
        parts = [answer.text[at:end] for at, end in zip(found.text_offset, ends, strict=True)]
        assert all(part == token or "\ufffd" in token for part, token in zip(parts, found.tokens, strict=True))

    @pytest.mark.parametrize("prompt", ["the<end> cat", "<end>the cat<pad>", [0, 1, 80, 0, 81]])
    def test_marks_in_a_prompt_have_their_place(self, live: Live, prompt: Any) -> None:
        asked = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2, "ignore_eos": True}
        choice = live.post("/v1/completions", asked).json()["choices"][0]
        text, found = choice["text"], choice["logprobs"]
        said = [text[at:end] for at, end in pairwise(found["text_offset"][:-1])]
        assert said == found["tokens"][:-2] and "<end>" in said

    def test_what_the_tokenizer_adds_is_not_echoed(self) -> None:
        tokenizer = tiny_tokenizer()
        marks = [("<end>", 0), ("<pad>", 1)]
        added = processors.TemplateProcessing(single="<end> $A <pad>", special_tokens=marks)
        tokenizer.backend_tokenizer.post_processor = added
        writer = CompletionWriter(CompletionRequest(prompt="the cat", echo=True, logprobs=0), "m", tokenizer)
        ids = tokenizer.encode("the cat")
        scores = [None, *({token: TokenLogprob(logprob=-1.0, rank=1)} for token in ids[1:])]
        opened = writer.opening(0, stream_chunk(prompt_token_ids=ids, prompt_logprobs=scores))
        assert opened is not None and opened["text"] == "the cat"
        first, *offsets, last = opened["logprobs"]["text_offset"]
        parts = ["the cat"[at:end] for at, end in zip(offsets, [*offsets[1:], last], strict=True)]
        assert parts == opened["logprobs"]["tokens"][1:-1] and (first, last) == (0, 7)

    def test_a_stream_says_the_same(self, client: OpenAI) -> None:
        asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "n": 2}
        asked |= {"echo": True, "logprobs": 2}
        for choice in client.completions.create(**asked).choices:
            text, parts = "", dict[str, list[Any]]()
            for chunk in client.completions.create(**asked, stream=True):
                for own in (own for own in chunk.choices if own.index == choice.index):
                    text += own.text
                    for name, values in (own.logprobs.model_dump() if own.logprobs else {}).items():
                        parts.setdefault(name, []).extend(values)
            assert choice.logprobs is not None and text == choice.text
            assert parts == choice.logprobs.model_dump()

    def test_offsets_are_those_of_tokens_whose_text_is_held_back(self, client: OpenAI) -> None:
        """It may become a stop string, and is sent with a later chunk."""
        asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
        text = client.completions.create(**asked).choices[0].text
        asked["stop"] = [character + "\x00" for character in sorted(set(text))[:16]]
        whole = client.completions.create(**asked).choices[0]
        choices = [one for chunk in client.completions.create(**asked, stream=True) for one in chunk.choices]
        offsets = [at for one in choices if one.logprobs is not None for at in one.logprobs.text_offset or []]
        assert whole.text == text and whole.logprobs is not None and offsets == whole.logprobs.text_offset

    def test_no_token_is_written_where_none_is_wanted(self, live: Live, client: OpenAI) -> None:
        """As lm-eval-harness asks for scores; several prompts at once, one of them as long as the context."""
        longest = live.llm.max_model_len
        prompts = [ids_of(live, PROMPT), ids_of(live, "the cat"), (ids_of(live, PROMPT) * longest)[:longest]]
        answer = client.completions.create(
            model=NAME, prompt=prompts, max_tokens=0, echo=True, logprobs=1, temperature=0
        )
        for choice, ids in zip(answer.choices, prompts, strict=True):
            assert choice.finish_reason == "length" and choice.logprobs is not None and choice.logprobs.token_logprobs
            expected = probs(live, ids)
            scores = [float(expected[place, token]) for place, token in enumerate(ids[1:])]
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores, abs=1e-4)
        assert answer.usage is not None and answer.usage.completion_tokens == 0
        streamed = client.completions.create(model=NAME, prompt="the cat", max_tokens=0, echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == "the cat"

    def test_vllms_shape(self, live: Live, client: OpenAI) -> None:
        text = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 1})
        chat = client.chat.completions.create(
            model=NAME, messages=ASK, max_tokens=1, extra_body={"prompt_logprobs": 1, "return_token_ids": True}
        )
        extra: Any = chat.model_extra
        pairs: list[Any] = [(ids_of(live, PROMPT), text.choices[0].model_extra["prompt_logprobs"])]
        pairs.append((extra["prompt_token_ids"], extra["prompt_logprobs"]))
        for ids, found in pairs:
            expected = probs(live, ids)
            assert found[0] is None and len(found) == len(ids)
            for place, entry in enumerate(found[1:]):
                own = entry[str(ids[place + 1])]
                assert own["logprob"] == pytest.approx(float(expected[place, ids[place + 1]]), abs=1e-4)
                assert own["rank"] == 1 + int((expected[place] > expected[place, ids[place + 1]]).sum())
                assert own["decoded_token"] and 1 in {value["rank"] for value in entry.values()} and len(entry) <= 2

    @pytest.mark.parametrize(("count", "named"), [(1, {1: "odd", 2: "even", 3: "odd"}), (50, {1: "1", 2: "2", 3: "3"})])
    def test_a_token_is_named_once_and_of_those_with_the_same_text_the_likeliest_counts(
        self, count: int, named: dict[int, str]
    ) -> None:
        best = {place: TokenLogprob(logprob=-float(place), rank=place) for place in named}
        token = OutputToken(id=3, text="", source=Source.TARGET, step=0, logprob=best[3], top_logprobs=best)
        decoded = list[int]()
        tokenizer: Any = SimpleNamespace(decode=lambda ids: (decoded.append(ids[0]), named[ids[0]])[1])
        writer = CompletionWriter(CompletionRequest(prompt="", logprobs=3), NAME, tokenizer)
        choice = writer.delta(0, stream_chunk(tokens=[token] * count))
        likeliest = {named[place]: -float(place) for place in reversed(named)}
        assert choice["logprobs"]["top_logprobs"] == [likeliest] * count and sorted(decoded) == [1, 2, 3]
        assert choice["logprobs"]["tokens"] == [named[3]] * count
        assert choice["logprobs"]["token_logprobs"] == [-3.0] * count


def test_counts_grow_with_the_stream(live: Live, client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 9, "temperature": 0, "stream": True}
    asked |= {"stream_options": options, "extra_body": {"ignore_eos": True}}
    for chunks in (
        list(client.completions.create(prompt=PROMPT, **asked)),
        list(client.chat.completions.create(messages=ASK, **asked)),
    ):
        usage = [chunk.usage for chunk in chunks]
        assert all(one is not None and one.prompt_tokens == usage[-1].prompt_tokens for one in usage)
        counts = [one.completion_tokens for one in usage if one is not None]
        assert counts == sorted(counts) and counts[-1] == 9 and len(set(counts)) > 2
        assert all(one.total_tokens == one.prompt_tokens + one.completion_tokens for one in usage if one is not None)


@pytest.mark.parametrize("chat", [True, False])
def test_token_ids(live: Live, client: OpenAI, chat: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 6, "temperature": 0, "n": 2}
    asked["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
    create: Any = client.chat.completions.create if chat else client.completions.create
    asked |= {"messages": ASK} if chat else {"prompt": PROMPT}
    prompt = live.llm.chat_prompt(ASK)["prompt_token_ids"] if chat else ids_of(live, PROMPT)
    whole, streamed = create(**asked), [chunk.model_dump() for chunk in create(**asked, stream=True)]
    assert (whole if chat else whole.choices[0]).prompt_token_ids == prompt
    first = streamed[0] if chat else streamed[0]["choices"][0]
    assert first["prompt_token_ids"] == prompt
    for choice in whole.choices:
        own = [one for chunk in streamed for one in chunk["choices"] if one["index"] == choice.index]
        ids = [token for one in own for token in one.get("token_ids") or []]
        assert ids == choice.token_ids and len(ids) == 6


def test_tokens_named_by_their_ids(client: OpenAI) -> None:
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    text = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=3, logprobs=1, extra_body=more).choices[0]
    chat = client.chat.completions.create(model=NAME, messages=ASK, max_tokens=3, logprobs=True, extra_body=more)
    assert text.logprobs is not None and chat.choices[0].logprobs is not None
    assert text.logprobs.tokens == [f"token_id:{token}" for token in text.model_extra["token_ids"]]
    names = [token.token for token in chat.choices[0].logprobs.content or []]
    assert names == [f"token_id:{token}" for token in chat.choices[0].model_extra["token_ids"]]


def test_a_prompt_is_cut_at_its_beginning(live: Live, client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 5, "echo": True}
    ids = ids_of(live, PROMPT)
    cut = client.completions.create(prompt=PROMPT, extra_body={"truncate_prompt_tokens": 3}, **asked)
    same = client.completions.create(prompt=ids[-3:], **asked)
    assert cut.choices[0].text == same.choices[0].text and cut.usage and cut.usage.prompt_tokens == 3
    uncut = client.completions.create(prompt=PROMPT, extra_body={"truncate_prompt_tokens": 100}, **asked)
    assert uncut.choices[0].text.startswith(PROMPT)
    longest = live.llm.max_model_len
    fitted = client.completions.create(prompt=PROMPT * 90, extra_body={"truncate_prompt_tokens": -1}, **asked)
    assert fitted.usage and fitted.usage.total_tokens == longest


def test_the_last_message_is_continued(templated: Live, official: OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 8}
    prompt = "user: the cat sat on\nassistant: the mat"
    text = official.completions.create(prompt=prompt, **asked).choices[0].text
    messages = [*ASK, {"role": "assistant", "content": "the mat"}]
    chat = official.chat.completions.create(messages=messages, extra_body={"continue_final_message": True}, **asked)
    assert chat.choices[0].message.content == text
    ended = official.chat.completions.create(messages=messages, extra_body={"add_generation_prompt": False}, **asked)
    assert ended.usage and chat.usage and ended.usage.prompt_tokens == chat.usage.prompt_tokens
    refused = templated.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": ""}], "continue_final_message": True}
    )
    assert refused.status_code in (200, 400), refused.text


def test_effort_is_the_templates_variable(official: OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": ASK, "temperature": 0, "max_tokens": 2}
    asked["extra_body"] = {"return_token_ids": True}
    create, effort = official.chat.completions.create, {"reasoning_effort": "low"}
    low, plain = create(**effort, **asked), create(**asked)
    more = create(**{**asked, "extra_body": {"chat_template_kwargs": effort, **asked["extra_body"]}})
    assert low.prompt_token_ids == more.prompt_token_ids != plain.prompt_token_ids


class TestCalls:
    @pytest.mark.parametrize("mode", ["auto", "required"])
    def test_only_what_is_allowed_is_called(self, templated: Live, official: OpenAI, mode: str) -> None:
        """A random model hardly calls anything of its own accord: what it may write is looked at, too."""
        asked: dict[str, Any] = {"messages": ASK, "tools": [TOOL, OTHER], "tool_choice": allowed(mode, "time")}
        body = ChatRequest.model_validate(asked)
        chat_format = chat_format_of(templated.llm, templated.session.settings, body)
        form = chat_format.constrained(body, None, templated.llm.reader.grammars.mark)
        assert "time" in form.grammar and "weather" not in form.grammar
        names = []
        for seed in range(4):
            answer = official.chat.completions.create(
                model=NAME, temperature=1.5, seed=seed, max_tokens=100, **asked
            ).choices[0]
            names += [call.function.name for call in answer.message.tool_calls or []]
        assert set(names) <= {"time"} and (mode == "auto" or len(names) >= 4)

    def test_the_model_is_shown_all_tools(self, official: OpenAI) -> None:
        def shown(choice: Any) -> int:
            answer = official.chat.completions.create(
                model=NAME, messages=ASK, tools=[TOOL, OTHER], tool_choice=choice, max_tokens=1
            )
            return answer.usage.prompt_tokens

        assert shown(allowed("auto", "time")) == shown("auto") > shown("none")


class TestStopReason:
    @pytest.mark.parametrize("chat", [True, False])
    @pytest.mark.parametrize("kind", ["string", "id", "end", "length"])
    def test_what_ended_each_choice(self, live: Live, chat: bool, kind: str) -> None:
        """Whole and in the last chunk of each choice; the model's own end is none, though a client names it."""
        tokenizer = live.llm.tokenizer
        [liked], end = ids_of(live, "the")[:1], tokenizer.eos_token_id
        more: dict[str, Any] = {
            "string": {"stop": ["hethe", "x"], "logit_bias": {liked: 100}},
            "id": {"stop_token_ids": [liked], "logit_bias": {liked: 100}},
            "end": {"stop_token_ids": [end], "logit_bias": {end: 100}},
            "length": {"logit_bias": {liked: 100}},
        }[kind]
        wanted = {"string": "hethe", "id": liked}.get(kind)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        asked = {"messages": ASK} if chat else {"prompt": PROMPT}
        asked |= {"n": 2, "max_tokens": 5, **more}
        whole = live.post(path, asked).json()["choices"]
        reason = "length" if kind == "length" else "stop"
        assert [(one["finish_reason"], one["stop_reason"]) for one in whole] == [(reason, wanted)] * 2
        events = sent(live.post(path, {**asked, "stream": True}).text)
        choices = [choice for event in events for choice in event["choices"]]
        assert all(("stop_reason" in one) == (one["finish_reason"] is not None) for one in choices)
        assert [one["stop_reason"] for one in choices if one["finish_reason"]] == [wanted] * 2


class TestTokenize:
    def test_the_conversation_may_end_with_its_last_message(self, templated: Live) -> None:
        def tokens(**more: Any) -> list[int]:
            found: dict[str, Any] = templated.post("/tokenize", {"messages": ASK, **more}).json()
            assert found["count"] == len(found["tokens"]) and found["token_strs"] is None
            return list(found["tokens"])

        opened, bare = tokens(), tokens(add_generation_prompt=False)
        assert opened == tokens(add_generation_prompt=True) == bare + ids_of(templated, "\nassistant: ")

    def test_strings_of_tokens(self, live: Live) -> None:
        found = live.post("/tokenize", {"prompt": "the cat", "return_token_strs": True}).json()
        assert found["token_strs"] == live.llm.tokenizer.convert_ids_to_tokens(found["tokens"])


def test_bytes_of_tokens_join_to_the_text(client: OpenAI) -> None:
    """A token may be a part of a character, of which the text has nothing to show."""
    form = {"structured_outputs": {"choice": ["the \u00e9\u65e5\U0001f389"]}}
    asked: dict[str, Any] = {"model": NAME, "messages": ASK, "logprobs": True, "top_logprobs": 2, "extra_body": form}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    *said, end = choice.logprobs.content
    assert any("\ufffd" in one.token for one in said) and end.token == "<end>"
    assert bytes(byte for one in said for byte in one.bytes or []).decode() == choice.message.content
    assert all(best.bytes == one.bytes for one in said for best in one.top_logprobs if best.logprob == one.logprob)
