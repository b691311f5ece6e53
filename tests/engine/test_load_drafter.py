"""Another head or draft model takes the place of the one that drafts while requests run, and no answer changes."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contract.harness import eagle_head, medusa_head, model, relative
from forerun import LLM, AsyncLLM, SamplingParams
from forerun.control.config import SpeculativeConfig
from forerun.errors import ArgumentError, ForerunError
from forerun.heads.files import HeadCheckpoint, TargetFacts, write_head
from forerun.types import RequestOutput

PROMPTS = [{"prompt_token_ids": prompt} for prompt in ([3, 1, 4, 1, 5], [2, 7, 1], [8, 2, 8, 1, 8, 2, 8])]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True)
FACTS = TargetFacts.of(model().config, "target")
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The target, two draft models of which one is the target itself, two heads, and a head of another kind."""
    root = tmp_path_factory.mktemp("models")
    made = {"target": model(), "worse": relative(0.3), "same": model()}
    for name, one in made.items():
        one.save_pretrained(root / name)
    write_head(HeadCheckpoint.of(eagle_head()), root / "head", "flat", FACTS)
    write_head(HeadCheckpoint.of(eagle_head(norm_output=True)), root / "other_head", "flat", FACTS)
    write_head(HeadCheckpoint.of(medusa_head()), root / "medusa", "medusa", FACTS)
    return {path.name: path for path in root.iterdir()}


def engine(folders: Folders, drafter: dict[str, Any] | None, **more: Any) -> LLM:
    options = {"tokenizer": False, "max_num_seqs": 4, "max_model_len": 64, "check": True, "self_check": False} | more
    return LLM(str(folders["target"]), speculative_config=drafter, dtype="float32", **options)


def draft_model(folders: Folders, name: str = "worse", **more: Any) -> dict[str, Any]:
    named = {"method": "draft_model", "model": str(folders[name]), "num_speculative_tokens": 3}
    return {**named, "adaptive": False, **more}


def answers_across(llm: LLM, params: SamplingParams, swaps: dict[int, Callable[[], None]]) -> list[RequestOutput]:
    """The answers to all prompts, the second half submitted after the last swap; a swap comes before its step."""
    order = [llm.submit(prompt, params) for prompt in PROMPTS]
    outputs, step = dict[str, RequestOutput](), 0
    while len(outputs) < 2 * len(PROMPTS):
        if step in swaps:
            swaps[step]()
        if step == max(swaps) + 1:
            order += [llm.submit(prompt, params) for prompt in PROMPTS]
        outputs |= {chunk.request_id: chunk.output for chunk in llm.engine.step() if chunk.output is not None}
        step += 1
    return [outputs[request_id] for request_id in order]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def accepted(output: RequestOutput) -> float:
    return output.outputs[0].speculation.draft_acceptance_rate


@pytest.mark.parametrize(
    ("config", "names", "params"),
    [
        (draft := {"method": "draft_model", "num_speculative_tokens": 3}, "models", GREEDY),
        ({**draft, "draw": "deterministic", "adaptive": False}, "models", SAMPLED),
        ({"method": "eagle3", "top_k": 2, "nodes": 6, "draw": "deterministic", "adaptive": False}, "heads", SAMPLED),
        ({"method": "auto"}, "heads", GREEDY),
        ({"method": "auto"}, "heads", SAMPLED),
        ({"method": "first_of", "drafters": [{"method": "ngram"}, {"method": "draft_model"}]}, "models", SAMPLED),
    ],
    ids=["adaptive", "draft_model", "eagle3", "auto-greedy", "auto", "first_of"],
)
def test_no_answer_changes_when_drafters_are_swapped(
    folders: Folders, config: dict[str, Any], names: str, params: SamplingParams
) -> None:
    """Rows in the middle of their answers, prompts that are read in chunks, rows that are preempted, prefixes that are
    kept for the former drafter: all there is goes across several swaps, one of them to the same directory."""
    first, second = ("worse", "same") if names == "models" else ("head", "other_head")
    made = {**config}
    if "drafters" in config:
        made["drafters"] = [config["drafters"][0], {**config["drafters"][1], "model": str(folders[first])}]
    else:
        made["model"] = str(folders[first])
    plain = engine(folders, None)
    expected = tokens_of(plain.generate(PROMPTS, params))
    llm = engine(folders, made, max_num_batched_tokens=4, kv_cache_tokens=96)
    swaps = {2: second, 5: second, 6: first, 11: second}
    found = answers_across(
        llm, params, {step: lambda name=name: llm.load_drafter(folders[name]) for step, name in swaps.items()}
    )
    assert tokens_of(found) == [*expected, *expected]
    assert not llm.engine.drafting.replaced and len(llm.engine.drafting._active) == 1


def test_new_requests_have_the_new_drafter_and_running_ones_their_own(folders: Folders) -> None:
    """Also those that ask for less by the drafter's former name, which is how the server names it."""
    llm = engine(folders, draft_model(folders, "worse"))
    found = answers_across(llm, GREEDY, {4: lambda: llm.load_drafter(folders["same"])})
    before, after = found[: len(PROMPTS)], found[len(PROMPTS) :]
    assert max(map(accepted, before)) < 1.0 and all(accepted(output) == 1.0 for output in after)
    fewer = llm.generate(PROMPTS, GREEDY, speculative=draft_model(folders, "worse", num_speculative_tokens=2))
    assert all(accepted(output) == 1.0 for output in fewer) and len(llm.engine.drafting._active) == 1


def test_the_former_drafter_is_freed_with_its_last_row(folders: Folders) -> None:
    """Also in a server, whose garbage collector passes over all that was there when it began."""
    llm = engine(folders, {"method": "eagle3", "model": str(folders["head"]), "adaptive": False})
    drafter = llm.engine.drafting._active[llm._drafter or ""].drafter.drafter
    former = [weakref.ref(drafter), weakref.ref(drafter.head)]
    del drafter
    gc.collect()
    gc.disable()
    try:
        long, short = (
            llm.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)) for n in (30, 4)
        )
        for _ in range(3):
            llm.engine.step()
        llm.load_drafter(folders["other_head"])
        ended = set[str]()
        while llm.engine.busy:
            assert all(one() is not None for one in former), f"{long} still has it"
            ended |= {chunk.request_id for chunk in llm.engine.step() if chunk.output is not None}
        assert ended == {long, short}
        assert [one() for one in former] == [None, None]
    finally:
        gc.enable()


def broken(folders: Folders, tmp_path: Path) -> list[tuple[Path, str]]:
    """What cannot be loaded, and what is said."""
    empty = tmp_path / "empty"
    empty.mkdir()
    torn = write_head(HeadCheckpoint.of(eagle_head()), tmp_path / "torn", "flat", FACTS)
    weights = next(torn.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-64])
    told = [(tmp_path / "nowhere", "there is no directory"), (empty, "empty"), (torn, "torn")]
    return told + [(folders[name], name) for name in ("medusa", "target")]


def test_a_shipped_head_is_loaded_by_its_name(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an engine is made."""
    monkeypatch.setattr("forerun.shipped.folder_of", lambda name: folders["other_head"])
    llm = engine(folders, {"method": "eagle3", "model": str(folders["head"]), "adaptive": False})
    loaded = list[str]()
    monkeypatch.setattr(llm.engine, "load_drafter", lambda key, folder: loaded.append(folder))
    llm.load_drafter("demo-eagle3")
    assert loaded == [str(folders["other_head"])]


def test_a_head_that_cannot_serve_is_refused_and_the_former_stays(folders: Folders, tmp_path: Path) -> None:
    """Each in another step of the same answers."""
    llm = engine(folders, {"method": "eagle3", "model": str(folders["head"]), "adaptive": False})
    expected = tokens_of(llm.generate(PROMPTS, GREEDY))
    before = llm.engine.drafting._active[llm._drafter or ""]

    def load(folder: Path, said: str) -> None:
        with pytest.raises(ForerunError, match=said) as refused:
            llm.load_drafter(folder)
        assert "\n" not in str(refused.value)

    faults = enumerate(broken(folders, tmp_path), start=2)
    found = answers_across(llm, GREEDY, {step: partial(load, *fault) for step, fault in faults})
    assert tokens_of(found) == [*expected, *expected]
    assert all(output.outputs[0].speculation.num_draft_tokens for output in found)
    assert llm.engine.drafting._active == {llm._drafter: before} and not llm.engine.drafting.replaced


def test_only_a_drafter_with_one_model_can_be_replaced(folders: Folders) -> None:
    with pytest.raises(ArgumentError, match="no drafter is configured"):
        engine(folders, None).load_drafter(folders["same"])
    with pytest.raises(ArgumentError, match="'ngram' has no model"):
        engine(folders, {"method": "ngram"}).load_drafter(folders["same"])
    both = {"method": "merge", "drafters": [{"method": "draft_model", "model": name} for name in ("a", "b")]}
    config = SpeculativeConfig.parse(both)
    assert config is not None
    with pytest.raises(ArgumentError, match="'merge' has 2 models"):
        config.with_model("c")


async def test_streams_go_on_across_a_swap(folders: Folders) -> None:
    options: dict[str, Any] = {"tokenizer": False, "max_model_len": 64, "dtype": "float32", "self_check": False}
    plain = engine(folders, None).generate(PROMPTS, GREEDY)
    async with AsyncLLM(str(folders["target"]), speculative_config=draft_model(folders), **options) as llm:
        running = asyncio.create_task(llm.generate(PROMPTS, GREEDY))
        await asyncio.sleep(0)
        for name in ("same", "worse", "same"):
            await llm.load_drafter(folders[name])
        assert tokens_of(await running) == tokens_of(plain)
        assert all(accepted(output) == 1.0 for output in await llm.generate(PROMPTS, GREEDY))
        with pytest.raises(ForerunError, match="there is no directory"):
            await llm.load_drafter("nowhere")
