"""The probe names the boundary that is off; the final norm alone; features from vLLM, and its connector on the CPU."""

import fcntl
import importlib
import os
import pickle
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import ArgumentError, CheckpointError, DataError
from forerun.training.features import vllm_source
from forerun.training.features.online import BoundaryCheck, OnlineFeatures, compare, reference_states, require
from forerun.training.features.vllm_source import FinalNorm, VllmFeatures
from forerun.types import LAST_HIDDEN
from model.families import make, random_tokens

TOKENS = [random_tokens(21, seed=1), random_tokens(12, seed=2)]


def compared(model: Any, captured: Sequence[Mapping[int, Tensor]]) -> list[BoundaryCheck]:
    """With the states that the model reports itself."""
    return compare(captured, [reference_states(model, tokens) for tokens in TOKENS])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "granite"])
def test_the_probe_passes_for_every_boundary(family: str) -> None:
    model = make(family)
    checks = compared(model, OnlineFeatures(model, (0, 1, 2, 3, 4)).documents(TOKENS))
    require(checks)
    assert [check.boundary for check in checks] == [0, 1, 2, 3, 4, LAST_HIDDEN]
    assert all(check.passed for check in checks) and min(check.lowest for check in checks) > 0.9999


def wrong(model: Any, change: Any) -> list[Mapping[int, Tensor]]:
    return [change(reference_states(model, tokens)) for tokens in TOKENS]


def test_the_probe_catches_layer_ids_that_are_off_by_one() -> None:
    model = make("llama")
    off = wrong(model, lambda own: {1: own[1], 2: own[3], LAST_HIDDEN: own[LAST_HIDDEN]})
    checks = compared(model, off)
    assert [check.passed for check in checks] == [True, False, True]
    with pytest.raises(DataError, match=r"boundary 2: cosine 0\.\d+.*nearest is boundary 3: layer ids are off by one"):
        require(checks)


def test_the_probe_catches_a_last_state_without_its_norm_even_where_the_norm_only_scales() -> None:
    model = make("llama")
    for weights in (model.model.norm.weight.data, torch.ones(64)):
        model.model.norm.weight.data = weights
        raw = wrong(model, lambda own: {2: own[2], LAST_HIDDEN: own[4]})
        with pytest.raises(DataError, match=r"boundary LAST_HIDDEN: .*nearest is boundary 4"):
            require(compared(model, raw))


def test_the_probe_refuses_nan_and_other_shapes() -> None:
    model = make("llama")
    nan = wrong(model, lambda own: {2: own[2] * float("nan")})
    with pytest.raises(DataError, match="boundary 2: cosine nan"):
        require(compared(model, nan))
    with pytest.raises(DataError, match=r"boundary 2: features \(31, 64\), the target has \(33, 64\)"):
        compared(model, wrong(model, lambda own: {2: own[2][1:]}))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_final_norm_alone_does_what_it_does_in_the_model(tmp_path: Path, family: str) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    own = reference_states(model, TOKENS[0])
    torch.testing.assert_close(FinalNorm(tmp_path, model.config)(own[4]), own[LAST_HIDDEN])
    weights = {"unrelated": torch.zeros(2)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks the final norm's .*weight"):
        FinalNorm(tmp_path, model.config)


class FakeVllm:
    """Behaves as vLLM's documentation says: raw states (tokens, ids, H) in a file for each prompt.

    Its own connector's files are locked.
    """

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool = True) -> None:
        self.model = model
        self.arguments: dict[str, Any] = {}
        self.shift = 0
        self.locks: list[int] = []
        """File descriptors, held by the writer."""
        # Set here, so that the source's own default is undone when the test ends.
        monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        for name, members in {
            "vllm": {"LLM": self.start, "SamplingParams": lambda **options: options},
            "vllm.config": {},
            "vllm.config.kv_transfer": {"KVTransferConfig": lambda **options: options},
            "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: on_cpu)},
        }.items():
            module = types.ModuleType(name)
            module.__dict__.update(members)
            monkeypatch.setitem(sys.modules, name, module)

    def start(self, **arguments: Any) -> "FakeVllm":
        self.arguments = arguments
        return self

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> list[Any]:
        assert sampling["max_tokens"] == 1 and not use_tqdm
        ids = self.arguments["speculative_config"]["draft_model_config"]["hf_config"]
        folder = Path(self.arguments["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"])
        outputs = []
        for number, prompt in enumerate(prompts):
            tokens = prompt["prompt_token_ids"]
            own = reference_states(self.model, tokens)
            states = torch.stack([own[i] for i in ids["eagle_aux_hidden_state_layer_ids"]], dim=1)
            path = folder / f"{number}.safetensors"
            save_file({"hidden_states": states, "token_ids": torch.tensor(tokens) + self.shift}, path)
            if "kv_connector_module_path" not in self.arguments["kv_transfer_config"]:
                self.locks.append(os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY))
                fcntl.flock(self.locks[-1], fcntl.LOCK_EX)
            outputs.append(types.SimpleNamespace(kv_transfer_params={"hidden_states_path": str(path)}))
        return outputs


def vllm_features(model: Any, directory: Path) -> VllmFeatures:
    model.save_pretrained(directory)
    norm = FinalNorm(directory, model.config)
    return VllmFeatures("target", (1, 2), norm, num_layers=4, max_tokens=21, batch_tokens=16)


Started = tuple[Any, FakeVllm, VllmFeatures]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Started]:
    """A model, vLLM on the CPU or, where a parameter says so, elsewhere, and its features."""
    model = make("llama")
    fake = FakeVllm(model, monkeypatch, on_cpu=getattr(request, "param", True))
    source = vllm_features(model, tmp_path)
    yield model, fake, source
    if hasattr(source, "_engine"):
        source.close()


def test_vllm_is_asked_for_boundaries_without_prefix_cache_or_chunks_and_its_states_pass(
    started: Started,
) -> None:
    model, fake, source = started
    speculation, transfer = (fake.arguments[name] for name in ("speculative_config", "kv_transfer_config"))
    assert speculation["method"] == "extract_hidden_states" and speculation["num_speculative_tokens"] == 1
    connector = transfer["kv_connector_module_path"], transfer["kv_connector"]
    assert connector == ("forerun.training.features.vllm_connector", "PromptStatesConnector")
    assert fake.arguments["enforce_eager"] and fake.arguments["kv_cache_memory_bytes"] == 2 << 30
    assert speculation["draft_model_config"] == {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    assert fake.arguments["enable_prefix_caching"] is fake.arguments["enable_chunked_prefill"] is False
    assert fake.arguments["max_num_batched_tokens"] == fake.arguments["max_model_len"] == 23
    require(compared(model, source.documents(TOKENS)))
    folder = Path(transfer["kv_connector_extra_config"]["shared_storage_path"])
    assert not list(folder.iterdir())
    source.close()
    assert not folder.exists()


def test_other_tokens_or_no_states_of_vllm_are_refused(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fake, source = started
    fake.shift = 1
    with pytest.raises(DataError, match="states of other tokens"):
        source.documents(TOKENS)
    missing = types.SimpleNamespace(kv_transfer_params={"hidden_states_path": str(tmp_path / "0.safetensors")})
    for told, says in (
        (types.SimpleNamespace(), "does not support extract_hidden_states"),
        (missing, r"wrote no states to .*0\.safetensors"),
    ):
        monkeypatch.setattr(fake, "generate", lambda prompts, *_, told=told, **__: [told for _ in prompts])
        with pytest.raises(DataError, match=says):
            source.documents(TOKENS)


@pytest.mark.parametrize("started", [False], indirect=True)
def test_an_accelerator_awaits_the_writer_but_not_for_ever(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fake, source = started
    assert fake.arguments["kv_transfer_config"]["kv_connector"] == "ExampleHiddenStatesConnector"
    assert not {"enforce_eager", "kv_cache_memory_bytes"} & set(fake.arguments)
    # The writer lets go of a file when the reader has found it locked once.
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: (waited.append(seconds), os.close(fake.locks[len(waited) - 1])))
    require(compared(model, source.documents(TOKENS)))
    assert len(waited) == len(TOKENS)
    monkeypatch.setattr(vllm_source, "WRITE_TIMEOUT_S", -1.0)
    with pytest.raises(DataError, match="unset VLLM_ENABLE_V1_MULTIPROCESSING"):
        source.documents(TOKENS)
    for lock in fake.locks[len(waited) :]:
        os.close(lock)


def test_an_engine_that_fails_is_told_of_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    fake = FakeVllm(model, monkeypatch)
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def dead(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("EngineCore encountered an issue.")

    source = vllm_features(model, tmp_path)
    monkeypatch.setattr(fake, "generate", dead)
    with pytest.raises(DataError, match=r"vLLM stopped: EngineCore encountered an issue\. Its log above says why"):
        source.documents(TOKENS)
    source.close()
    monkeypatch.setattr(sys.modules["vllm"], "LLM", dead)
    with pytest.raises(DataError, match="vLLM did not start: EngineCore"):
        vllm_features(model, tmp_path)
    assert not list(scratch.iterdir())


def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ArgumentError, match="pip install vllm, or use --source transformers"):
        VllmFeatures("target", (1,), lambda states: states, num_layers=4, max_tokens=8)


BLOCK, IDS, HIDDEN = 4, 3, 8
LAYER = "model.cache_only_layers.4"
PROMPTS = {"a": ([5, 6, 7, 8, 9, 10], [7, 2]), "b": ([11, 12], [4]), "cut": ([13, 14, 15], [5])}
"""Request -> tokens and the blocks where its states lie."""


class Base:
    """What the connector uses of KVConnectorBase_V1."""

    def __init__(self, *, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.metadata: Any = None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """() -> a connector, as either of vLLM's sides makes one; `connect.rank` is the worker's."""

    def made() -> Any:
        config = types.SimpleNamespace(kv_transfer_config=extra)
        return connector(config, "worker", types.SimpleNamespace(kv_cache_groups=groups))

    made.rank = 0
    parallel = types.ModuleType("vllm.distributed.parallel_state")
    parallel.__dict__["get_tensor_model_parallel_rank"] = lambda: made.rank
    base = types.ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.base")
    base.__dict__.update(KVConnectorBase_V1=Base, KVConnectorMetadata=object, KVConnectorRole=str, SupportsHMA=object)
    packages = ["vllm", "vllm.distributed", "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector"]
    for name in [*packages, "vllm.distributed.kv_transfer.kv_connector.v1"]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (parallel, base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "forerun.training.features.vllm_connector"
    # Set and removed, so that what is imported here is forgotten when the test ends: it is made from the stand-ins.
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    del sys.modules[name]
    connector = importlib.import_module(name).PromptStatesConnector
    extra = types.SimpleNamespace(kv_connector_extra_config={"shared_storage_path": str(tmp_path)})
    groups = [group(["model.layers.0.attn"], 16), group([LAYER], BLOCK)]
    return made


def group(layers: list[str], block_size: int) -> Any:
    return types.SimpleNamespace(layer_names=layers, kv_cache_spec=types.SimpleNamespace(block_size=block_size))


def step() -> Any:
    """A step that computes `a` and `b` as a whole, and one token of `cut`; the other group has other blocks."""
    new = [
        types.SimpleNamespace(req_id=name, prompt_token_ids=tokens, block_ids=([0, 1], blocks))
        for name, (tokens, blocks) in PROMPTS.items()
    ]
    return types.SimpleNamespace(scheduled_new_reqs=new, num_scheduled_tokens={"a": 6, "b": 2, "cut": 1})


def cache() -> torch.Tensor:
    return torch.arange(9 * IDS * BLOCK * HIDDEN, dtype=torch.float32).reshape(9, IDS, BLOCK, HIDDEN)


def write(worker: Any, metadata: Any) -> None:
    worker.register_kv_caches({"model.layers.0.attn": torch.zeros(9, 2, 16, 4), LAYER: cache()})
    # From the scheduler's process to the worker's.
    worker.metadata = pickle.loads(pickle.dumps(metadata))
    worker.wait_for_save()


def test_each_whole_prompt_has_its_file_when_its_step_ends(connect: Any, tmp_path: Path) -> None:
    scheduler, worker = connect(), connect()
    write(worker, scheduler.build_connector_meta(step()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
    for name in ("a", "b"):
        tokens, blocks = PROMPTS[name]
        delayed, told = scheduler.request_finished_all_groups(types.SimpleNamespace(request_id=name), ([], blocks))
        found = load_file(told["hidden_states_path"])
        assert not delayed and found["token_ids"].tolist() == tokens
        wanted = [cache()[blocks[i // BLOCK], :, i % BLOCK] for i in range(len(tokens))]
        torch.testing.assert_close(found["hidden_states"], torch.stack(wanted), rtol=0, atol=0)


def test_only_the_first_rank_writes(connect: Any, tmp_path: Path) -> None:
    connect.rank = 1
    write(connect(), connect().build_connector_meta(step()))
    assert not list(tmp_path.iterdir())


def test_a_cache_in_other_blocks_than_the_scheduler_counts_is_refused(connect: Any) -> None:
    with pytest.raises(ValueError, match=r"expected blocks of 4 states, the cache is \(9, 3, 16, 8\)"):
        connect().register_kv_caches({LAYER: torch.zeros(9, IDS, 16, HIDDEN)})
