"""What a figure was measured on. Knows no figure."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Processor, software, and how busy it was at the beginning."""

    processor: str
    cores: int
    threads: int
    flags: tuple[str, ...]
    """What matters for bf16, of what the processor has."""
    versions: str
    load: float
    """Processes that wanted to run, averaged over the last minute, when the benchmark began."""

    @property
    def busy(self) -> bool:
        """True if something else ran: then figures are comparable with each other only."""
        return self.load > 0.5

    def __str__(self) -> str:
        features = ", ".join(self.flags) or "no vector extensions known"
        return f"{self.processor}, {self.cores} cores, {self.threads} threads ({features}); {self.versions}"


def this_machine() -> Machine:
    """The machine that this runs on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines())}
    flags = fields.get("flags", "").split()
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return Machine(
        processor=fields.get("model name", platform.processor() or platform.machine()),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        flags=tuple(flag for flag in _FLAGS if flag in flags),
        versions=f"Python {platform.python_version()}, {libraries}",
        load=os.getloadavg()[0],
    )
