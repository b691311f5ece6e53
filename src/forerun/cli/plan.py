"""``forerun plan``: what speculation can bring, before anything is trained or bought. Without a MODEL no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from forerun.cli import console
from forerun.cli.options import LOADING, SPECULATION, LoadOptions, SpeculationOptions
from forerun.cli.plan_options import ACCEPTANCE, ROOFLINE, AcceptanceOptions, Asked, RooflineOptions
from forerun.cli.plan_view import Shown, show
from forerun.engine import theory
from forerun.engine.costs import FREE, DraftCost, PassCost
from forerun.errors import ArgumentError
from forerun.plan.assumptions import assumed_alpha
from forerun.plan.devices import DEVICES, Device, device_named, dtype_named
from forerun.plan.planner import Load, judge, plan_tree
from forerun.plan.planner import plan as make_plan
from forerun.plan.plot import check_plot, draw_plan
from forerun.plan.roofline import FreeVerification, KeyValues, Roofline, Size

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.engine.costs import CostModel
    from forerun.plan.measured import Answers, Measured


def plan(
    model: str | None = None,
    /,
    *,
    batch: int = 1,
    context: int | None = None,
    temperature: Annotated[float | None, Parameter(alias="-t")] = None,
    text: str | None = None,
    prompts: Path | None = None,
    choose_draft: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = (),
    max_tokens: int = 96,
    limit: int = 8,
    plot: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    acceptance: AcceptanceOptions = ACCEPTANCE,
    roofline: RooflineOptions = ROOFLINE,
    speculation: SpeculationOptions = SPECULATION,
    loading: LoadOptions = LOADING,
) -> int:
    """Say what speculation can bring: tokens per pass, speed-up, best draft length, break-even batch, and a verdict.

    Parameters
    ----------
    model
        Directory or hub id: passes are measured here, acceptance with --drafter and --prompts, too.
    batch
        Sequences that are decoded together.
    context
        Committed tokens of each; measured on the prompts where there are some, else 0.
    temperature
        Of the answers; measured at it, or an assumption for --text. 0 is greedy.
    text
        chat, code, math, creative, translation, summary, qa or rag: acceptance is assumed from published figures.
    prompts
        File with one prompt per line, or JSON lines with 'prompt' or 'messages'.
    choose_draft
        Candidate draft models, ranked by measured acceptance and cost.
    max_tokens
        Tokens of each measured answer.
    limit
        Prompts that are measured at most.
    plot
        Write the plan as a picture (png, svg or pdf).
    json
        One JSON object on stdout instead of the tables.
    """
    check_plot(plot)
    asked = Asked(
        batch=batch,
        context=context,
        temperature=temperature,
        text=text,
        prompts=prompts,
        candidates=choose_draft,
        max_tokens=max_tokens,
        limit=limit,
        acceptance=acceptance,
        roofline=roofline,
        speculation=speculation,
        loading=loading,
    )
    asked.check(model)
    shown = on_paper(asked) if model is None else on_model(asked, model)
    if plot is not None:
        draw_plan(shown.plan, plot, shown.title)
    if json:
        console.write_json(shown.record())
    else:
        show(shown)
    return 0


# --- without a model --------------------------------------------------------------------------------------------------


def on_paper(asked: Asked) -> Shown:
    """Given or assumed acceptance, a roofline or free verification."""
    survival, notes = _survival(asked)
    cost, about = _cost(asked)
    notes += about
    if asked.acceptance.draft_cost is None and asked.acceptance.draft_params is None:
        notes.append("drafting counts as free; --draft-cost or --draft-params say what it costs")
    load = Load(
        survival=survival,
        cost=cost,
        draft=_draft(asked, cost),
        rows=asked.batch,
        context=asked.context or 0,
    )
    return _shown(asked, load, notes, roofline=cost if isinstance(cost, Roofline) else None)


def _shown(asked: Asked, load: Load, notes: list[str], **more: Any) -> Shown:
    found = make_plan(load, k=asked.k)
    measured: Measured | None = more.get("measured")
    tree = None
    if asked.acceptance.rank_acceptance is not None:
        ranks = [_numbers(line, "--rank-acceptance") for line in asked.acceptance.rank_acceptance.split(";")]
        tree = plan_tree(load, ranks, nodes=asked.acceptance.tree_nodes, depth=asked.k or 8)
    verdict = judge(found, load, drafter=measured.name if measured is not None else None, text=asked.text)
    return Shown(plan=found, load=load, verdict=verdict, notes=[*notes, *verdict.notes], tree=tree, **more)


def _survival(asked: Asked) -> tuple[list[float], list[str]]:
    """By depth, and what was assumed for it."""
    options = asked.acceptance
    length = max(16, asked.k or 0)
    if options.acceptance is not None:
        return theory.survival_of(_numbers(options.acceptance, "--acceptance")), []
    if options.alpha is not None:
        extra = []
        if asked.text is not None or asked.temperature is not None:
            extra = ["--alpha is taken as measured on this text and at this temperature; neither changes it"]
        return theory.geometric(options.alpha, length), extra
    if options.rank_acceptance is not None:
        ranks = [_numbers(line, "--rank-acceptance") for line in options.rank_acceptance.split(";")]
        theory.check_ranks(ranks)
        return theory.survival_of([line[0] for line in ranks]), ["the chain drafts the first rank of each depth"]
    assert asked.text is not None
    alpha, notes = assumed_alpha(asked.text, asked.temperature or 0.0)
    return theory.geometric(alpha, length), notes


def _cost(asked: Asked) -> tuple[PassCost, list[str]]:
    options = asked.roofline
    if options.params is None:
        described = (asked.loading.device, options.active_params, options.layers, options.tflops)
        if any(value is not None for value in described) or asked.acceptance.draft_params is not None:
            raise ArgumentError("a roofline needs the target's size: --params 70e9")
        notes = ["verification counts as free, v(n) = 1; --params and --device, or a MODEL, say what it costs"]
        if asked.batch > 1:
            notes.append("where verification is free the batch changes nothing")
        return FreeVerification(), notes
    line = _roofline(asked, _size(options))
    notes = [
        f"roofline of {line.tp} x {line.device.name}: {line.compute_efficiency:.0%} of the peak arithmetic, "
        f"{line.bandwidth_efficiency:.0%} of the peak bandwidth; launches and traffic between devices are left out"
    ]
    if line.device.note:
        notes.append(f"{line.device.name}: {line.device.note}")
    if line.kv is None:
        notes.append("the KV cache is not counted; --layers, --kv-heads, --head-dim and --context add it")
    if line.fits(asked.batch, asked.context or 0) is False:
        notes.append(
            f"{line.weights_gb():.0f} GB of weights and the cache do not fit {line.tp} x {line.device.memory:.0f} GB: "
            "raise --tp, or choose a narrower --dtype"
        )
    return line, notes


def _size(options: RooflineOptions) -> Size:
    assert options.params is not None
    return Size(
        params=options.params,
        active_params=options.active_params,
        experts=options.experts,
        experts_per_token=options.experts_per_token,
    )


def _roofline(asked: Asked, size: Size) -> Roofline:
    options = asked.roofline
    dims = (options.layers, options.kv_heads, options.head_dim)
    kv = None
    if any(value is not None for value in dims):
        if options.layers is None or options.kv_heads is None or options.head_dim is None:
            raise ArgumentError("the KV cache needs --layers, --kv-heads and --head-dim together")
        kv = KeyValues(layers=options.layers, kv_heads=options.kv_heads, head_dim=options.head_dim, heads=options.heads)
    return Roofline(device=_device(asked), size=size, dtype=dtype_named(asked.loading.dtype), tp=options.tp, kv=kv)


def _device(asked: Asked) -> Device:
    options = asked.roofline
    if options.tflops is not None and options.bandwidth is not None:
        if not (options.tflops > 0 and options.bandwidth > 0):
            raise ArgumentError("--tflops and --bandwidth must be positive")
        name = asked.loading.device or "your device"
        return Device(name=name, tflops=options.tflops, bandwidth=options.bandwidth / 1000, memory=None)
    if options.tflops is not None or options.bandwidth is not None:
        raise ArgumentError("a device of your own needs --tflops and --bandwidth")
    if asked.loading.device is None:
        raise ArgumentError(f"on which device? Give --device: {', '.join(DEVICES)}")
    return device_named(asked.loading.device)


def _draft(asked: Asked, cost: PassCost) -> Any:
    """The drafter's cost for a batch: given as c, or by the roofline."""
    options, context = asked.acceptance, asked.context or 0
    if options.draft_cost is not None and options.draft_params is not None:
        raise ArgumentError("give --draft-cost or --draft-params, not both")
    if options.draft_cost is not None:
        share = options.draft_cost
        if not share >= 0:
            raise ArgumentError(f"--draft-cost must be 0 or more, got {share}")
        return lambda rows: DraftCost(fixed_ms=0.0, level_ms=share * cost.pass_ms(1, rows, context))
    if options.draft_params is None:
        return lambda rows: FREE
    small = replace(_roofline(asked, Size(params=options.draft_params)), kv=None)
    return lambda rows: DraftCost(fixed_ms=0.0, level_ms=small.pass_ms(1, rows, 0))


def _numbers(given: str, option: str) -> list[float]:
    try:
        return [float(part) for part in given.split(",")]
    except ValueError as error:
        raise ArgumentError(f"{option} takes numbers with commas between them, got {given!r}") from error


# --- on a model -------------------------------------------------------------------------------------------------------


def on_model(asked: Asked, model: str) -> Shown:
    """Measured passes; acceptance given, assumed, or measured on the user's prompts."""
    from forerun.cli import session
    from forerun.engine.costs import load_or_measure

    llm = session.load(model, asked.loading, None, max_num_seqs=1)
    with console.telling("planning") as tell:
        cost = load_or_measure(llm.target, rows=(1,), tell=tell)
        return _measured(asked, llm, cost, tell) if asked.measuring else _with_costs(asked, cost)


def _with_costs(asked: Asked, cost: CostModel) -> Shown:
    survival, notes = _survival(asked)
    if asked.acceptance.draft_cost is None:
        notes.append("drafting counts as free; --draft-cost says what it costs")
    if asked.acceptance.draft_params is not None:
        raise ArgumentError("--draft-params needs a roofline (--params); for a MODEL give --draft-cost")
    load = Load(survival=survival, cost=cost, draft=_draft(asked, cost), rows=asked.batch, context=asked.context or 0)
    return _shown(asked, load, [*notes, *_batch_note(asked)])


def _measured(asked: Asked, llm: LLM, cost: CostModel, tell: Any) -> Shown:
    from forerun.engine.config import SpeculativeConfig
    from forerun.plan import measured
    from forerun.plan.prompts import read_prompts

    assert asked.prompts is not None
    answers = measured.Answers.of(
        llm,
        read_prompts(asked.prompts),
        temperature=asked.temperature,
        max_tokens=asked.max_tokens,
        limit=asked.limit,
    )
    if asked.candidates:
        return _ranked(asked, llm, cost, answers, tell)
    config = SpeculativeConfig.parse(asked.speculation.config())
    assert config is not None
    found = measured.measure_drafter(llm, config, answers, tell)
    measured.keep(llm, cost, config, found.draft)
    return _from_measured(asked, cost, found, [])


def _ranked(asked: Asked, llm: LLM, cost: CostModel, answers: Answers, tell: Any) -> Shown:
    from forerun.plan import measured

    options = {} if asked.k is None else {"num_speculative_tokens": asked.k}
    found, refused = measured.rank_models(llm, asked.candidates, answers, tell, options=options)
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ArgumentError(f"none of the candidates can draft for this target: {reasons}")
    plans = [(make_plan(one.load(cost, rows=asked.batch)), one) for one in found]
    plans.sort(key=lambda pair: -pair[0].best.speedup)
    best = plans[0][1]
    return _from_measured(
        asked,
        cost,
        best,
        [f"{name} cannot draft here: {reason}" for name, reason in refused.items()],
        ranking=[(one, made.best) for made, one in plans],
    )


def _from_measured(asked: Asked, cost: CostModel, found: Measured, notes: Sequence[str], **more: Any) -> Shown:
    load = found.load(cost, rows=asked.batch)
    stated = list(notes)
    if found.trial.coverage < 1:
        stated.append(f"something was drafted in {found.trial.coverage:.0%} of the steps")
    shown = _shown(asked, load, [*stated, *_batch_note(asked)], measured=found, **more)
    return shown


def _batch_note(asked: Asked) -> list[str]:
    if asked.batch == 1:
        return []
    return [
        f"passes were measured with one row; one over {asked.batch} rows of n nodes counts as one over "
        f"{asked.batch} n nodes, and drafting grows as the target's plain pass does"
    ]
