"""What every test module shares: loggers are left as they were found."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def loggers_as_they_were() -> Iterator[None]:
    """A server's set-up of logging stays in force as long as its process, and here that is the process of all tests."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in ("forerun", "uvicorn", "uvicorn.error"))]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        # pytest puts handlers of its own on the root logger for every phase of a test, and takes them away.
        logger.handlers[:] = [h for h in logger.handlers if h in handlers or type(h).__module__.startswith("_pytest")]
        logger.setLevel(level)
        logger.propagate = propagate
