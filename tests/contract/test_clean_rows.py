"""Whatever NaN or infinity a cache row held, whoever is given it next is answered as if it had never been used."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from contract.harness import PROMPT, SAMPLED, Variant, as_prompts, each_family, llm
from forerun import LLM, SamplingParams
from forerun.heads.runner import HeadRunner
from forerun.model.cache import SlotCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DRAWN = replace(SAMPLED, max_tokens=12, seed=3, logits_processors=())
BRIEF = replace(GREEDY, max_tokens=2)
"""Drafters are shown the text, and draft nothing."""
LONG, SHORT = [*PROMPT, 4, 9, 4, 9, *PROMPT[::-1]], PROMPT[:5]


@contextmanager
def noted(*kinds: type) -> Iterator[list[Any]]:
    """Objects of these kinds that are made while it is open."""
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            before = kind.__init__

            def init(self: Any, *args: Any, _before: Any = before, **keywords: Any) -> None:
                _before(self, *args, **keywords)
                made.append(self)

            patch.setattr(kind, "__init__", init)
        yield made


@torch.inference_mode()
def poison(made: list[Any], value: float) -> int:
    """Put `value` wherever any pass has written anything, in the caches of target and drafters; how many slots."""
    count = 0
    for each in made:
        if isinstance(each, HeadRunner):
            for state in ("_features", "_outputs"):  # of a parallel head there is but one
                getattr(each, state, each._features).fill_(value)
            continue
        for store in each._tensors():
            written = store.flatten(2).abs().amax(2) > 0
            store[written] = value
            count += int(written.sum())
    return count


def told(engine: LLM, prompt: list[int], params: SamplingParams) -> tuple[Any, ...]:
    """An answer, and how its drafts fared."""
    (output,) = engine.generate(as_prompts([prompt]), params)
    stats = output.outputs[0].speculation
    return output.outputs[0].token_ids, stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.drafter_errors


@pytest.mark.parametrize("variant", [None, *each_family(4)], ids=str)
def test_the_next_occupant_of_a_row(variant: Variant | None) -> None:
    found = []
    for poisoned in (False, True):
        with noted(SlotCache, HeadRunner) as made:
            engine = llm(variant, rows=1)
            engine.engine._prefixes.enabled = False  # the same text would be found again, and that is poisoned too
            for value, first, then in (
                (torch.nan, GREEDY, GREEDY),
                (torch.inf, DRAWN, DRAWN),
                (torch.nan, BRIEF, GREEDY),
            ):
                told(engine, LONG, first)
                if poisoned:
                    assert poison(made, value) > 50
                found.append(told(engine, SHORT, then))
    assert found[:3] == found[3:]


@pytest.mark.parametrize("variant", [None, *each_family(7)], ids=str)
def test_whoever_goes_on_from_a_shared_prefix(variant: Variant | None) -> None:
    """What stands behind it is another's."""
    found, shared = [], [1, 5, 3, 2] * 5
    for poisoned in (False, True):
        with noted(SlotCache) as made:
            engine = llm(variant, rows=1)
            told(engine, [*shared, 7, 8, 9, 10, 11], GREEDY)
            if poisoned:
                with torch.inference_mode():
                    for store in (store for cache in made for store in cache._tensors()):
                        behind = store[:, len(shared) :]
                        behind[behind.flatten(2).abs().amax(2) > 0] = torch.nan
            found.append(told(engine, [*shared, 0], GREEDY))
            assert engine.engine.prefix_hits >= 16 or variant is not None
    assert found[0] == found[1]
