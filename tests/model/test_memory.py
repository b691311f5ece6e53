"""The memory plan: what it counts is what is allocated, and it speaks before anything is loaded."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import huggingface_hub
import psutil
import pytest
import torch
from transformers import CONFIG_MAPPING

from forerun.control.config import SpeculativeConfig, drafter_bytes
from forerun.errors import OutOfMemoryError
from forerun.model import TransformersTarget, memory, prepare
from forerun.model.load import LoadOptions, stored_bytes, weight_bytes
from forerun.model.memory import MemoryPlan, _container_room, available_bytes, cache_bytes_per_token
from forerun.model.states.rows import MOST
from model.families import FAMILIES, make, random_tokens
from model.tiny import build


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_takes_what_the_plan_says(name: str) -> None:
    target = TransformersTarget.load(make(name), rows=3, slots=21, self_check=False)
    target.prefill([0], [random_tokens(5, 0)])
    assert target.cache.nbytes() == cache_bytes_per_token(target.config, 4) * 3 * 22


def test_memory_follows_use() -> None:
    """Of a cache of gigabytes what sequences reach is in memory, whoever wrote, moved, copied or cleared it."""
    script = """
        import psutil, torch
        from forerun.model import TransformersTarget
        from model.families import make, random_tokens
        own = psutil.Process()
        used = lambda: own.memory_info().rss / 2**20
        target = TransformersTarget.load(make("llama"), rows=64, slots=2**17)  # the trial reserves the layers
        target.prefill([3], [random_tokens(8, 0)])  # what a first pass takes besides
        whole, before = target.cache.nbytes() / 2**20, used()
        seen = lambda: round(used() - before)
        target.prefill([5], [random_tokens(8, 0)])
        target.copy_row(5, 6, 8)
        target.clear(5)
        few = seen()
        token = target.cache.nbytes() / 64 / 2**17
        for start in range(0, 64):
            for stores in target.cache._stores.values():
                for store in stores:
                    store[start, :2048] += 1.0
        print(round(whole), few, seen(), round(64 * 2048 * token / 2**20))
    """
    command, folder = [sys.executable, "-c", dedent(script)], Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path]), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    whole, few, many, expected = map(int, found.stdout.split())
    assert whole > 4096, "or it would not show"
    assert few < 64, "a few tokens took as much as"
    assert 0.9 * expected < many < 1.5 * expected + 64


def test_what_caches_may_still_take_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=2**40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(memory, "_container_room", lambda: 2**62)
    target = TransformersTarget.load(make("llama"), rows=4, slots=1023)
    before, whole = available_bytes(torch.device("cpu")), target.cache.nbytes()
    target.prefill([1], [random_tokens(512, 0)])
    assert available_bytes(torch.device("cpu")) - before == pytest.approx(whole / 8, rel=0.01), "these are taken now"
    target.truncate([1], [0])
    target.clear(1)
    assert target.cache.untouched_bytes() == pytest.approx(whole * 7 / 8, rel=0.01), "zeros are written, not given back"


@pytest.mark.parametrize(("dtype", "itemsize"), [(None, 4), (torch.bfloat16, 2)])
def test_weights_are_counted_from_the_headers(tmp_path: Path, dtype: torch.dtype | None, itemsize: int) -> None:
    model = make("qwen3")
    model.save_pretrained(tmp_path)
    count = sum(weight.numel() for weight in model.parameters())
    assert weight_bytes(tmp_path, dtype.itemsize if dtype else None) == count * itemsize


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_of_a_model_that_is_not_here_are_counted_from_its_configuration(name: str) -> None:
    model = make(name)
    count = sum(weight.numel() for weight in model.parameters())
    assert stored_bytes("nobody/nothing", LoadOptions(dtype="bfloat16"), model.config) == 2 * count
    assert stored_bytes("nobody/nothing", LoadOptions(dtype=torch.float32), model.config) == 4 * count


def test_downloaded_weights_are_counted_from_their_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    found = {file.name: str(file) for file in tmp_path.iterdir()}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, file, revision: found.get(file))
    config = make("gpt2").config
    assert stored_bytes("nobody/nothing", LoadOptions(), config) == weight_bytes(tmp_path, None)
    next(tmp_path.glob("model-00001*")).unlink()
    expected = 4 * sum(weight.numel() for weight in make("gpt2").parameters())
    assert stored_bytes("nobody/nothing", LoadOptions(dtype="float32"), config) == expected


def plan(**changes: int) -> MemoryPlan:
    sizes = {"rows": 8, "slots": 999, "weights": 10 * 2**30, "token": 2**20, "probs": 2**30, "reserve": 2**30}
    return MemoryPlan(**(sizes | changes))


def test_a_cache_that_does_not_fit_says_what_to_lower() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        plan().check(16 * 2**30, "cuda:0")
    text = str(caught.value)
    assert "19.81 GiB are needed on cuda:0, 16.00 GiB are free" in text
    assert "weights 10.00, KV cache 7.81 (8 rows x 999 slots), logits and probabilities 1.00, drafter 1.00" in text
    assert "Lower slots (max_model_len, kv_cache_tokens) to 511, or rows (max_num_seqs) to 4." in text
    plan(slots=511).check(16 * 2**30, "cuda:0")
    plan(rows=4).check(16 * 2**30, "cuda:0")


def test_weights_that_do_not_fit_need_another_way() -> None:
    assert plan().cache == 8000 * 2**20
    plan().check(plan().total, "cpu")
    with pytest.raises(OutOfMemoryError, match="smaller dtype, a quantised checkpoint, or device_map"):
        plan().check(8 * 2**30, "cpu")


def test_nothing_is_loaded_if_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 100_000)
    monkeypatch.setattr(prepare, "open_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(OutOfMemoryError, match=r"are needed on cpu.*2 rows x 64 slots"):
        TransformersTarget.load(tmp_path, rows=2, slots=64, device="cpu")


def test_recurrent_states_that_do_not_fit_are_told_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen3_next")
    model.save_pretrained(tmp_path)
    target = TransformersTarget.load(model, rows=2, slots=64)
    assert target.states is not None
    states = prepare.states_bytes_per_row(TransformersTarget, model.config, torch.float32)
    assert states == (1 + MOST) * target.states.nbytes() // 2
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 2**23)
    monkeypatch.setattr(prepare, "open_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(OutOfMemoryError, match=r"recurrent states 0\.08, .*Lower rows \(max_num_seqs\) to \d+\."):
        TransformersTarget.load(tmp_path, rows=500, slots=64, device="cpu")
    assert prepare.states_bytes_per_row(TransformersTarget, make("llama").config, torch.float32) == 0


def test_the_drafters_share_is_kept_free(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    with pytest.raises(OutOfMemoryError, match=r"drafter 1048576\.00"):
        TransformersTarget.load(tmp_path, slots=64, device="cpu", reserve_bytes=2**50)


def test_slots_that_nobody_asked_for_shrink_to_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", max_position_embeddings=4000)
    assert TransformersTarget.load(model, self_check=False).slots == 4000 + memory.HEADROOM
    longer = make("llama", max_position_embeddings=10**6)
    assert TransformersTarget.load(longer, self_check=False).slots == 8192 + memory.HEADROOM
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 2**20)
    target = TransformersTarget.load(model, self_check=False)
    assert 512 <= target.slots < 4000
    with pytest.raises(OutOfMemoryError, match="Lower slots"):
        TransformersTarget.load(model, slots=4000, self_check=False)


def test_a_container_is_a_limit(tmp_path: Path) -> None:
    assert _container_room(tmp_path) == 2**62
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert _container_room(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_room(tmp_path) == 2**62


def test_the_drafters_cache_is_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short slots are lowered to what fits beside it."""
    model, draft = make("llama"), make("qwen3")
    model.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    own, its = cache_bytes_per_token(model.config, 4), cache_bytes_per_token(draft.config, 4)
    config = SpeculativeConfig(method="draft_model", options={"model": str(tmp_path / "draft")})
    assert drafter_bytes(config) == (weight_bytes(tmp_path / "draft", None), its) and drafter_bytes(None) == (0, 0)
    least = plan(rows=1, slots=0, weights=weight_bytes(tmp_path / "target", None), token=0, reserve=0)
    least = replace(least, probs=memory.SCORED_NODES * model.config.vocab_size * 8)
    monkeypatch.setattr(memory, "available_bytes", lambda _device: least.total + 31 * (own + its))
    monkeypatch.setattr(memory, "LEAST_SLOTS", 8)
    assert TransformersTarget.load(tmp_path / "target", device="cpu", reserve_bytes_per_slot=its).cache.slots == 30
    assert TransformersTarget.load(tmp_path / "target", device="cpu").cache.slots > 30


@pytest.mark.parametrize("name", ["demo-draft", "demo-eagle3"])
def test_what_ships_keeps_a_cache(name: str) -> None:
    method = "draft_model" if name == "demo-draft" else "eagle3"
    assert all(drafter_bytes(SpeculativeConfig(method=method, options={"model": name})))


def test_a_draft_model_for_images_too_counts_the_cache_of_its_text_model(tmp_path: Path) -> None:
    """Its configuration leaves out what is the default of the text model's class."""
    whole = CONFIG_MAPPING["qwen3_5"](text_config={"num_hidden_layers": 4})
    whole.save_pretrained(tmp_path)
    text = whole.get_text_config(decoder=True)
    assert memory.bytes_of_drafts([str(tmp_path)]) == (0, cache_bytes_per_token(text, 2)) != (0, 0)


@pytest.mark.parametrize("text", ["[]", "{", '{"num_hidden_layers": "many"}'])
def test_a_broken_draft_model_is_left_to_its_loader(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert memory.bytes_of_drafts([str(tmp_path)]) == (0, 0)
