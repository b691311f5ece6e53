"""The kernels between a layer's products compute what transformers' modules compute, and a token's bits are its own."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from forerun.errors import ArgumentError
from forerun.model.kernels import native
from forerun.model.kernels.native import Heads

pytestmark = pytest.mark.usefixtures("in_c")


@pytest.fixture(autouse=True)
def inference() -> object:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def normed(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = states.double()
    return weight.double() * wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()


@pytest.mark.parametrize("size", [16, 48, 1536])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_norm(size: int, scale: float) -> None:
    states, weight = (scale * torch.randn(3, 5, size)).bfloat16(), torch.randn(size).bfloat16()
    found = native.rms_norm(states, weight, 1e-5)
    assert found.shape == states.shape and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), normed(states, weight, 1e-5), rtol=2**-7, atol=1e-6)


def test_float32_is_rounded_nowhere() -> None:
    """The same functions, compiled for another dtype."""
    if not native.ready(torch.device("cpu"), torch.float32):
        pytest.skip("no AVX-512")
    states, weight, both = torch.randn(3, 5, 48), torch.randn(48), 4 * torch.randn(3, 5, 2 * 96)
    both[0, 0, :8] = torch.tensor([0.0, -0.0, 1e4, -1e4, 90.0, -90.0, -104.0, 3e-5])
    found = native.rms_norm(states, weight, 1e-5)
    torch.testing.assert_close(found.double(), normed(states, weight, 1e-5), rtol=1e-6, atol=1e-7)
    gate, up = both.split(96, dim=-1)
    torch.testing.assert_close(native.silu_and_mul(both), functional.silu(gate) * up, rtol=1e-5, atol=1e-30)
    logits = torch.randn(2, 3, 49)
    logits[1, 2, 7] = torch.nan
    logits[1, 0, 40:] = 9.0
    expected = logits.argmax(-1).tolist()
    expected[1][2] = -1
    assert native.largest(logits) == expected and expected[1][0] == 40


@pytest.mark.parametrize("width", [3, 64, 1003, 4096])
def test_top_ids(width: int) -> None:
    """They are those of a stable sort, with equals and infinities among the logits; NaN is said first."""
    logits = (2 * torch.randn(2, 4, width)).bfloat16()
    logits[0, 0] = 1.0
    logits[0, 1, 1:] = -torch.inf
    logits[1, 1, -1] = torch.inf
    logits[1, 2] = -2 - logits[1, 2].abs()
    logits[1, 3] = logits[1, 3].sort().values
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    for k in {1, min(8, width), min(native.MOST_TOP, width)}:
        found = native.top_ids(logits, k)
        assert found is not None
        assert torch.equal(found, order[..., :k])
    assert native.top_ids(logits, width + 1) is None
    for place in {0, width // 2, width - 1}:
        logits[0, 2] = 0.0
        logits[0, 2, place] = torch.nan
        found = native.top_ids(logits, 2)
        assert found is not None
        assert found[0, 2, 0] == -1 and (found[0, 3] == order[0, 3, :2]).all()


def test_gated() -> None:
    both = 4 * torch.randn(3, 5, 2 * 96)
    both[0, 0, :8] = torch.tensor([0.0, -0.0, 1e4, -1e4, 90.0, -90.0, -104.0, 3e-5])
    both = both.bfloat16()
    gate, up = both.split(96, dim=-1)
    torch.testing.assert_close(native.silu_and_mul(both), functional.silu(gate) * up, rtol=2**-7, atol=1e-30)
    assert native.silu_and_mul(torch.full((1, 32), torch.nan).bfloat16()).isnan().all()


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("queries", "keys", "depth"), [(4, 2, 32), (3, 1, 64), (2, 2, 128)])
def test_place(queries: int, keys: int, depth: int, norms: bool) -> None:
    batch, count, rows, slots = 2, 7, 3, 11
    states = torch.randn(batch, count, (queries + 2 * keys) * depth).bfloat16()
    turns = (50 * torch.rand(batch, count, depth // 2)).repeat(1, 1, 2)
    angles = turns.cos().bfloat16(), turns.sin().bfloat16()
    query_norm, key_norm = (
        SimpleNamespace(weight=torch.rand(depth).bfloat16(), epsilon=eps) if norms else None for eps in (1e-6, 1e-2)
    )
    stores = torch.full((2, rows, slots, keys, depth), 7.0).bfloat16()
    places = torch.randperm(rows * slots)[: batch * count]
    heads = Heads(queries=queries, keys=keys, depth=depth, query_norm=query_norm, key_norm=key_norm)

    found = native.rope_and_write(states, angles, heads, (stores[0], stores[1]), places)

    parts = states.view(batch, count, -1, depth).split([queries, keys, keys], dim=2)
    query, key = (
        part if norm is None else normed(part, norm.weight, norm.epsilon).bfloat16()
        for part, norm in zip(parts, (query_norm, key_norm), strict=False)
    )
    query, key = (
        part.transpose(1, 2) for part in apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *angles)
    )
    exact = {"rtol": 0, "atol": 0} if not norms else {"rtol": 2**-6, "atol": 1e-2}
    torch.testing.assert_close(found, query, **exact)
    flat = stores.view(2, rows * slots, keys, depth)
    torch.testing.assert_close(flat[0, places], key.flatten(0, 1), **exact)
    assert torch.equal(flat[1, places], parts[2].flatten(0, 1))
    untouched = torch.ones(rows * slots, dtype=torch.bool).index_fill_(0, places, False)
    assert bool((flat[:, untouched] == 7).all())


def test_a_tokens_bits_are_its_own() -> None:
    """Whoever stands beside it, and however many threads share the work."""
    states, weight = torch.randn(64, 1024).bfloat16(), torch.randn(1024).bfloat16()
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        whole, gated = native.rms_norm(states, weight, 1e-5), native.silu_and_mul(states)
        for row in (0, 5, 63):
            assert torch.equal(native.rms_norm(states[row : row + 1], weight, 1e-5), whole[row : row + 1])
            assert torch.equal(native.silu_and_mul(states[row : row + 1]), gated[row : row + 1])
    torch.set_num_threads(before)


def test_what_it_does_not_take() -> None:
    states = torch.randn(2, 32).bfloat16()
    assert native.takes_states(states)
    assert not native.takes_states(states.half()) and not native.takes_states(states.double())
    assert not native.takes_states(states[:, :16])
    with torch.inference_mode(False), torch.enable_grad():
        assert not native.takes_states(states)


@pytest.mark.parametrize("wrong", [-1, 22, 2**40, -(2**62)])
@pytest.mark.parametrize("which", [0, 6])
def test_slots_that_are_not_there_are_refused_and_nothing_is_written(wrong: int, which: int) -> None:
    """Two rows of eleven slots, with memory of others on both sides."""
    heads, states = Heads(queries=2, keys=1, depth=32), torch.randn(7, 4 * 32).bfloat16()
    angles = torch.ones(7, 32).bfloat16(), torch.zeros(7, 32).bfloat16()
    around = torch.full((2, 66, 32), 7.0).bfloat16()
    stores = around[0, 22:44].view(2, 11, 1, 32), around[1, 22:44].view(2, 11, 1, 32)
    places = torch.arange(7)
    native.rope_and_write(states, angles, heads, stores, places)
    assert not (around[:, 22:29] == 7).any(-1).all()
    around.fill_(7)
    places[which] = wrong
    with pytest.raises(ArgumentError, match="cannot be written"):
        native.rope_and_write(states, angles, heads, stores, places)
    assert bool((around == 7).all())


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    heads, states = Heads(queries=2, keys=1, depth=32), torch.randn(7, 4 * 32).bfloat16()
    angles, stores = torch.ones(2, 7, 32).bfloat16(), torch.zeros(2, 2, 11, 1, 32).bfloat16()
    fitting = {
        **{"states": states, "angles": tuple(angles), "heads": heads, "stores": tuple(stores)},
        "places": torch.arange(7),
    }
    native.rope_and_write(**fitting)
    norm = SimpleNamespace(weight=torch.ones(16).bfloat16(), epsilon=1e-5)
    wrong = [
        {"places": torch.arange(6)},
        {"places": torch.arange(7, dtype=torch.int32)},
        {"places": torch.arange(14)[::2]},
        {"states": states[:, :96].contiguous()},
        {"angles": (angles[0], angles[1, :, :16])},
        {"stores": (stores[0], stores[1, :1])},
        {"stores": tuple(stores.float())},
        {"heads": Heads(queries=2, keys=1, depth=32, key_norm=norm)},
        {"heads": Heads(queries=4, keys=2, depth=16), "angles": tuple(angles[..., :16].contiguous())},
    ]
    for changed in wrong:
        with pytest.raises(ArgumentError, match="cannot be written"):
            native.rope_and_write(**(fitting | changed))
    with pytest.raises(ArgumentError, match="weights"):
        native.rms_norm(states, torch.ones(64).bfloat16(), 1e-5)
    with pytest.raises(ArgumentError, match="16s"):
        native.silu_and_mul(torch.zeros(3, 40).bfloat16())
