"""What every test module shares: loggers are left as they were found, workers do not fight for the cores, and nothing
fails for having been slow."""

import functools
import gc
import logging
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, settings

from forerun import errors

# Every client of httpx reads the certificates of the world, 30 ms each time; the servers here are on this machine.
ssl.create_default_context = functools.cache(ssl.create_default_context)

settings.register_profile("whatever the time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whatever the time")

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Read when torch is imported, by processes that a test starts, too. Not set in the process that starts the workers,
    # or they would inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


REAL = "tests/real/"
"""The tests on a real model, which is loaded once for each dtype."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests on the real model come first: pytest-xdist gives the first half of all tests to the first process, and
    others steal from its end, so that one process loads the model."""
    items.sort(key=lambda item: not item.nodeid.startswith(REAL))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly that the real model or the browser was not there: a green run without it proves less."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if report.nodeid.startswith(REAL)]
    whys = {str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple)}
    for why in sorted(why for why in whys if "no real model" in why):
        line = f"NOT TESTED ON A REAL MODEL ({len(skipped)} tests): {why.removeprefix('Skipped: ')}"
        terminalreporter.write_line(line, red=True, bold=True)
    for report in terminalreporter.stats.get("skipped", []):
        if "Chromium" in str(report.longrepr) or "playwright" in str(report.longrepr):
            line = "THE PLAYGROUND WAS NOT TESTED IN A BROWSER: apt-get install chromium, pip install -e '.[dev]'"
            terminalreporter.write_line(line, red=True, bold=True)
            break


def pytest_collection_finish() -> None:
    """What was imported stays, and is searched for garbage no more: a twentieth of the time. Nothing is frozen later:
    a command that runs in this process would keep for good what a test has done with."""
    gc.freeze()
    gc.freeze = lambda: None


@contextmanager
def loggers_restored() -> Iterator[None]:
    """A server's set-up of logging stays in force as long as its process, and here that is the process of all tests."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in ("forerun", "uvicorn", "uvicorn.error"))]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        # pytest puts handlers of its own on the root logger for every phase of a test, and takes them away.
        logger.handlers[:] = [h for h in logger.handlers if h in handlers or type(h).__module__.startswith("_pytest")]
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(autouse=True, scope="module")
def loggers_as_they_were() -> Iterator[None]:
    """Of every module."""
    with loggers_restored():
        yield


@pytest.fixture(autouse=True)
def warned_of_nothing() -> None:
    """What a process is told once, it is told once in each test."""
    errors.forget_warnings()
