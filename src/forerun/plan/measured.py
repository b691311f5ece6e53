"""This module measures acceptance and costs of drafters on the user's own prompts and machine, in
real steps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.drafters import build, default_length
from forerun.drafters.base import DrafterSetup
from forerun.engine.config import SpeculativeConfig
from forerun.engine.costs import CostModel, DraftCost
from forerun.engine.llm import LLM
from forerun.engine.measuring import save
from forerun.engine.prompts import PromptReader
from forerun.errors import ArgumentError, DataError, ForerunError
from forerun.plan.planner import PlanLoad
from forerun.plan.trial import Trial, measure_draft, try_drafter
from forerun.types import SamplingParams

log = logging.getLogger(__name__)

UserPrompt = str | Sequence[Mapping[str, Any]]  # A text, or the messages of a conversation whose last answer is wanted
Tell = Callable[[str], None]
LONGEST = 32  # Depth of a trial where neither user nor drafter says one


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDrafter:
    """A `MeasuredDrafter` holds what one drafter did on the user's prompts, and what its drafts
    cost.
    """

    method: str
    model: str | None  # Directory or hub id of the drafter's model, where it has one
    trial: Trial
    draft: DraftCost

    @property
    def name(self) -> str:
        return self.method if self.model is None else f"{self.method} {self.model}"

    @property
    def deepest(self) -> int:
        """Return the levels of the deepest draft, at least 1: the K that was measured."""
        return max((done.depth for done in self.trial.steps), default=1) or 1

    def load(self, cost: CostModel, *, rows: int) -> PlanLoad:
        """Return the planner's load for a batch of `rows`. At a batch the drafter's cost is assumed
        to grow as the target's plain pass does.
        """
        trial, draft = self.trial, self.draft

        def draft_at(batch: int) -> DraftCost:
            share = cost.pass_ms(1, batch, trial.context) / cost.pass_ms(1, 1, trial.context)
            return DraftCost(fixed_ms=draft.fixed_ms * share, level_ms=draft.level_ms * share)

        return PlanLoad(
            survival=trial.survival or [0.0],
            cost=cost,
            draft=draft_at,
            rows=rows,
            context=trial.context,
            coverage=trial.coverage,
            nodes_per_level=trial.nodes / self.deepest,
            filled=trial.depth / self.deepest,
        )

    def record(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        stats = self.trial.stats
        return {
            "drafter": self.method,
            "model": self.model,
            "steps": len(self.trial.steps),
            "tokens_per_pass": self.trial.tokens_per_pass,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_per_depth": self.trial.survival,
            "rank_acceptance": self.trial.rank_acceptance,
            "drafting_steps": self.trial.coverage,
            "drafted_nodes": self.trial.nodes,
            "context": self.trial.context,
            "fixed_ms": self.draft.fixed_ms,
            "level_ms": self.draft.level_ms,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompts:
    """`EncodedPrompts` are the prompts as the target reads them, with the parameters of their
    answers.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    stop_ids: frozenset[int]

    @classmethod
    def of(
        cls, llm: LLM, prompts: Sequence[UserPrompt], *, temperature: float | None, max_tokens: int, limit: int
    ) -> EncodedPrompts:
        """Return token ids and resolved parameters; ArgumentError if there is no prompt, or one
        leaves no room for an answer.
        """
        if not prompts or max_tokens < 2 or limit < 1:
            raise ArgumentError("acceptance is measured on at least one prompt and over at least two tokens")
        reader = PromptReader(
            tokenizer=llm.tokenizer,
            generation_config=llm.target.generation_config,
            vocab_size=llm.target.vocab_size,
            context=llm.max_model_len - max_tokens,
            default_seed=0,
        )
        texts = [text if isinstance(text, str) else llm.chat_prompt(text) for text in prompts[:limit]]
        params = reader.resolve(SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0))
        return cls(prompts=[reader.tokens(text)[1] for text in texts], params=params, stop_ids=reader.end_ids())


def measure_drafter(llm: LLM, config: SpeculativeConfig, answers: EncodedPrompts, tell: Tell) -> MeasuredDrafter:
    """Measure how one drafter helps with the answers; ForerunError if it cannot be built, or no row
    of the target is free.
    """
    target = llm.target
    setup = DrafterSetup(target=target, tokenizer=llm.tokenizer, rows=target.rows, slots=target.slots)
    drafter = build(config.method, config.drafter_options, setup)
    depth, model = depth_of(config), config.options.get("model")
    tell(f"{config.method} drafts")
    prompts, stops = answers.prompts, answers.stop_ids
    trial = try_drafter(
        target, drafter, prompts, answers.params, depths=(depth,), name=config.method, stop_ids=stops, rule=config.rule
    )
    if not trial.steps:
        raise ArgumentError("every answer ended with its first token; nothing could be measured")
    tell(f"what {config.method} costs")
    draft = measure_draft(target, drafter, prompts[0], depth=max(1, round(trial.depth) or depth))
    return MeasuredDrafter(method=config.method, model=None if model is None else str(model), trial=trial, draft=draft)


def depth_of(config: SpeculativeConfig) -> int:
    """Return the levels that a configuration drafts at most; the drafter's own options limit it
    further.
    """
    return config.num_speculative_tokens or default_length(config.method) or LONGEST


def rank_models(
    llm: LLM, models: Sequence[str], answers: EncodedPrompts, tell: Tell, *, options: Mapping[str, Any]
) -> tuple[list[MeasuredDrafter], dict[str, str]]:
    """Measure every candidate draft model on the same prompts; return those, and the refused ones
    with the reason.
    """
    found, refused = list[MeasuredDrafter](), dict[str, str]()
    for model in models:
        config = SpeculativeConfig.parse({"method": "draft_model", "model": model, **options})
        assert config is not None
        try:
            found.append(measure_drafter(llm, config, answers, tell))
        except (ForerunError, OSError) as error:
            log.info("candidate %s cannot draft", model, exc_info=True)
            refused[model] = str(error).splitlines()[0]
    return found, refused


def save_draft_cost(llm: LLM, cost: CostModel, config: SpeculativeConfig, draft: DraftCost) -> CostModel:
    """Add a drafter's cost to the target's saved cost model."""
    known = cost.with_draft(config.key, draft)
    save(llm.target, known)
    return known


def read_prompts(path: Path) -> list[UserPrompt]:
    """Return the prompts of a file, empty lines left out; DataError if it holds none, or something
    else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read prompts from {path}: {error}") from error
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise DataError(f"{path} holds no prompts; one a line is expected, or JSON lines with 'prompt' or 'messages'")
    if path.suffix not in (".jsonl", ".ndjson"):
        return [line for _, line in filled]
    return [_from_json(line, f"{path}:{number}") for number, line in filled]


def _from_json(line: str, where: str) -> UserPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    fields = record if isinstance(record, dict) else {}
    text, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(text, str):
        return text
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        # The last message of an assistant is left out: the target writes it itself.
        asked: list[dict[str, Any]] = messages[:-1] if messages[-1].get("role") == "assistant" else messages
        return asked
    raise DataError(f"{where} needs 'prompt' (a string) or 'messages' (a list), got {line[:60]!r}")
