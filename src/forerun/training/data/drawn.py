"""This module draws prompts from a chat model itself, as Magpie does (Xu et al. 2024, arXiv 2406.08464).

A model that has learned conversations goes on behind the mark of a user's turn as a user would: it writes what it
expects to be asked. So prompts of great breadth come from nothing but the model. They are what it was tuned on, and
not what the users of a service ask.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.core.rng import request_seed
from forerun.engine.prompts import rendered
from forerun.errors import ArgumentError, DataError, refuse
from forerun.params import NEUTRAL
from forerun.training.data.records import BadRecords, read_records
from forerun.training.data.regenerate import append_lines, find_hidden_mark, special_marks
from forerun.training.data.store import runs_in_circles
from forerun.types import SamplingParams, StreamChunk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.engine.llm import LLM

SOURCE = "drawn"  # The source, and so the category, of every drawn prompt
SHARED_WORDS = 10  # So many words in a row that stand in another prompt make one the same
TRIED = 200  # Prompts after which a model that has written none that is usable is given up
SENTINEL = "forerunsentinel"  # Stands in a user's place while the template is read


@dataclass(frozen=True, kw_only=True, slots=True)
class UserTurn:
    """A `UserTurn` says where the words of a user begin and end in a chat template."""

    begins: str  # All that stands before the user's first word
    stop_token_ids: tuple[int, ...] = ()  # The control token behind the last word, where there is one
    stop: tuple[str, ...] = ()  # The text behind the last word, where that is no control token

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None) -> UserTurn:
        """Read the turn off a message that the chat template renders; ArgumentError where that does not show it."""
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ArgumentError(
                "the model has no chat template, and so knows nobody who asks: prompts are drawn from chat models "
                "alone; give files of prompts instead"
            )
        message = {"role": "user", "content": SENTINEL}
        text: str = rendered(tokenizer, [message], None, tokenize=False, add_generation_prompt=True)
        if text.count(SENTINEL) != 1:
            raise ArgumentError(
                f"the chat template shows a user's message {text.count(SENTINEL)} times, and not once: no prompts can "
                "be drawn from this model"
            )
        before, behind = text.split(SENTINEL)
        # A space in front belongs to the first word's token.
        begins, end = before.rstrip(" "), behind.strip()
        if not begins or not end:
            raise ArgumentError(
                "the chat template does not mark where a user's message begins and ends: no prompts can be drawn from "
                "this model"
            )
        for token, mark in special_marks(tokenizer).items():
            if end.startswith(mark):
                return cls(begins=begins, stop_token_ids=(token,))
        return cls(begins=begins, stop=(end.splitlines()[0].strip(),))


class PromptSieve:
    """A `PromptSieve` lets every usable prompt through once, and counts what it holds back."""

    def __init__(self, held_out: Iterable[str] = ()) -> None:
        """Let nothing through that shares `SHARED_WORDS` words in a row with one of the `held_out` prompts."""
        self.refused = Counter[str]()  # By reason
        self._seen = {span for text in held_out for span in _spans(text)}

    def takes(self, text: str, token_ids: Sequence[int], *, ended: bool) -> bool:
        """Return whether a prompt is usable and new; the next one like it is not. `ended`: the model ended it."""
        spans = _spans(text)
        reason = ""
        if not ended:
            reason = "too long"
        elif not spans:
            reason = "empty"
        elif runs_in_circles(np.array(token_ids, np.int32)):
            reason = "in circles"
        elif not self._seen.isdisjoint(spans):
            reason = "like another one"
        if reason:
            self.refused[reason] += 1
            return False
        self._seen |= spans
        return True


def _spans(text: str) -> set[tuple[str, ...]]:
    """Return all `SHARED_WORDS` words in a row of a text; all words of a shorter one."""
    words = re.findall(r"\w+", text.casefold())
    if not words:
        return set()
    last = max(0, len(words) - SHARED_WORDS)
    return {tuple(words[start : start + SHARED_WORDS]) for start in range(last + 1)}


def read_words(files: Iterable[Path]) -> list[str]:
    """Return what is asked in some files of prompts, each message of a user as one text."""
    bad, texts = BadRecords(skip=True), list[str]()
    for path in files:
        for record in read_records(path, bad):
            texts += [str(message["content"]) for message in record.messages if message["role"] == "user"]
            texts += [record.text] if record.text else []
    return texts


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawSettings:
    """`DrawSettings` say how prompts are drawn."""

    temperature: float = 1.0
    top_p: float = 0.95  # Of SmolLM2-135M's words 0.99 lets 17 % through that never end, most of them no language
    max_tokens: int = 192  # A prompt that is longer is left out
    seed: int = 0
    concurrency: int = 16  # Prompts at once

    def __post_init__(self) -> None:
        refuse(
            (self.concurrency < 1, f"concurrency must be at least 1, got {self.concurrency}"),
            (self.max_tokens < 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (self.temperature <= 0, f"temperature must be above 0, or all prompts are one, got {self.temperature}"),
        )


DRAWING = DrawSettings()


@dataclass(kw_only=True, slots=True)
class PromptDraw:
    """A `PromptDraw` draws prompts into a file of JSON lines, on from those that an earlier run left there."""

    output: Path
    count: int  # Prompts that the file is to have
    settings: DrawSettings = DRAWING
    held_out: Sequence[str] = ()  # Texts with which no prompt may share many words in a row
    tell: Callable[[PromptDraw], None] = lambda _: None  # Called after each prompt, usable or not
    kept: int = 0  # Prompts in the file
    resumed: int = 0  # Of them, those of earlier runs
    tokens: int = 0  # Written, those of refused prompts included
    refused: Counter[str] = field(default_factory=Counter[str])  # By reason
    _sieve: PromptSieve = field(init=False)
    _next: int = 0  # Number of the next prompt, from which its seed follows

    def __post_init__(self) -> None:
        """Read the file of an earlier run; DataError where it is something else."""
        refuse((self.count < 1, f"count must be at least 1, got {self.count}"))
        self._sieve = PromptSieve(self.held_out)
        lines = self.output.read_text(encoding="utf-8").splitlines(keepends=True) if self.output.exists() else []
        for line in lines:
            if not line.endswith("\n"):
                break
            try:
                entry = json.loads(line)
                source, number = str(entry["id"]).split("-")
                text, self._next = str(entry["prompt"]), max(self._next, int(number) + 1)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{self.output} holds no drawn prompts; choose another --output") from error
            if source != SOURCE:
                raise DataError(f"{self.output} holds no drawn prompts; choose another --output")
            self._sieve.takes(text, (), ended=True)
            self.kept += 1
        self.resumed = self.kept
        self.refused = self._sieve.refused = Counter[str]()

    def summary(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        return {
            "output": str(self.output),
            "prompts": self.kept,
            "resumed": self.resumed,
            "refused": dict(self.refused),
        }

    def run(self, llm: LLM, *, go_on: Callable[[], bool] = lambda: True) -> None:
        """Draw until there are enough prompts, or as long as `go_on` says; then what has begun is dropped.

        DataError: the model writes nothing that could be asked.
        """
        turn = UserTurn.of(llm.tokenizer)
        marks = special_marks(llm.tokenizer)
        prompt = {"prompt_token_ids": llm.encode(turn.begins, add_special_tokens=False)}
        waiting = dict[str, int]()
        with append_lines(self.output) as write:
            try:
                while self.kept < self.count and go_on():
                    while len(waiting) < self.settings.concurrency:
                        # Drafts do not pay at a temperature of 1 in a full batch.
                        waiting[llm.submit(prompt, self._params(turn), speculative=False)] = self._next
                        self._next += 1
                    for chunk in llm.engine.step():
                        if chunk.error is not None:
                            raise chunk.error
                        if chunk.output is not None and self.kept < self.count:
                            self._take(waiting.pop(chunk.request_id), chunk, marks, write)
            finally:
                for request in waiting:
                    llm.abort(request)

    def _params(self, turn: UserTurn) -> SamplingParams:
        how = {**NEUTRAL, "temperature": self.settings.temperature, "top_p": self.settings.top_p}
        return SamplingParams(
            **how,
            max_tokens=self.settings.max_tokens,
            stop=turn.stop or None,
            stop_token_ids=turn.stop_token_ids or None,
            seed=request_seed(self.settings.seed, self._next),
        )

    def _take(
        self, number: int, chunk: StreamChunk, marks: dict[int, str], write: Callable[[dict[str, Any]], None]
    ) -> None:
        """Keep a prompt that is usable."""
        assert chunk.output is not None
        written = chunk.output.outputs[0]
        self.tokens += len(written.token_ids)
        text = written.text.strip()
        if find_hidden_mark(written.token_ids, marks):
            self.refused["control tokens"] += 1
        elif self._sieve.takes(text, written.token_ids, ended=written.finish_reason == "stop"):
            write({"id": f"{SOURCE}-{number}", "source": SOURCE, "prompt": text})
            self.kept += 1
        drawn = self.kept - self.resumed
        if not drawn and self.refused.total() >= TRIED:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
            raise DataError(
                f"of the first {TRIED} prompts that the model wrote none can be asked ({reasons}): give files of "
                "prompts instead"
            )
        self.tell(self)
