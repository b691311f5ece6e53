"""This module gives a chat model real prompts, plainly and speculatively side by side, for
``forerun demo``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from forerun.cli import console
from forerun.demo import Question
from forerun.types import OutputToken, RequestOutput, SamplingParams, tokens_per_pass

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.certify.reference import Difference
    from forerun.speedup.compare import SpeedupArm

ASKED_CHARACTERS = 360  # Characters of a question that are shown
WARM_UP_TOKENS = 32  # Tokens of the warm-up's completions
WIDE = 78  # Least width of a terminal for the summary with both speeds, which stand above it, too
ARMS = ("plain", "speculative")


def both_arms() -> tuple[SpeedupArm, ...]:
    """Return the two ways to decode that ``forerun demo`` compares: plainly, and as the engine is configured."""
    from forerun.speedup.compare import SpeedupArm

    return tuple(SpeedupArm(name=name, speculative=None if name == "speculative" else False) for name in ARMS)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredPair:
    """One prompt at one temperature, completed both ways."""

    question: Question
    temperature: float
    plain: RequestOutput
    speculative: RequestOutput
    parted: Difference | None  # Where the two completions part; None where they are the same

    @property
    def wrong(self) -> bool:
        """Return whether a greedy completion differs by more than a numeric tie."""
        return self.temperature == 0 and self.parted is not None and not self.parted.tie

    def record(self) -> dict[str, Any]:
        """Return the completion as ``demo --json`` prints it."""
        return {
            "question": self.question.name,
            "temperature": self.temperature,
            "identical": self.parted is None,
            "numeric_tie": None if self.parted is None else self.parted.tie,
            "tokens": len(self.speculative.outputs[0].token_ids),
            **figures([self]),
            "text": self.speculative.outputs[0].text,
        }


def figures(answers: Sequence[AnsweredPair]) -> dict[str, float]:
    """Return tokens per second of both arms, their ratio, and tokens per pass, over some completions."""
    speeds = dict[str, float]()
    for arm in ARMS:  # The last one is speculative
        outputs = [getattr(answer, arm) for answer in answers]
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        passes = sum(output.outputs[0].speculation.num_passes for output in outputs)
        speeds[arm] = tokens / (sum(output.seconds for output in outputs) or 1e-9)
    return {
        **{f"{arm}_tokens_per_second": round(speed, 2) for arm, speed in speeds.items()},
        "speedup": round(speeds["speculative"] / (speeds["plain"] or 1e-9), 3),
        "tokens_per_pass": round(tokens_per_pass(tokens, passes), 3),
    }


def ask_all(
    llm: LLM, questions: Sequence[Question], params: Sequence[SamplingParams], *, show: bool
) -> Iterator[AnsweredPair]:
    """Ask every question with each of `params`, first plainly and then speculatively; with `show` on stdout."""
    warm_up(llm, questions[0], params[0])
    for question in questions:
        if show:
            _introduce(question)
        for settings in params:
            yield _ask(llm, question, settings, show=show)


def warm_up(llm: LLM, question: Question, params: SamplingParams) -> None:
    """Decode a few tokens in both ways: the first passes of a process pay for what is made once."""
    from forerun.speedup.compare import ask_arms

    short = replace(params, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    ask_arms(llm, both_arms(), _word_question(llm, question, short), short)


def _word_question(llm: LLM, question: Question, params: SamplingParams) -> dict[str, Any]:
    """Return the question as the model wants to read it; a model without a chat template goes on
    with its text.
    """
    if llm.has_chat_template:
        return llm.chat_prompt(question.messages)
    return llm.read_prompt(question.text, params)


def _ask(llm: LLM, question: Question, params: SamplingParams, *, show: bool) -> AnsweredPair:
    from forerun.speedup.compare import find_parting

    prompt = _word_question(llm, question, params)
    runs = dict[str, RequestOutput]()
    temperature = float(params.temperature or 0.0)
    with _picture(temperature, show=show) as picture:
        for arm in both_arms():
            for chunk in llm.stream(prompt, params, **arm.options()):
                picture.add(arm.name, chunk.tokens)
                if chunk.output is not None:
                    runs[arm.name] = chunk.output
            picture.done(arm.name, runs[arm.name])
    parted = find_parting(llm, runs["plain"], runs["speculative"])
    return AnsweredPair(question=question, temperature=temperature, parted=parted, **runs)


class _Picture:
    """Shows two columns that fill as the tokens come."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._out = console.out()
        self._texts = {arm: Text() for arm in ARMS}
        self._feet = {arm: Text("...", "dim") for arm in ARMS}

    def add(self, arm: str, tokens: Iterable[OutputToken]) -> None:
        """Show tokens; those of speculation in the colours of their sources."""
        from forerun.cli.session import colour_tokens

        if arm == "plain":
            self._texts[arm].append("".join(token.text for token in tokens))
        else:
            self._texts[arm].append_text(colour_tokens(tokens, self._out))

    def done(self, arm: str, run: RequestOutput) -> None:
        """Show the time and passes of a completion."""
        tokens, passes = len(run.outputs[0].token_ids), run.outputs[0].speculation.num_passes
        speed = tokens / run.seconds if run.seconds else 0.0
        said = f"{tokens} tokens, {passes} passes: "  # With the speed one line of half a terminal
        self._feet[arm] = Text(said, "dim").append(f"{speed:.1f} tokens/s", "default")

    def __rich__(self) -> Table:
        titles = (f"{arm}, T = {self._temperature:g}" for arm in ARMS)
        columns = (Column(title, ratio=1, header_style="bold", footer_style="default") for title in titles)
        table = Table(*columns, box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
        table.add_row(*self._texts.values())
        for column, foot in zip(table.columns, self._feet.values(), strict=True):
            column.footer = foot
        return table


@contextmanager
def _picture(temperature: float, *, show: bool) -> Iterator[_Picture]:
    """Yield the columns, which grow in a terminal and are printed once elsewhere; show nothing
    unless `show`.
    """
    picture = _Picture(temperature)
    out = console.out()
    if show and out.is_terminal and not out.record:
        with Live(picture, console=out, refresh_per_second=8):
            yield picture
    else:
        yield picture
        if show:
            out.print(picture)
    if show:
        out.print()


def _introduce(question: Question) -> None:
    out = console.out()
    text = question.text
    if len(text) > ASKED_CHARACTERS:
        text = text[:ASKED_CHARACTERS].rpartition(" ")[0] + " ..."
    out.rule(Text(f" {question.title} ", "bold"), align="left", style="dim")
    out.print(Padding(Text(text, "dim"), (0, 0, 1, 0)), soft_wrap=False)


def summary(answers: Sequence[AnsweredPair], note: str) -> Group:
    """Return a table of all completions, the speed-up of all together, and whether anything differs. Below `WIDE`
    columns the table leaves both arms' speeds out: a heading that is cut off says nothing.
    """
    arms = ("plain\ntokens/s", "speculative\ntokens/s") if console.out().width >= WIDE else ()
    table = console.table("", "T", *arms, "speed-up", "tokens\nper pass", "same text", numbers_from=1)
    first = len(ARMS) - len(arms)
    for answer in answers:
        table.add_row(answer.question.title, f"{answer.temperature:g}", *_cells([answer])[first:], _verdict(answer))
    together = figures(answers)
    table.add_section()
    table.add_row(Text("all", "bold"), "", *_cells(answers)[first:], "")
    verdict = Text("speed-up: ", "bold")
    verdict.append(f"{together['speedup']:.2f} x", "bold green" if together["speedup"] > 1 else "bold yellow")
    wrong, tied = [answer for answer in answers if answer.wrong], [a for a in answers if a.parted is not None]
    verdict.append("   identical: ", "bold")
    if wrong:
        verdict.append("no", "bold red").append(", and no numeric tie explains it: please report this")
    elif tied:
        verdict.append(f"{len(answers) - len(tied)} of {len(answers)}", "bold yellow")
        verdict.append(", the others part at a numeric tie, or where rounding moved a draw")
    else:
        verdict.append("yes", "bold green").append(", token for token")
    return Group(table, verdict, Text(note, "dim"))


def _cells(answers: Sequence[AnsweredPair]) -> list[str]:
    found = figures(answers)
    speeds = (f"{found[f'{arm}_tokens_per_second']:.1f}" for arm in ARMS)
    return [*speeds, f"{found['speedup']:.2f} x", f"{found['tokens_per_pass']:.2f}"]


def _verdict(answer: AnsweredPair) -> Text:
    if answer.parted is None:
        return Text("yes", "green")
    return Text("no", "bold red") if answer.wrong else Text(f"up to {answer.parted.position}", "yellow")
