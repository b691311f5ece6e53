"""A drafter that asks for hidden states gets those of the token before each fresh one, after prompts and steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.decode.scores import Scores
from forerun.drafters import DRAFTERS, DrafterEntry
from forerun.types import LAST_HIDDEN, Boundary, Budget, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config:
    num_speculative_tokens: int = 3


Heard = dict[tuple[int, ...], dict[int, dict[Boundary, Tensor]]]
LISTENER = {"method": "listener", "adaptive": False}


class Listener(Drafter):
    """Writes down every state it is shown; repeats the text's first tokens as a branching draft."""

    name = "listener"
    Config = _Config
    heard: ClassVar[Heard] = {}

    def __init__(self, config: _Config, setup: DrafterSetup) -> None:
        self.reading: dict[int, dict[int, dict[Boundary, Tensor]]] = {}
        """By row, of a prompt that comes in pieces."""

    @property
    def requires(self) -> frozenset[Boundary]:
        return frozenset({0, 1, LAST_HIDDEN})

    def extend(self, context: DraftContext) -> None:
        for index, (tokens, fresh) in enumerate(zip(context.tokens, context.fresh, strict=True)):
            count = min(fresh, len(tokens) - 1)
            row, length = context.rows[index], context.prompt_lengths[index]
            notes = self.reading.setdefault(row, {})
            if len(tokens) >= length:
                notes = self.heard.setdefault(tuple(tokens[:length]), self.reading.pop(row))
            for entry in range(count):
                place = len(tokens) - 1 - count + entry
                assert place not in notes, "a state came twice"
                notes[place] = {boundary: context.hidden_states[boundary][index, entry] for boundary in self.requires}

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for tree, tokens, depth in zip(trees, context.tokens, budget.depth, strict=True):
            tree.add_path(list(tokens[:3])[:depth])
            tree.add_path(list(tokens[-3:])[:depth])
        return trees


def test_every_state_is_that_of_a_plain_forward(checkpoint: Path, heard: Heard) -> None:
    llm = LLM(str(checkpoint), dtype="float32", speculative_config=LISTENER, max_num_seqs=2)
    prompts = [[9, 9, 9, 9, 9], [20, 31, 42], [7, 8]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True))
    assert sum(output.outputs[0].speculation.num_accepted_draft_tokens for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [*prompt, *output.outputs[0].token_ids]
        with torch.no_grad():
            states = llm.target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        notes = heard[tuple(prompt)]
        assert sorted(notes) == list(range(len(notes)))
        assert len(notes) >= len(text) - 4
        for place in range(min(len(notes), len(text) - 1)):
            for boundary, entry in ((0, 0), (1, 1), (LAST_HIDDEN, -1)):
                torch.testing.assert_close(notes[place][boundary], states[entry][0, place], atol=2e-5, rtol=1e-4)


class _Onlooker(Drafter):
    """Drafts what comes next in the alphabet and compares the scores that it is shown with the text."""

    name = "onlooker"
    Config = _Config
    seen: ClassVar[list[bool]] = []

    def __init__(self, config: _Config, setup: DrafterSetup) -> None:
        pass

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for tree, tokens, depth in zip(trees, context.tokens, budget.depth, strict=True):
            tree.add_path([(tokens[-1] + step) % 250 for step in range(1, 4)][:depth])
        return trees

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        for index, (tokens, verdict) in enumerate(zip(context.tokens, verdicts, strict=True)):
            last = verdict.path[-1] if verdict.path else 0
            root = tokens[-2 - len(verdict.path)]
            right = scores.trees[index].tokens[0] == root and scores.raw_argmax(index, last) == tokens[-1]
            self.seen.append(right)


def test_a_drafter_observes_the_scores_of_its_own_rows(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "onlooker", DrafterEntry(path=f"{__name__}:_Onlooker", summary="looks on"))
    _Onlooker.seen.clear()
    llm = LLM(str(checkpoint), dtype="float32", max_num_seqs=3)
    choices: list[Any] = [False, *({"method": name, "adaptive": False} for name in ("ngram", "onlooker"))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for prompt, chosen in zip([[9, 9, 9], [20, 31, 42], [7, 8]], choices, strict=True):
        llm.submit(prompt, params, speculative=chosen)
    while llm.engine.busy:
        llm.engine.step()
    assert len(_Onlooker.seen) > 3 and all(_Onlooker.seen)
