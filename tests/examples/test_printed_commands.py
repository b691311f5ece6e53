"""Every command and every block of Python that a document prints is run, or given to the parser that would read it.

A page is one session: what it prints is typed in order, in a fresh folder, in this process. `stand_ins` says what takes
the place of the reader's models and files, and what is only parsed, and why; a line that it does not know is a failure.
"""

import argparse
import asyncio
import contextlib
import functools
import io
import itertools
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import httpx
import pytest
from cyclopts import MissingArgumentError

from assistant import assistant
from benchmarks.suite.__main__ import app as bench_app
from caches import empty_cache
from conftest import loggers_restored
from examples import stand_ins
from examples.printed import ROOT, Printed, markdown, pages, printed
from forerun.certify import checks as certifying
from forerun.cli import build_app, demo, leaderboard, main
from forerun.control import measuring
from forerun.drafters import DRAFTERS, DrafterEntry
from forerun.drafters.self_drafting import tuning
from forerun.plan import measured
from forerun.serve import server as http_server
from forerun.serve.session import Session, State
from selection import slow

PAGES = [page for page in pages() if printed(page)]
WRITES = ("--output", "--out", "--record-traffic", "--plot", "--report")
"""Options that name what a command makes."""
ENTRY = re.compile(r'"\w+": DrafterEntry\(')  # A line for the drafters' registry
Request = tuple[str, str, dict[str, str], str | None]
"""Method, path, headers, body."""


class _ParsedError(Exception):
    """A script's parser has read its arguments, and nothing else is wanted of it."""


def programs(command: str) -> list[list[str]]:
    """The words of each program of a line, patterns of the repository's files filled in."""
    reader = shlex.shlex(command, posix=True, punctuation_chars="|&")
    reader.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in reader:
        if set(word) <= {"|", "&"}:
            found.append([])
        else:
            found[-1].append(word)
    return found


def known(command: str, table: dict[str, str]) -> bool:
    return any(re.search(pattern, command) for pattern in table)


def quick(words: list[str]) -> list[str]:
    """The words with the options that keep their verb short."""
    words = list(words)
    for verb, options in stand_ins.QUICK.items():
        for names, value in options.items() if words[: len(verb.split())] == verb.split() else ():
            _set(words, names.split(), value)
    return words


def _set(words: list[str], names: list[str], value: str) -> None:
    for index, word in enumerate(words):
        if word in names:
            words[index + 1] = value
            return
        if names[0].endswith("=") and word.startswith(names[0]):
            words[index] = names[0] + value
            return
    words += [names[0] + value] if names[0].endswith("=") else [names[0], value]


def parse(words: list[str], *, inline: bool) -> None:
    """Give the words to the command line's own parser. In a sentence a part may stand for the whole."""
    words = [word for word in words if not inline or word != "..."]
    with contextlib.suppress(*[MissingArgumentError] if inline else []):
        build_app().parse_args(words, exit_on_error=False, print_error=False)


def parse_script(words: list[str]) -> None:
    """Run a script up to the point where its own parser has read the words."""
    whole, before, script = argparse.ArgumentParser.parse_args, set(sys.modules), ROOT / words[0]

    def parse_and_stop(self: argparse.ArgumentParser, *given: object, **more: object) -> None:
        whole(self, *given, **more)
        raise _ParsedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", [str(script.parent), *sys.path])
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        try:
            with pytest.raises(_ParsedError):
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            raise ValueError(f"{script.name} does not take {words[1:]}") from error
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(script.parent)):
            del sys.modules[name]


def served(
    session: Session, *, host: str, listener: socket.socket, asked: Request = ("GET", "/health", {}, None)
) -> int:
    """In place of serving until SIGTERM: until the model is there and one request has been answered."""
    port = listener.getsockname()[1]
    answers = list[httpx.Response]()

    def ask() -> None:
        while session.state not in (State.READY, State.FAILED):
            time.sleep(0.01)
        if session.state is State.READY:  # else the server ends by itself, and the command with 2
            method, path, headers, body = asked
            url = f"http://127.0.0.1:{port}{path}"
            answers.append(httpx.request(method, url, headers=headers, content=body, timeout=60))
            session.state = State.DRAINING

    thread = threading.Thread(target=ask)
    thread.start()
    asyncio.run(http_server.server(session, host="127.0.0.1", port=port).serve(sockets=[listener]))
    thread.join()
    assert all(answer.status_code == 200 for answer in answers), answers
    return 0 if session.failure is None else 2


@dataclass(kw_only=True)
class Reader:
    """Somebody who types what a page says, in a folder of their own."""

    folder: Path
    endpoint: str
    """A server that answers."""
    done: set[tuple[str, ...]]
    """Commands that read nothing which a page made, and have been run, on this page or another."""
    patch: pytest.MonkeyPatch
    shown: Callable[[], str]
    """What was written to stderr since the last time."""
    module: ModuleType = field(default_factory=lambda: ModuleType("page"))
    """Where Python is run."""
    runs: bool = True
    """Else commands are only read, and Python is only compiled."""
    laid: set[str] = field(default_factory=set)
    """Files and folders of `stand_ins` that stand in this one."""
    serving: list[str] = field(default_factory=list)
    """The last server that was started."""

    def type(self, found: Printed) -> None:
        """Run it, or parse it where it stands in a sentence or the table says so."""
        text = found.text
        for word, instead in stand_ins.WORDS.items():
            text = re.sub(rf"(?<![\w/.-]){re.escape(word)}(?![\w/-])", lambda _, to=instead: to, text)
        if found.python:
            self._python(text)
            return
        text = text.replace("{line}", str(found.line)).replace("{endpoint}", self.endpoint)
        if not known(text, stand_ins.NOT_OURS):
            piped = ""
            for words in programs(text):
                self._lay(words, found)
                parsing = not self.runs or found.inline or known(text, stand_ins.ONLY_PARSED)
                piped = self._program(words, found, piped, parsing)

    def _program(self, words: list[str], found: Printed, piped: str, parsing: bool) -> str:
        """One program, which prints for the next what is returned."""
        match Path(words[0]).name, words[1:]:
            case "cat", [name]:
                return (self.folder / name).read_text() if self.runs else ""
            case ("forerun", options) | ("python", ["-m", "forerun", *options]):
                self._forerun(options, found, piped, parsing)
            case "torchrun", options:  # here as one process
                self._forerun(options[options.index("forerun.cli") + 1 :], found, piped, parsing)
            case "docker", options:
                self._forerun(["serve", *options[options.index("forerun") + 1 :]], found, piped, parsing)
            case "python", ["-m", "benchmarks.suite", *options]:
                bench_app.parse_args(options, exit_on_error=False, print_error=False)
            case "python", ["-m", module, *options]:
                parse_script([f"{module.replace('.', '/')}.py", *options])
            case "python", options:
                parse_script(options)
            case "make", options:
                self._make(options, found)
            case "curl", options:
                self._ask(options)
            case name, _:
                raise AssertionError(f"nobody knows what to do with {name!r}: see tests/examples/stand_ins.py")
        return ""

    def _forerun(self, options: list[str], found: Printed, piped: str, parsing: bool) -> None:
        parse(options, inline=found.inline)
        named = {word.rpartition("=")[2] for word in options} - self.laid
        alone = not any((self.folder / name).exists() or name in WRITES for name in named)
        key = (*options, piped)
        if not parsing and not (alone and key in self.done):
            self.run(quick(options), piped)
            self.done.add(key)

    def run(self, words: list[str], piped: str = "") -> None:
        """The command line in this process, with what is piped into it."""
        if words[0] == "serve":
            self.serving = words
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(piped))
            code = main(words)
        answers = (0, 1) if words[0] == "doctor" else (0,)  # of a head, 1 says that an engine cannot read it
        assert code in answers, f"exit code {code}: {self.shown()[-1500:]}"

    def _python(self, text: str) -> None:
        if ENTRY.match(text):  # about the drafter above it
            for name, entry in eval(f"{{{text}}}", {"DrafterEntry": DrafterEntry}).items():
                module = entry.path.partition(":")[0]
                written = self.folder / f"{module.rpartition('.')[2]}.py"
                self.module.__spec__ = ModuleSpec(module, None, origin=str(written))
                self.patch.setitem(sys.modules, module, self.module)
                self.patch.setitem(DRAFTERS, name, entry)
            return
        code = compile(text, "a page", "exec")
        if not self.runs:
            return
        if file := re.match(r"# (\w+)\.py\n", text):  # a file of the reader's own, which commands below it import
            (self.folder / f"{file[1]}.py").write_text(text)
            self.patch.delitem(sys.modules, file[1], raising=False)
        exec(code, self.module.__dict__)

    def _lay(self, words: list[str], found: Printed) -> None:
        """Put the files where the words look for them, unless an earlier command of the page has made them."""
        made = {words[index + 1] for index, word in enumerate(words[:-1]) if word in WRITES}
        read = {word.rpartition("=")[2] for word in words} - made
        for name in sorted(read | ({"data/train"} if "recipe.yaml" in read else set())):
            target = self.folder / name
            if not name or name.startswith("/") or target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in stand_ins.TEXTS:
                target.write_text(stand_ins.TEXTS[name])
            elif name in stand_ins.FOLDERS and self.runs:
                stand_ins.FOLDERS[name](target, self.run)
            if target.exists():
                self.laid.add(name)
            for place in (ROOT / name, (ROOT / found.page).parent / name):
                if place.is_file():
                    shutil.copy(place, target)

    def _make(self, options: list[str], found: Printed) -> None:
        """Type the lines that make would run; what sets up environments is taken as done."""
        marks = [*(f".venv/{name}" for name in (".ready", ".docs-ready"))]
        marks += [*(f".venv-{name}/.ready" for name in ("vllm", "sglang", "llama")), "build/triton/.ready"]
        command = ["make", "-n", *(word for mark in marks for word in ("-o", mark)), *options]
        ours = ("MAKE", "ARGS", "WORKERS")  # Of the make that we run in
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        asked = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert asked.returncode == 0 and asked.stdout, asked.stderr
        for line in asked.stdout.splitlines():
            self.type(Printed(page=found.page, line=found.line, text=line))

    def _ask(self, options: list[str]) -> None:
        """Send a request to the last server that was started."""
        parser = argparse.ArgumentParser(prog="curl")
        parser.add_argument("url", type=urlsplit)
        parser.add_argument("-H", type=lambda header: header.split(": "), action="append")
        parser.add_argument("-d")
        asked = parser.parse_args(options)
        if not self.runs:
            return
        request = ("POST", asked.url.path, dict(asked.H), asked.d)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http_server, "run", functools.partial(served, asked=request))
            self.run(self.serving)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with assistant() as url:
        yield url


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[tuple[str, ...]]]:
    """What has been run; what costs seconds and is the same for all of it is done once."""
    check_rules = certifying.check_rules  # of which tests/core makes every check
    settings_for = certifying.settings_for  # of which tests/certify makes every one
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_CACHE", empty_cache(tmp_path_factory.mktemp("cache")))
        patch.setattr(certifying, "check_rules", lambda names: itertools.islice(check_rules(names), 3))
        patch.setattr(certifying, "settings_for", lambda run, warm: settings_for(run, warm)[:1])
        patch.setattr(demo, "PROMPT_CHARACTERS", 120)
        for name in ("FILES", "EDITS"):
            patch.setattr(leaderboard, name, 1)
        patch.setattr(leaderboard, "COPYING", {"suffix": {"method": "suffix"}})
        patch.setitem(measuring.load_or_measure.__kwdefaults__, "seconds", 0.3)
        patch.setitem(measured.measure_draft.__kwdefaults__, "steps", 8)
        patch.setattr(tuning, "REPEATS", 1)
        yield set()


@pytest.fixture
def reader(
    endpoint: str,
    done: set[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(http_server, "run", served)
    monkeypatch.setattr("forerun.cli.serve.listen", lambda *_: socket.create_server(("127.0.0.1", 0)))
    made = Reader(
        folder=tmp_path, endpoint=endpoint, done=done, patch=monkeypatch, shown=lambda: capsys.readouterr().err
    )
    monkeypatch.setitem(sys.modules, made.module.__name__, made.module)
    with loggers_restored():
        yield made


RUN = [(page, page == "README.md") for page in PAGES]


@pytest.mark.parametrize(("page", "runs"), [*RUN, *slow(*((page, True) for page, runs in RUN if not runs))])
def test_a_page_works_as_printed(page: str, runs: bool, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.runs = runs
    for name, module in stand_ins.MODULES.get(page, dict)().items():
        monkeypatch.setitem(sys.modules, name, module)
    reader.module.__dict__.update(stand_ins.NAMES.get(page, dict)())
    failed = []
    for found in printed(page):
        try:
            reader.type(found)
        except Exception as error:  # all of a page's failures are told, each with its place
            failed.append(f"{found}\n    {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def test_nothing_is_overlooked() -> None:
    found = [item for page in PAGES for item in printed(page)]
    assert len(found) > 220 and sum(item.python for item in found) > 6 and sum(item.inline for item in found) > 60
    assert {"README.md", "CONTRIBUTING.md", "benchmarks/README.md", "deploy/README.md", "docs/cli.md"} <= set(PAGES)


WRONG = [
    "forerun generate demo --prompt x --drafter ngram --drafter-option window=4",
    "forerun demo --prompt-name nothing.py",
    "forerun train eagle3 recipe.yaml objective.stepps=3",
    "torchrun --nproc-per-node 2 -m forerun.cli train eagle3 recipe.yaml --paralel fsdp",
    "docker run forerun MODEL --drafter suffix --prt 8000",
    "python -m benchmarks.suite --parts nothing",
    "python benchmarks/serving/soak.py --hours 20",
    "make demo ARGS=--scales",
    "kubectl apply -f forerun.yaml",
    "forerun drafters && forerun nothing",
]
"""One for each program, and for each way that forerun reads words."""


@pytest.mark.parametrize("command", WRONG)
def test_what_does_not_work_is_noticed(command: str, reader: Reader) -> None:
    [found] = markdown("README.md", f"Say:\n```\n{command}\n```\n")
    with pytest.raises(Exception, match=r"\w"):
        reader.type(found)


@pytest.mark.parametrize("text", ["`forerun serve --drafterr`", "`forerun data prepar ...`", "`make nothing`"])
def test_a_part_of_a_command_in_a_sentence_is_checked_too(text: str, reader: Reader) -> None:
    [found] = markdown("README.md", f"With {text} it works.")
    assert found.inline
    with pytest.raises(Exception, match=r"\w"):
        reader.type(found)


def test_python_that_does_not_work_is_noticed(reader: Reader) -> None:
    [found] = markdown("README.md", '```python\nfrom forerun import LLM\n\nLLM("demo", speculate="ngram")\n```\n')
    with pytest.raises(TypeError, match="speculate"):
        reader.type(found)


@pytest.mark.parametrize("text", ["  ```\n  forerun nothing\n  ```\n", "```powershell\nforerun nothing\n```\n"])
def test_a_block_that_would_be_overlooked_is_refused(text: str) -> None:
    with pytest.raises(AssertionError, match="README"):
        list(markdown("README.md", text))
