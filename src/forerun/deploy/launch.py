"""A launch plan turns a speculative configuration into the commands, files and environment of
another engine: first a request and its result, then what the engines share.

An engine is an `EngineWriter` in one file of `engines/` and one line in `ENGINES`. What engines make
of a trained head is read by `forerun.heads`, as ``forerun doctor`` and ``forerun export`` do.

The planner's costs say how much to draft at each batch size, and what it costs to draft the same at
every one.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from forerun.control.config import SpeculativeConfig, arms_of
from forerun.core.acceptance import RankAcceptance
from forerun.deploy import check_plugged, list_methods, reads_text_alone
from forerun.drafters import AUTO, check_options, default_length, entry_named, is_outside
from forerun.drafters.kinds import KINDS, import_named
from forerun.errors import ArgumentError, CheckpointError, refuse, refuse_below, refuse_unknown
from forerun.model.names import gguf_file
from forerun.model.other_apps import find_kept
from forerun.plan import theory
from forerun.plan.planner import PlanLoad, plan_tree
from forerun.shipped import resolve
from forerun.writing import read_object

if TYPE_CHECKING:
    from forerun.heads.engines import Finding, Launch

DRAFTS_TREES = ("eagle2", "peagle", "pard", "medusa", "dflash")
"""These methods draft a tree where their options do not say otherwise."""


class Stretch(NamedTuple):
    """A range of batch sizes, `first` to `last` inclusive, at which `k` tokens are drafted."""

    first: int
    last: int
    k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The planner's forecast of a deployment."""

    load: PlanLoad
    max_batch: int  # Most sequences that the server decodes together
    ranks: RankAcceptance | None = None  # Acceptance by depth and rank, where it was given

    def __post_init__(self) -> None:
        refuse_below("--", self, max_batch=1)

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
        lengths = list[int]()
        most = k
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
    """One drafter that an engine is to run."""

    method: str  # A drafter's name in forerun
    k: int  # Tokens on one path
    model: str | None
    options: Mapping[str, Any]  # Those that were given

    @property
    def copies(self) -> bool:
        return entry_named(self.method).is_lookup

    @property
    def nodes(self) -> int:
        """Return the most nodes of the tree, root not counted; 0 where a chain is drafted."""
        options = self.options
        if options.get("tree") is not None and not isinstance(options["tree"], str):
            return len(options["tree"])
        shape = options.get("shape")
        level = 1
        count = 0
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
    """The name of one of our methods in an engine, and what it needs besides."""

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)  # Always given
    options: Mapping[str, str] = field(default_factory=dict)  # Our option -> the engine's
    model: bool = True  # True where a model or head must be named
    note: str = ""  # Note on the differences there
    versions: tuple[str, ...] = ()  # Those that have it; empty: all


@dataclass(frozen=True, kw_only=True, slots=True)
class ExaminedFiles:
    """The result of reading the drafter's files."""

    launch: Launch | None = None  # For `heads.engines.Destination`; None for what is no head
    depth: int | None = None  # Most tokens that the head drafts on one path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployRequest:
    """A request: what is to be deployed, and where."""

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
    """One command line."""

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
    """Everything that starts the engine."""

    commands: tuple[Command, ...]
    files: Mapping[str, str] = field(default_factory=dict)  # Name -> text
    schedule: tuple[Stretch, ...] = ()  # Draft lengths by batch size; empty: always the same
    notes: tuple[str, ...] = ()  # Differences of the engine, and their cost


ENGINES: dict[str, str] = {
    "vllm": "forerun.deploy.engines.vllm:Vllm",
    "sglang": "forerun.deploy.engines.sglang:SGLang",
    "trtllm": "forerun.deploy.engines.trtllm:TensorRtLlm",
    "llamacpp": "forerun.deploy.engines.llamacpp:LlamaCpp",
    "dynamo": "forerun.deploy.engines.vllm:Dynamo",
}
COMBINED = ("first_of", "merge", AUTO, "cascade")
_AS_STORED = "(as the files are)"  # In what is wrong with files that an export would write otherwise
_TREE = ("tree", "shape", "top_k", "nodes", "max_branches")
TOKENS = "num_speculative_tokens"
_OWN = ("model", TOKENS, *_TREE)
"""These options are translated or commented upon elsewhere than in `EngineWriter.choose`."""


class EngineWriter(ABC):
    """One deployment on one engine, whose flags and keys are known from its own sources of the versions named."""

    title: ClassVar[str]
    versions: ClassVar[tuple[str, ...]]  # Known ones, the newest last
    ways: ClassVar[Mapping[str, Counterpart]]  # Our method -> the engine's
    reads: ClassVar[str]  # Its name in `heads.engines`
    rules: ClassVar[Mapping[str, Any]] = {}  # Our verification rules that it has
    predictions: ClassVar[bool] = False  # Whether requests bring predictions to a plug-in
    combines: ClassVar[tuple[str, ...]] = ()  # Copying methods that it puts before a model
    vocabulary_margin: ClassVar[int | None] = (
        None  # Most by which a draft model's vocabulary may differ in size; None: not known
    )
    handled: ClassVar[tuple[str, ...]] = ()  # Words of findings that a deployment sees to
    variable: ClassVar[str] = ""  # Environment variable with the plug-in's options; empty: there is no plug-in
    routes: ClassVar[bool] = False  # True where the plug-in also chooses among drafters (`auto`)

    def __init__(self, request: DeployRequest) -> None:
        self.request = request
        self.notes: list[str] = []  # What the engine does otherwise, and what that costs; `deployment` fills it

    @abstractmethod
    def deployment(self) -> Deployment:
        """Return commands and files; ArgumentError if the engine cannot do it."""

    @property
    def config(self) -> SpeculativeConfig:
        """Return the drafter that was requested, where there is one."""
        assert self.request.config is not None
        return self.request.config

    # --- which drafter, and under which name ---

    def choose(self) -> tuple[DraftSpec, Counterpart, DraftSpec | None]:
        """Return the drafter that the engine runs, its counterpart there, and a copying one that it
        puts before it.

        ArgumentError: the engine has no counterpart, or needs a model that was not named.
        """
        drafts = self.list_drafts()
        main = self._choose_main(drafts)
        first = next((draft for draft in drafts if draft.method in self.combines and not main.copies), None)
        lost = [draft.method for draft in drafts if draft is not main and draft is not first]
        if lost:
            self.notes.append(
                f"{self.title} does not draft with {', '.join(lost)} beside {main.method} ({self.config.method}); "
                f"`forerun plan MODEL --drafter {self.config.method} --prompts FILE` measures what they bring"
            )
        way = self.ways[main.method]
        if way.model and main.model is None:
            raise ArgumentError(f"{main.method} needs a model or head; name it with --drafter-model DIR")
        if main.model is not None and not way.model and same_place(main.model, self.request.model):
            main = replace(main, model=None)
        if main.model is not None and not way.model:
            raise ArgumentError(
                f"{self.title} reads {main.method} in the target's own checkpoint; {self._export(main)}, "
                "leaving --drafter-model out"
            )
        if way.note:
            self.notes.append(way.note)
        without = [f"{key}={value}" for key, value in main.options.items() if key not in (*way.options, *_OWN)]
        if without:
            self.notes.append(
                f"{self.title} has no counterpart of {main.method}'s {', '.join(without)}; its own default holds"
            )
        return main, way, first

    def _choose_main(self, drafts: Sequence[DraftSpec]) -> DraftSpec:
        able = [draft for draft in drafts if self.has(draft.method)]
        if not able:
            asked = ", ".join(draft.method for draft in drafts)
            have = ", ".join(filter(self.has, self.ways))
            raise ArgumentError(
                f"{self.title} {self.request.version} has no counterpart of {asked}; it has {have}. "
                "forerun serve drafts with it here"
            )
        return next((draft for draft in able if not draft.copies), able[0])

    def list_drafts(self) -> list[DraftSpec]:
        """Return the drafters that the configuration is made of, those that copy first.

        ArgumentError: it asks for a rule that the engine does not have, or for one in a plug-in,
        whose tokens the engine verifies by its own.
        """
        config, plugged = self.config, self.plugs_in
        if config.rule is not None and (plugged or config.rule not in self.rules):
            have = ", ".join(self.rules)
            own = "verifies these drafts by its own rule" if plugged or not have else f"has {have}"
            raise ArgumentError(
                f"{self.title} has no counterpart of the rule {config.rule!r}; it {own}: leave --rule out"
            )
        if plugged:
            check_plugged(config.named, predictions=self.predictions)
        return [_draft(member) for member in _members(config)]

    def has(self, method: str) -> bool:
        """Return whether the requested version drafts by that method."""
        way = self.ways.get(method)
        return way is not None and (not way.versions or self.version in way.versions)

    @property
    def version(self) -> str:
        """Return the version that `Counterpart.versions` are of."""
        return self.request.version

    @property
    def plugs_in(self) -> bool:
        """Return whether the drafter goes into the engine as forerun's plug-in.

        It does where it reads text alone, and the engine has none like it. Of `auto`, the drafters
        named to choose from decide.
        """
        if self.request.config is None:
            return False
        method, *members = list_methods(self.config.named)
        fits = "model" not in self.config.options and self.routes if method == AUTO else reads_text_alone(method)
        return bool(self.variable) and method not in self.ways and fits and all(map(reads_text_alone, members))

    def note_outside(self) -> None:
        """Note what a plug-in's drafters outside of forerun need."""
        outside = ", ".join(filter(is_outside, list_methods(self.config.named)))
        if outside:
            self.notes.append(f"{outside}: put the module's folder in PYTHONPATH where {self.title} runs")

    # --- how much is drafted ---

    def note_chain(self, draft: DraftSpec, k: int) -> None:
        """Note that the tree of `draft` becomes a chain of `k`, and what that costs."""
        if draft.nodes == 0:
            return
        forecast = self.request.forecast
        cost = forecast.chain_cost(k, draft.nodes) if forecast is not None else None
        cost = cost or "--rank-acceptance with --params and --device predicts what that costs"
        self.notes.append(f"{self.title} drafts this as a chain of {k}, not as a tree of {draft.nodes} nodes; {cost}")

    def schedule(self, k: int, *, able: bool = True) -> tuple[Stretch, ...]:
        """Return what to draft at which batch size; empty where it is always `k`, or was requested to
        be.

        `able` says whether the engine can vary it.
        """
        forecast = self.request.forecast
        if not self.config.adaptive:
            return ()
        if forecast is None:
            if able:
                self.notes.append(
                    "the draft is as long at every batch; --text chat --params 8e9 --device h100, say, computes how "
                    "long it should be at which"
                )
            return ()
        if not able:
            cost = forecast.fixed_cost(k)
            if cost:
                self.notes.append(f"{self.title} drafts as much at every batch: {cost}")
            return ()
        stretches = forecast.stretches(k)
        if stretches[0].k == 0:
            raise ArgumentError(
                f"no draft of up to {k} tokens is predicted to be faster than plain decoding, at any batch; deploy "
                "without --drafter, or give --no-adaptive to draft nevertheless"
            )
        return () if len(stretches) == 1 and stretches[0].k == k else stretches

    # --- what the engine makes of the drafter's files ---

    def read_drafter(self, draft: DraftSpec) -> tuple[ExaminedFiles, int]:
        """Read the drafter's files, note what is to be said of them, and return them with the tokens on one path.

        Errors as `examine` and `depth_of`.
        """
        examined = self.examine(draft)
        self.notes += examined.notes
        if guesses_length(draft, examined):
            self.notes.append(
                f"K = {draft.k} is a guess: what the head was trained for is in its files; say it with -k"
            )
        return examined, depth_of(draft, examined)

    def examine(self, draft: DraftSpec) -> ExaminedFiles:
        """Return what this engine would do with the drafter's files, where they and the target's
        are on this machine.

        CheckpointError, unless `DeployRequest.force`: it would not load them, or draft worse; the
        error says what to do.
        """
        target = self.request.model
        if not self.request.force:
            self._check_models(draft)
        if draft.model is None or (draft.method not in KINDS and draft.method != "pard"):
            return ExaminedFiles()
        if not (is_local(draft.model) and is_local(target)):
            check = f"`forerun doctor {draft.model} --target {target}` does"
            return ExaminedFiles(notes=(f"the {draft.method} head was not looked at; {check}",))
        findings, files = _findings(target, draft)
        findings = [
            each
            for each in findings
            if each.engine == self.reads and not any(word in each.why for word in self.handled)
        ]
        wrong = [each for each in findings if each.severity in ("degrades", "fails")]
        if wrong and not self.request.force:
            rewritten = all(_AS_STORED in each.what for each in wrong)
            todo = f" So {self._export(draft)}." if rewritten else ""
            raise CheckpointError(
                f"{self.title} would not serve {draft.model} as it was trained. "
                f"{'; '.join(map(self._describe, wrong))}.{todo} To go on nevertheless: --force"
            )
        return replace(files, notes=tuple(self._describe(each) for each in findings if each.severity != "ok"))

    def _check_models(self, draft: DraftSpec) -> None:
        """Raise CheckpointError where the target brings no MTP layers, or the draft model has
        another vocabulary.

        Only files on this machine are checked.
        """
        if not is_local(self.request.model):
            return
        target = _read_config(self.request.model)
        if draft.method == "mtp":
            from forerun.heads.mtp_files import COUNTS, MtpFormat

            if not MtpFormat().recognises(target):
                raise CheckpointError(
                    f"{self.request.model} brings no MTP layers: its config.json has none of {', '.join(COUNTS)}. "
                    "Draft with another method; to go on nevertheless: --force"
                )
        elif (
            draft.method in ("draft_model", "pard")
            and self.vocabulary_margin is not None
            and is_local(draft.model or "")
        ):
            ours, theirs = (config.get("vocab_size") for config in (_read_config(str(draft.model)), target))
            if ours and theirs and abs(ours - theirs) > self.vocabulary_margin:
                allowed = (
                    f"at most {self.vocabulary_margin} tokens larger or smaller"
                    if self.vocabulary_margin
                    else "of the same size"
                )
                raise CheckpointError(
                    f"the vocabulary of {draft.model} has {ours} tokens, the target's {theirs}; {self.title} wants one "
                    f"{allowed}: name a draft model of the target's family. To go on nevertheless: --force"
                )

    def _describe(self, finding: Finding) -> str:
        remedy = f" ({finding.remedy})" if finding.remedy else ""
        return f"{finding.what}: {self.title} {finding.why}{remedy}"

    def _export(self, draft: DraftSpec) -> str:
        """Say which command writes the drafter as this engine reads it."""
        from forerun.heads.engines import engines_for

        known = ["vllm", "trtllm"]
        if draft.method in KINDS:
            known = list(engines_for(KINDS[draft.method].stored_as).destinations)
        to = self.reads if self.reads in known else next(iter(known), "hf")
        words = ["forerun", "export", str(draft.model), "--to", to, "--target", self.request.model, "--output", "DIR"]
        return f"write it as {self.title} reads it first, `{shlex.join(words)}`, and deploy what is in DIR"


def map_options(draft: DraftSpec, way: Counterpart) -> dict[str, Any]:
    """Return the engine's options with the values that ours have, given or by default, because
    its own defaults differ.
    """
    options = check_options(draft.method, draft.options)
    return {theirs: getattr(options, ours) for ours, theirs in way.options.items()}


def guesses_length(draft: DraftSpec, examined: ExaminedFiles) -> bool:
    """Return whether the draft length is a guess: the head drafts all tokens at once, and
    neither its files nor the user say how many.
    """
    at_once = draft.method in KINDS and KINDS[draft.method].drafts != "sequential"
    return at_once and examined.depth is None and TOKENS not in draft.options


def depth_of(draft: DraftSpec, examined: ExaminedFiles) -> int:
    """Return the tokens on one path; ArgumentError for more than the head has."""
    most = examined.depth
    if most is None:
        return draft.k
    given = TOKENS in draft.options
    if given and draft.k > most:
        raise ArgumentError(f"the {draft.method} head drafts {most} tokens on one path, {draft.k} were requested")
    return min(draft.k, most) if given or KINDS[draft.method].drafts == "sequential" else most


def find_engine(name: str) -> type[EngineWriter]:
    """Return what writes for the engine of that name; an ArgumentError names the nearest where there is none."""
    name = "llamacpp" if name == "llama.cpp" else name
    refuse_unknown("unknown engine", name, ENGINES)
    return import_named(ENGINES[name])


def choose_version(engine: type[EngineWriter], requested: str | None, *, force: bool = False) -> tuple[str, list[str]]:
    """Return the version to write for, and a note where it is not the requested one.

    ArgumentError: nothing is known of `requested`, and not `force`.
    """
    known = engine.versions
    if requested is None or requested in known:
        return requested or known[-1], []
    release = requested.partition(" ")[0].partition("+")[0].removesuffix("-dev")
    if release in known:  # what `--version` says: 0.5.0-dev (build 1, commit 0c1e570), 0.32.0+cpu
        return release, []
    if not force:
        raise ArgumentError(
            f"nothing is known of {engine.title} {requested}; known are {', '.join(known)}, and flags change between "
            f"versions. To write what is right for {known[-1]}: --force"
        )
    return known[-1], [f"nothing is known of {engine.title} {requested}: this is right for {known[-1]}"]


def same_place(one: str, other: str) -> bool:
    """Return whether two names are of the same directory."""
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def is_local(name: str) -> bool:
    """Return whether a model or head is a directory on this machine."""
    return bool(name) and Path(name).expanduser().is_dir()


def _read_config(folder: str) -> dict[str, Any]:
    """Return a model's configuration, merged with that of its text part."""
    file = Path(folder).expanduser() / "config.json"
    config = read_object(file, "expected a model's configuration", CheckpointError)
    return {**config, **(config.get("text_config") or {})}


def _findings(target: str, draft: DraftSpec) -> tuple[list[Finding], ExaminedFiles]:
    """Return what engines do with the drafter's files."""
    from forerun.heads.engines import Launch, diagnose, diagnose_files
    from forerun.heads.files import TargetFacts, parse, read_files
    from forerun.heads.pard_files import PardModel

    facts = TargetFacts.read(target)
    directory = Path(str(draft.model)).expanduser()
    if draft.method == "pard":
        model = PardModel.at(directory)
        if model is None:
            raise ArgumentError(f"{directory} holds no PARD draft model; deploy it with --drafter draft_model")
        return list(model.findings(facts)), ExaminedFiles()
    stored = read_files(directory)
    head = parse(stored, num_layers=facts.num_layers)
    if head.config.kind != KINDS[draft.method].stored_as:
        raise ArgumentError(f"{directory} holds a {head.config.kind} head: --drafter {head.config.kind}")
    findings = diagnose(head, facts) + diagnose_files(stored, head, facts)
    return findings, ExaminedFiles(
        launch=Launch(head=head, target=facts, directory=directory), depth=head.config.max_depth
    )


def _members(config: SpeculativeConfig) -> list[SpeculativeConfig]:
    """Return the drafters that a combined one is made of, those that copy first; itself where it is
    none.
    """
    from forerun.drafters.combined.composed import options_of

    if config.method == AUTO:
        return arms_of(config, every=True)  # An engine may have `ngram` alone
    if config.method not in COMBINED:
        return [config]
    options = check_options(config.method, config.drafter_options)
    named = [options.inner] if config.method == "cascade" else list(options.drafters)
    if config.method == "cascade":
        named.append({"method": "draft_model", "model": options.model})
    members = list[SpeculativeConfig]()
    for member in named:
        method, member_options = options_of(config.method, member)
        parsed = SpeculativeConfig.parse({"method": method, **member_options})
        assert parsed is not None
        members.append(
            replace(parsed, num_speculative_tokens=parsed.num_speculative_tokens or config.num_speculative_tokens)
        )
    return members


def find_model(name: str) -> str:
    """Return what an engine opens under a model's name: the folder of a shipped one, the GGUF file that Ollama or LM
    Studio keeps, and anything else unchanged.
    """
    return str(gguf_file(name) if find_kept(name) else resolve(name))


def _draft(config: SpeculativeConfig) -> DraftSpec:
    check_options(config.method, config.drafter_options)
    k = config.num_speculative_tokens or default_length(config.method) or 1
    given = config.options.get("model")
    return DraftSpec(
        method=config.method,
        k=k,
        model=None if given is None else find_model(str(given)),
        options=config.drafter_options,
    )
