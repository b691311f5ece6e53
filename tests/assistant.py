"""An OpenAI-compatible endpoint that gives one answer to everything."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.scripted import Answer, Script, said, scripted

WORDS = "four words of answer"


def _answer(body: dict[str, Any]) -> Answer | tuple[int, str]:
    if body.get("stream"):
        return said(WORDS, tokens=4)
    choice = {"message": {"role": "assistant", "content": WORDS}, "finish_reason": "stop"}
    return 200, json.dumps({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 4}})


@contextmanager
def assistant() -> Iterator[str]:
    """Its URL, which works until the block ends."""
    with scripted(Script(_answer, models=("assistant",))) as url:
        yield f"{url}/v1"
