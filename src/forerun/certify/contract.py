"""``forerun drafters check`` tests the contract of drafters on a tiny random model.

The real engine runs the drafter, so users would meet every fault that is found here. forerun's own drafters pass the
same checks, and more, in its tests.
"""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from forerun.certify import CertifyPlan, Check
from forerun.certify.checks import Run, examined
from forerun.certify.reference import TransformersReference
from forerun.certify.steps import Found, StepCase, StepEnumeration, TooManyOutcomes
from forerun.errors import ArgumentError, ForerunError, find_place, forget_warnings, outside_frames
from forerun.types import SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from forerun import LLM
    from forerun.core.tree import TokenTree
    from forerun.decode.drafter import DraftContext
    from forerun.types import Budget, RequestOutput

VOCABULARY = 12
SLOTS = 128
PROMPT = [1, 5, 3, 1, 5, 7, 2, 1, 5]
"""Its last tokens occurred twice before, with different continuations, so that lookup drafters have a match."""
PROMPTS = [PROMPT, [3], [4, 9, 4, 9, 4], [2, 2, 2, 2, 2, 2], [11, 0, 7, 6, 5, 4, 3, 2, 1, 0, 11, 0, 7]]
WHOLE = 512  # Tokens of a prefill pass, more than all of `PROMPTS`
PIECE = 3  # Tokens of a chunk, where prompts are read in chunks
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, detokenize=False, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.95)
TOY_VOCABULARY = 3  # Tokens of the target whose step is enumerated
TOY_TEXTS = [((1, 2, 0, 2, 1, 2, 0, 1, 2), 0), ((2,), 1), ((0, 1, 0, 2, 0, 0, 1, 1, 2, 1, 0, 2), 1)]
"""Prompts, each with the first token of its answers. In the first and the last, tokens were followed by several others,
so that drafters that count draw among these."""
TOY_SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, stop_token_ids=[2], detokenize=False)
TOY_ROOM = 4  # Tokens behind the first one; a step drafts one fewer
MOST_OUTCOMES = 200  # Of a drafter's draws in the step that is enumerated; with more, fewer tokens are drafted
EXACT = 1e-4  # Largest error of an enumerated probability that counts as rounding, in float32
PLAN = CertifyPlan(prompts=len(PROMPTS), max_tokens=24, detect=0.2, temperatures=(0.0, 0.8))

Config = Mapping[str, Any]  # A drafter as `LLM` takes it
Step = list[tuple[int, int, int]]  # One draft's nodes without the root: token, parent, how it was drawn


@cache
def tiny_target(seed: int = 0, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """Return a random Llama in float32 whose distributions are neither flat nor peaked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SLOTS}
    ends = {"bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **heads, **ends)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.25
    return model


def tiny_engine(
    config: Config | None,
    *,
    target: LlamaForCausalLM | None = None,
    tokenizer: Any = False,
    rows: int = 8,
    piece: int = WHOLE,
    check: bool = True,
    device: str | None = "cpu",
) -> LLM:
    """Return a new engine on the tiny target, or on another one as small, with a new drafter. It drafts the same at
    every step unless the config says otherwise, and has no self-check, so that every fault shows. Its prefill passes
    have `piece` tokens.
    """
    from forerun import LLM

    return LLM(
        tiny_target() if target is None else target,
        tokenizer=tokenizer,
        speculative_config=None if config is None else {"adaptive": False, **config},
        device=device,
        max_num_seqs=rows,
        max_model_len=64,
        max_num_batched_tokens=piece,
        check=check,
        self_check=False,
    )


class LeftOut(Exception):
    """A check examines nothing of this drafter, for the reason that this says."""


class Recorder:
    """Wraps a drafter and records its drafts for each isolation domain."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.drafts: dict[str | None, list[Step]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        """The drafter's own trees."""
        trees: list[TokenTree] = self._drafter.propose(context, budget)
        for index, tree in enumerate(trees):
            nodes = list(zip(tree.tokens, tree.parents, map(int, tree.drawn), strict=True))[1:]
            self.drafts.setdefault(context.salt(index), []).append(nodes)
        return trees


def recorded(engine: LLM) -> Recorder:
    """Wrap the engine's drafter in a recorder, and return it."""
    recorders: list[Recorder] = []

    def around(drafter: Any) -> Any:
        recorders.append(Recorder(drafter))
        return recorders[-1]

    key = engine.engine.drafting.ensure(engine.speculative)
    assert key is not None, "an engine under examination drafts"
    engine.engine.drafting.wrap(key, around)
    return recorders[0]


def as_prompts(prompts: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    """Return prompts of token ids as `LLM.generate` takes them."""
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the token ids of each output's first completion."""
    return [output.outputs[0].token_ids for output in outputs]


def answer(engine: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, **more: Any) -> list[RequestOutput]:
    """Generate completions of prompts of token ids in one batch. Each has its own seed, since a drafter may draw for a
    greedy request, too."""
    asked = [replace(params, seed=seed) for seed in range(len(prompts))]
    return engine.generate(as_prompts(prompts), asked, **more)


# --- the checks -------------------------------------------------------------------------------------------------------


def check_drafter(config: Config, progress: Callable[[str], None] = lambda _: None) -> list[Check]:
    """Examine a drafter (``{"method": "module:Class", ...}``); after a failed check the others still run.

    Raises:
        ArgumentError: there is no such drafter, or it refuses its options.
    """
    try:
        tiny_engine(config, rows=1)  # An error here is raised, not reported as a finding
    except SystemExit as error:
        raise ArgumentError(f"drafter {config['method']!r} cannot be made: {_ended(error)}") from error
    checks = []
    for name, (key, look) in CHECKS.items():
        progress(name)
        checks.append(_examine(name, key, partial(look, config)))
    progress("the text and the distribution of completions")
    checks += _answers(config)
    if checks[0].passed:
        return checks
    follows = f"; this may follow from the first failure, {checks[0].name!r}"
    return [checks[0], *(one if one.passed else replace(one, summary=one.summary + follows) for one in checks[1:])]


def _examine(name: str, key: str, look: Callable[[], tuple[bool, str]]) -> Check:
    """Run a check. If it fails, the traceback of the drafter's first failure is among its figures."""
    tracebacks = list[str]()
    with _collect_problems([], tracebacks):
        try:
            passed, summary = look()
        except LeftOut as reason:
            return Check(id=key, name=name, passed=True, summary=str(reason), left_out=True)
        except SystemExit as error:
            passed, summary, tracebacks = False, _ended(error), [_traceback(error)]
        except (AssertionError, ForerunError) as error:
            passed, summary = False, str(error)
    figures = {"traceback": tracebacks[0]} if tracebacks and not passed else {}
    return Check(id=key, name=name, passed=passed, summary=summary, figures=figures)


def _ended(error: SystemExit) -> str:
    return f"it ends the process by {error!r}{find_place(error)}; raise a ForerunError with advice"


def _traceback(error: BaseException) -> str:
    """Return a traceback without the calls of forerun that lead to the drafter."""
    return "".join([*traceback.format_list(outside_frames(error)), *traceback.format_exception_only(error)]).rstrip()


def _sound(config: Config) -> tuple[bool, str]:
    """Check that it raised nothing, and that each tree was valid and within its budget."""
    total = SpeculationStats()
    problems = list[str]()
    with _collect_problems(problems):
        for params in (GREEDY, SAMPLED):
            for output in answer(tiny_engine(config, rows=3), PROMPTS, params):
                total.add(output.outputs[0].speculation)
    if total.drafter_errors:
        return False, f"it failed {total.drafter_errors} times; the first: {problems[0] if problems else 'not told'}"
    if not total.num_draft_tokens:
        return False, "it drafted nothing on any of the prompts, so nothing is tested; try other --drafter-option"
    return True, f"{total.num_draft_tokens} tokens drafted in {total.num_spec_steps} passes, all trees within budget"


def _ends(config: Config) -> tuple[bool, str]:
    """Check that a completion ends where plain decoding ends it, also within an accepted draft."""
    engine = tiny_engine(config)
    whole = tokens_of(answer(engine, PROMPTS, GREEDY, speculative=False))
    for place in range(1, 8):
        cut = tokens_of(answer(engine, PROMPTS, replace(GREEDY, max_tokens=place)))
        if cut != [tokens[:place] for tokens in whole]:
            return False, f"with max_tokens={place} a completion is not the first {place} tokens of plain decoding's"
        stops = [replace(GREEDY, stop_token_ids=[tokens[place]]) for tokens in whole]
        cut = tokens_of(engine.generate(as_prompts(PROMPTS), stops))
        if cut != [tokens[: tokens.index(tokens[place]) + 1] for tokens in whole]:
            return False, f"a completion does not end at the first of its stop tokens (the one at place {place})"
    return True, "completions end where plain decoding ends them, at max_tokens and at stop tokens"


def _company(config: Config) -> tuple[bool, str]:
    """Check that rows do not affect each other: a text is the same alone and in a batch. Seeded texts are compared with
    the policy, under which drafters draft deterministically for them, since what they learn would change their draws.
    """
    for params in (GREEDY, SAMPLED):
        own = config if params.greedy else {**config, "adaptive": True}

        def answered(*indices: int, own: Config = own, params: SamplingParams = params) -> list[list[int]]:
            engine = tiny_engine(own)
            asked = [replace(params, seed=index) for index in indices]
            with engine.engine.drafting.free_of_charge():
                return tokens_of(engine.generate(as_prompts([PROMPTS[index] for index in indices]), asked))

        together = answered(*range(len(PROMPTS)))
        for index in range(len(PROMPTS)):
            if answered(index) != [together[index]]:
                kind = "greedy" if params.greedy else "seeded"
                return False, f"the {kind} completion to prompt {index} is another one beside other prompts than alone"
    return True, f"{len(PROMPTS)} prompts have the same greedy and the same seeded completions alone and together"


def _repeats(config: Config) -> tuple[bool, str]:
    """Check that `context.rng` is its only source of randomness."""
    first, second = (_drafts(config, SAMPLED) for _ in range(2))
    if first != second:
        return False, "two engines with the same seeds drafted differently: draw with context.rng alone"
    return True, "the same seeds give the same drafts"


def _pieces(config: Config) -> tuple[bool, str]:
    """Check that a prompt that is read in chunks gets the same drafts as one that is read at once."""
    if _drafts(config, GREEDY, one_by_one=True) != _drafts(config, GREEDY, one_by_one=True, piece=PIECE):
        return (
            False,
            f"a prompt shown in pieces of {PIECE} tokens gets other drafts than at once: read `fresh` in extend",
        )
    return True, f"prompts shown in pieces of {PIECE} tokens get the drafts of prompts shown at once"


def _domains(config: Config) -> tuple[bool, str]:
    """Check that the texts of one isolation domain do not change the drafts for another domain in the same row."""
    drafts = []
    for others in (False, True):
        engine = tiny_engine(config, rows=1)
        recorder = recorded(engine)
        if others:
            answer(engine, PROMPTS[::-1], GREEDY, cache_salt="other")
        for prompt in PROMPTS:
            answer(engine, [prompt], GREEDY, cache_salt="own")
        drafts.append(recorder.drafts.get("own"))
    if drafts[0] != drafts[1]:
        advice = "keep what is learned in PerDomain, and forget a row when truncate says 0"
        return False, f"what another isolation domain asked before changes what is drafted: {advice}"
    return True, "what another isolation domain asked before, in the same row, changes no draft"


def _exact(config: Config) -> tuple[bool, str]:
    """Check by enumeration that one step emits the target's distribution, whatever the drafter draws."""
    problems = list[str]()
    with _collect_problems(problems):
        found = list[Found]()
        for prompt, first in TOY_TEXTS:
            found.append(_enumerate_step(config, prompt, first))
            if found[-1].error > EXACT:
                return False, (
                    f"sampled text differs from the target's by a total variation of {found[-1].distance:.2g}, by all "
                    f"{found[-1].drafts} outcomes of its draws over {TOY_VOCABULARY} tokens: draft a sampled node "
                    "whatever its token is and what is drawn after it, and record with set_probs what it was drawn from"
                )
    if problems:
        return (
            False,
            f"it failed while its draws over {TOY_VOCABULARY} tokens were enumerated; the first: {problems[0]}",
        )
    drafts, cases = sum(one.drafts for one in found), sum(one.cases for one in found)
    if not sum(one.depth for one in found):
        return True, f"it drafts nothing behind {len(TOY_TEXTS)} short prompts of {TOY_VOCABULARY} tokens"
    return True, (
        f"{drafts} outcomes of its draws over {TOY_VOCABULARY} tokens, drafts up to {max(one.depth for one in found)} "
        f"deep, and {cases} of the rule's enumerated, largest error {max(one.error for one in found):.1e} (tolerance "
        f"{EXACT})"
    )


def _enumerate_step(config: Config, prompt: tuple[int, ...], first: int) -> Found:
    """Enumerate a step of the drafter, of as many tokens as do not take minutes. Where that is not exact, each outcome
    gets a drafter of its own: one that changes in `propose` may be right.
    """
    target = tiny_target(vocabulary=TOY_VOCABULARY)
    for room in range(TOY_ROOM, 1, -1):
        case = StepCase(target=target, config=config, prompt=prompt, first=first, params=TOY_SAMPLED, room=room)
        with suppress(TooManyOutcomes):
            found = StepEnumeration(case).run(MOST_OUTCOMES)
            if found.error <= EXACT:
                return found
            one, other = (StepEnumeration(case, fresh=True) for _ in range(2))
            if one.run(MOST_OUTCOMES) == other.run(MOST_OUTCOMES):
                return one.found
            raise LeftOut("nothing can be enumerated, because the same draws of context.rng gave different drafts")
    raise LeftOut(f"nothing can be enumerated: a draft one token deep has more than {MOST_OUTCOMES} outcomes")


CHECKS: dict[str, tuple[str, Callable[[Config], tuple[bool, str]]]] = {
    "drafts are sound": ("sound", _sound),
    "completions end as plain ones": ("ends", _ends),
    "rows do not disturb each other": ("rows", _company),
    "seeds repeat": ("seeds", _repeats),
    "prompts in pieces": ("chunks", _pieces),
    "isolation domains": ("domains", _domains),
    "every draw of a step": ("exact", _exact),
}
"""Name -> the check's id, and what says whether a drafter passes, and why."""


def _answers(config: Config) -> list[Check]:
    """Run the checks of ``forerun certify``: greedy text, log-probabilities, distributions and rules."""
    reference = TransformersReference(copy.deepcopy(tiny_target()))
    run = Run(
        llm=tiny_engine(config, rows=32), reference=reference, prompts=[list(prompt) for prompt in PROMPTS], plan=PLAN
    )
    try:
        return examined(run)
    except (AssertionError, ForerunError, SystemExit) as error:
        said = _ended(error) if isinstance(error, SystemExit) else str(error)
        return [Check(id="text", name="text and distribution", passed=False, summary=said)]


def _drafts(config: Config, params: SamplingParams, *, one_by_one: bool = False, piece: int = WHOLE) -> list[Step]:
    engine = tiny_engine(config, piece=piece)
    recorder = recorded(engine)
    for prompts in [[prompt] for prompt in PROMPTS] if one_by_one else [PROMPTS]:
        answer(engine, prompts, params)
    return recorder.drafts.get(None, [])


@contextmanager
def _collect_problems(problems: list[str], tracebacks: list[str] | None = None) -> Iterator[None]:
    """Collect the log messages about a drafter's failures, each kind once, and their tracebacks within the context."""
    log = logging.getLogger("forerun.decode.drafter")
    handler, level, propagate = logging.Handler(), log.level, log.propagate

    def emit(record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            problems.append(record.getMessage())
        elif tracebacks is not None and record.exc_info and (error := record.exc_info[1]) and outside_frames(error):
            tracebacks.append(_traceback(error))

    handler.emit = emit  # type: ignore[method-assign]
    forget_warnings()
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
        log.setLevel(level)
