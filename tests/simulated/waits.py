"""How often a decoding step waits for the device, and how much it launches there one by one: reads, blocking writes and
launches of each drafter on the simulated device.

    python tests/simulated/waits.py [ARM ...] [--rows 1 8] [--json]

The shipped demo models answer on the device of `device.py`. Prints a table and, as its last line, one JSON object.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # of a script, Python only adds its own folder

from forerun import LLM, SamplingParams, shipped
from forerun.model.recordings import Recordings
from forerun.types import CompletionOutput
from simulated.arms import ARMS, PARAMS, PROMPT
from simulated.device import NAME, Counts, Kind, SimulatedDevice, moved

Steps = tuple[list[Counts], list[CompletionOutput]]

ROWS = (1, 8)
WARM_UP = 2
"""First decoding steps, which are not counted: what is made once, such as recordings, belongs to no step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """What one arm did in one setting."""

    arm: str
    setting: str
    rows: int
    steps: Sequence[Counts]
    """Of each step in which all rows were decoded."""
    tokens: float
    """Committed per step and row."""
    drafter_errors: int

    def per_step(self, kind: Kind) -> float:
        """Transfers of this kind in a mean step."""
        return round(sum(step.of(kind) for step in self.steps) / len(self.steps), 2)

    @property
    def launches(self) -> int:
        """Operations that the host launched in the middle one of the steps, recordings not counted."""
        return int(median(step.launches for step in self.steps))

    @property
    def replays(self) -> int:
        """Recordings that ran in the middle one of the steps."""
        return int(median(step.replays for step in self.steps))


@contextmanager
def recording(device: SimulatedDevice) -> Iterator[None]:
    """Heads that are built while this is open record their work on the simulated device, as they do on CUDA."""

    def on(cls: type[Recordings], place: torch.device) -> Recordings:
        return cls(device.record if place.type == NAME else None)

    with patch.object(Recordings, "on", classmethod(on)):
        yield


@cache
def loaded(name: str) -> torch.nn.Module:
    """A shipped model on the CPU."""
    return AutoModelForCausalLM.from_pretrained(shipped.resolve(name))


def engine(arm: str, rows: int) -> LLM:
    """The arm with the demo target on the device, which is open."""
    config = ARMS[arm]
    if config is not None:
        config = {"adaptive": arm == "auto", **config}
    if config is not None and config.get("model") == "demo-draft":
        config = config | {"model": moved(loaded("demo-draft"))}
    tokenizer = AutoTokenizer.from_pretrained(shipped.resolve("demo"))
    return LLM(
        moved(loaded("demo")),
        **{"tokenizer": tokenizer, "speculative_config": config, "max_num_seqs": rows, "max_model_len": 256},
        self_check=False,
    )


def decoding_steps(llm: LLM, prompts: Sequence[str], params: SamplingParams, device: SimulatedDevice) -> Steps:
    """Answer the prompts together: transfers of each step that decoded for all of them, and the finished answers."""
    ids = [llm.submit(prompt, params) for prompt in prompts]
    counts, begun, outputs = list[Counts](), set[str](), list[CompletionOutput]()
    while llm.engine.busy:
        together = len(begun) == len(ids) == llm.engine.running
        with device.counting() as count:
            chunks = llm.engine.step()
        if together:
            counts.append(count)
        begun.update(chunk.request_id for chunk in chunks)
        outputs += [chunk.output.outputs[0] for chunk in chunks if chunk.output is not None]
    return counts[WARM_UP:], outputs


def measured(arm: str, rows: int) -> list[Waits]:
    """The arm's waits in every setting, with so many requests at once."""
    device = SimulatedDevice()
    prompts = [f"# file number {row}\n{PROMPT}" for row in range(rows)]
    found = list[Waits]()
    with device, recording(device):
        llm = engine(arm, rows)
        for setting, params in PARAMS.items():
            steps, outputs = decoding_steps(llm, prompts, params, device)
            told = [output.speculation for output in outputs]
            found.append(
                Waits(
                    **{"arm": arm, "setting": setting, "rows": rows, "steps": steps},
                    tokens=sum(one.mean_acceptance_length for one in told) / rows,
                    drafter_errors=sum(one.drafter_errors for one in told),
                )
            )
    return found


def summary(found: Sequence[Waits]) -> dict[str, Any]:
    """By arm: the most reads and blocking writes per step of any setting, and those of each."""
    arms: dict[str, Any] = {}
    for waits in found:
        own = {
            **{"reads": waits.per_step(Kind.READ), "blocking_writes": waits.per_step(Kind.BLOCKING_WRITE)},
            **{"staged_copies": waits.per_step(Kind.STAGED), "launches": waits.launches, "replays": waits.replays},
        }
        arm = arms.setdefault(waits.arm, {"reads": 0.0, "blocking_writes": 0.0, "settings": {}})
        arm["settings"][f"{waits.setting}, rows={waits.rows}"] = own
        for name in ("reads", "blocking_writes"):
            arm[name] = max(arm[name], own[name])
    return arms


def table_line(waits: Waits) -> str:
    """One line of the table."""
    figures = "".join(f"{waits.per_step(kind):>10.1f}" for kind in Kind)
    errors = f"  {waits.drafter_errors} drafter errors" if waits.drafter_errors else ""
    figures += f"{waits.launches:>10}{waits.replays:>10}"
    return f"{waits.arm:<18}{waits.setting:<14}{waits.rows:>4}{waits.tokens:>9.2f}{figures}{errors}"


TITLES = ("reads", "writes", "staged", "launches", "replays")
HEADER = f"{'arm':<18}{'setting':<14}{'rows':>4}{'tokens':>9}{''.join(f'{title:>10}' for title in TITLES)}   per step"


def sites(waits: Waits) -> Iterator[str]:
    """Lines that say where the transfers came from, the most frequent first."""
    places = Counter((event.kind, event.site, event.operation) for step in waits.steps for event in step.events)
    for (kind, site, operation), count in places.most_common():
        yield f"{count / len(waits.steps):10.2f}  {kind:<15}{site:<45}{operation}"


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", metavar="ARM", help=f"default: all of {', '.join(ARMS)}")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="requests at once (default: 1 8)")
    parser.add_argument("--json", action="store_true", help="print the JSON object alone")
    parser.add_argument("--sites", action="store_true", help="also print which lines of forerun caused the transfers")
    args = parser.parse_args()
    if unknown := [arm for arm in args.arms if arm not in ARMS]:
        parser.error(f"unknown arm {unknown[0]!r}; there are {', '.join(ARMS)}")
    if min(args.rows) < 1:
        parser.error(f"--rows takes numbers of at least 1, got {min(args.rows)}")
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    found = list[Waits]()
    if not args.json:
        print(HEADER)  # noqa: T201
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, FORERUN_CACHE=folder):
        for arm in args.arms or ARMS:
            for rows in args.rows:
                for waits in measured(arm, rows):
                    found.append(waits)
                    if not args.json:
                        lines = [table_line(waits), *(sites(waits) if args.sites else ())]
                        print(*lines, sep="\n", flush=True)  # noqa: T201
    print(json.dumps(summary(found)))  # noqa: T201


if __name__ == "__main__":
    main()
