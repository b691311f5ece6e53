"""``forerun tune skip-layers`` finds the sub-layers that a model can do without while it drafts for
itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from forerun.cli import INTERRUPTED, OK, console, session
from forerun.cli.options import LOADING, Json, Model, TargetOptions
from forerun.errors import ArgumentError, DataError, refuse, refuse_below
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.drafters.self_drafting.skip_layers import SkipFile
    from forerun.drafters.self_drafting.tuning import Tuned, Worth
    from forerun.training.data.records import Record

tune = App(name="tune", help="Find settings for a model by measuring it.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """The options that say on what to search, for how long, and where to write what was found."""

    output: Path
    """JSON file for the set that was found: --drafter-option skip=FILE takes it."""
    prompts: Path | None = None
    """Texts or conversations of the kind that you serve (.jsonl, .json, .parquet, plain text); demo has some."""
    limit: int = 8
    """Prompts to use, from the first."""
    prompt_tokens: int = 300
    """Tokens of a plain text that are the prompt."""
    tokens: int = 48
    """Tokens to decode for each prompt and each set."""
    num_speculative_tokens: Annotated[int, Parameter(alias="-k")] = 8
    """Longest chain to consider; the best length is found too."""
    temperature: Annotated[float, Parameter(alias="-t")] = 0.0
    """0 is greedy."""
    iterations: int | None = None
    """Sets to try: 60, or as many as fit --budget-s."""
    budget_s: float | None = None
    """Seconds to search."""
    seed: int = 0
    """Seed of the search and of sampling."""

    def __post_init__(self) -> None:
        refuse_below("--", self, limit=1, prompt_tokens=1, tokens=1, num_speculative_tokens=1, iterations=1)
        refuse(
            (
                self.temperature < 0 or (self.budget_s is not None and self.budget_s <= 0),
                f"--temperature must be 0 or more and --budget-s above 0, got {self.temperature} and {self.budget_s}",
            ),
            (
                self.output.is_dir(),
                f"--output names the directory {self.output}; name a file in it, such as {self.output / 'skip.json'}",
            ),
        )


@tune.command(name="skip-layers")
def skip_layers(
    model: Model, /, *, options: SearchOptions, json: Json = False, loading: TargetOptions = LOADING
) -> int:
    """Search the sub-layers that `skip_layers` should leave out of a draft pass; Ctrl-C keeps the best so far."""
    if options.prompts is None and model != "demo":
        raise ArgumentError(
            "give --prompts FILE with texts of the kind that the model will complete; only demo brings its own"
        )
    from forerun.drafters.self_drafting import tuning
    from forerun.model.transformers_target import require_layers
    from forerun.training.data.records import BadRecords, read_records

    questions: list[Record] = []
    if options.prompts is not None:
        questions = list(itertools.islice(read_records(options.prompts, BadRecords(skip=False)), options.limit))
        if not questions:
            raise DataError(f"{options.prompts} holds no prompt")
    llm = session.load(model, loading.handing_out_layers(), None, max_num_seqs=len(questions) or options.limit)
    params = SamplingParams(temperature=options.temperature, seed=options.seed, top_k=0)
    prompts = _tokens(llm, questions, options)
    probe = tuning.Probe(
        require_layers(llm.target, "skip_layers"),
        prompts,
        length=options.num_speculative_tokens,
        tokens=options.tokens,
        params=params,
    )
    limits: dict[str, Any] = {"iterations": options.iterations, "budget_s": options.budget_s, "seed": options.seed}
    sets = options.iterations or (None if options.budget_s else tuning.ITERATIONS)
    with console.progress_bar("sets", sets) as update:

        def progress(_tried: Worth, best: Worth) -> None:
            update(advance=1, description=f"sets; best {best.ms_per_token:.3g} ms per token")

        tuned = tuning.tune(probe, llm.target.num_layers, progress=progress, **limits)
    file = _file(llm, model, tuned, options, prompts=len(prompts))
    file.write(options.output)
    _show(file, tuned, options.output, json=json)
    return INTERRUPTED if tuned.interrupted else OK


def _tokens(llm: LLM, questions: list[Record], options: SearchOptions) -> list[list[int]]:
    """Return the prompts as the model reads them.

    These are conversations up to their last turns of the assistant, the beginnings of texts, or, where there are
    no questions, excerpts of the shipped files.
    """
    if llm.tokenizer is None:
        raise ArgumentError(f"{llm.target.name_or_path} has no tokenizer beside it; prompts are read with one")
    if not questions:
        from forerun.demo import contexts

        return contexts(llm.tokenizer, count=options.limit, length=options.prompt_tokens)
    from forerun.plan.measured import make_request

    prompts = []
    for record in questions:
        ids = (
            llm.tokenizer.encode(record.text, add_special_tokens=False)[: options.prompt_tokens] if record.text else []
        )
        turns = [index for index, message in enumerate(record.messages) if message["role"] in ("user", "tool")]
        if turns:
            asked: Any = record.messages[: turns[-1] + 1]
            asked = make_request(llm, asked if len(asked) > 1 else str(asked[0]["content"]))
            ids = llm.reader.tokens(asked)[1]
        if not ids:
            raise DataError(f"{record.where}: there is nothing to complete")
        prompts.append(ids)
    return prompts


def _file(llm: LLM, model: str, tuned: Tuned, options: SearchOptions, *, prompts: int) -> SkipFile:
    import torch

    from forerun.drafters.self_drafting.skip_layers import SkipFile, structure_hash
    from forerun.model.transformers_target import require_layers

    target = require_layers(llm.target, "skip_layers")
    best = tuned.best
    measured = {
        "ms_per_token": best.ms_per_token,
        "plain_ms_per_token": tuned.plain_ms,
        "speedup": tuned.speedup,
        "mean_acceptance_length": best.mean_acceptance_length,
        "draft_ms": best.draft_ms,
        "verify_ms": tuned.costs.verify_ms[best.num_speculative_tokens],
        "temperature": options.temperature,
        "prompts": prompts,
        "tokens": options.tokens,
        "seed": options.seed,
        "sets": len(tuned.trials),
        "seconds": tuned.seconds,
        "interrupted": tuned.interrupted,
        "device": str(target.device),
        "runs_as": target.runs_as,
        "threads": torch.get_num_threads(),
    }
    return SkipFile(
        model=model,
        num_layers=target.num_layers,
        structure=structure_hash(target),
        skip=best.skip,
        num_speculative_tokens=best.num_speculative_tokens,
        measured=measured,
        trace=[trial.record() for trial in tuned.trials],
    )


def _show(file: SkipFile, tuned: Tuned, output: Path, *, json: bool) -> None:
    from forerun.drafters.self_drafting.skip_layers import names

    skip = names(file.skip)
    if tuned.interrupted:
        console.warn(f"stopped after {len(tuned.trials)} sets; the best of them is kept")
    if tuned.speedup <= 1:
        console.warn("no set that was tried is faster than plain decoding: the model needs its layers, or is too small")
    if json:
        facts = {
            "output": str(output),
            "model": file.model,
            "num_layers": file.num_layers,
            "skip": skip,
            "num_speculative_tokens": file.num_speculative_tokens,
            "measured": dict(file.measured),
        }
        console.write_json(facts)
        return
    best = tuned.best
    console.out().print(
        f"{output}: {len(skip)} of {2 * file.num_layers} sub-layers skipped ({', '.join(skip)}), "
        f"chains of {best.num_speculative_tokens}: mean acceptance length {best.mean_acceptance_length:.2f}, "
        f"{best.ms_per_token:.3g} ms per token, plainly {tuned.plain_ms:.3g}"
    )
