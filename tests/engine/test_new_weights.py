"""The weights of a served model are replaced by those of another checkpoint, as a trainer does between rollouts."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.conftest import byte_llama, tiny_tokenizer
from forerun import LLM, AsyncLLM, SamplingParams
from forerun.errors import ArgumentError, CheckpointError, ForerunError, VocabularyMismatchError
from forerun.types import StreamChunk

PROMPTS = ["the cat sat on the mat and the dog sat on the " * 3, "the log and the dog and the"]
"""The first fills some blocks of the cache."""
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The checkpoint that is served, two that a trainer made of it, and some that do not fit."""
    root = tmp_path_factory.mktemp("trained")

    def saved(name: str, scale: float, *, tokenizer: Any = None, nan: bool = False, model: Any = None) -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint) if model is None else model
        generator = torch.Generator().manual_seed(len(name))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(scale * torch.randn(weight.shape, generator=generator))
            if nan:
                model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
        model.save_pretrained(root / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(root / name)

    own = AutoTokenizer.from_pretrained(checkpoint)
    other = tiny_tokenizer()
    other.add_tokens(["<new>"])
    saved("trained", 0.2, tokenizer=own)
    saved("later", 0.1)
    saved("diverged", 0.1, nan=True)
    saved("other_tokenizer", 0.1, tokenizer=other)
    saved("deeper", 0.0, model=byte_llama(0, tiny_tokenizer(), layers=3))
    saved("cut_short", 0.0)
    for file in (root / "cut_short").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    return {"served": checkpoint, **{path.name: path for path in root.iterdir()}, "missing": root / "missing"}


def engine(folder: Path, drafter: Any = None, kind: Any = LLM, **more: Any) -> Any:
    options = {"dtype": "float32", "max_num_seqs": 3, "max_model_len": 200, **more}
    return kind(str(folder), speculative_config=drafter, **options)


def texts(llm: LLM, params: SamplingParams = GREEDY, **more: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params, **more)]


@pytest.mark.parametrize(
    ("drafter", "dtype"),
    [
        (None, "bfloat16"),
        ({"method": "suffix"}, "float32"),
        *(({"method": "quantized_self", "adaptive": False}, dtype) for dtype in ("float32", "bfloat16")),
    ],
)
def test_answers_are_those_of_an_engine_that_began_with_the_weights(folders: Folders, drafter: Any, dtype: str) -> None:
    """There and back again: packed weights, kept prefixes and a rounded twin, all are the new ones'."""
    llm = engine(folders["served"], drafter, dtype=dtype)
    before = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
    for name in ("trained", "later", "served"):
        llm.update_weights_from_disk(folders[name])
        fresh = engine(folders[name], drafter, dtype=dtype, tokenizer=str(folders["served"]))
        outputs, expected = llm.generate(PROMPTS, GREEDY), fresh.generate(PROMPTS, GREEDY)
        drafted, own = ([one.outputs[0].token_ids for one in some] for some in (outputs, expected))
        assert drafted == own
        assert [one.num_cached_tokens for one in outputs] == [0, 0], "nothing that the former weights computed is left"
        if drafter is not None and drafter["method"] == "quantized_self":
            counts = [[one.outputs[0].speculation for one in some] for some in (outputs, expected)]
            assert counts[0] == counts[1], "it drafts with the new weights"
        again = llm.generate(PROMPTS, GREEDY)
        assert again[0].num_cached_tokens > 16 and [one.outputs[0].token_ids for one in again] == drafted
        assert (drafted == before) == (name == "served")


def test_what_drafters_have_learned_of_texts_stays(folders: Folders) -> None:
    llm = engine(folders["served"], {"method": "suffix", "adaptive": False})
    texts(llm)
    [(_, suffix)] = next(iter(llm.engine.drafting._active.values())).drafters
    [domain] = suffix.drafter._domains.all()
    held = domain.store.held
    llm.update_weights_from_disk(folders["trained"])
    assert held > 40 and domain.store.held == held


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("missing", ArgumentError, "there is no directory"),
        ("deeper", CheckpointError, "num_hidden_layers 3, served is 2"),
        ("diverged", CheckpointError, r"not all finite: model\.layers\.1\.mlp\.down_proj\.weight"),
        ("cut_short", CheckpointError, "cannot open .*cut_short"),
        ("other_tokenizer", VocabularyMismatchError, "is not that of the server"),
    ],
)
def test_nothing_is_lost_if_it_does_not_fit(folders: Folders, name: str, error: type[ForerunError], says: str) -> None:
    llm = engine(folders["served"])
    before = texts(llm)
    with pytest.raises(error, match=says):
        llm.update_weights_from_disk(folders[name])
    assert texts(llm) == before


def test_no_answer_is_from_two_policies(folders: Folders) -> None:
    llm = engine(folders["served"])
    expected = texts(llm)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with pytest.raises(ArgumentError, match=r"weights cannot change to those in .*trained while 1 completions run"):
        llm.update_weights_from_disk(folders["trained"])
    assert [chunk.output for chunk in stream][-1].outputs[0].text == expected[0]  # type: ignore[union-attr]


async def _read(chunks: AsyncIterator[StreamChunk], begun: asyncio.Event) -> Any:
    output = None
    async for chunk in chunks:
        begun.set()
        output = chunk.output or output
    return output


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_answers_that_run_end_as_asked_and_those_that_come_wait(folders: Folders, mode: Any) -> None:
    old, new = (texts(engine(folders[name]), LONG) for name in ("served", "trained"))
    async with engine(folders["served"], {"method": "ngram"}, AsyncLLM) as llm:
        begun = asyncio.Event()
        running = asyncio.create_task(_read(llm.stream(PROMPTS[0], LONG), begun))
        await begun.wait()
        for name in ("deeper", "missing"):
            with pytest.raises(ForerunError):
                await llm.update_weights_from_disk(folders[name], mode=mode)
        with pytest.raises(ArgumentError, match="level 2: only level 1"):
            await llm.sleep(level=2, mode=mode)
        assert not running.done(), "what is refused ends nothing"
        update = asyncio.create_task(llm.update_weights_from_disk(folders["trained"], mode=mode))
        while llm._drained is None:
            await asyncio.sleep(0)
        later = asyncio.create_task(_read(llm.stream(PROMPTS[1], LONG), asyncio.Event()))
        with pytest.raises(ArgumentError, match="is already running"):
            await llm.update_weights_from_disk(folders["later"])
        await llm.wake_up()  # Nothing sleeps: the update goes on, and new requests still wait for it
        await asyncio.wait_for(update, 30)
        former = (await running).outputs[0]
        assert former.finish_reason == {"wait": "length", "abort": "abort"}[mode]
        assert old[0].startswith(former.text) and former.token_ids
        assert (await later).outputs[0].text == new[1]
        [again] = await llm.generate(PROMPTS[0], LONG)
        assert again.outputs[0].text == new[0]


async def test_a_mode_that_would_mix_policies_is_refused(folders: Folders) -> None:
    async with engine(folders["served"], None, AsyncLLM) as llm:
        with pytest.raises(ArgumentError, match=r"mode 'keep'.*none continues with other weights"):
            await llm.update_weights_from_disk(folders["trained"], mode="keep")
        [output] = await llm.generate(PROMPTS[0], GREEDY)
        assert len(output.outputs[0].token_ids) == 24


def test_sleep_frees_the_cache_and_an_update_is_taken_meanwhile(folders: Folders) -> None:
    llm = engine(folders["served"], {"method": "quantized_self"})
    before = texts(llm)
    used = llm.target.memory_bytes()
    llm.sleep()
    assert llm.is_sleeping and llm.target.memory_bytes() < used
    with pytest.raises(ArgumentError, match="call wake_up first"):
        llm.generate(PROMPTS[0], GREEDY)
    with pytest.raises(ArgumentError, match="level 2: only level 1"):
        llm.sleep(level=2)
    llm.update_weights_from_disk(folders["trained"])
    llm.wake_up(["weights"])
    assert llm.is_sleeping
    with pytest.raises(ArgumentError, match="'weight'"):
        llm.wake_up(["weight"])
    llm.wake_up(["kv_cache"])
    assert texts(llm) == texts(engine(folders["trained"])) != before
    llm.update_weights_from_disk(folders["served"])
    assert texts(llm) == before


def test_a_loaded_model_is_written_to_in_place(folders: Folders, tmp_path: Path) -> None:
    """Its weights are the caller's own, also where the head is the embedding."""
    model = AutoModelForCausalLM.from_pretrained(folders["served"])
    model.config.tie_word_embeddings = True
    model.tie_weights()
    shutil.copytree(folders["served"], tmp_path / "tied")
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.5)
    model.save_pretrained(tmp_path / "tied")
    with torch.no_grad():
        model.get_input_embeddings().weight.sub_(0.5)
    llm = LLM(model, tokenizer=str(folders["served"]), max_num_seqs=2, max_model_len=100, repack=True)
    before = texts(llm)
    llm.update_weights_from_disk(tmp_path / "tied")
    assert texts(llm) == texts(engine(tmp_path / "tied")) != before
