"""Engines of one process do not harm each other: not by module state, by a model that they share, or by loading."""

import asyncio
import copy
import itertools
import random
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, Lock
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from emulation import kernels_in_c, packed_linears
from forerun import LLM, AsyncLLM, SamplingParams
from forerun.errors import ArgumentError, EngineError
from forerun.heads.eagle import EagleHead
from forerun.model import TransformersTarget
from llamas import tiny_eagle, tiny_llama
from selection import slow

VOCABULARY, SIZE, ROWS = 128, 64, 4
DRAFTERS: list[Any] = [
    False,
    {"method": "ngram", "num_speculative_tokens": 5},
    {"method": "suffix", "num_speculative_tokens": 9},
    {"method": "eagle3", "num_speculative_tokens": 2},
]


def model(seed: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Two layers whose heads are as wide as the kernels want them; random, but sharp."""
    sizes = {"hidden_size": SIZE, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 256}
    return tiny_llama(VOCABULARY, seed, initializer_range=0.3, **sizes).to(dtype)


def head(seed: int, dtype: torch.dtype) -> EagleHead:
    """A random head for `model`."""
    sizes = {"hidden_size": SIZE, "target_hidden_size": SIZE, "intermediate_size": 96, "head_dim": 32}
    return tiny_eagle(VOCABULARY, seed, **sizes).to(dtype)


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    speculative: Any


def jobs(count: int, seed: int, made: EagleHead) -> list[Job]:
    """Prompts and answers of unequal length, half of the prompts repetitive, half of the answers sampled."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        words = [rng.randrange(VOCABULARY) for _ in range(rng.choice((3, 20, 60)))]
        prompt = words * rng.choice((1, 2))
        heat = rng.choice((0.0, 0.8))
        params = SamplingParams(temperature=heat, seed=index, max_tokens=rng.randint(2, 24), detokenize=False)
        chosen = DRAFTERS[index % len(DRAFTERS)]
        own = {"model": made} if chosen and chosen["method"] == "eagle3" else {}
        found.append(Job(prompt, params, chosen and {**chosen, **own}))
    return found


class Side:
    """One engine and its requests."""

    def __init__(self, seed: int, count: int, dtype: torch.dtype, *, shared: Any = None, **loading: Any) -> None:
        """`shared`: the model object of both engines; else each has its own."""
        self._alone = model(seed, dtype) if shared is None else copy.deepcopy(shared)
        self._model = copy.deepcopy(self._alone) if shared is None else shared
        self._loading = {"repack": True, "tokenizer": False, "max_num_seqs": ROWS, "max_model_len": 200, **loading}
        self.jobs = jobs(count, seed, head(seed, dtype))
        self.expected = self.alone()

    def alone(self) -> list[list[int]]:
        """The answers of an engine that is the only one, to one request after the other."""
        llm = LLM(self._alone, **self._loading)
        found = [llm.generate(job.prompt, job.params, speculative=job.speculative) for job in self.jobs]
        return [output.outputs[0].token_ids for (output,) in found]

    async def serve(self, ready: Barrier) -> list[Any]:
        """Answers or errors."""
        async with AsyncLLM(self._model, **self._loading) as llm:
            await asyncio.to_thread(ready.wait)
            answers = [llm.generate(job.prompt, job.params, speculative=job.speculative) for job in self.jobs]
            return await asyncio.gather(*answers, return_exceptions=True)

    def wrong(self, ready: Barrier) -> list[str]:
        """What became of each request that did not get its answer."""
        found = asyncio.run(self.serve(ready))
        lines = []
        for job, answer, expected in zip(self.jobs, found, self.expected, strict=True):
            method = job.speculative["method"] if job.speculative else "plain"
            if isinstance(answer, BaseException):
                lines.append(f"{method}: {answer!r}")
            elif answer[0].outputs[0].token_ids != expected:
                lines.append(f"{method}: {answer[0].outputs[0].token_ids}, alone {expected}")
        return lines


def together(requests: int, dtype: torch.dtype, *, shared: bool = False) -> list[str]:
    """Run both engines at once; what became of requests that did not get their answer."""
    ready, one = Barrier(2, timeout=60), model(0, dtype) if shared else None
    sides = [Side(seed, requests // 2, dtype, shared=one) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        return [line for lines in threads.map(lambda side: side.wrong(ready), sides) for line in lines]


@pytest.mark.parametrize(
    ("dtype", "shared"),
    [(torch.bfloat16, True), *slow((torch.bfloat16, False), (torch.float32, False), (torch.float32, True))],
    ids=str,
)
def test_two_engines_at_once(dtype: torch.dtype, shared: bool) -> None:
    with kernels_in_c(), packed_linears(dtype):
        assert together(48, dtype, shared=shared) == []


PLAIN = (
    *(str, bytes, int, float, tuple, frozenset, type(None), Path),
    *(torch.dtype, torch.device, ModuleType, FunctionType),
)


def held(value: Any) -> Any:
    """What can be changed about it, two levels deep."""
    if isinstance(value, dict):
        return {str(key): id(item) for key, item in value.items()}
    if isinstance(value, list | set):
        return [id(item) for item in value]
    own = {name: getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    return {name: id(item) for name, item in (own | getattr(value, "__dict__", {})).items()}


def module_state() -> Iterator[tuple[str, Any]]:
    """Everything that threads share: names of modules and of their classes, and what hangs on these."""
    for name in [name for name in sys.modules if name.startswith("forerun.")]:
        module = sys.modules[name]
        for key, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == name:
                yield from (
                    (f"{name}.{key}.{own}", id(of)) for own, of in vars(value).items() if own != "__abstractmethods__"
                )
            elif not key.startswith("__") and not isinstance(value, (*PLAIN, ContextVar, torch.library.Library)):
                yield f"{name}.{key}", (id(value), held(value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)], ids=["bf16-in-c", "float32-in-torch"])
def test_nothing_that_threads_share_changes_in_a_pass(dtype: torch.dtype) -> None:
    """Looked at from inside passes of all kinds, before and after attention, once everything has been made."""
    seen, passes = list[dict[str, Any]](), itertools.count()

    def look(*_: Any) -> None:
        if next(passes) % 5 == 0:
            seen.append(dict(module_state()))

    with kernels_in_c(), packed_linears(dtype):
        engine = LLM(model(1, dtype), repack=True, tokenizer=False, max_num_seqs=ROWS, max_model_len=200)
        made = head(1, dtype)
        for repetition in range(2):
            if repetition:
                engine.target._layers[1].register_forward_pre_hook(look)
                engine.target._layers[1].self_attn.register_forward_hook(look)
            for speculative in {str(job.speculative): job.speculative for job in jobs(8, 1, made)}.values():
                some = [job for job in jobs(24, 1, made) if job.speculative == speculative][:2]
                engine.generate([job.prompt for job in some], [job.params for job in some], speculative=speculative)
    assert len(seen) > 10
    for state in seen[1:]:
        assert {name for name in state if state[name] != seen[0].get(name)} == set()


def test_models_are_loaded_one_after_the_other(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sets torch's default dtype while it loads; two at once would leave the one's to the other."""
    before, counting, inside, most = transformers.AutoModelForCausalLM.from_pretrained, Lock(), 0, 0

    def late(*args: Any, **keywords: Any) -> Any:
        nonlocal inside, most
        with counting:
            inside += 1
            most = max(most, inside)
        time.sleep(0.05)
        try:
            return before(*args, **keywords)
        finally:
            with counting:
                inside -= 1

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", late)
    with ThreadPoolExecutor(3) as threads:
        dtypes = ("bfloat16", "float32", "bfloat16")
        targets = list(
            threads.map(lambda dtype: TransformersTarget.load(str(checkpoint), dtype=dtype, self_check=False), dtypes)
        )
    assert most == 1 and torch.get_default_dtype() == torch.float32
    assert [str(target.dtype) for target in targets] == [f"torch.{dtype}" for dtype in dtypes]


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


def test_reprs_are_short_and_the_tokenizer_is_handed_out_where_there_is_one(checkpoint: Path) -> None:
    with LLM(str(checkpoint), dtype="float32", device="cpu", speculative_config="ngram") as llm:
        assert repr(llm) == f"LLM({str(checkpoint)!r}, drafter='ngram': float32 on CPU)"
        assert llm.get_tokenizer() is llm.tokenizer
        [output] = llm.generate("the cat sat", GREEDY)
    answer = output.outputs[0]
    assert repr(answer) == (
        f"CompletionOutput(index=0, text={answer.text!r}, finish_reason='length', num_tokens=6, "
        f"tokens_per_pass={answer.speculation.tokens_per_pass:.2f})"
    )
    assert repr(output).count("CompletionOutput(") == 1 and "OutputToken" not in repr(output)
    assert repr(answer.speculation).startswith("SpeculationStats(tokens_per_pass=")
    with LLM(str(checkpoint), tokenizer=False, dtype="float32") as llm, pytest.raises(ArgumentError, match="tokenizer"):
        llm.get_tokenizer()
