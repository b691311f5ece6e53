"""``forerun certify MODEL --drafter X`` tests on the user's own model that speculation changes
nothing; ``forerun certify --server URL`` tests any server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.padding import Padding
from rich.text import Text

from forerun.certify import CertifyPlan, Check, Report
from forerun.cli import console, session
from forerun.cli.options import SPECULATION, CertifiedOptions, Flag, Json, SpeculationOptions
from forerun.errors import DataError, refuse
from forerun.plan.prompts import UserPrompt, read_prompts

_ROWS = 32  # Completions at once: the thousands of short ones are then drawn in a minute or two
_TEMPERATURES = (0.0, 0.7)
_MODEL = Parameter(
    help="Directory or hub id of a Hugging Face causal LM, or a GGUF file; with --server the model's name there."
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """The options that say which servers are examined, in place of a model."""

    server: str | None = None
    """Address of an OpenAI-compatible server to examine in place of a model: forerun's, vLLM's, SGLang's,
    llama.cpp's, ...: http://localhost:8000. --dtype says how near a tie is there, bfloat16 if not given."""
    against: str | None = None
    """Address of a second server of the same model, without speculation for example, whose completions are compared."""
    api_key: str | None = None
    """Bearer token of the servers; OPENAI_API_KEY if not given."""


SERVERS = ServerOptions()
CERTIFIED = CertifiedOptions()


def certify(
    model: Annotated[str | None, _MODEL] = None,
    /,
    *,
    prompt_file: Path | None = None,
    temperature: tuple[float, ...] = (),
    prompts: int = 6,
    max_tokens: int = 96,
    detect: float = 0.2,
    quick: Flag = False,
    json: Json = False,
    servers: ServerOptions = SERVERS,
    speculation: SpeculationOptions = SPECULATION,
    loading: CertifiedOptions = CERTIFIED,
) -> int:
    """Test on your own model, or on a server, that speculation changes nothing. Exit code 1 if a check fails.

    The verification rules are checked exhaustively: on small vocabularies, every outcome is enumerated, and the emitted
    distribution must equal the target's to 1e-12. On your model, greedy text is compared token by token. Sampled text
    is compared by chi-square tests, each of which detects a total variation of --detect with a probability of 99 %.

    The model runs in float32 where --dtype names no other: 16 bits round, and so excuse differences and leave out what
    cuts tokens off. A GGUF file runs on llama.cpp as it is, and is compared with llama.cpp's own passes. A server gets
    greedy requests and requests at temperature 1, by 1 and by 16 clients at a time; a check that fails prints the
    smallest request found that shows the fault.

    Parameters
    ----------
    prompt_file
        One prompt a line, or records (.jsonl, .json, .parquet) with `prompt`, `messages` or `turns`, which are
        continued as text; by default held-out source files that ship with forerun.
    temperature
        0 for the greedy checks, any other for a chi-square test at that temperature. By default 0 and 0.7.
    prompts
        Prompts of the greedy checks.
    max_tokens
        Tokens of each greedy completion.
    detect
        Total variation from the target's distribution that each chi-square test detects with a probability of 99 %. The
        number of completions follows from it: half of it takes four times as many.
    quick
        A first look in a minute or two: at most 2 greedy completions of 32 tokens, and two chi-square tests at the
        first temperature above 0, which detect a total variation of 0.6 with a probability of 99 %. Left out are the
        parameters that cut tokens off or penalise them, grammars, and drafts that are sampled.
    """
    config = speculation.config()
    refuse(
        (
            model is None and servers.server is None,
            "certify needs a model, or a server: forerun certify MODEL --drafter NAME, forerun certify --server URL",
        ),
        (servers.server is None and servers.against is not None, "--against compares with --server, which is missing"),
        (
            servers.server is not None and (config is not None or bool(temperature)),
            "a server drafts and samples in its own way: leave --drafter, its options and --temperature out",
        ),
        (servers.server is not None and quick, "--quick examines a model: leave it out for a server"),
        (
            servers.server is None and config is None,
            "certify needs a drafter to examine; add --drafter NAME (see: forerun drafters)",
        ),
        (prompts < 1 or max_tokens < 1, "--prompts and --max-tokens must be at least 1"),
        (not 0 < detect < 1, f"--detect is a total variation between 0 and 1, got {detect:g}"),
    )
    if quick:
        prompts, max_tokens, detect = min(prompts, 2), min(max_tokens, 32), max(detect, 0.6)
    texts = _texts(prompt_file)
    temperatures = temperature or _TEMPERATURES
    ways = 1 if quick else None
    plan = CertifyPlan(prompts=prompts, max_tokens=max_tokens, detect=detect, temperatures=temperatures, ways=ways)
    if servers.server is None:
        assert model is not None
        session.check(model, loading, config, max_num_seqs=_ROWS)  # Before anything large is imported
        from forerun.control.config import SpeculativeConfig, reads_layers
        from forerun.model.back_ends import file_for_llama_cpp

        if reads_layers(SpeculativeConfig.parse(config)):
            loading = loading.handing_out_layers()
        file = file_for_llama_cpp(model, backend=loading.backend, dtype=loading.dtype, device=loading.device)
        if loading.dtype == "auto" and file is None:
            loading = replace(loading, dtype="float32")  # Rounding moves the border of what top-k and others cut
            console.warn(
                "certifying in float32, where no difference is excused; --dtype bfloat16 certifies what serve runs"
            )
        llm = session.load(model, loading, config, longest=plan.longest, max_num_seqs=_ROWS)
        from forerun.certify.checks import certify as examine

        with console.telling_news("certifying") as (tell, news):
            report = examine(llm, texts, plan, tell, news=news)
    else:
        report = _examine_server(model, servers, texts, plan, loading.dtype)
    if json:
        console.write_json(report.record())
    else:
        show_report(report)
    return 0 if report.passed else 1


def _examine_server(
    model: str | None, servers: ServerOptions, texts: Sequence[str], plan: CertifyPlan, dtype: str
) -> Report:
    from forerun.certify.served import serving_model
    from forerun.certify.server import certify_server

    key = servers.api_key
    with ExitStack() as opened, console.telling_news("certifying") as (tell, news):
        served = opened.enter_context(serving_model(servers.server or "", model=model, api_key=key))
        against = None
        if servers.against is not None:
            against = opened.enter_context(serving_model(servers.against, api_key=key))
        return certify_server(served, texts, plan, against=against, dtype=dtype, progress=tell, news=news)


def _texts(prompt_file: Path | None) -> list[str]:
    if prompt_file is None:
        from forerun import demo

        texts = [prompt.text for prompt in demo.prompts()]
        if not texts:
            raise DataError("the shipped prompts are missing; give --prompt-file FILE with one prompt per line")
        return texts
    return [_text(prompt, prompt_file) for prompt in read_prompts(prompt_file)]


def _text(prompt: UserPrompt, file: Path) -> str:
    """Return a prompt as the text that is continued: of a conversation what its messages say."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        raise DataError(f"{file} holds token ids, and certify reads texts: give records with 'prompt' or 'messages'")
    return "\n\n".join(str(message["content"]) for message in prompt)


def show_checks(checks: Sequence[Check]) -> None:
    """Print each check with its evidence on stdout, and the commands that show a fault."""
    for check in checks:
        mark = Text("pass  ", "green") if check.passed else Text("FAIL  ", "bold red")
        if check.left_out:
            mark = Text("none  ", "yellow")
        console.out().print(mark.append(check.name, "bold"))
        console.out().print(Padding(Text(check.summary), (0, 0, 0, 6)), soft_wrap=False)
        for line in [*str(check.figures.get("traceback", "")).splitlines(), *check.shown_by]:
            console.out().print(Text(line, "dim"))


def show_report(report: Report) -> None:
    """Print the checks and a verdict on stdout."""
    out = console.out()
    show_checks(report.checks)
    failed = sum(not check.passed for check in report.checks)
    missing = sum(check.left_out for check in report.checks)
    what = f"{report.drafter} on {report.model}, {report.runs_as}"
    what += f"; {missing} checks were left out" if missing else ""
    if report.passed:
        verdict = Text("quick look passed: " if report.quick else "certified: ", "bold green")
        out.print(verdict.append(f"{what}; {_seen(report)}" if report.quick else what, ""))
        return
    verdict = Text("not certified: ", "bold red")
    out.print(verdict.append(f"{failed} of {len(report.checks)} checks failed; {what}", ""))


def _seen(report: Report) -> str:
    """Return what a quick look could have seen."""
    figures = [check.figures for check in report.checks]
    seen = [f"compared {each['prompts']} greedy completions" for each in figures if "bugs" in each]
    apart = [each["detects_total_variation"] for each in figures if "detects_total_variation" in each]
    seen += [f"would have seen sampled text at a total variation of {max(apart):.2g} or more"] if apart else []
    return f"it {' and '.join(seen)}, nothing finer; certify without --quick"
