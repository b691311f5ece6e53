"""``forerun certify MODEL --drafter X`` proves on the user's own model that speculation changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.padding import Padding
from rich.text import Text

from forerun.certify.plan import CertifyPlan
from forerun.cli import console, session
from forerun.cli.options import LOADING, SPECULATION, Json, Model, SpeculationOptions, TargetOptions, read_text
from forerun.errors import DataError, refuse

if TYPE_CHECKING:
    from forerun.certify.checks import Check, Report


_ROWS = 32  # Answers at once: the thousands of short ones are then drawn in a minute or two


def certify(
    model: Model,
    /,
    *,
    prompt_file: Path | None = None,
    temperature: Annotated[tuple[float, ...], Parameter(negative="")] = (0.0, 0.7),
    prompts: int = 6,
    max_tokens: int = 96,
    detect: float = 0.2,
    json: Json = False,
    speculation: SpeculationOptions = SPECULATION,
    loading: TargetOptions = LOADING,
) -> int:
    """Prove on your own model that speculation changes nothing. Exit code 1 if a check fails.

    The model runs in float32 where --dtype names no other: 16 bits round, and so excuse differences and leave out what
    cuts tokens off.

    Parameters
    ----------
    prompt_file
        File with one prompt per line; by default held-out source files that ship with forerun.
    temperature
        0 for the greedy checks, any other for a chi-square test at that temperature; may be repeated.
    prompts
        Prompts of the greedy checks.
    max_tokens
        Tokens of each greedy answer.
    detect
        Total variation from the target's distribution that each chi-square test detects with a probability of 99 %. The
        number of answers follows from it: half of it takes four times as many.
    """
    config = speculation.config()
    refuse(
        (config is None, "certify needs a drafter to examine; add --drafter NAME (see: forerun drafters)"),
        (prompts < 1 or max_tokens < 1, "--prompts and --max-tokens must be at least 1"),
        (not 0 < detect < 1, f"--detect is a total variation between 0 and 1, got {detect:g}"),
    )
    texts = _texts(prompt_file)

    plan = CertifyPlan(prompts=prompts, max_tokens=max_tokens, detect=detect, temperatures=tuple(temperature))
    if loading.dtype == "auto":  # Rounding is more than --detect, and moves the border of what top-k and others cut off
        loading = replace(loading, dtype="float32")
    llm = session.load(model, loading, config, longest=plan.longest, max_num_seqs=_ROWS)
    from forerun.certify.checks import certify as examine

    with console.telling("certifying") as tell:
        report = examine(llm, texts, plan, tell)
    if json:
        console.write_json(report.record())
    else:
        show_report(report)
    return 0 if report.passed else 1


def _texts(prompt_file: Path | None) -> list[str]:
    if prompt_file is None:
        from forerun import demo

        texts = [prompt.text for prompt in demo.prompts()]
        if not texts:
            raise DataError("the shipped prompts are missing; give --prompt-file FILE with one prompt per line")
        return texts
    return [line for line in read_text(prompt_file, "prompts").splitlines() if line.strip()]


def show_checks(checks: Sequence[Check]) -> None:
    """Print each check with its evidence on stdout."""
    for check in checks:
        mark = Text("pass  ", "green") if check.passed else Text("FAIL  ", "bold red")
        console.out().print(mark.append(check.name, "bold"))
        console.out().print(Padding(Text(check.summary), (0, 0, 0, 6)), soft_wrap=False)


def show_report(report: Report) -> None:
    """Print the checks and a verdict on stdout."""
    out = console.out()
    show_checks(report.checks)
    failed = sum(not check.passed for check in report.checks)
    what = f"{report.drafter} on {report.model}, {report.dtype} on {report.device}"
    verdict = Text("certified: ", "bold green") if report.passed else Text("not certified: ", "bold red")
    out.print(verdict.append(what if report.passed else f"{failed} of {len(report.checks)} checks failed; {what}", ""))
