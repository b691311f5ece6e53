"""Draws prompts from a chat model itself, as Magpie does (Xu et al. 2024, arXiv 2406.08464).

After the mark that opens a user's turn, a chat model writes a message as a user would. This gives broad prompts from
the model alone. They resemble the data that it was tuned on, not what the users of a service ask.
"""

from __future__ import annotations

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
from forerun.training.data.regenerate import append_lines, find_hidden_mark, read_lines, special_marks
from forerun.training.data.store import runs_in_circles
from forerun.types import SamplingParams, StreamChunk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.engine.llm import LLM

SOURCE = "drawn"  # The source, and so the category, of every drawn prompt
SHARED_WORDS = 10  # Prompts with this many consecutive words in common are duplicates
TRIED = 200  # If none of the first prompts, this many, is usable, the draw ends
SENTINEL = "forerunsentinel"  # The user's message while the template is read


@dataclass(frozen=True, kw_only=True, slots=True)
class UserTurn:
    """The texts that open and close a user's message in a chat template."""

    begins: str  # The text before the user's message
    stop_token_ids: tuple[int, ...] = ()  # The control token after the message, if there is one
    stop: tuple[str, ...] = ()  # The text after the message, if that is no control token

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None) -> UserTurn:
        """Find the turn in a message that the chat template renders. Raises ArgumentError if it cannot be found."""
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ArgumentError(
                "the model has no chat template: prompts are drawn from chat models only; give files of prompts instead"
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
    """Filters drawn prompts: it accepts every usable prompt once, and counts the others by reason."""

    def __init__(self, held_out: Iterable[str] = ()) -> None:
        """Refuse prompts that have `SHARED_WORDS` consecutive words in common with one of the `held_out` prompts."""
        self.refused = Counter[str]()  # By reason
        self._seen = {span for text in held_out for span in _spans(text)}

    def takes(self, text: str, token_ids: Sequence[int], *, ended: bool) -> bool:
        """Return whether a prompt is usable and new, and remember it. `ended`: the model ended it by itself."""
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


def _read_drawn(line: Any) -> tuple[int, str]:
    """Return number and text of a drawn prompt. Raises ValueError for another line."""
    source, number = str(line["id"]).split("-")
    if source != SOURCE:
        raise ValueError(source)
    return int(number), str(line["prompt"])


def _spans(text: str) -> set[tuple[str, ...]]:
    """Return all runs of `SHARED_WORDS` consecutive words of a text; the whole text if it is shorter."""
    words = re.findall(r"\w+", text.casefold())
    if not words:
        return set()
    last = max(0, len(words) - SHARED_WORDS)
    return {tuple(words[start : start + SHARED_WORDS]) for start in range(last + 1)}


def read_words(files: Iterable[Path]) -> list[str]:
    """Return the users' messages in files of prompts, each as one text."""
    bad, texts = BadRecords(skip=True), list[str]()
    for path in files:
        for record in read_records(path, bad):
            texts += [str(message["content"]) for message in record.messages if message["role"] == "user"]
            texts += [record.text] if record.text else []
    return texts


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawSettings:
    """The settings with which prompts are drawn."""

    temperature: float = 1.0
    top_p: float = 0.95  # With 0.99, 17 % of SmolLM2-135M's prompts never end, most of them gibberish
    max_tokens: int = 192  # Longer prompts are refused
    seed: int = 0
    concurrency: int = 16  # Prompts drawn at once

    def __post_init__(self) -> None:
        refuse(
            (self.concurrency < 1, f"concurrency must be at least 1, got {self.concurrency}"),
            (self.max_tokens < 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (self.temperature <= 0, f"temperature must be above 0, or all prompts are one, got {self.temperature}"),
        )


DRAWING = DrawSettings()


@dataclass(kw_only=True, slots=True)
class PromptDraw:
    """Draws prompts into a JSONL file, continuing after those of an earlier run."""

    output: Path
    count: int  # Prompts that the file is to have
    settings: DrawSettings = DRAWING
    held_out: Sequence[str] = ()  # Texts that no prompt may repeat, see `PromptSieve`
    tell: Callable[[PromptDraw], None] = lambda _: None  # Called after each prompt, usable or not
    kept: int = 0  # Prompts in the file
    resumed: int = 0  # Those of earlier runs among them
    tokens: int = 0  # Tokens that were generated, refused prompts included
    refused: Counter[str] = field(default_factory=Counter[str])  # By reason
    _sieve: PromptSieve = field(init=False)
    _next: int = 0  # Number of the next prompt, from which its seed is derived

    def __post_init__(self) -> None:
        """Read the prompts of an earlier run. Raises DataError if the file is something else."""
        refuse((self.count < 1, f"count must be at least 1, got {self.count}"))
        self._sieve = PromptSieve(self.held_out)
        for number, text in read_lines(self.output, "drawn prompt", _read_drawn):
            self._next = max(self._next, number + 1)
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
        """Draw until there are enough prompts or `go_on` returns False; unfinished prompts are dropped then. Raises
        DataError if the model writes no usable prompt.
        """
        turn = UserTurn.of(llm.tokenizer)
        marks = special_marks(llm.tokenizer)
        prompt = {"prompt_token_ids": llm.encode(turn.begins, add_special_tokens=False)}
        waiting = dict[str, int]()
        with append_lines(self.output) as write:
            try:
                while self.kept < self.count and go_on():
                    while len(waiting) < self.settings.concurrency:
                        # Drafting does not pay at temperature 1 in a full batch.
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
        """Write a prompt to the file if it is usable."""
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
                f"of the first {TRIED} prompts that the model wrote none is usable ({reasons}): give files of prompts "
                "instead"
            )
        self.tell(self)
