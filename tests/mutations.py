"""Faults planted in a copy of the source, one at a time: the tests named beside each must fail.

    python tests/mutations.py            # all of them, two at a time; ends with 1 if one survives
    python tests/mutations.py rules 12   # those whose floor or number is named

A fault (`faults.txt`) is a change marked in a piece of the source, «old → new», which stands once in `src`: so the list
outlives files that move. Where the text has changed the command says so, and the fault is written anew.
"""

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
AT_ONCE = 2
LIMIT_S = 900  # After which tests that hang have failed


class Fault(NamedTuple):
    """One line of the source that is wrong, and where that must be noticed."""

    floor: str
    what: str
    old: str
    new: str
    tests: str  # Arguments of pytest

    def place(self, src: Path) -> Path:
        """The file that holds the old text; ValueError unless there is exactly one such place."""
        suffixes = (".py", ".c", ".h")
        found = [path for path in sorted(src.rglob("*.*")) if path.suffix in suffixes and self.old in path.read_text()]
        if len(found) != 1 or found[0].read_text().count(self.old) != 1:
            raise ValueError(f"{self.what}: {self.old!r} stands in {len(found)} files, once in one was expected")
        return found[0]


def read_faults(text: str) -> list[Fault]:
    """A line names a floor and its tests; two lines each below it are a fault: what is wrong, and the change."""
    found, floor, tests, what = list[Fault](), "", "", ""
    for line in text.splitlines():
        if line.startswith("    "):
            before, old, new, behind = re.split("«| → |»", line[4:].replace("\\n", "\n"))
            found.append(Fault(floor, what, before + old + behind, before + new + behind, tests))
        elif line.startswith("  "):
            what = line[2:]
        else:
            floor, tests = line.split(": ", 1)
    return found


FAULTS = read_faults((Path(__file__).parent / "faults.txt").read_text(encoding="utf-8"))


def main() -> int:
    """Plant the faults whose floor or number is named, or all; 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="FLOOR|NUMBER")
    wanted = parser.parse_args().wanted
    chosen = [(n, f) for n, f in enumerate(FAULTS, 1) if not wanted or str(n) in wanted or f.floor in wanted]
    places = {number: fault.place(ROOT / "src") for number, fault in chosen}
    for name in ("pytest", "hypothesis", "scipy.stats", "torch", "transformers", "numba"):
        importlib.import_module(name)  # once, for all processes that are forked
    running, survived = dict[int, tuple[int, Fault, float]](), 0
    with tempfile.TemporaryDirectory() as folder:
        sound = Fault("none", "nothing is wrong", "import", "import", "tests/core/test_rules.py -k says_what_it_is")
        _, status = os.waitpid(_test(Path(folder) / "0", sound, ROOT / "src/forerun/__init__.py"), 0)
        if os.waitstatus_to_exitcode(status) != 0:
            parser.error("the tests fail where nothing is wrong")
        while chosen or running:
            if chosen and len(running) < AT_ONCE:
                number, fault = chosen.pop(0)
                running[_test(Path(folder) / str(number), fault, places[number])] = number, fault, time.monotonic()
                continue
            pid, status = os.wait()
            number, fault, began = running.pop(pid)
            ended = os.waitstatus_to_exitcode(status)
            said = {0: "SURVIVED", 1: "caught", -signal.SIGALRM: "caught, hangs"}.get(ended, f"FAILED with {ended}")
            survived += not said.startswith("caught")
            seconds, where = time.monotonic() - began, places[number].name
            sys.stdout.write(f"{number:3} {seconds:4.0f} s {said}: {fault.what} ({where})\n")
            sys.stdout.flush()
    sys.stdout.write(f"{survived} faults were not caught\n")
    return int(survived > 0)


def _test(folder: Path, fault: Fault, place: Path) -> int:
    """Begin a process that runs the fault's tests on a copy of the source with the fault in it; its id."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    wrong = folder / place.relative_to(ROOT)
    wrong.write_text(wrong.read_text().replace(fault.old, fault.new))
    if pid := os.fork():
        return pid
    code = 9
    try:  # what raises here must not unwind the parent's frames
        signal.alarm(LIMIT_S)
        os.chdir(ROOT)
        sys.path.insert(0, str(folder / "src"))
        os.environ["PYTHONPATH"] = str(folder / "src")  # for commands that tests run
        sys.dont_write_bytecode = True
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        quiet = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = importlib.import_module("pytest").main([*quiet, *fault.tests.split()])
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
