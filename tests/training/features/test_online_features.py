"""Features of packed documents are those of the documents alone; nothing of the model is changed."""

import datetime
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from forerun.errors import ArgumentError
from forerun.losses.objective import TokenBatch
from forerun.training.features.online import OnlineFeatures, batch_of, reference_states
from forerun.types import LAST_HIDDEN
from model.families import WINDOW, make
from training.features.conftest import Documents, Segment, Windows

DATA = Documents((11, 14, 9, 20))
assert max(map(len, DATA.tokens)) > WINDOW
PACKED = Windows(
    DATA,
    [
        Segment(row=0, column=0, document=0, offset=0, length=11),
        Segment(row=0, column=11, document=1, offset=0, length=14),
        Segment(row=0, column=25, document=2, offset=0, length=9),
        Segment(row=1, column=0, document=3, offset=0, length=20),
    ],
    (2, 36),
)
FAMILIES = ("llama", "mistral", "gemma2", "qwen2_mixed", "gpt2", "gpt_oss")


def packed() -> TokenBatch:
    return PACKED.batch(0, 0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_has_the_features_of_the_document_alone(family: str) -> None:
    model = make(family)
    online = OnlineFeatures(model, (0, 2, 4))
    found = online.features(packed())
    assert list(found.features) == [0, 2, 4, LAST_HIDDEN]
    for segment in PACKED.segments(0, 0, 1):
        alone = reference_states(model, DATA.tokens[segment.document].tolist())
        for boundary, states in found.features.items():
            part = states[segment.row, segment.column : segment.column + segment.length]
            torch.testing.assert_close(part, alone[boundary], atol=2e-4, rtol=2e-4)


def test_whole_documents_in_rows_of_unequal_length() -> None:
    model = make("mistral")
    tokens = [document.tolist() for document in DATA.tokens]
    for document, states in zip(tokens, OnlineFeatures(model, (1, 4)).documents(tokens), strict=True):
        alone = reference_states(model, document)
        assert all(len(values) == len(document) for values in states.values())
        for boundary, values in states.items():
            torch.testing.assert_close(values, alone[boundary], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_autocast_is_honoured(family: str) -> None:
    model = make(family)
    online = OnlineFeatures(model, (2,))
    exact = online.features(packed()).features[LAST_HIDDEN]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = online.features(packed()).features[LAST_HIDDEN].float()
    real = packed().documents >= 0
    assert not torch.equal(exact, rounded)
    assert cosine_similarity(exact[real], rounded[real], dim=-1).min() > 0.99


def test_dropout_of_a_trainer_does_not_reach_the_target_and_modes_are_kept() -> None:
    model = make("gpt2")
    online = OnlineFeatures(model, (2,))
    quiet = online.features(packed()).features[2]
    model.train()
    assert torch.equal(online.features(packed()).features[2], quiet)
    assert all(module.training for module in model.modules())


def test_features_can_feed_a_module_that_learns_while_the_target_gets_no_gradient() -> None:
    model = make("llama")
    states = OnlineFeatures(model, (2,)).features(packed()).features[2]
    head = torch.nn.Linear(64, 1)
    head(states).sum().backward()
    assert head.weight.grad is not None and not states.requires_grad
    assert all(weight.grad is None for weight in model.parameters())


def test_boundaries_out_of_range_and_documents_beyond_the_context_are_refused() -> None:
    model = make("llama", max_position_embeddings=16)
    with pytest.raises(ArgumentError, match=r"no layer boundary 5: expected 0\.\.4"):
        OnlineFeatures(model, (2, 5))
    with pytest.raises(ArgumentError, match="distinct, got 2, 2"):
        OnlineFeatures(model, (2, 2))
    with pytest.raises(ArgumentError, match="20 tokens, but the target's context ends at 16"):
        OnlineFeatures(model, (2,)).features(batch_of([list(range(20))]))


def test_a_target_sharded_with_fsdp_gives_the_same(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make("llama")
    plain = OnlineFeatures(model, (2,)).features(packed()).features
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        sharded = fully_shard(model, mesh=mesh)
        found = OnlineFeatures(sharded, (2,)).features(packed()).features
        for boundary, states in found.items():
            torch.testing.assert_close(states, plain[boundary])
    finally:
        torch.distributed.destroy_process_group()
