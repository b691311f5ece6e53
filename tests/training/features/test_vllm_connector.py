"""The connector for vLLM on the CPU, between stand-ins of vLLM's scheduler and cache; `make test-vllm` has both."""

from __future__ import annotations

import importlib
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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
