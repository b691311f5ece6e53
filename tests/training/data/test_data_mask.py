"""Only what the assistant wrote counts, with and without generation markers, and is read as the server reads it."""

from functools import partial
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.conftest import tiny_tokenizer
from forerun import shipped
from forerun.engine.prompts import conversation
from forerun.errors import ArgumentError, DataError
from forerun.training.data.prepare import RecordEncoder, apply_template
from forerun.training.data.records import Record
from forerun.training.data.store import UNWRITTEN
from training.data.conftest import CHAT, FORGETFUL, MARKED, PLAIN, byte_tokenizer, counted


def talk(*messages: dict[str, Any], **more: Any) -> Record:
    return Record(where="here", id="1", messages=messages, **more)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_answers_and_their_ends_count(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    encoded = RecordEncoder(tokenizer).encode(talk(*CHAT))
    assert counted(tokenizer, encoded) == ["yes</s>", "4</s>"]
    assert tokenizer.decode(encoded.tokens).startswith("<system>be brief</s>\n<user>hi</s>\n<assistant>yes</s>\n")


def test_markers_and_prefixes_agree_on_the_demo_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped.resolve("demo"))
    marked = RecordEncoder(tokenizer).encode(talk(*CHAT))
    assert counted(tokenizer, marked) == ["yes<|end|>", "4<|end|>"]
    template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer.chat_template = template
    assert RecordEncoder(tokenizer).encode(talk(*CHAT)) == marked


def test_what_follows_the_last_answer_is_left_out() -> None:
    tokenizer = byte_tokenizer()
    whole = RecordEncoder(tokenizer).encode(talk(*CHAT))
    assert RecordEncoder(tokenizer).encode(talk(*CHAT, {"role": "user", "content": "bye"})) == whole


def test_a_conversation_that_ends_with_its_user_gets_room_for_an_answer_where_that_is_asked_for() -> None:
    tokenizer = byte_tokenizer()
    leaves_room = RecordEncoder(tokenizer, answer_tokens=3)
    encoded = leaves_room.encode(talk(*CHAT[:2]))
    assert tokenizer.decode(encoded.tokens[:-3]) == "<system>be brief</s>\n<user>hi</s>\n<assistant>"
    assert encoded.tokens[-3:] == [UNWRITTEN] * 3
    assert encoded.mask == [False] * (len(encoded.tokens) - 3) + [True] * 3
    assert leaves_room.encode(talk(*CHAT)) == RecordEncoder(tokenizer).encode(talk(*CHAT)), "it has its answers"
    further = leaves_room.encode(talk(*CHAT, {"role": "user", "content": "bye"}))
    assert further.mask.count(True) == 3, "earlier answers are a part of the prompt"
    with pytest.raises(DataError, match=r"no assistant turn.*--answer-tokens"):
        RecordEncoder(tokenizer).encode(talk(*CHAT[:2]))


def test_tool_messages_do_not_count() -> None:
    tokenizer = byte_tokenizer()
    result = {"role": "tool", "content": "4"}
    encoded = RecordEncoder(tokenizer).encode(talk(*CHAT[1:3], result, {"role": "assistant", "content": "it is 4"}))
    assert counted(tokenizer, encoded) == ["yes</s>", "it is 4</s>"]


def test_a_template_that_rewrites_history_is_refused_with_the_reason() -> None:
    tokenizer = byte_tokenizer(FORGETFUL)
    thinking = [{**m, "content": "hm#" + m["content"]} if m["role"] == "assistant" else m for m in CHAT]
    with pytest.raises(DataError, match=r"no usable loss mask.*rewrites.*generation.*--last-turn-only"):
        RecordEncoder(tokenizer).encode(talk(*thinking))
    last = RecordEncoder(tokenizer, last_turn_only=True).encode(talk(*thinking))
    assert counted(tokenizer, last) == ["hm#4</s>"] and "hm#yes" not in tokenizer.decode(last.tokens)


SPOKEN = (
    "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
"""As ChatML: a line break stands before the answer, and merges with spaces that the answer begins with."""


def test_an_answer_that_begins_with_spaces_is_read_apart_from_its_prompt() -> None:
    tokenizer = byte_tokenizer(SPOKEN, extra=["ĊĠĠ"])
    code = [CHAT[1], {"role": "assistant", "content": "  return 1"}, CHAT[3], {"role": "assistant", "content": "4"}]
    encoded = RecordEncoder(tokenizer).encode(talk(*code))
    assert counted(tokenizer, encoded) == ["  return 1</s>", "4</s>"]
    prompt = apply_template(tokenizer, code[:1], (), add_generation_prompt=True, tokenize=True, return_dict=True)
    assert encoded.tokens[: len(prompt["input_ids"])] == prompt["input_ids"], "what the target reads when it is served"


def test_an_answer_that_merges_is_refused_where_its_tokenizer_cannot_read_it_apart() -> None:
    tokenizer = byte_tokenizer(SPOKEN, extra=["ĊĠĠ"])
    code = [{"role": "user", "content": "what is </s>?"}, {"role": "assistant", "content": "  return 1"}]
    with pytest.raises(DataError, match="merge"):
        RecordEncoder(tokenizer).encode(talk(*code))


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_empty_answer_is_not_learned_as_an_end(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    silent = [CHAT[1], {"role": "assistant", "content": " "}, *CHAT[3:]]
    assert counted(tokenizer, RecordEncoder(tokenizer).encode(talk(*silent))) == ["4</s>"]
    assert not any(RecordEncoder(tokenizer).encode(talk(*silent[:2])).mask)


def test_markers_around_nothing_are_refused() -> None:
    empty = "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match=r"markers enclose no token"):
        RecordEncoder(byte_tokenizer(empty)).encode(talk(*CHAT))


def test_no_assistant_turn_no_template_and_a_template_that_objects() -> None:
    with pytest.raises(DataError, match="no assistant turn"):
        RecordEncoder(byte_tokenizer()).encode(talk(*CHAT[:2]))
    with pytest.raises(DataError, match="no chat template"):
        RecordEncoder(byte_tokenizer(None)).encode(talk(*CHAT))
    with pytest.raises(DataError, match="begins with the assistant"):
        RecordEncoder(byte_tokenizer()).encode(talk(*CHAT[2:]))
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"refuses this conversation: roles must alternate"):
        RecordEncoder(byte_tokenizer(strict)).encode(talk(*CHAT))


def test_plain_text_counts_from_the_end_of_its_prompt() -> None:
    encoder = RecordEncoder(byte_tokenizer())
    assert all(encoder.encode(Record(where="here", id="1", text="abcd")).mask)
    encoded = encoder.encode(Record(where="here", id="1", text="abcd", prompt_tokens=3))
    assert encoded.mask == [False, False, False, True]
    assert not any(encoder.encode(Record(where="here", id="1", text="abcd", prompt_tokens=4)).mask)


def test_a_pair_without_a_template_is_prompt_completion_and_end() -> None:
    tokenizer = byte_tokenizer(None)
    encoded = RecordEncoder(tokenizer).encode(talk(*CHAT[1:3], pair=("hi", "yes")))
    assert counted(tokenizer, encoded) == ["yes</s>"] and tokenizer.decode(encoded.tokens) == "hiyes</s>"


def test_the_end_of_a_truncated_answer_does_not_count() -> None:
    tokenizer = byte_tokenizer(MARKED)
    encoded = RecordEncoder(tokenizer).encode(talk(*CHAT, truncated=True))
    assert counted(tokenizer, encoded) == ["yes</s>", "4"]


THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set thought = m.get('reasoning_content') or '' %}"
    "<assistant>{% if loop.last %}{% if '</think>' in m['content'] %}{{ m['content'] }}{% else %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ m['content'].lstrip('\n') }}{% endif %}"
    "{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}</s>\n"
    "{% else %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: the last answer begins with its thinking, which an answer without it gets empty."""


def cut(**answer: Any) -> Record:
    return talk(CHAT[1], {"role": "assistant", "content": "", **answer}, truncated=True)


@pytest.mark.parametrize("template", [PLAIN, MARKED, THINKING])
@pytest.mark.parametrize("written", ["<think>\nlong", "<think>\nhm\n</think>\n\nye", "ye ", ""])
def test_a_truncated_answer_is_its_prompt_and_what_was_written(template: str, written: str) -> None:
    tokenizer = byte_tokenizer(template)
    encoded = RecordEncoder(tokenizer).encode(cut(content=written))
    assert tokenizer.decode(encoded.tokens) == f"<user>hi</s>\n<assistant>{written}"
    assert "".join(counted(tokenizer, encoded)) == written


def test_a_truncated_answer_whose_thinking_was_told_apart_ends_where_it_was_cut() -> None:
    tokenizer = byte_tokenizer(THINKING)
    for answer, written in (
        ({"reasoning_content": "long. "}, "<think>\nlong. "),
        ({"reasoning_content": "hm", "content": "\nye"}, "<think>\nhm\n</think>\n\nye"),
    ):
        encoded = RecordEncoder(tokenizer).encode(cut(**answer))
        assert tokenizer.decode(encoded.tokens) == f"<user>hi</s>\n<assistant>{written}"
        assert counted(tokenizer, encoded) == [written]
    with pytest.raises(DataError, match=r"cut off.*does not show its reasoning_content.*--max-tokens"):
        RecordEncoder(byte_tokenizer(PLAIN)).encode(cut(reasoning_content="long"))


def test_earlier_answers_of_a_truncated_conversation_count_unless_only_the_last_one_does() -> None:
    for template in (PLAIN, MARKED):
        tokenizer = byte_tokenizer(template)
        record = talk(*CHAT, truncated=True)
        assert counted(tokenizer, RecordEncoder(tokenizer).encode(record)) == ["yes</s>", "4"]
        assert counted(tokenizer, RecordEncoder(tokenizer, last_turn_only=True).encode(record)) == ["4"]
    with pytest.raises(DataError, match="begins with the assistant"):
        RecordEncoder(byte_tokenizer(MARKED)).encode(talk(CHAT[2], truncated=True))


def test_truncated_texts_and_pairs_have_no_end() -> None:
    tokenizer = byte_tokenizer(None)
    encoded = RecordEncoder(tokenizer).encode(talk(*CHAT[1:3], pair=("hi", "yes"), truncated=True))
    assert counted(tokenizer, encoded) == ["yes"] and tokenizer.decode(encoded.tokens) == "hiyes"
    for truncated, text in ((False, "abcd</s>"), (True, "abcd")):
        encoded = RecordEncoder(tokenizer).encode(Record(where="here", id="1", text="abcd</s>", truncated=truncated))
        assert tokenizer.decode(encoded.tokens) == text and all(encoded.mask)


CALLING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for call in m.get('tool_calls', []) %}{{ ARGUMENTS }}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    "arguments",
    [
        "call.function.arguments | tojson",  # Llama, gpt-oss
        "'<\uff5ctool\u2581calls\u2581begin\uff5c>'[:0] + call['function']['arguments']",  # DeepSeek
    ],
)
def test_arguments_of_calls_are_rendered_as_the_model_writes_them(arguments: str) -> None:
    tokenizer = byte_tokenizer(CALLING.replace("ARGUMENTS", arguments))
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]}
    encoded = RecordEncoder(tokenizer).encode(talk(CHAT[1], call))
    assert counted(tokenizer, encoded) == ['{"a": "é"}</s>']


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_calls_that_the_template_does_not_show_are_refused(template: str) -> None:
    """They would count as answers that end at once; where only the last answer counts, earlier ones do not matter."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    tokenizer, called = byte_tokenizer(template), (CHAT[1], call, {"role": "tool", "content": "1"}, CHAT[2])
    for messages in ((CHAT[1], call), called):
        with pytest.raises(DataError, match=r"does not show the assistant's calls of tools \(tool_calls\)"):
            RecordEncoder(tokenizer).encode(talk(*messages))
    last = RecordEncoder(tokenizer, last_turn_only=True).encode(talk(*called))
    assert counted(tokenizer, last) == ["yes</s>"]


def test_a_call_that_the_template_drops_beside_others_is_refused() -> None:
    """Of several calls in a message some templates write the first alone, others none where there is a text."""
    calls, shown = "m.get('tool_calls', [])", CALLING.replace("ARGUMENTS", "call.function.arguments | tojson")
    first, silent = (shown.replace(calls, f"({calls}{how})") for how in ("[:1]", " if not m['content'] else []"))
    one, two = ({"function": {"name": "f", "arguments": {"a": value}}} for value in ("x", "y"))
    both = {"role": "assistant", "content": "", "tool_calls": [one, two]}
    tokenizer = byte_tokenizer(first)
    RecordEncoder(tokenizer).encode(talk(CHAT[1], {**both, "tool_calls": [one]}))
    with pytest.raises(DataError, match="leaves out call 2 of 2 in message 2"):
        RecordEncoder(tokenizer).encode(talk(CHAT[1], both))
    later = {"role": "assistant", "content": "so", "tool_calls": [two]}
    tokenizer = byte_tokenizer(silent)
    called = ({**both, "tool_calls": [one]}, {"role": "tool", "content": "1"})
    RecordEncoder(tokenizer).encode(talk(CHAT[1], *called, CHAT[2]))
    with pytest.raises(DataError, match="leaves out call 1 of 1 in message 4"):
        RecordEncoder(tokenizer).encode(talk(CHAT[1], *called, later))


def test_variables_of_the_chat_template_reach_it() -> None:
    tokenizer = byte_tokenizer(THINKING)
    off = RecordEncoder(tokenizer, variables={"enable_thinking": False}, answer_tokens=1)
    assert tokenizer.decode(off.encode(talk(CHAT[1])).tokens[:-1]) == "<user>hi</s>\n<assistant><think>\n\n</think>\n\n"
    assert counted(tokenizer, off.encode(talk(*CHAT[1:3]))) == ["yes</s>"]
    assert counted(tokenizer, RecordEncoder(tokenizer).encode(talk(*CHAT[1:3]))) == ["<think>\n\n</think>\n\nyes</s>"]
    for name in ("tokenize", "add_generation_prompt", "messages"):
        with pytest.raises(ArgumentError, match=f"{name}: not a variable of the chat template"):
            RecordEncoder(tokenizer, variables={name: True})


END = "<end>"  # The tokenizer's control token


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "the cat"}],
        [{"role": "user", "content": f"what does {END} mean?"}],
        [{"role": "system", "content": END}, {"role": "user", "content": f"{END}<pad>"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": END}, {"role": "user", "content": "y"}],
    ],
)
def test_the_server_and_the_data_read_alike(messages: list[dict[str, Any]]) -> None:
    tokenizer = tiny_tokenizer()
    encode = partial(tokenizer.encode, add_special_tokens=False)
    served = conversation(tokenizer, messages, None, {}, encode)["prompt_token_ids"]
    prepared = apply_template(tokenizer, messages, (), tokenize=True, return_dict=True, add_generation_prompt=True)
    assert list(prepared["input_ids"]) == served
    assert tokenizer.eos_token_id not in served, "only a template writes control tokens"


def test_what_the_server_refuses_is_no_data_either() -> None:
    tokenizer, messages = tiny_tokenizer(), [{"role": "user", "content": "x", f"a{END}": "b"}]
    with pytest.raises(ArgumentError, match="control token"):
        conversation(tokenizer, messages, None, {}, partial(tokenizer.encode, add_special_tokens=False))
    with pytest.raises(DataError, match="control token"):
        apply_template(tokenizer, messages, (), tokenize=True)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_written_mark_ends_no_answer(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    messages = [{"role": "user", "content": "what is </s>?"}, {"role": "assistant", "content": "a </s> mark"}]
    encoded = RecordEncoder(tokenizer).encode(Record(where="here", id="1", messages=messages))
    assert counted(tokenizer, encoded) == ["a </s> mark</s>"]
    assert encoded.tokens.count(tokenizer.convert_tokens_to_ids("</s>")) == 2, "one for each turn"
