"""Server-sent events, as OpenAI's clients read them: ``data: {json}`` and ``data: [DONE]`` at the end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Keep proxies from holding the stream back."""


def event(data: Mapping[str, Any]) -> str:
    """One event; its ``type``, where it has one, is its name, too."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def with_end(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events and the end mark."""
    async for one in events:
        yield one
    yield "data: [DONE]\n\n"
