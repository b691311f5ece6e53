"""A clock as of a machine on which others run: what fails under it depends on how long things take.

``PYTHONPATH=tests .venv/bin/python -m pytest -p leaping_clock -n 2``. Time passes up to some hundred times too fast,
another factor at every look, and leaps now and then. ``LEAPS`` seeds it. `time.monotonic`, by which tests give up, goes
on as ever.
"""

import math
import os
import random
import time

SPREAD = 2.0
"""Standard deviation of the logarithm of how much too fast."""
LEAPS = (0.003, 0.02, 0.1, 0.5)
"""Seconds, in one look out of ten."""


class Clock:
    """`perf_counter` never goes back."""

    def __init__(self, seed: str) -> None:
        self.chance, self.real = random.Random(seed), time.perf_counter
        self.seen = self.told = self.real()

    def perf_counter(self) -> float:
        now = self.real()
        self.told += (now - self.seen) * math.exp(abs(self.chance.gauss(0, SPREAD)))
        self.told += self.chance.choice(LEAPS) if self.chance.random() < 0.1 else 0.0
        self.seen = now
        return self.told


time.perf_counter = Clock(os.environ.get("LEAPS", "1")).perf_counter
