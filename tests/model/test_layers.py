"""Layer ranges on the same cache: parts put together are the whole, bit for bit."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.model import LayerRange, TransformersTarget
from forerun.model.layers import base_of, layers_of
from forerun.model.memory import cache_bytes_per_token
from forerun.model.partial import prove
from forerun.types import LAST_HIDDEN
from model.families import FAMILIES, SHARING, random_tokens
from model.test_resume import ROWS, TREES, prefilled
from model.tiny import build


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranges_are_the_whole_bit_for_bit(name: str) -> None:
    target = prefilled(name)
    whole = target.score(ROWS, TREES, boundaries=frozenset({1, 2, 3, 4, LAST_HIDDEN}))
    for exit_ in (1, 2, 3):
        target.truncate(ROWS, target.lengths)
        early = target.run(ROWS, TREES, LayerRange(stop=exit_))
        assert torch.equal(early, whole.hidden_states[exit_])
        last = target.run(ROWS, TREES, LayerRange(start=exit_, stop=4), states=early)
        assert torch.equal(last, whole.hidden_states[4])
        normed = target.final_norm(last)
        assert torch.allclose(normed, whole.hidden_states[LAST_HIDDEN], atol=1e-6)
        assert torch.allclose(target.lm_head(normed), whole.logits, atol=1e-5)
    target.commit(ROWS, [(1, 3), (), (3,)])
    assert target.lengths == [6, 10, 19]


@pytest.mark.parametrize(("kind", "changes"), [("opt", {}), ("electra", {"is_decoder": True}), ("gemma3", {})])
def test_layers_further_down_in_the_base_model(kind: str, changes: dict[str, bool]) -> None:
    target = TransformersTarget.load(build(kind, **changes), rows=3, slots=64)
    assert "." in layers_of(base_of(target.model), 4)[0]
    target.prefill(ROWS, [random_tokens(count, count) for count in (3, 9, 17)])
    prove(target, 2)
    whole = target.score(ROWS, TREES, boundaries=frozenset({2, 4, LAST_HIDDEN}))
    early = target.run(ROWS, TREES, LayerRange(stop=2))
    assert torch.equal(early, whole.hidden_states[2])
    assert torch.equal(target.run(ROWS, TREES, LayerRange(start=2, stop=4), states=early), whole.hidden_states[4])
    assert torch.equal(target.final_norm(whole.hidden_states[4]), whole.hidden_states[LAST_HIDDEN])


@pytest.mark.parametrize("name", FAMILIES)
def test_skipping_both_halves_of_a_layer_leaves_the_stream_as_it_was(name: str) -> None:
    target = prefilled(name)
    skipped = target.run(ROWS, TREES, LayerRange(stop=4, skip=frozenset({(2, "attn"), (2, "mlp")})))
    before = target.run(ROWS, TREES, LayerRange(stop=2))
    after = target.run(ROWS, TREES, LayerRange(start=3, stop=4), states=before)
    assert torch.equal(skipped, after)
    half = target.run(ROWS, TREES, LayerRange(stop=4, skip=frozenset({(2, "mlp")})))
    assert not torch.equal(half, skipped)
    whole = target.score(ROWS, TREES, boundaries=frozenset({4}))
    assert not torch.equal(whole.hidden_states[4], half), "the layers must be put back"


def test_layers_with_embeddings_of_their_own_are_not_run_in_part() -> None:
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**SHARING)).eval()
    target = TransformersTarget.load(model, rows=3, slots=64)
    target.prefill([0], [[4, 5]])
    assert target.cache.nbytes() == cache_bytes_per_token(target.config, 4) * 3 * 65
    for refused in (lambda: target.run(ROWS, TREES, LayerRange(stop=2)), lambda: prove(target, 2)):
        with pytest.raises(UnsupportedModelError, match="cannot be run in part"):
            refused()


@pytest.mark.parametrize(
    "plan",
    [
        LayerRange(start=2, stop=2),
        LayerRange(stop=5),
        LayerRange(start=-1, stop=2),
        LayerRange(stop=2, skip=frozenset({(2, "attn")})),
        LayerRange(stop=2, skip=frozenset({(1, "norm")})),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: LayerRange) -> None:
    with pytest.raises(ArgumentError):
        prefilled("llama").run(ROWS, TREES, plan)


def test_states_belong_to_a_later_start() -> None:
    target = prefilled("llama")
    with pytest.raises(ArgumentError, match="states are needed"):
        target.run(ROWS, TREES, LayerRange(start=1, stop=2))
    with pytest.raises(ArgumentError, match=r"expected \(3, 8, 64\)"):
        target.run(ROWS, TREES, LayerRange(start=1, stop=2), states=torch.zeros(3, 1, 64))
