"""This module lets the model complete the prompts that a head learns from, and says whether the completions are any
good.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import DataError, first_line
from forerun.speedup.prompts import PROMPT_TOKENS, SpeedupPrompt
from forerun.speedup.settings import SETTINGS, SpeedupRequest
from forerun.training.data.prepare import prepare
from forerun.training.data.records import Record
from forerun.training.data.regenerate import AnswerRun, Director, with_engine
from forerun.training.data.store import runs_in_circles
from forerun.types import SamplingParams
from forerun.writing import write_file

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

MANY = 0.1  # Share of empty or circular completions from which they are reported
MOST = 0.5  # Share from which a head is not trained on them


class _UntilDeadline(list[Record]):
    """`_UntilDeadline` are records that nothing begins to complete after a deadline; what has begun is finished, so
    long completions are as likely as short ones.
    """

    deadline: float

    def __iter__(self) -> Iterator[Record]:
        for record in list(super().__iter__()):
            if time.monotonic() > self.deadline:
                return
            yield record


def answer_prompts(
    llm: LLM,
    parts: Mapping[str, Sequence[SpeedupPrompt]],
    folder: Path,
    request: SpeedupRequest,
    *,
    seconds: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Have the prompts of the parts ``trial`` and ``train`` completed, as many of the latter as the time allows, and
    return counts. What an earlier run completed stays; what a server recorded is complete already.

    Half of the training prompts are answered at each of `SpeedupSettings.temperatures`.
    """
    deadline, total = time.monotonic() + seconds, 0
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
            # The time is shared out evenly; the trial's prompts, which come first, are few.
            until = time.monotonic() + (deadline - time.monotonic()) / (len(temperatures) - index)
            run = _ask(llm, questions, folder / f"{name}-{temperature:g}.jsonl", request, temperature)
            run.records = _UntilDeadline(run.records)
            run.records.deadline = until
            run.tell = _progress(tell, total, until)
            if run.records:
                with_engine(run, llm, concurrency=SETTINGS.rows)
            total += run.resumed + run.written
    return {"answered": total}


def _ask(llm: LLM, questions: Path, output: Path, request: SpeedupRequest, temperature: float) -> AnswerRun:
    params = SamplingParams(max_tokens=request.max_tokens, temperature=temperature, seed=1)
    name = Path(request.model).name
    director = Director(tokenizer=llm.tokenizer, prompt_tokens=PROMPT_TOKENS, params=params, by=name)
    return AnswerRun(questions, output, director, skip_bad=True)


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
    total, circles, found = len(lines), 0, dict[str, Any](tokens=0, reason="")
    try:
        for part in ("train", "trial"):
            files = [path for path in sorted(folder.glob(f"{part}-*.jsonl")) if path.stat().st_size]
            how: dict[str, Any] = {"max_length": SETTINGS.longest, "skip_bad": True, "name": name}
            data = prepare(files, llm.tokenizer, prepared / part, **how).data
            documents = [data.document(index) for index in range(len(data))]
            circles += sum(runs_in_circles(tokens[mask != 0]) for tokens, mask in documents)
            if part == "train":
                found["tokens"] = data.manifest["counts"]["counted_tokens"]
    except DataError as error:
        found["reason"] = f"there is nothing that a head could learn: {first_line(error)}"
    if total and max(empty, circles) > MOST * total:
        what = "are empty" if empty > circles else "go in circles"
        found["reason"] = f"{max(empty, circles) / total:.0%} of the completions {what}: no head is trained on them"
    return {**found, "empty": empty, "circles": circles, "notes": _notes(empty, circles, total)}


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
