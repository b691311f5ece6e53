"""``forerun plan`` says what speculation can bring, before anything is trained or bought. Without a
MODEL no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forerun.cli import console, session
from forerun.cli.options import (
    SPECULATION,
    AnswerLength,
    Flag,
    Json,
    PlannedOptions,
    SpeculationOptions,
    numbers,
)
from forerun.control.costs import FREE, DraftCost, PassCost
from forerun.errors import ArgumentError, refuse
from forerun.plan import assumptions, theory
from forerun.plan.assumptions import DEVICES, Device, FreeVerification, KeyValues, Roofline, Size
from forerun.plan.planner import MOST_BATCH, PlanLine, PlanLoad, decide, draw_plan, plan_tree
from forerun.plan.planner import plan as make_plan
from forerun.plan.prompts import UserPrompt, read_prompts
from forerun.plots import check_plot

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.control.costs import CostModel
    from forerun.plan.measured import MeasuredDrafter


def _count(_: object, tokens: Sequence[Token]) -> float:
    """Read a number of parameters: 8e9, or 8B."""
    written = tokens[0].value
    try:
        return float(written[:-1]) * _UNITS[written[-1].upper()] if written[-1:].isalpha() else float(written)
    except (KeyError, ValueError) as error:
        raise ArgumentError(f"{tokens[0].keyword} takes a number of parameters, 8e9 or 8B, got {written!r}") from error


_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_Parameters = Annotated[float | None, Parameter(converter=_count)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastOptions:
    """The options that say what is accepted, and what a pass of which target costs."""

    context: int | None = None
    """Committed tokens of each sequence; measured on the prompts where there are some, else 0."""
    temperature: Annotated[float | None, Parameter(alias="-t")] = None
    """Temperature of the completions; measured at it, or an assumption for --text. 0 is greedy."""
    text: str | None = None
    """chat, code, math, creative, translation, summary, qa or rag: acceptance is assumed from published figures."""
    alpha: float | None = None
    """Probability that a drafted token is accepted, in 0..1."""
    acceptance: str | None = None
    """Acceptance by position, comma separated: 0.8,0.7,0.6; the last one goes on."""
    rank_acceptance: str | None = None
    """Acceptance in a tree: by rank, and by depth behind semicolons: 0.6,0.2,0.1;0.5,0.2."""
    draft_cost: float | None = None
    """c: time of one drafted level in plain passes of the target; default 0."""
    draft_params: _Parameters = None
    """Parameters of a draft model, costed by the same roofline."""
    params: _Parameters = None
    """Parameters of a target that is not here, 70e9 or 70B; --dtype and --device say in what and where it runs."""
    active_params: _Parameters = None
    """Mixture of experts: parameters that one token runs through."""
    experts: int | None = None
    """Mixture of experts: routed experts of a layer."""
    experts_per_token: int | None = None
    """Mixture of experts: how many of them a token is sent to."""
    layers: int | None = None
    """Layers of the target; with --kv-heads and --head-dim the cache's traffic counts."""
    kv_heads: int | None = None
    """Key-value heads of a layer."""
    head_dim: int | None = None
    """Width of a head."""

    @property
    def given(self) -> bool:
        return any(value is not None for value in (self.alpha, self.acceptance, self.rank_acceptance))


FORECAST = ForecastOptions()


PLANNED = PlannedOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions(ForecastOptions):
    """The options that say what is to be planned, and how its acceptance is known."""

    batch: int = 1
    """Sequences that are decoded together."""
    prompts: Path | None = None
    """File with one prompt per line, or JSON lines with 'prompt', 'messages' or 'turns' (Spec-Bench's)."""
    raw: Flag = False
    """The model continues the prompts as they stand. Else they are messages of a user where it has a chat template."""
    choose_draft: tuple[str, ...] = ()
    """Candidate draft models, ranked by measured acceptance and cost."""
    max_tokens: Annotated[int, AnswerLength] = 96
    """Tokens of each measured completion."""
    limit: int = 8
    """Prompts that are measured at most."""
    tree_nodes: int = 32
    """Most drafted nodes of a tree."""
    tp: int = 1
    """Devices that share every layer."""
    heads: int | None = None
    """Query heads of the target; with them the arithmetic of attention counts, too."""
    tflops: float | None = None
    """Peak bf16 arithmetic of a device that is not in the table, 1e12 operations a second."""
    bandwidth: float | None = None
    """Its peak memory bandwidth, 1e9 bytes a second."""
    speculation: SpeculationOptions = SPECULATION
    loading: PlannedOptions = PLANNED

    @property
    def k(self) -> int | None:
        return self.speculation.num_speculative_tokens

    @property
    def measuring(self) -> bool:
        """Return whether acceptance is measured: prompts or candidates are given, or nothing else
        says it.
        """
        return self.prompts is not None or bool(self.choose_draft) or not (self.given or self.text is not None)

    @property
    def ranks(self) -> list[list[float]] | None:
        """Return acceptance by depth and rank, where it was given for a tree."""
        given = self.rank_acceptance
        return None if given is None else [numbers(line, "--rank-acceptance", float) for line in given.split(";")]

    def check(self, model: str | None) -> None:
        """Raise ArgumentError where options contradict each other, or something is missing."""
        if self.text is not None:
            assumptions.find_text(self.text)
        wants_model = self.prompts is not None or self.choose_draft or self.speculation.drafter is not None
        refuse(
            (
                self.k is not None and self.k < 1,
                f"at least one token must be drafted: -k must be 1 or more, got {self.k}",
            ),
            (
                self.temperature is not None and self.temperature < 0,
                f"temperature must be 0 (greedy) or more, got {self.temperature}",
            ),
            (self.alpha is not None and self.acceptance is not None, "give --alpha or --acceptance, not both"),
            (
                model is not None and self.params is not None,
                "a MODEL is measured here and --params describes one that is not: give one of them",
            ),
            (
                model is None and wants_model,
                "--prompts, --drafter and --choose-draft measure, for which a MODEL is needed",
            ),
            (
                model is None and not self.given and self.text is None,
                "what is accepted? Give --alpha 0.7, --acceptance 0.8,0.7,0.6, --text chat (published figures), or "
                "measure it: forerun plan MODEL --drafter NAME --prompts FILE",
            ),
            (
                self.given and (self.prompts is not None or self.choose_draft),
                "acceptance is given (--alpha ...) or measured (--prompts ...), not both",
            ),
        )
        self._check_effect(model)
        refuse(
            (
                self.measuring and self.prompts is None,
                "acceptance is measured on prompts of yours: give --prompts FILE (one a line), or "
                "give a figure instead, --alpha 0.7",
            ),
            (
                self.measuring and not self.choose_draft and not self.speculation.config(),
                "whose acceptance? Give --drafter NAME or --choose-draft MODEL ... (forerun drafters)",
            ),
        )

    def _check_effect(self, model: str | None) -> None:
        """Raise ArgumentError for an option that would change nothing."""
        if model is not None:
            _refuse(self, ("draft_params",), "needs a roofline (--params); for a MODEL give --draft-cost")
        if self.params is None:
            _refuse(self, _ROOFLINE, "is for a target that is not here: give its size, --params 70e9, and no MODEL")
        if model is None:
            _refuse(self.loading, ("adapter", "max_model_len", "reproducible"), "needs a MODEL")
            if self.params is None:
                _refuse(self.loading, ("device", "dtype"), "needs the target's size (--params 70e9), or a MODEL")
        if self.measuring:
            _refuse(self, ("draft_cost", "context"), "is measured on the prompts: leave it out")
            return
        _refuse(self, ("raw",), "is of prompts that are completed: give --prompts and no other acceptance")
        _refuse(self.speculation, _DRAFTER, "is of acceptance that is measured: give --prompts and no other acceptance")
        if self.rank_acceptance is None:
            _refuse(self, ("tree_nodes",), "is of a tree: give --rank-acceptance, or measure it (--prompts)")


def _refuse(options: Any, names: Sequence[str], reason: str) -> None:
    """Raise ArgumentError where one of these options has another value than its default."""
    defaults = type(options)()
    given = next((name for name in names if getattr(options, name) != getattr(defaults, name)), None)
    if given is not None:
        raise ArgumentError(f"--{given.replace('_', '-')} {reason}")


_ROOFLINE = (
    *("active_params", "experts", "experts_per_token", "layers", "kv_heads", "head_dim", "heads"),
    *("draft_params", "tp", "tflops", "bandwidth"),
)
_DRAFTER = ("drafter", "drafter_model", "speculative_config", "drafter_option", "rule", "adaptive")
OPTIONS = PlanOptions()


def plan(
    model: str | None = None, /, *, options: PlanOptions = OPTIONS, plot: Path | None = None, json: Json = False
) -> int:
    """Say what speculation can bring: tokens per pass, speed-up, best draft length, break-even batch, and a verdict.

    Parameters
    ----------
    model
        Directory or hub id: passes are measured here, acceptance with --drafter and --prompts, too.
    plot
        Write the plan as a picture (png, svg or pdf).
    """
    check_plot(plot)
    options.check(model)
    shown = on_paper(options) if model is None else on_model(options, model)
    if plot is not None:
        draw_plan(shown.plan, plot, shown.title, costed=shown.costed, batches=shown.batches)
    if json:
        console.write_json(shown.record())
    else:
        show(shown)
    return 0


def on_paper(options: PlanOptions) -> Shown:
    """Plan with given or assumed acceptance, and passes that cost what the roofline says."""
    return _with_costs(options, *_cost(options))


def _with_costs(options: PlanOptions, cost: PassCost, notes: list[str]) -> Shown:
    """Plan with given or assumed acceptance, and passes that cost so much."""
    survival, assumed = _survival(options)
    uncosted = ["verifying"] if isinstance(cost, FreeVerification) else []
    if options.draft_cost is None and options.draft_params is None:
        notes.append("drafting counts as free until --draft-cost says what it costs")
        uncosted.insert(0, "drafting")
    load = PlanLoad(
        survival=survival, cost=cost, draft=_draft(options, cost), rows=options.batch, context=options.context or 0
    )
    return Shown(options, load, [*assumed, *notes], uncosted=uncosted)


def _survival(options: PlanOptions) -> tuple[list[float], list[str]]:
    """Return acceptance by depth, and what was assumed for it."""
    length = max(16, options.k or 0)
    described = options.given and (options.text is not None or options.temperature is not None)
    note = "acceptance is taken as measured on this text and at this temperature; neither changes it"
    notes = [note] if described else []
    if options.acceptance is not None:
        return theory.survival_of(numbers(options.acceptance, "--acceptance", float)), notes
    if options.alpha is not None:
        return theory.geometric(options.alpha, length), notes
    if options.ranks is not None:
        theory.check_ranks(options.ranks)
        chain = "the chain drafts the first rank of each depth"
        return theory.survival_of([line[0] for line in options.ranks]), [*notes, chain]
    assert options.text is not None
    alpha, notes = assumptions.assume_alpha(options.text, options.temperature or 0.0)
    return theory.geometric(alpha, length), notes


def _cost(options: PlanOptions) -> tuple[PassCost, list[str]]:
    """Return what passes cost, and what was assumed for it."""
    if options.params is None:
        notes = ["verification counts as free, v(n) = 1, until --params and --device, or a MODEL, say what it costs"]
        if options.batch > 1 or options.context:
            notes.append("where verification is free batch and context change nothing")
        return FreeVerification(), notes
    shape = {name: getattr(options, name) for name in ("params", "active_params", "experts", "experts_per_token")}
    line = _roofline(options, Size(**shape))
    notes = [
        f"roofline of {line.tp} x {line.device.name}: {line.compute_efficiency:.0%} of the peak arithmetic, "
        f"{line.bandwidth_efficiency:.0%} of the peak bandwidth; launches and traffic between devices are left out"
    ]
    if line.device.note:
        notes.append(f"{line.device.name}: {line.device.note}")
    if line.kv is None:
        notes.append("the KV cache is not counted; --layers, --kv-heads, --head-dim and --context add it")
    if line.fits(options.batch, options.context or 0) is False:
        notes.append(
            f"{line.weights_gb():.0f} GB of weights and the cache do not fit {line.tp} x {line.device.memory:.0f} GB: "
            "raise --tp, or choose a narrower --dtype"
        )
    return line, notes


def _roofline(options: PlanOptions, size: Size) -> Roofline:
    kv = None
    shape = {name: getattr(options, name) for name in ("layers", "kv_heads", "head_dim")}
    if None not in shape.values():
        kv = KeyValues(**shape, heads=options.heads)
    elif options.heads is not None or any(value is not None for value in shape.values()):
        raise ArgumentError("the KV cache needs --layers, --kv-heads and --head-dim together")
    return Roofline(
        device=_device(options), size=size, dtype=assumptions.parse_dtype(options.loading.dtype), tp=options.tp, kv=kv
    )


def _device(options: PlanOptions) -> Device:
    tflops, bandwidth, name = options.tflops, options.bandwidth, options.loading.device
    if tflops is not None and bandwidth is not None:
        if not (tflops > 0 and bandwidth > 0):
            raise ArgumentError("--tflops and --bandwidth must be positive")
        return Device(name=name or "your device", tflops=tflops, bandwidth=bandwidth / 1000, memory=None)
    if tflops is not None or bandwidth is not None:
        raise ArgumentError("a device of your own needs --tflops and --bandwidth")
    if name is None:
        raise ArgumentError(f"on which device? Give --device: {', '.join(DEVICES)}")
    return assumptions.find_device(name)


def _draft(options: PlanOptions, cost: PassCost) -> Any:
    """Return the drafter's cost for a batch: given as c, or by the roofline."""
    share = options.draft_cost
    params = options.draft_params
    context = options.context or 0
    if share is not None and params is not None:
        raise ArgumentError("give --draft-cost or --draft-params, not both")
    if share is not None:
        if not share >= 0:
            raise ArgumentError(f"--draft-cost must be 0 or more, got {share}")
        return lambda rows: DraftCost(fixed_ms=0.0, level_ms=share * cost.pass_ms(1, rows, context))
    if params is None:
        return lambda rows: FREE
    small = replace(_roofline(options, Size(params=params)), kv=None)
    return lambda rows: DraftCost(fixed_ms=0.0, level_ms=small.pass_ms(1, rows, 0))


def on_model(options: PlanOptions, model: str) -> Shown:
    """Plan with measured passes; acceptance is given, assumed, or measured on the user's prompts."""
    prompts = read_prompts(options.prompts) if options.prompts is not None else None
    drafts = options.measuring and not options.choose_draft  # Else -k alone is no configuration
    session.check(model, options.loading, options.speculation.config() if drafts else None, max_num_seqs=1)
    llm = session.load(model, options.loading, None, max_num_seqs=1)
    with console.telling("planning") as tell:
        from forerun.control.measuring import load_or_measure

        cost = load_or_measure(llm.target, rows=(1,), tell=tell)
        if prompts is not None:
            return _measure(options, llm, cost, prompts, tell)
    return _with_costs(options, cost, [f"passes were measured here, {llm.target.runs_as}", *_batch_note(options)])


def _measure(options: PlanOptions, llm: LLM, cost: CostModel, prompts: Sequence[UserPrompt], tell: Any) -> Shown:
    from forerun.control.config import SpeculativeConfig
    from forerun.plan import measured

    how: dict[str, Any] = {name: getattr(options, name) for name in ("temperature", "max_tokens", "limit", "raw")}
    answers = measured.EncodedPrompts.of(llm, prompts, **how)
    ranking: list[tuple[MeasuredDrafter, PlanLine]] = []
    refused: dict[str, str] = {}
    if options.choose_draft:
        able, refused = measured.rank_models(
            llm,
            options.choose_draft,
            answers,
            tell,
            options={} if options.k is None else {"num_speculative_tokens": options.k},
        )
        if not able:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            raise ArgumentError(f"none of the candidates can draft for this target: {reasons}")
        ranking = [(drafter, make_plan(drafter.load(cost, rows=options.batch)).best) for drafter in able]
        ranking.sort(key=lambda pair: -pair[1].speedup)
        drafter = ranking[0][0]
    else:
        config = SpeculativeConfig.parse(options.speculation.config())
        assert config is not None
        drafter = measured.measure_drafter(llm, config, answers, tell)
        measured.save_draft_cost(llm, cost, config, drafter.draft)
    notes = [f"passes were measured here, {llm.target.runs_as}", answers.asked]
    notes += [f"{name} cannot draft here: {reason}" for name, reason in refused.items()] + _batch_note(options)
    if drafter.trial.coverage < 1:
        notes.append(f"something was drafted in {drafter.trial.coverage:.0%} of the steps")
    return Shown(options, drafter.load(cost, rows=options.batch), notes, measured=drafter, ranking=ranking)


def _batch_note(options: PlanOptions) -> list[str]:
    note = (
        f"passes were measured with one row; one over {options.batch} rows of n nodes counts as one over "
        f"{options.batch} n nodes, and drafting grows as the target's plain pass does"
    )
    return [note] if options.batch > 1 else []


class Shown:
    """A plan with everything that is printed about it."""

    def __init__(
        self,
        options: PlanOptions,
        load: PlanLoad,
        notes: Sequence[str],
        *,
        measured: MeasuredDrafter | None = None,
        ranking: Sequence[tuple[MeasuredDrafter, PlanLine]] = (),
        uncosted: Sequence[str] = (),
    ) -> None:
        """Plan the load.

        Args:
            notes: assumptions and limits, in sentences.
            ranking: candidates with their best lines, fastest first.
            uncosted: what counts as free, because nothing says what it costs.
        """
        ranks = options.ranks
        depth = options.k or 8
        if measured is not None and any(len(line) > 1 for line in measured.trial.rank_acceptance):
            ranks, depth = measured.trial.rank_acceptance, measured.deepest
        self.load, self.measured, self.ranking = load, measured, ranking
        self.plan = make_plan(load, k=options.k)
        self.verdict = decide(
            self.plan, load, drafter=measured.name if measured else None, text=options.text, uncosted=uncosted
        )
        self.costed = len(uncosted) < 2  # Else a speed-up would mean nothing
        self.batches = "verifying" not in uncosted  # True where the cost of a batch is known
        self.requested_k = options.k
        tree_ranks = ranks if self.costed else None
        self.tree = None if tree_ranks is None else plan_tree(load, tree_ranks, nodes=options.tree_nodes, depth=depth)
        self.notes = [*notes, *self.verdict.notes]

    @property
    def roofline(self) -> Roofline | None:
        return self.load.cost if isinstance(self.load.cost, Roofline) else None

    @property
    def title(self) -> str:
        """Return the title of plots and tables."""
        what = self.measured.name if self.measured is not None else f"first token accepted: {self.load.survival[0]:.0%}"
        where = f", {self.roofline.tp} x {self.roofline.device.name}" if self.roofline is not None else ""
        return f"{what}, batch {self.load.rows}{where}"

    def record(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        requested = self.plan.requested
        best = self.plan.best
        depth = len(self.load.survival)
        tokens = theory.tokens_of(self.load.survival)
        record = {
            "expected_tokens_per_pass": requested.tokens_per_pass,
            "k": requested.k,
            "speedup": requested.speedup,
            "alpha": theory.alpha_of(min(tokens, depth + 1), depth),
            "acceptance_per_position": theory.conditional_of(self.load.survival)[: max(requested.k, 1)],
            "batch": self.load.rows,
            "context": self.load.context,
            "best_k": best.k,
            "best_speedup": best.speedup,
            "best_tokens_per_pass": best.tokens_per_pass,
            "break_even_batch": self.plan.break_even_batch,
            "worth_it": self.verdict.worth_it,
            "method": self.verdict.method,
            "verdict": self.verdict.words,
            "assumptions": self.notes,
            "by_k": [asdict(line) for line in self.plan.lines],
            "by_batch": [{"batch": batch, "best_speedup": gain} for batch, gain in self.plan.batches],
            "tree": self.tree and asdict(self.tree),
            "roofline": self.roofline and roofline_record(self.roofline, self.load),
            "measured": self.measured and self.measured.record(),
            "ranking": [
                {**drafter.record(), "best_k": line.k, "best_speedup": line.speedup} for drafter, line in self.ranking
            ],
        }
        if not self.batches:
            record |= {"break_even_batch": None, "by_batch": []}
        if not self.costed:
            record |= dict.fromkeys(("speedup", "best_k", "best_speedup", "best_tokens_per_pass"))
            lengths = [{"k": line.k, "tokens_per_pass": line.tokens_per_pass} for line in self.plan.lines]
            record["by_k"] = lengths
        return record


def roofline_record(line: Roofline, load: PlanLoad) -> dict[str, Any]:
    """Return the roofline's own figures at the load's batch and context."""
    terms = line.terms(1, load.rows, load.context)
    return {
        "device": line.device.name,
        "devices": line.tp,
        "dtype": line.dtype,
        "weights_gb": line.weights_gb(),
        "fits": line.fits(load.rows, load.context),
        "plain_pass_ms": terms.ms,
        "compute_ms": terms.compute_ms,
        "memory_ms": terms.memory_ms,
        "bound_by": "memory" if terms.memory_ms >= terms.compute_ms else "arithmetic",
        "operations_per_byte": terms.intensity,
        "balance_tokens_at_peak": line.balance,
        "free_nodes_per_row": line.free_nodes(load.rows, load.context),
    }


def show(shown: Shown) -> None:
    """Print tables and the verdict on stdout, assumptions below."""
    out = console.out()
    verdict = shown.verdict
    if shown.ranking:
        out.print(_ranking_table(shown))
    out.print(_length_table(shown))
    if shown.roofline is not None:
        figures = roofline_record(shown.roofline, shown.load)
        out.print(
            f"plain pass {figures['plain_pass_ms']:.2f} ms ({figures['memory_ms']:.2f} reading, "
            f"{figures['compute_ms']:.2f} computing), {figures['operations_per_byte']:.1f} operations a byte; balance "
            f"at {shown.roofline.balance:.0f} tokens in a pass (peak figures); up to "
            f"{figures['free_nodes_per_row']} nodes "
            f"per row cost at most {assumptions.FREE_PASS:.2f} plain passes",
            soft_wrap=not out.is_terminal,
        )
    if shown.costed:
        _show_gain(shown)
    style = "bold green" if verdict.worth_it else "bold yellow"
    with_what = f"; draft with {verdict.method}" if verdict.method else ""
    if verdict.worth_it is False:
        with_what = "; decode plainly"
    out.print(Text(verdict.words, style).append(with_what, ""))
    for note in shown.notes:
        indented = Padding(Text(note, "dim"), (0, 0, 0, 2)) if out.is_terminal else Text(f"  {note}", "dim")
        out.print(indented, soft_wrap=not out.is_terminal)


def _show_gain(shown: Shown) -> None:
    """Print the best tree, where there is one, and up to which batch anything is gained."""
    out = console.out()
    tree = shown.tree
    if tree is not None and tree.parents:
        out.print(
            f"best tree: {len(tree.parents)} nodes, {tree.depth} levels, {tree.tokens:.3f} tokens per pass, "
            f"{tree.speedup:.2f} x; parents {list(tree.parents)}"
        )
    elif tree is not None:
        out.print("no tree is faster than plain decoding")
    if not shown.batches:
        return
    most = shown.plan.break_even_batch
    batches = f"up to a batch of {most}" if most else "at no batch"
    batches = f"at every batch up to {MOST_BATCH}" if most is None else batches
    out.print(f"K = {shown.plan.requested.k or 1} gains {batches}")


def _length_table(shown: Shown) -> Table:
    costs = ("verify cost", "speed-up") if shown.costed else ()
    table = console.table("K", "tokens per pass", *costs, "", title=shown.title, numbers_from=0)
    table.columns[-1].justify = "left"
    requested, best = shown.requested_k, shown.plan.best.k if shown.costed else None
    for line in shown.plan.lines:
        if line.k in {0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, requested, best}:
            mark = "best" if line.k == best else "-k" if line.k == requested else ""
            gain = (f"{line.v:.2f}", f"{line.speedup:.2f}") if shown.costed else ()
            table.add_row(str(line.k), f"{line.tokens_per_pass:.3f}", *gain, mark, style="bold" if mark else "")
    return table


def _ranking_table(shown: Shown) -> Table:
    titles = ("draft model", "first token\naccepted", "tokens\nper pass", "c per\nlevel", "best\nK", "speed-up")
    table = console.table(*titles, title="candidates, the fastest first", numbers_from=1)
    for drafter, line in shown.ranking:
        first = drafter.trial.survival[0] if drafter.trial.survival else 0.0
        cost = drafter.draft.level_ms / shown.load.cost.pass_ms(1, 1, drafter.trial.context)
        measured = (f"{first:.0%}", f"{drafter.trial.tokens_per_pass:.2f}", f"{cost:.3f}")
        table.add_row(drafter.model or drafter.method, *measured, str(line.k), f"{line.speedup:.2f}")
    return table
