"""What a grammar may cost: it is refused, or it ends its own answer, and the process and the other answers go on."""

import asyncio
import gc
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from forerun import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from forerun.engine import grammar, grammar_trial
from forerun.engine.grammar import MAX_CHOICES, check
from forerun.errors import ArgumentError
from forerun.nesting import MAX_DEPTH

PROMPT = "the cat sat"
AMBIGUOUS = "start: e\ne: e e | e e e | e e e e | /[a-z ]/"


def schemas(length: int) -> dict[str, Any]:
    """Definitions that refer to the next, `length` of them."""
    links: dict[str, Any] = {f"d{k}": {"$ref": f"#/$defs/d{k + 1}"} for k in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def rules(length: int, name: str = "r") -> str:
    """Rules that name the next, `length` of them."""
    return "\n".join([f"start: {name}0", *(f"{name}{k}: {name}{k + 1}" for k in range(length)), f'{name}{length}: "x"'])


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"not": value}
    return value


TOO_MUCH: dict[str, tuple[str, str, str]] = {
    "a deep schema": ("json", json.dumps(nested(MAX_DEPTH)), "levels deep"),
    "a deep text": ("json", '{"not":' * 20_000, "levels deep"),
    "deep brackets": ("grammar", "start: " + "(" * 3000 + '"x"' + ")" * 3000, "levels deep"),
    "deep expressions": ("regex", "(" * 1000 + ")" * 1000, "levels deep"),
    "a large schema": ("json", json.dumps({"enum": ["x" * 300_000]}), "characters"),
    "a large expression": ("regex", "(ab|cd)" * 100_000, "characters"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_before_it_is_compiled(name: str) -> None:
    kind, text, why = TOO_MUCH[name]
    with pytest.raises(ArgumentError, match=why):
        check(kind, text)


FINE: list[tuple[str, str]] = [
    ("json", json.dumps(nested(MAX_DEPTH - 1))),
    ("json", json.dumps({"$ref": "#"})),
    ("json", '"(((((" '),
    ("grammar", 'start: "' + "(" * 500 + '"'),
    ("grammar", "start: rule_0\nrule_0: %json " + json.dumps(schemas(5)) + "\nTEXT: /(.|\\n)*/"),
]


@pytest.mark.parametrize(("kind", "text"), FINE)
def test_what_is_ordinary_passes(kind: str, text: str) -> None:
    check(kind, text)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), dtype="float32", max_num_seqs=4)


def ask(llm: LLM, form: StructuredOutputs, **params: Any) -> str:
    sampling = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "structured_outputs": form, **params})
    return llm.generate(PROMPT, sampling)[0].outputs[0].text


GOOD = StructuredOutputs(regex="(cat|dog)!")


@pytest.mark.parametrize("text", ["start: start", 'start: "a" x\nx: x', "start: /[^\\w\\W]/"])
def test_a_grammar_of_no_text_is_refused(llm: LLM, text: str) -> None:
    with pytest.raises(ArgumentError, match="structured outputs"):
        ask(llm, StructuredOutputs(grammar=text))
    assert ask(llm, GOOD) in ("cat!", "dog!")


@pytest.mark.parametrize("length", [50, 900, 3000])
def test_chains_of_references_are_compiled_or_refused(llm: LLM, length: int) -> None:
    """A compiler that calls itself for each of them runs out of stack: in the process that tries it."""
    for form in (StructuredOutputs(json=schemas(length)), StructuredOutputs(grammar=rules(length))):
        try:
            ask(llm, form)
        except ArgumentError as error:
            assert length > 50 and "structured outputs" in str(error)


def test_a_process_that_ends_is_a_refusal_and_another_one_is_started(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever got past the checks: here they are off."""
    monkeypatch.setattr(grammar, "check", lambda kind, text: None)
    for form in (StructuredOutputs(json=schemas(20_000)), StructuredOutputs(grammar=rules(100_000))):
        with pytest.raises(ArgumentError, match="structured outputs"):
            ask(llm, form)
    assert ask(llm, StructuredOutputs(choice=["cat", "dog"])) in ("cat", "dog")


def test_a_process_that_was_ended_from_outside_is_started_again(llm: LLM) -> None:
    ask(llm, GOOD)
    process = llm.reader.grammars._trials._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert ask(llm, StructuredOutputs(regex="(cow|dog)!")) in ("cow!", "dog!")


def test_compiling_has_a_deadline(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(llm, GOOD)
    process = llm.reader.grammars._trials._started()
    os.kill(process.pid, signal.SIGSTOP)  # answers never, once all of its threads have stopped
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    monkeypatch.setattr(grammar, "DEADLINE_S", 0.1)
    with pytest.raises(ArgumentError, match="too complex"):
        ask(llm, StructuredOutputs(regex="(hen|dog)!"))
    monkeypatch.undo()
    assert ask(llm, StructuredOutputs(regex="(hen|dog)!")) in ("hen!", "dog!")


def test_a_machine_that_is_busy_makes_no_grammar_complex(llm: LLM) -> None:
    """What counts is the processor's time that compiling takes, not the clock's."""
    ask(llm, GOOD)
    process = llm.reader.grammars._trials._started()
    os.kill(process.pid, signal.SIGSTOP)
    timer = threading.Timer(grammar_trial.TRIAL_S + 0.5, os.kill, (process.pid, signal.SIGCONT))
    timer.start()
    assert ask(llm, StructuredOutputs(regex="(owl|dog)!")) in ("owl!", "dog!")
    timer.join()


def test_the_process_ends_with_its_engine(checkpoint: Path) -> None:
    own = LLM(str(checkpoint), dtype="float32", max_num_seqs=1)
    ask(own, GOOD)
    process = own.reader.grammars._trials._process
    assert process is not None and process.poll() is None
    del own
    gc.collect()
    assert process.poll() is not None


def test_many_choices(llm: LLM) -> None:
    words = [f"word {k}" for k in range(MAX_CHOICES)]
    assert ask(llm, StructuredOutputs(choice=words), max_tokens=40) in words
    with pytest.raises(ArgumentError, match="choices"):
        ask(llm, StructuredOutputs(choice=[*words, "x"]))
    with pytest.raises(ArgumentError, match="characters"):
        ask(llm, StructuredOutputs(choice=["x" * 5000]))


async def test_too_slow_a_grammar_ends_its_answer_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ambiguous: what may come next is looked for in ever more ways. With so small a vocabulary it takes longer."""
    monkeypatch.setattr(grammar_trial, "MAX_ITEMS", 200)
    async with AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=3) as llm:
        form = StructuredOutputs(grammar=AMBIGUOUS)
        good = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        bad = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, structured_outputs=form)
        found = await asyncio.gather(
            llm.generate(PROMPT, good), llm.generate(PROMPT, bad), llm.generate("the dog", good), return_exceptions=True
        )
        assert isinstance(found[1], ArgumentError) and "structured outputs" in str(found[1])
        assert [len(found[i][0].outputs[0].token_ids) for i in (0, 2)] == [40, 40]


def test_masks_that_take_too_long_end_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within the parser's own limits."""
    monkeypatch.setattr(grammar, "GRACE_S", 0.0)
    monkeypatch.setattr(grammar, "MASK_S", 0.0)
    masks, asked = grammar.GrammarProcessor._bits, list[int]()
    monkeypatch.setattr(grammar.GrammarProcessor, "_bits", lambda self: (asked.append(1), masks(self))[1])
    with pytest.raises(ArgumentError, match=r"took .* s for 1 tokens"):
        ask(llm, GOOD, n=4)
    assert len(asked) == 1, "what one answer has spent, the others of the request have not"


def test_an_error_of_the_parser_is_no_end_of_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be taken for a stop: a parser in an error state allows the end alone."""
    masks = grammar.GrammarProcessor._bits

    def failing(self: Any) -> Any:
        if len(self._read) == 2:
            self._matcher.consume_token(10**6)
        return masks(self)

    monkeypatch.setattr(grammar.GrammarProcessor, "_bits", failing)
    with pytest.raises(ArgumentError, match="the grammar failed"):
        ask(llm, StructuredOutputs(regex="[a-z]{8,9}"))
