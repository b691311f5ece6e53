"""A closed `LLM` has freed its memory and says so; what it and its answers are is told in a line."""

import weakref
from pathlib import Path

import pytest

from forerun import LLM, AsyncLLM, SamplingParams
from forerun.errors import ArgumentError, EngineError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_close_frees_the_model_and_later_calls_say_so(checkpoint: Path, draft_checkpoint: Path) -> None:
    with LLM(str(checkpoint), dtype="float32", speculative_config={"model": str(draft_checkpoint)}) as llm:
        llm.generate("the cat", GREEDY)
        stream = llm.stream("the dog", GREEDY)
        next(stream)
        held = [weakref.ref(llm.target), weakref.ref(llm.engine), weakref.ref(llm.target.model)]
    assert [one() for one in held] == [None, None, None]
    for call in (lambda: llm.generate("the cat", GREEDY), llm.sleep, lambda: list(stream)):
        with pytest.raises(EngineError, match="closed"):
            call()
    llm.close()
    assert repr(llm) == f"LLM({str(checkpoint)!r}, closed)"


async def test_closing_an_async_llm_frees_the_model(checkpoint: Path) -> None:
    async with AsyncLLM(str(checkpoint), dtype="float32") as llm:
        await llm.generate("the cat", GREEDY)
        target = weakref.ref(llm.llm.target)
    assert target() is None


def test_reprs_are_short_and_the_tokenizer_is_handed_out(checkpoint: Path) -> None:
    with LLM(str(checkpoint), dtype="float32", device="cpu", speculative_config="ngram") as llm:
        assert repr(llm) == f"LLM({str(checkpoint)!r}, dtype='float32', device='cpu', drafter='ngram')"
        assert llm.get_tokenizer() is llm.tokenizer
        [output] = llm.generate("the cat sat", GREEDY)
    answer = output.outputs[0]
    assert repr(answer) == (
        f"CompletionOutput(index=0, text={answer.text!r}, finish_reason='length', num_tokens=6, "
        f"tokens_per_pass={answer.speculation.tokens_per_pass:.2f})"
    )
    assert repr(output).count("CompletionOutput(") == 1 and "OutputToken" not in repr(output)
    assert repr(answer.speculation).startswith("SpeculationStats(tokens_per_pass=")


def test_without_a_tokenizer_there_is_none_to_hand_out(checkpoint: Path) -> None:
    with LLM(str(checkpoint), tokenizer=False, dtype="float32") as llm, pytest.raises(ArgumentError, match="tokenizer"):
        llm.get_tokenizer()
