"""An assistant's message in OpenAI's shape, whole or as deltas, out of the pieces of its text.

Reasoning goes by two names, vLLM's older ``reasoning_content`` and its newer ``reasoning``: clients read either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forerun.serve.tools.incoming import Kind, Piece


class MessageWriter:
    """Writes one message.

    Args:
        new_id: makes an id for a call.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.calls = 0
        """Calls begun."""

    def delta(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What these pieces add to the message."""
        found: dict[str, Any] = {}
        content = "".join(piece.text for piece in pieces if piece.kind is Kind.CONTENT)
        reasoning = "".join(piece.text for piece in pieces if piece.kind is Kind.REASONING)
        if content:
            found["content"] = content
        if reasoning:
            found |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls = self._calls(pieces)
        return found | ({"tool_calls": calls} if calls else {})

    def message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole message."""
        found = self.delta(pieces)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in found.pop("tool_calls", [])]
        content = found.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **found}
        return message | ({"tool_calls": calls} if calls else {})

    def _calls(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for piece in pieces:
            if piece.kind is Kind.CALL:
                function = {"name": piece.text, "arguments": ""}
                found.append({"index": self.calls, "id": self._new_id(), "type": "function", "function": function})
                self.calls += 1
            elif piece.kind is Kind.ARGUMENTS:
                if not found:
                    found.append({"index": self.calls - 1, "function": {"arguments": ""}})
                found[-1]["function"]["arguments"] += piece.text
        return found
