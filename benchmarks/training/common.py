"""What the training benchmarks share: target, windows of text, the real training step, and how a report is written.

Knows no figure, no goal and no peer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUILD = ROOT / "build" / "bench-training"
sys.path[:0] = [str(ROOT / "recipes" / "demo"), str(ROOT)]

import corpus  # noqa: E402 - recipes/demo: the same files and the same split as the shipped target

from benchmarks.suite.goals import Goal  # noqa: E402
from benchmarks.suite.suite import Machine, this_machine  # noqa: E402
from forerun import shipped  # noqa: E402
from forerun.losses.objective import FeatureBatch, TokenBatch  # noqa: E402
from forerun.training.features.online import OnlineFeatures  # noqa: E402

FILES_AT_ONCE = 32


def load_target(name: str, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """(frozen causal LM, tokenizer) of a directory, hub id or shipped model's name."""
    from transformers import AutoTokenizer

    from forerun.model.load import LoadOptions, open_model, read_config

    found = shipped.resolve(name)
    options = LoadOptions(dtype=dtype, device=device)
    model = open_model(found, options, read_config(found, options), quiet=True)
    model.requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(found)


def text_windows(tokenizer: Any, count: int, length: int, *, seed: int = 0) -> Tensor:
    """(at most `count`, `length`) int64: the training files one behind the other, cut, in an order given by `seed`."""
    files, _ = corpus.split(corpus.read_standard_library())
    random.Random(seed).shuffle(files)
    stream: list[int] = []
    for start in range(0, len(files), FILES_AT_ONCE):
        texts = [file.text for file in files[start : start + FILES_AT_ONCE]]
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
            stream += [*ids, tokenizer.eos_token_id]
        if len(stream) >= count * length:
            break
    found = min(count, len(stream) // length)
    windows = torch.tensor(stream[: found * length]).view(found, length)
    return windows[torch.randperm(found, generator=torch.Generator().manual_seed(seed))]


def whole_windows(tokens: Tensor) -> TokenBatch:
    """Windows (B, S) as a batch: one document each, every token counts but the first."""
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    return TokenBatch(
        tokens=tokens,
        loss_mask=mask,
        documents=torch.zeros_like(tokens),
        positions=torch.arange(tokens.shape[1]).expand_as(tokens).contiguous(),
    )


class Clock:
    """Adds up wall seconds by name. On CUDA it waits for the device around each phase, so phases do not overlap."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to `name`."""
        self.wait()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.wait()
            self.seconds[name] += time.perf_counter() - began


@dataclass(kw_only=True, slots=True)
class WindowBatches:
    """Batches of the training loop from fixed windows, in their order, again from the start when they are used up."""

    windows: Tensor
    """(N, S) int64."""
    rows: int
    """B, windows per step."""
    source: OnlineFeatures
    clock: Clock

    @property
    def steps_per_epoch(self) -> int:
        """Steps until the windows begin again."""
        return max(1, len(self.windows) // self.rows)

    def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
        """Tokens and the target's states; one process only."""
        assert (rank, world) == (0, 1)
        with self.clock.phase("features"):
            first = step % self.steps_per_epoch * self.rows
            tokens = whole_windows(self.windows[first : first + self.rows])
            return self.source.features(tokens.to(self.source.model.device))


def parser(description: str | None) -> argparse.ArgumentParser:
    """With what every benchmark takes."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    found.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    found.add_argument("--out", type=Path, default=RESULTS, help="folder of training.json")
    found.add_argument("--device", default="cpu", help="cpu or cuda")
    found.add_argument("--threads", type=int, help="processor threads; all cores by default")
    return found


def start(arguments: argparse.Namespace) -> Machine:
    """Threads, quiet libraries, and what this runs on."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    machine = this_machine()
    if machine.busy:
        say(f"the machine is busy (load {machine.load:.1f}): these figures are a look, not a measurement")
    return machine


def say(text: str) -> None:
    """A line of progress on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def finish(name: str, arguments: argparse.Namespace, report: Mapping[str, Any], tables: Sequence[Table]) -> None:
    """Make the report the entry `name` of ``<out>/training.json``; tables or the JSON object on stdout."""
    report = {"command": shlex.join(["python", f"benchmarks/training/{name}.py", *sys.argv[1:]]), **report}
    path = arguments.out / "training.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**entries, name: report}, indent=2, default=_plain) + "\n", encoding="utf-8")
    if arguments.json:
        sys.stdout.write(json.dumps(report, indent=2, default=_plain) + "\n")
        return
    console = Console(width=max(120, Console().width))
    for table in tables:
        console.print(table)


def rows_table(title: str, rows: Sequence[Mapping[str, Any]], caption: str | None = None) -> Table:
    """Records with the same keys as a table."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    return table


def goals_table(goals: Sequence[Goal]) -> Table:
    """Goals beside what was measured."""
    rows = [
        {"": "met" if goal.met else "missed", "what": goal.what, "goal": goal.goal, "measured": goal.measured}
        | {"note": goal.note}
        for goal in goals
    ]
    return rows_table("Goals", rows)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
