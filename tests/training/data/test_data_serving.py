"""A conversation is prepared as the server reads it, to the last token: one path leads from messages to ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from engine.conftest import tiny_tokenizer
from forerun.engine.prompts import conversation
from forerun.errors import ArgumentError, DataError
from forerun.training.data.prepare import RecordEncoder, apply_template
from forerun.training.data.records import Record
from training.data.conftest import MARKED, PLAIN, byte_tokenizer, counted

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
