"""This module has what is asked of a deployment, what is predicted of it, and what it comes to: commands, files and
notes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from forerun.control.config import SpeculativeConfig
from forerun.core.acceptance import RankAcceptance
from forerun.errors import ArgumentError, refuse
from forerun.plan import theory
from forerun.plan.planner import PlanLoad, plan_tree

if TYPE_CHECKING:
    from forerun.heads.engines import Launch

DRAFTS_TREES = ("eagle2", "peagle", "pard", "medusa", "dflash")
"""These methods draft a tree where their options do not say otherwise."""


class Stretch(NamedTuple):
    """A `Stretch` is a range of batch sizes, `first` to `last` inclusive, at which `k` tokens are
    drafted.
    """

    first: int
    last: int
    k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A `Forecast` holds what the planner says of a deployment."""

    load: PlanLoad
    max_batch: int  # Most sequences that the server decodes together
    ranks: RankAcceptance | None = None  # Acceptance by depth and rank, where it was given

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ArgumentError(f"--max-batch must be at least 1, got {self.max_batch}")

    def speedup(self, k: int, rows: int) -> float:
        """Return the speed-up over plain decoding, with chains of `k` in a batch of `rows`."""
        return self.load.predict(k, rows).speedup

    def best_k(self, k: int, rows: int) -> int:
        """Return the draft length up to `k` that is fastest in a batch of `rows`; 0 where none
        gains what can be measured.
        """
        best = max(range(k + 1), key=lambda length: self.speedup(length, rows))
        return best if self.speedup(best, rows) >= theory.WORTH else 0

    def stretches(self, k: int) -> tuple[Stretch, ...]:
        """Return the best length up to `k` for every batch size from 1 to `max_batch`.

        It never rises with the batch, as TensorRT-LLM wants it.
        """
        lengths, most = list[int](), k
        for rows in range(1, self.max_batch + 1):
            most = self.best_k(most, rows)
            lengths.append(most)
        return tuple(_runs(lengths))

    def fixed_cost(self, k: int) -> str | None:
        """Say in words what drafting `k` tokens at every batch costs; None where that is best
        anyway.
        """
        best = self.best_k(k, self.max_batch)
        if best == k:
            return None
        fixed, chosen = self.speedup(k, self.max_batch), self.speedup(best, self.max_batch)
        return (
            f"at batch {self.max_batch} K = {k} is predicted at {fixed:.2f} x plain decoding, K = {best} {chosen:.2f} x"
        )

    def chain_cost(self, k: int, nodes: int) -> str | None:
        """Say in words what a chain of `k` loses against the best tree of up to `nodes` nodes at
        batch 1; None if unknown.
        """
        if self.ranks is None:
            return None
        tree = plan_tree(self.load, self.ranks, nodes=nodes, depth=k)
        return (
            f"at batch 1 the chain is predicted at {self.speedup(k, 1):.2f} x plain decoding, a tree of "
            f"{len(tree.parents)} nodes {tree.speedup:.2f} x"
        )


def _runs(lengths: list[int]) -> Iterator[Stretch]:
    first = 1
    for k, group in groupby(lengths):
        last = first + len(list(group)) - 1
        yield Stretch(first, last, k)
        first = last + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSpec:
    """A `DraftSpec` is one drafter that an engine is to run."""

    method: str  # A drafter's name in forerun
    k: int  # Tokens on one path
    model: str | None
    options: Mapping[str, Any]  # Those that were given

    @property
    def nodes(self) -> int:
        """Return the most nodes of the tree, root not counted; 0 where a chain is drafted."""
        options = self.options
        if options.get("tree") is not None and not isinstance(options["tree"], str):
            return len(options["tree"])
        shape, level, count = options.get("shape"), 1, 0
        for children in shape or ():
            level *= children
            count += level
        if count > len(shape or ()):
            return count
        if options.get("max_branches", 1) > 1:
            return int(options["max_branches"]) * self.k
        grows = self.method in DRAFTS_TREES or options.get("top_k") or options.get("tree") is not None
        return int(options.get("nodes") or (32 if grows else 0)) if shape is None else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Counterpart:
    """A `Counterpart` says how an engine names one of our methods, and what it needs besides."""

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)  # Always given
    options: Mapping[str, str] = field(default_factory=dict)  # Our option -> the engine's
    model: bool = True  # True where a model or head must be named
    note: str = ""  # Note on the differences there
    versions: tuple[str, ...] = ()  # Those that have it; empty: all


@dataclass(frozen=True, kw_only=True, slots=True)
class ExaminedFiles:
    """`ExaminedFiles` hold what was read of the drafter's files."""

    launch: Launch | None = None  # For `heads.engines.Destination`; None for what is no head
    depth: int | None = None  # Most tokens that the head drafts on one path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployRequest:
    """A `DeployRequest` says what is to be deployed, and where."""

    model: str
    config: SpeculativeConfig | None
    version: str
    tp: int = 1  # Devices that share every layer
    pp: int = 1  # Groups of devices that share the layers out
    nodes: int = 1  # Machines that hold the model together
    head_address: str | None = None  # Address of the first machine, where there are several
    port: int = 8000
    out: Path | None = None  # Folder of the files; None: they are printed, and named in the current folder
    forecast: Forecast | None = None
    adaptive: bool = False  # That `config` is was said, and is not the default
    force: bool = False

    def __post_init__(self) -> None:
        refuse(
            (
                self.nodes == 1 and self.head_address is not None,
                "--head-address is of the first of several machines: give --nodes, or leave it out",
            ),
            (
                self.config is None and self.forecast is not None,
                "what is accepted says how much to draft: name a --drafter, or leave that out",
            ),
            (not 1 <= self.port <= 65535, f"--port is a number from 1 to 65535, got {self.port}"),
            (
                min(self.tp, self.pp, self.nodes) < 1,
                f"--tp, --pp and --nodes are at least 1, got {self.tp}, {self.pp}, {self.nodes}",
            ),
            (
                self.nodes and self.tp * self.pp % self.nodes,
                f"{self.tp} x {self.pp} devices (--tp x --pp) cannot be shared out evenly to {self.nodes} machines "
                "(--nodes)",
            ),
        )

    @property
    def devices(self) -> int:
        """Return the number of devices of each machine."""
        return self.tp * self.pp // self.nodes

    @property
    def first_machine(self) -> str:
        """Return the first machine's address; ArgumentError where none was given."""
        if self.head_address is None:
            raise ArgumentError(f"{self.nodes} machines need the first one's address: --head-address HOST")
        return self.head_address

    def sharing(self, tp: str, pp: str) -> list[str]:
        """Return the flags that share the model out to devices, by an engine's names for both."""
        return [word for name, count in ((tp, self.tp), (pp, self.pp)) if count > 1 for word in (name, str(count))]

    def path(self, name: str) -> str:
        """Return the path of a deployment's file as its command names it."""
        return name if self.out is None else str((self.out / name).resolve())


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A `Command` is one command line."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    where: str = ""  # Purpose, or place where it is typed, if there are several
    role: Literal["serve", "before", "elsewhere", "by hand"] = "serve"
    """``--run`` starts it (serve), needs it done first (before), or leaves it; "by hand" has a
    blank that the user fills in.
    """
    script: str = "deploy.sh"  # Which file of ``--out`` it stands in: one for each place and time

    @classmethod
    def on_machine(cls, rank: int, words: Sequence[str], environment: Mapping[str, str]) -> Command:
        """Return the command of one of several machines, in a script of its own."""
        where, script = f"on machine {rank}", f"machine-{rank}.sh"
        return cls(words=tuple(words), environment=environment, where=where, role="elsewhere", script=script)

    @property
    def line(self) -> str:
        """Return the command as a line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A `Deployment` holds what starts the engine."""

    commands: tuple[Command, ...]
    files: Mapping[str, str] = field(default_factory=dict)  # Name -> text
    schedule: tuple[Stretch, ...] = ()  # Draft lengths by batch size; empty: always the same
    notes: tuple[str, ...] = ()  # Differences of the engine, and their cost
