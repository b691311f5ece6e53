"""Reads the prompts of ``forerun speedup``, splits them into those that are learned from and held-out ones, and lets
the model complete those that are learned from.

Which part a prompt belongs to follows from a digest of its text and from its category: the same prompt is held out in
every run, in whatever order a file holds it.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import DataError, first_line
from forerun.speedup.settings import SETTINGS, SpeedupRequest
from forerun.training.data.prepare import prepare
from forerun.training.data.records import BadRecords, Record, read_records
from forerun.training.data.regenerate import AnswerRun, Director, with_engine
from forerun.training.data.store import runs_in_circles
from forerun.training.features.store import find_loaded, target_hash
from forerun.types import SamplingParams
from forerun.writing import hash_json, write_file

if TYPE_CHECKING:
    from forerun.engine.llm import LLM


MIX_TRIAL = 16  # Of the built-in prompts are for trials beside drawn ones; the others are held out
PROMPT_TOKENS = 64  # Tokens of a plain text that are given to the model, which goes on with it
FEW = 50  # Held-out prompts below which a report warns that its intervals are wide
MOST_CATEGORIES = 12  # More, and the smallest ones are reported together
OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupPrompt:
    """One prompt of the model, in the form that ``forerun data`` reads."""

    digest: str
    category: str
    entry: dict[str, Any]
    """It has `messages`, `text`, or a server's own token ids with their completion (`answered`)."""

    @property
    def answered(self) -> bool:
        """Return whether the model has completed it already: what a server recorded."""
        return "token_ids" in self.entry

    @property
    def line(self) -> str:
        """Return the prompt as a line of JSON."""
        return json.dumps({"id": self.digest, "category": self.category, **self.entry}, ensure_ascii=False) + "\n"

    @classmethod
    def parse(cls, line: str) -> SpeedupPrompt:
        """Return what `line` holds."""
        entry = json.loads(line)
        return cls(digest=entry.pop("id"), category=entry.pop("category"), entry=entry)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Return the messages up to the first of a user; what comes behind it waits for a completion."""
        messages: list[dict[str, Any]] = self.entry.get("messages", [])
        first = next((index for index, one in enumerate(messages) if one["role"] == "user"), len(messages))
        return messages[: first + 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSplit:
    """The prompts of each part."""

    train: list[SpeedupPrompt]
    trial: list[SpeedupPrompt]
    """Free drafters are chosen on these, and a head is evaluated on them while it trains; it does not learn them."""
    held_out: list[SpeedupPrompt]
    """Only the last measurement asks these."""
    skipped: int = 0  # Entries of the files that could not be used


def read_prompts(files: Sequence[Path], *, template: bool) -> tuple[list[SpeedupPrompt], int]:
    """Return the different prompts of some files, in any form that ``forerun data prepare`` reads, and how many entries
    could not be used.

    Without a chat `template` the model goes on with the text of each question. DataError: nothing is usable.
    """
    bad, by_digest = BadRecords(skip=True), dict[str, SpeedupPrompt]()
    for path in files:
        for record in read_records(path, bad):
            entry = _entry(record, template=template)
            if entry is None:
                bad.report(f"{record.where}: nobody asks anything")
                continue
            content = entry.get("messages") or entry.get("text") or entry.get("prompt_token_ids")
            digest = hash_json(content)[:16]
            by_digest.setdefault(digest, SpeedupPrompt(digest=digest, category=record.category or "all", entry=entry))
    if not by_digest:
        reason = f": {bad.examples[0]}" if bad.examples else ""
        raise DataError(f"{', '.join(map(str, files))}: no entry could be used as a prompt{reason}")
    return _with_few_categories(list(by_digest.values())), bad.count


def _entry(record: Record, *, template: bool) -> dict[str, Any] | None:
    """Return the prompt of a record, its completions left out unless a server wrote them down; None if it has none."""
    if record.tokens:
        prompt_tokens = record.prompt_tokens
        ids = {
            "prompt_token_ids": list(record.tokens[:prompt_tokens]),
            "token_ids": list(record.tokens[prompt_tokens:]),
        }
        return {**ids, "vocabulary": record.vocabulary}
    if not record.messages:
        return {"text": record.text}
    prompt = [message for message in record.messages if message["role"] in ("system", "user")]
    if not any(message["role"] == "user" for message in prompt):
        return None
    if not template:
        return {"text": "\n\n".join(str(message["content"]) for message in prompt[:2])}
    tools = {"tools": [dict(tool) for tool in record.tools]} if record.tools else {}
    return {"messages": prompt, **tools}


def _with_few_categories(prompts: list[SpeedupPrompt]) -> list[SpeedupPrompt]:
    """Return the prompts with all but the largest categories taken together."""
    counts = Counter(prompt.category for prompt in prompts)
    if len(counts) <= MOST_CATEGORIES:
        return prompts
    largest = {name for name, _ in counts.most_common(MOST_CATEGORIES - 1)}
    return [
        prompt
        if prompt.category in largest
        else SpeedupPrompt(digest=prompt.digest, category=OTHER, entry=prompt.entry)
        for prompt in prompts
    ]


def split_prompts(prompts: Sequence[SpeedupPrompt], *, skipped: int = 0) -> PromptSplit:
    """Split prompts by digest, the same shares of each category; DataError for fewer than three.

    A fifth is held out, at least 50 where that leaves half, and at most 200; a tenth is for trials, at most 32.
    """
    if len(prompts) < 3:
        raise DataError(
            f"{len(prompts)} different prompts are too few: some are held out, and some are for trials; give at least "
            "3, better 500 (--prompts FILE)"
        )
    total = len(prompts)
    held_out = min(200, max(total // 5, min(FEW, total // 2)))
    trial = min(32, max(total // 10, 1))
    parts: dict[str, list[SpeedupPrompt]] = {"held_out": [], "trial": [], "train": []}
    for number, prompt in enumerate(take_turns(prompts)):
        part = "held_out" if number < held_out else "trial" if number < held_out + trial else "train"
        parts[part].append(prompt)
    return PromptSplit(**parts, skipped=skipped)


def split_drawn(drawn: Sequence[SpeedupPrompt], written: Sequence[SpeedupPrompt]) -> PromptSplit:
    """Split drawn prompts, and add the written ones to those for trials and to those held out: they show what a head
    that has learned from drawn prompts alone is worth elsewhere.
    """
    split, turns = split_prompts(drawn), take_turns(written)
    split.trial.extend(turns[:MIX_TRIAL])
    split.held_out.extend(turns[MIX_TRIAL:])
    return split


def take_turns(prompts: Iterable[SpeedupPrompt]) -> list[SpeedupPrompt]:
    """Return the prompts by digest, categories taking turns in proportion to their sizes: any first part of the list
    has about the shares of the whole.
    """
    by_category = defaultdict[str, list[SpeedupPrompt]](list)
    for prompt in sorted(prompts, key=lambda one: one.digest):
        by_category[prompt.category].append(prompt)
    placed = [
        ((index + 0.5) / len(group), category, prompt)
        for category, group in by_category.items()
        for index, prompt in enumerate(group)
    ]
    return [prompt for _, _, prompt in sorted(placed, key=lambda one: one[:2])]


MANY = 0.1  # Share of empty or circular completions from which they are reported
MOST = 0.5  # Share from which a head is not trained on them


def answer_prompts(
    llm: LLM,
    parts: Mapping[str, Sequence[SpeedupPrompt]],
    folder: Path,
    request: SpeedupRequest,
    *,
    seconds: float,
    last_s: float = 0.0,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Have the prompts of the parts ``trial`` and ``train`` completed, as many as the time allows, but at least one row
    of each, and return counts. What an earlier run completed stays; what a server recorded is complete already.

    Half of the training prompts are answered at each of `SpeedupSettings.temperatures`; those for trials, which come
    first, take a small share of the time. None begins when fewer than `last_s` are left, the seconds of a completion.
    """
    began, total = time.monotonic(), 0
    deadline = began + seconds
    for name, part in parts.items():
        recorded = [prompt for prompt in part if prompt.answered]
        if recorded:
            write_file(folder / f"{name}-recorded.jsonl", "".join(prompt.line for prompt in recorded))
            total += len(recorded)
        waiting = [prompt for prompt in part if not prompt.answered]
        temperatures = SETTINGS.temperatures if name == "train" else SETTINGS.temperatures[:1]
        for index, temperature in enumerate(temperatures):
            chosen = waiting[index :: len(temperatures)]
            if not chosen:
                continue
            questions = folder / "asked" / f"{name}-{temperature:g}.jsonl"
            write_file(questions, "".join(prompt.line for prompt in chosen))
            now = time.monotonic()
            share = SETTINGS.trial_answers_share if name == "trial" else 1 / (len(temperatures) - index)
            until = now + share * max(0.0, deadline - now)
            run = _ask(llm, questions, folder / f"{name}-{temperature:g}.jsonl", request, temperature)
            run.tell = _progress(tell, total, until)
            # What has begun is finished, so that long completions are as likely as short ones.
            with_engine(run, llm, concurrency=SETTINGS.rows, go_on=_until(until - last_s, SETTINGS.rows))
            total += run.resumed + run.written
    return {"answered": total}


def _ask(llm: LLM, questions: Path, output: Path, request: SpeedupRequest, temperature: float) -> AnswerRun:
    params = SamplingParams(max_tokens=request.max_tokens, temperature=temperature, seed=1)
    name, weights = Path(request.model).name, target_hash(find_loaded(request.model))[:16]
    director = Director(tokenizer=llm.tokenizer, prompt_tokens=PROMPT_TOKENS, params=params, by=name, weights=weights)
    return AnswerRun(questions, output, director, skip_bad=True)


def _until(deadline: float, fewest: int) -> Callable[[], bool]:
    """Return what says whether another completion may begin: the fewest in any case."""
    asked = itertools.count()
    return lambda: next(asked) < fewest or time.monotonic() <= deadline


def _progress(tell: Callable[[str], None], before: int, until: float) -> Callable[[AnswerRun], None]:
    def said(run: AnswerRun) -> None:
        left = max(0.0, until - time.monotonic())
        tell(f"{before + run.done:,} completions, at most {left / 60:.1f} min more at this temperature")

    return said


def prepare_answers(llm: LLM, folder: Path, prepared: Path, *, name: str) -> dict[str, Any]:
    """Tokenize the completions for training, and say what is wrong with them.

    ``reason`` says why no head can be trained on them; empty where one can.
    """
    assert llm.tokenizer is not None, "a named model has a tokenizer"
    shutil.rmtree(prepared, ignore_errors=True)  # Of an earlier budget
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    empty = sum("messages" in line and not str(line["messages"][-1]["content"]).strip() for line in lines)
    total, circles, counts = len(lines), 0, dict[str, Any](tokens=0, reason="")
    try:
        for part in ("train", "trial"):
            files = [path for path in sorted(folder.glob(f"{part}-*.jsonl")) if path.stat().st_size]
            if not files:
                raise DataError(f"the model completed none of the {part} prompts; give others (--prompts)")
            how: dict[str, Any] = {"max_length": SETTINGS.longest, "skip_bad": True, "name": name}
            data = prepare(files, llm.tokenizer, prepared / part, **how).data
            documents = [data.document(index) for index in range(len(data))]
            circles += sum(runs_in_circles(tokens[mask != 0]) for tokens, mask in documents)
            if part == "train":
                counts["tokens"] = data.manifest["counts"]["counted_tokens"]
    except DataError as error:
        counts["reason"] = f"there is nothing that a head could learn: {first_line(error)}"
    if total and max(empty, circles) > MOST * total:
        what = "are empty" if empty > circles else "go in circles"
        counts["reason"] = f"{max(empty, circles) / total:.0%} of the completions {what}: no head is trained on them"
    return {**counts, "empty": empty, "circles": circles, "notes": _notes(empty, circles, total)}


def _notes(empty: int, circles: int, total: int) -> list[str]:
    """Say what empty and circular completions mean for the figures."""
    notes = list[str]()
    if total and empty >= MANY * total:
        notes.append(
            f"{empty / total:.0%} of the completions are empty: the model has nothing to say to such prompts, and "
            "nothing that could become faster"
        )
    if total and circles >= MANY * total:
        notes.append(
            f"{circles / total:.0%} of the completions end in a circle, the same words again and again: what copies is "
            "flattered there, and figures at T = 0 promise more than a reader of completions would gain"
        )
    return notes
