"""The command line has one thin file per verb, which is imported when the verb is used. Importing
this imports no torch.

Data goes to stdout, logs and statistics to stderr. Exit codes: 0 done, 1 a check failed, 2 bad usage or bad input,
130 interrupted. ``FORERUN_DEBUG=1`` shows tracebacks.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from forerun.errors import ArgumentError, ForerunError
from forerun.other_engines import OPTIONS, explain_unknown

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection, CycloptsError
    from cyclopts.help import HelpEntry
    from cyclopts.help.specs import ColumnSpec
    from rich.console import Console, ConsoleOptions


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in what ``--config FILE`` says and neither flags nor environment variables do; this is
    cyclopts' ``App.config``. Keys are the flags' names, with or without dashes, in YAML (so JSON is
    understood, too) or, with that suffix, TOML.
    """
    named = next((argument for argument in arguments if "--config" in argument.names and argument.tokens), None)
    if named is None:
        return
    from cyclopts.config import Dict

    path = named.tokens[0].value
    keys = {str(key).lstrip("-").replace("_", "-"): value for key, value in _read(path).items() if value is not None}
    if "config" in keys:
        raise ArgumentError(f"{path} names another file under 'config'; one file is read")
    flags = [name for argument in arguments for name in argument.names]
    for key in keys:
        if f"--{key}" not in flags and f"-{key}" not in flags and not key.startswith("no-"):
            raise ArgumentError(f"{path}: {explain_unknown(f'--{key}', flags, ' '.join(commands))}")
    # A mapping becomes JSON, which such flags take (--speculative-config).
    options = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in keys.items()}
    Dict(options, source=path, use_commands_as_keys=False)(app, commands, arguments)


def keep_model_out_of_lists(_app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse a list of words (``serve --api-key KEY MODEL``) that may have taken MODEL, which then is missing. A verb
    with a default would start with that model and one more key; this is cyclopts' ``App.config``, too.
    """
    named = [one for one in arguments if one.index == 0 or (one.index is not None and one.required)]
    missing = next((one.name.lstrip("-").upper() for one in named if not one.tokens), None)
    if missing is None:
        return
    for option in arguments:
        words = option.index is None and option.hint in (tuple[str, ...], tuple[Path, ...])
        if words and any(token.index for token in option.tokens if token.source == "cli"):
            raise ArgumentError(
                f"{option.name} takes all words that follow it, and {missing} is missing: name it first, "
                f"forerun {' '.join(commands)} {missing} {option.name} ..."
            )


def keep_letters_together(_app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse another engine's option of several letters (llama.cpp's ``-ngl``) that was taken for one of a letter and
    its value; this is cyclopts' ``App.config``, too.
    """
    flags = [name for argument in arguments for name in argument.names]
    for token in [token for argument in arguments for token in argument.tokens if token.source == "cli"]:
        if (
            token.keyword
            and not token.keyword.startswith("--")
            and (written := token.keyword + token.value)[1:] in OPTIONS
        ):
            raise ArgumentError(explain_unknown(written, flags, " ".join(commands)))


def _read(path: str) -> dict[str, Any]:
    import tomllib

    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        options = tomllib.loads(text) if path.endswith(".toml") else yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise ArgumentError(f"cannot read the options in {path}: {where}{error.problem}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ArgumentError(f"cannot read the options in {path}: {error}") from error
    if not isinstance(options, dict):
        raise ArgumentError(f"{path} must hold options, 'name: value' a line, got {type(options).__name__}")
    return options


VERBS = {
    "demo": "See a model complete the same prompts twice, plainly and speculatively.",
    "generate": "Complete one prompt, as a chat message where the model has a chat template.",
    "chat": "Talk to a model.",
    "serve": "Serve a model behind OpenAI's API.",
    "bench": "Measure any OpenAI-compatible server under load.",
    "certify": "Test on your own model, or on a server, that speculation changes nothing.",
    "speedup": "Make a model faster, and say honestly how much: one command.",
    "data": "Prepare training data, or let the target write it.",
    "train": "Train a draft head for your own model.",
    "tune": "Find settings for a model by measuring it.",
    "datastore": "Make a corpus searchable for the drafter `rest`.",
    "features": "Store the target's hidden states for prepared data.",
    "heads": "List public heads for a target.",
    "drafters": "List what there is to draft with, or check a drafter of your own.",
    "plan": "Say what speculation can bring, before anything is trained or bought.",
    "calibrate": "Measure what passes of a model cost on this machine.",
    "export": "Write a draft head as a serving engine reads it.",
    "deploy": "Write what starts the same drafter on vLLM, SGLang, TensorRT-LLM, llama.cpp or Dynamo.",
    "doctor": "Say what this machine offers, or what each serving engine does with a draft head.",
}
"""These are all verbs with their lines in ``forerun --help``; ``forerun.cli.<verb>:<verb>`` is
imported when called.
"""

_VERBS_ELSEWHERE = {
    **dict.fromkeys(("run", "talk"), "chat"),
    **dict.fromkeys(("complete", "completion"), "generate"),
    **dict.fromkeys(("server", "start"), "serve"),
    "benchmark": "bench",
}
"""Verbs of Ollama, vLLM and llama.cpp map to ours."""

_SERVER = "http://localhost:8000"
EXAMPLES = {"--server": _SERVER, "--baseline-server": _SERVER, "--against": "http://localhost:8001"}
"""These are values of options that an error about a missing one shows."""

OK, CHECK_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def build_app() -> App:
    """Build the application, with every verb registered by its import path."""
    from cyclopts import App, Parameter
    from cyclopts.help import DefaultFormatter

    app = App(
        name="forerun",
        help="Lossless speculative decoding: language models decode faster, with the same output.",
        version=lambda: version("forerun"),
        suppress_keyboard_interrupt=False,
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        help_on_error=False,
        help_format="plaintext",
        help_formatter=DefaultFormatter(column_specs=_help_columns),
        # A list option takes all values that follow it, as in vLLM: --rows 1 4 16.
        default_parameter=Parameter(show_default=_worth_showing, consume_multiple=(1, None), negative_iterable=()),
        config=(keep_letters_together, keep_model_out_of_lists, from_file),
    )
    for order, (verb, summary) in enumerate(VERBS.items()):
        app.command(f"forerun.cli.{verb}:{verb}", name=verb, help=summary, sort_key=order)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; `arguments` default to the process's own."""
    if "" not in sys.path:  # The folder one works in: a drafter of the user's own is found there, behind all else
        sys.path.append("")
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with _stopped_by_sigterm() if words[:1] != ["serve"] else nullcontext():  # a server drains
            return _run(arguments)
    except KeyboardInterrupt as stop:
        from forerun.cli import console

        console.warn(str(stop) or "stopped before it was done")
        return INTERRUPTED


class Terminated(KeyboardInterrupt):
    """SIGTERM came, which ends the command even where Ctrl-C ends less."""


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does while open: what is done is kept, and a line says so."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def leave(code: int) -> NoReturn:
    """End the process.

    One that torchrun started ends at once: threads of gloo can outlive the interpreter and abort a
    process whose work is done (pytorch/pytorch#179291).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    # Imported here, so that Ctrl-C during an import is a clean end, too.
    from cyclopts import CycloptsError

    try:
        result = build_app()(None if arguments is None else list(arguments))
    except CycloptsError as error:
        return _fail(error, f"{_describe(error)}\nTry: {' '.join(('forerun', *(error.command_chain or ())))} --help")
    except BrokenPipeError:
        # Whoever read our stdout has read enough; without this, Python complains once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (ForerunError, OSError) as error:
        return _fail(error, str(error))
    return result if isinstance(result, int) else OK


def _describe(error: CycloptsError) -> str:
    """Say what was wrong with a command line, in our words where cyclopts has a list of tokens or says little."""
    from cyclopts import MissingArgumentError, UnknownCommandError, UnknownOptionError

    if isinstance(error, UnknownOptionError):
        known = [name for argument in error.argument_collection for name in argument.names if argument.parse]
        return explain_unknown(error.token.keyword or error.token.value, known, " ".join(error.command_chain or ()))
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        verb, *words = error.unused_tokens
        if ours := _VERBS_ELSEWHERE.get(verb):
            return f"there is no verb {verb}; here it is forerun {shlex.join([ours, *words])}"
    option = error.argument if isinstance(error, MissingArgumentError) else None
    if option is not None:
        example = f", for example {option.name} {EXAMPLES[option.name]}" if option.name in EXAMPLES else ""
        if names := [name for name in option.names if name in (error.root_input_tokens or ())]:
            return f"{names[0]} needs a value{example}"
        return f"{' '.join(error.command_chain or ())} needs {option.name}, which is missing{example}"
    if not error.unused_tokens or type(error).__name__ != "UnusedCliTokensError":
        return str(error)
    command, unexpected = " ".join(error.command_chain or ()), " ".join(map(repr, error.unused_tokens))
    return f"{command} takes no further argument, got {unexpected}{_INSTEAD_OF_ARGUMENTS.get(command, '')}"


_INSTEAD_OF_ARGUMENTS = {
    "generate": "; give the prompt with --prompt",
    "chat": "; give what you say line by line, once it has started",
    "drafters": "; `forerun drafters` lists them, and `forerun drafters check DRAFTER` tries one",
}


def _help_columns(console: Console, options: ConsoleOptions, entries: list[HelpEntry]) -> tuple[ColumnSpec, ...]:
    from forerun.cli.console import help_columns

    return help_columns(console, options, entries)


def _worth_showing(default: object) -> str | None:
    if default is None or default is False or default in ((), ""):
        return None
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _fail(error: Exception, message: str) -> int:
    if os.environ.get("FORERUN_DEBUG") == "1":
        raise error
    from forerun.cli import console

    console.report_error(message)
    return BAD_INPUT
