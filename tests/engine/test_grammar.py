"""Structured outputs hold for every drafter, and the drafts change nothing about them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams, StructuredOutputs
from forerun.errors import ArgumentError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
LINE = r"(cat|dog) [0-9]{2,4}( and (cat|dog) [0-9]{2,4})*!"


@pytest.fixture(scope="module")
def llm(checkpoint: Path, draft_checkpoint: Path) -> LLM:
    return LLM(
        str(checkpoint),
        dtype="float32",
        max_num_seqs=4,
        speculative_config={"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 4},
    )


def ask(llm: LLM, form: StructuredOutputs, speculative: Any = None, **params: Any) -> list[str]:
    sampling = SamplingParams(**{"max_tokens": 80, "structured_outputs": form, **params})
    outputs = llm.generate(["the cat sat", "the dog"], sampling, speculative=speculative)
    return [answer.text for output in outputs for answer in output.outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_obeys_its_schema_and_is_the_plain_one(llm: LLM, temperature: float) -> None:
    drafters: list[Any] = [None, {"method": "ngram"}, {"method": "draft_model", **tree(llm)}]
    form = StructuredOutputs(json=SCHEMA)
    plain = ask(llm, form, speculative=False, temperature=temperature, seed=3)
    for text in plain:
        found = json.loads(text)
        assert set(found) == {"name", "count"} and len(found["name"]) <= 6 and found["count"] <= 99
    for drafter in drafters:
        texts = ask(llm, form, speculative=drafter, temperature=temperature, seed=3)
        assert all(set(json.loads(text)) == {"name", "count"} for text in texts)
        if temperature == 0.0:
            assert texts == plain


def tree(llm: LLM) -> dict[str, Any]:
    assert llm.speculative is not None
    return {"model": llm.speculative.options["model"], "shape": (2, 2, 1)}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutputs(regex=LINE), LINE),
        (StructuredOutputs(choice=["yes", "no", 'a "quoted" word']), 'yes|no|a "quoted" word'),
        (StructuredOutputs(grammar='start: "x" y+ "."\ny: "a" | "b"'), r"x[ab]+\."),
    ],
)
def test_expressions_choices_and_grammars(llm: LLM, form: StructuredOutputs, pattern: str) -> None:
    for text in ask(llm, form, temperature=1.0, seed=1, n=2, max_tokens=120):
        assert re.fullmatch(pattern, text) or len(text) > 60, text


def test_the_mask_follows_any_path(llm: LLM) -> None:
    make = llm.reader.grammars.processor
    form = StructuredOutputs(choice=["ab", "ac", "b"])
    processor, fresh = make(form, 2), make(form, 2)
    assert llm.tokenizer is not None
    a, b, c = (llm.tokenizer.encode(letter)[0] for letter in "abc")
    logits = torch.zeros(llm.target.vocab_size)

    def allowed(which: Any, *output: int) -> set[int]:
        return set(torch.isfinite(which([0, 0, *output], logits)).nonzero().flatten().tolist())

    for output in ((), (a,), (b,), (a, c), (a,), ()):
        assert allowed(processor, *output) == allowed(make(form, 2), *output)
    assert {b, c} <= allowed(fresh, a) and a not in allowed(fresh, a)
    assert processor.valid([], [a, b]) == 2 and processor.valid([], [a, a]) == 1 and processor.valid([b], [a]) == 0
    assert processor.valid([a, a], [b]) == 0, "behind what is forbidden nothing is allowed"


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "recycling", "auto"])
def test_no_copied_node_is_scored_that_the_grammar_forbids(llm: LLM, drafter: str) -> None:
    """What these drafters know of is the prompt, whose text the grammar does not allow."""
    form = StructuredOutputs(regex=r"(the cat sat|on a hot roof)+")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2, structured_outputs=form)
    prompt = "the cat sat on a mat. the dog sat on the cat. the cat sat on a hot dog, the cat sat on a mat. "
    assert llm.tokenizer is not None
    length, scored = len(llm.tokenizer.encode(prompt)), 0
    chooses = drafter == "auto"  # Which may draft nothing on a busy machine
    config = {"method": drafter, "adaptive": chooses}
    [output] = llm.generate([prompt], params, speculative=config, trace=True)
    for step in output.outputs[0].trace:
        grammar = llm.reader.grammars.processor(form, 0)
        paths = {0: list(output.outputs[0].token_ids[: step.position - length])}
        for node, drafted in enumerate(step.nodes, start=1):
            assert grammar.valid(paths[drafted.parent], [drafted.token])
            paths[node] = [*paths[drafted.parent], drafted.token]
            scored += 1
    assert scored or chooses


def test_bad_forms(llm: LLM) -> None:
    for both in ({}, {"regex": "a", "choice": ["b"]}):
        with pytest.raises(ArgumentError, match="exactly one"):
            StructuredOutputs(**both)
    for wrong in ({"json": {"type": "nonsense"}}, {"json": '{"a'}, {"regex": "("}, {"grammar": "start: missing"}):
        with pytest.raises(ArgumentError, match="structured outputs"):
            ask(llm, StructuredOutputs(**wrong))
