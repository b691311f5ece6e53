"""A token whose keys and values are NaN harms no later occupant of its row, and no request that only drafted it."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from contract.harness import installed
from emulation import kernels_in_c, packed_linears
from engine.test_two_engines import VOCABULARY, model
from forerun import LLM, SamplingParams
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.errors import NumericError
from forerun.model import LayerRange
from forerun.types import LAST_HIDDEN, Budget
from selection import in_turn, slow

POISON = 77
"""The embedding of this token is not finite."""
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7, 9, 8, 7, 9, 8], [50, 60, 70]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, detokenize=False)
SOUND = [token for token in range(VOCABULARY) if token != POISON]
DRAWN = SamplingParams(temperature=0.8, seed=4, max_tokens=16, allowed_token_ids=SOUND, detokenize=False)
PATHS = ["torch-float16", "torch-float32", "folded-float32", "c-bfloat16"]


@dataclass
class Path:
    """One way in which attention is computed."""

    name: str

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.name.partition("-")[2])

    def engine(self, value: float, **options: Any) -> LLM:
        """On a model in which `POISON` is `value`."""
        made = model(1, self.dtype)
        with torch.no_grad():
            made.model.embed_tokens.weight[POISON] = value
        fast = not self.name.startswith("torch")
        options = {"tokenizer": False, "self_check": False, "max_model_len": 200, "max_num_seqs": 3} | options
        return LLM(made, repack=fast, **options)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    found = Path(request.param)
    with ExitStack() as around:
        if not found.name.startswith("torch"):
            around.enter_context(packed_linears(found.dtype))
            around.enter_context(kernels_in_c())
        yield found


def answers(llm: LLM, params: SamplingParams = GREEDY, speculative: Any = False) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, speculative=speculative)]


class Poisonous(Drafter):
    """Drafts the right answer, and the token that fails."""

    name: ClassVar[str] = "poisonous"
    answers: ClassVar[dict[int, list[int]]] = {}
    """By the first token of the prompt."""
    form: ClassVar[str] = ""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """None."""

    def __init__(self, config: Any, setup: DrafterSetup) -> None:
        self.target = setup.target

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for tree, tokens, start, room in zip(trees, context.tokens, context.prompt_lengths, budget.depth, strict=True):
            right = self.answers[tokens[0]][len(tokens) - start :][: min(room, 3)]
            wrong = [POISON] * min(room, 2)
            paths = {"sibling": [wrong, right], "behind": [[*right, POISON][:room]], "alone": [wrong]}
            paths["unequal"] = [right[:1]] if tokens[0] == PROMPTS[0][0] else [wrong, right]
            for path in paths.get(self.form, []):
                tree.add_path(path)
        if self.form == "run":
            self._run_early(context)
        return trees

    def _run_early(self, context: DraftContext) -> None:
        """As a method that drafts with the target's own layers, and then thinks better of it."""
        trees = context.trees()
        for tree in trees:
            tree.add_path([POISON] * 3)
        self.target.run(context.rows, trees, LayerRange(stop=1))


def drafting(monkeypatch: pytest.MonkeyPatch, right: list[list[int]], form: str) -> None:
    """From now on `Poisonous` drafts so."""
    monkeypatch.setattr(Poisonous, "answers", {prompt[0]: own for prompt, own in zip(PROMPTS, right, strict=True)})
    monkeypatch.setattr(Poisonous, "form", form)


@pytest.mark.parametrize(("path", "value"), in_turn(PATHS, [torch.nan, torch.inf]), indirect=["path"])
def test_rows_of_failed_requests_serve_others(path: Path, value: float) -> None:
    """As many as there are, each after a longer prompt that failed somewhere, with and without drafts."""
    expected = answers(path.engine(value))
    llm = path.engine(value)
    for speculative in (False, {"method": "ngram"}, {"method": "suffix"}):
        for place in (0, 20, 39):
            bad = [*range(place), POISON, *range(place, 39)]
            with pytest.raises(NumericError):
                llm.generate([bad] * 3, GREEDY, speculative=speculative)
        assert answers(llm, GREEDY, speculative) == expected


FORMS = [
    *(("sibling", GREEDY), ("sibling", DRAWN), ("behind", DRAWN)),
    *(("alone", GREEDY), ("unequal", GREEDY), ("run", DRAWN)),
]
WHOLE = "torch-float32"  # The path on which every form is quick; the others differ in how attention is computed
CASES = [
    (path, *form) if path == WHOLE or form[0] in ("behind", "unequal") else slow((path, *form))[0]
    for path in PATHS
    for form in FORMS
]


@pytest.mark.parametrize(
    ("path", "form", "params"),
    CASES,
    indirect=["path"],
    ids=lambda value: value if isinstance(value, str) else f"temperature {value.temperature}",
)
def test_a_drafted_token_fails(path: Path, form: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(path.engine(torch.inf), params)
    drafting(monkeypatch, expected, form)
    with installed("poisonous", Poisonous):
        llm = path.engine(torch.inf, speculative_config={"method": "poisonous", "adaptive": False})
        outputs = llm.generate(PROMPTS, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert answers(llm, params, False) == expected, "the rows are clean"
    stats = [output.outputs[0].speculation for output in outputs]
    if form not in ("run", "unequal") and path.name.startswith("torch"):
        assert all(each.drafter_errors for each in stats), "a draft that is lost is counted"


class Reading(Poisonous):
    """Keeps the hidden states that it is shown."""

    requires = frozenset({LAST_HIDDEN})
    shown: ClassVar[dict[int, list[torch.Tensor]]] = {}
    """By the first token of the prompt."""

    def extend(self, context: DraftContext) -> None:
        for tokens, states, fresh in zip(
            context.tokens, context.hidden_states[LAST_HIDDEN], context.fresh, strict=True
        ):
            self.shown[tokens[0]].append(states[:fresh].clone())


@pytest.mark.parametrize("form", ["sibling", "behind", "alone"])
def test_what_drafters_read_of_it_is_sound(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = Path("torch-float32"), []
    right = answers(path.engine(torch.inf))
    for drafted in (form, "nothing"):
        drafting(monkeypatch, right, drafted)
        monkeypatch.setattr(Reading, "shown", {prompt[0]: [] for prompt in PROMPTS})
        with installed("reading", Reading):
            path.engine(torch.inf, speculative_config={"method": "reading", "adaptive": False}).generate(
                PROMPTS, GREEDY
            )
        found.append([torch.cat(Reading.shown[prompt[0]]) for prompt in PROMPTS])
    for poisoned, plain in zip(*found, strict=True):
        torch.testing.assert_close(poisoned, plain)


def test_a_token_that_fails_when_it_is_said_fails_with_a_draft_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third token of the answer is the one; the draft names it beforehand."""
    whole = answers(path.engine(0.0))
    monkeypatch.setitem(globals(), "POISON", whole[0][2])
    drafting(monkeypatch, whole, "sibling")
    assert whole[0][2] not in [*PROMPTS[0], *whole[0][:2]]
    with installed("poisonous", Poisonous):
        for speculative in (False, {"method": "poisonous", "adaptive": False}):
            llm = path.engine(torch.inf)
            said: list[int] = []
            with pytest.raises(NumericError):
                for chunk in llm.stream(PROMPTS[0], GREEDY, speculative=speculative):
                    said += [token.id for token in chunk.tokens]
            assert said == whole[0][:3]
