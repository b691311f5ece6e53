"""Every registered drafter on the simulated device: the text and the drafts of the CPU, no tensors of two devices."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.harness import PROMPTS, VARIANTS, Variant, as_prompts, model
from drafters.test_skip_layers import deep
from drafters.tied import SPEED
from engine.conftest import checkpoint, draft_checkpoint
from forerun import LLM, SamplingParams, devices
from forerun.drafters import DRAFTERS
from forerun.model import TransformersTarget
from forerun.model.recordings import MET_BEFORE
from selection import slow
from simulated.device import NAME, Kind, SimulatedDevice, moved
from simulated.steps import (
    AUTO,
    EVERY,
    OF_HEADS,
    SETTINGS,
    Answer,
    answers,
    drafters,
    kept,
    on_device,
    quickly_measured,
)
from simulated.waits import recording

__all__ = ["checkpoint", "draft_checkpoint", "quickly_measured"]
pytestmark = pytest.mark.usefixtures("quickly_measured")

WITHOUT_FLOAT64 = ("greedy without float64", "top-p without float64")
QUICK = {
    *(str(variant) for name in DRAFTERS for variant in VARIANTS.get(name, [Variant(name)])[:1]),
    *(str(None), str(SPEED), str(AUTO), "draft_model-tree", "eagle3-dynamic"),
}
"""One variant of each drafter, and of those that run a model a tree, too. The other variants are slow tests."""
IN_ALL = {str(None), "ngram", "draft_model-tree", "eagle3-dynamic"}
"""Of these every setting is quick. The other drafters meet the same rules, processors and draws."""


def cases(*settings: str) -> list[Any]:
    """Every variant in these settings."""

    def quick(variant: Variant | None, setting: str) -> bool:
        return str(variant) in QUICK and (setting == "greedy" or str(variant) in IN_ALL)

    return [case if quick(*case) else slow(case)[0] for case in itertools.product(EVERY, settings)]


@cache
def on_the_cpu(variant: Variant | None, setting: str) -> list[Answer]:
    """What is expected on the device."""
    return answers(variant, SETTINGS[setting])


@pytest.mark.parametrize(("variant", "setting"), cases(*SETTINGS), ids=str)
def test_the_device_gives_the_text_and_the_drafts_of_the_cpu(variant: Variant | None, setting: str) -> None:
    expected = on_the_cpu(variant, setting)
    device = SimulatedDevice()
    with device, recording(device):
        found = answers(variant, SETTINGS[setting], move=moved, device=NAME)
    assert not device.refused
    assert found == expected
    assert not any(answer.drafter_errors for answer in found)
    assert variant is None or sum(answer.drafted for answer in found) > 0
    assert device.counts.of(Kind.READ) > 0, "what came out was computed on the device"


@pytest.mark.parametrize(("variant", "setting"), cases(*WITHOUT_FLOAT64), ids=str)
def test_without_float64_it_does_so_too(variant: Variant | None, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MPS is one."""
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", {NAME})
    setting = setting.partition(" ")[0]
    expected = on_the_cpu(variant, setting)
    device = SimulatedDevice(lacks=[torch.float64])
    with device:
        found = answers(variant, SETTINGS[setting], move=moved, device=NAME)
    assert not device.refused
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert not any(answer.drafter_errors for answer in found)


def named(name: str) -> dict[str, dict[str, Any]]:
    """Configurations with a draft model by its name, and of drafters made of the target that is loaded by name; all but
    `auto` draft at every step."""
    ngram, draft_model = {"method": "ngram"}, {"method": "draft_model", "model": name}
    return {
        "draft_model": draft_model,
        "tli": {"method": "tli", "model": name},
        "slem": {"method": "slem", "model": name},
        "cascade": {"method": "cascade", "model": name, "inner": ngram},
        "first_of": {"method": "first_of", "drafters": [ngram, draft_model]},
        "merge": {"method": "merge", "drafters": [ngram, draft_model]},
        "auto": {"method": "auto", "model": name},
        "early_exit": {"method": "early_exit", "exit_layer": 1},
        "quantized_self": {"method": "quantized_self"},
    }


def answered(checkpoint: Path, place: str, **more: Any) -> list[int]:
    """Eight tokens of a greedy answer on this device."""
    llm = LLM(str(checkpoint), device=place, max_num_seqs=1, max_model_len=64, **more)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return llm.generate("the cat sat on the", params)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[int]:
    """The answer on the CPU, which no drafter changes."""
    return answered(checkpoint, "cpu")


@pytest.mark.parametrize("method", named(""))
def test_what_is_loaded_by_name_is_on_the_targets_device(
    method: str, plain: list[int], checkpoint: Path, draft_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # in the thread in which the device is open
    made: list[TransformersTarget] = []
    wrapped = TransformersTarget.__init__

    def noted(self: TransformersTarget, *args: Any, **keywords: Any) -> None:
        wrapped(self, *args, **keywords)
        made.append(self)

    monkeypatch.setattr(TransformersTarget, "__init__", noted)
    config = {"adaptive": method == "auto"} | named(str(draft_checkpoint))[method]
    with SimulatedDevice() as device:
        assert answered(checkpoint, NAME, speculative_config=config) == plain
    assert not device.refused
    assert {target.device.type for target in made} == {NAME}


WHOLE = ("ngram-chain", "draft_model-tree")
RECORDED = (*WHOLE, "early_exit-tree", "skip_layers-chain", "kangaroo-chain")
QUICKLY = (str(None), WHOLE[0])
REPLAYED = [one for one in EVERY if str(one) in (str(None), *RECORDED)]


@pytest.mark.parametrize("variant", [one if str(one) in QUICKLY else slow(one)[0] for one in REPLAYED], ids=str)
def test_the_targets_passes_are_few_recordings_and_the_text_is_that_of_the_cpu(
    variant: Variant | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come, end and grow past the first width; a replay runs none of the model's Python."""
    monkeypatch.setattr("forerun.model.recordings.LEAST_WIDTH", 16)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (30, 4, 12, 25, 8)]
    prompts = as_prompts([*PROMPTS[:3], *PROMPTS[:2]])

    def texts(*, there: bool) -> tuple[list[list[int]], LLM]:
        config = None if variant is None else variant.config()
        target, config = (moved(model()), on_device(config, moved)) if there else (model(), config)
        settings: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 64, "self_check": False}
        llm = LLM(target, tokenizer=False, speculative_config=config, **settings)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)], llm

    expected, _ = texts(there=False)
    device, forwards = SimulatedDevice(), list[int]()
    with device, recording(device):
        found, llm = texts(there=True)
        kept, since = -1, 0
        while (
            since <= 1 + MET_BEFORE and kept <= 48
        ):  # until no shape is new: how much is drafted is still being learned
            llm.generate(prompts, params)
            kept, since = len(llm.target.recordings), 1 + since if kept == len(llm.target.recordings) else 0
        for layer in llm.target._layers:
            layer.register_forward_pre_hook(lambda *_: forwards.append(1))
        again = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert found == again == expected
    assert 3 <= kept <= (16 if variant is None or str(variant) in WHOLE else 48)
    assert len(llm.target.recordings) == kept
    most = len(prompts) * llm.target.num_layers
    assert len(forwards) <= most, "prompts run as they come, all other passes are replayed"
    assert not caplog.records, "no recording failed"


def test_sub_layers_that_are_only_tried_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """SWIFT judges a candidate in a few steps: what is recorded of it would hardly be replayed."""
    candidates, kept = set[Any](), set[Any]()
    draft = TransformersTarget.draft

    def noted(self: TransformersTarget, rows: Any, nodes: Any, plan: Any, *head: Any, tried: bool = False) -> Any:
        (candidates if tried else kept).add(plan)
        return draft(self, rows, nodes, plan, *head, tried=tried)

    monkeypatch.setattr(TransformersTarget, "draft", noted)
    config = {
        **{"method": "skip_layers", "search": "swift", "skip_ratio": 0.3, "search_window": 6, "adaptive": False},
        "num_speculative_tokens": 2,
    }
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with (device := SimulatedDevice()), recording(device):
        llm = LLM(moved(deep()), tokenizer=False, speculative_config=config, max_model_len=64, self_check=False)
        for _ in range(2):
            llm.generate(as_prompts(PROMPTS[:1]), params)
        recorded = {key[0][1] for key in llm.target.recordings._known if key[0][0] == "part"}
    assert candidates - kept and recorded and recorded <= kept


DRAFT_MODELS = {"draft_model-chain": "greedy", "draft_model-iid-tree": "top-p", "tli-chain": "greedy"}
"""And the setting of each that is quick."""
DRAFTED = itertools.product([one for one in EVERY if str(one) in DRAFT_MODELS], ("greedy", "top-p", "penalties"))


@pytest.mark.parametrize(
    ("variant", "setting"),
    [case if DRAFT_MODELS[str(case[0])] == case[1] else slow(case)[0] for case in DRAFTED],
    ids=str,
)
def test_draft_models_draft_in_one_recording(variant: Variant, setting: str, caplog: pytest.LogCaptureFixture) -> None:
    """What it lacks, and all levels: a replay runs none of its Python; text and drafts are those of the CPU (above)."""
    prompts, forwards, device = as_prompts(PROMPTS[:3]), list[int](), SimulatedDevice()
    with device, recording(device):
        config = {"adaptive": False, **on_device(variant.config(), moved)}
        settings: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 64, "self_check": False}
        llm = LLM(moved(model()), tokenizer=False, speculative_config=config, **settings)
        texts = [[one.outputs[0].token_ids for one in llm.generate(prompts, SETTINGS[setting])] for _ in range(4)]
        [drafter] = drafters(llm)
        for layer in drafter.model._layers:
            layer.register_forward_pre_hook(lambda *_: forwards.append(1))
        texts += [[one.outputs[0].token_ids for one in llm.generate(prompts, SETTINGS[setting])]]
    assert all(text == texts[0] for text in texts)
    assert len(forwards) <= len(prompts) * drafter.model.num_layers, "prompts run as they come"
    assert not caplog.records, "no recording failed"


HEADS = [variant if str(variant) in QUICK else slow(variant)[0] for variant in OF_HEADS]


@pytest.mark.parametrize("variant", HEADS, ids=str)
def test_what_a_head_keeps_of_a_text_is_what_it_keeps_without_recordings(variant: Variant) -> None:
    """Not the text, which no draft changes: keys and values of what was committed, and the last features."""
    expected = kept(variant, lambda module: module)
    device = SimulatedDevice()
    with device, recording(device):
        found = kept(variant, moved)
    assert not device.refused
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
