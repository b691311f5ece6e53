"""Hydra and the MLP speculator: what their objective computes is what they draft; their loss, their start."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, linear, silu

from forerun.heads.base import RecurrentHead
from forerun.heads.hydra import HydraConfig, HydraHead, RecurrentObjective, RecurrentSettings
from forerun.heads.runner import RecurrentRunner
from forerun.losses.objective import FrozenTarget
from forerun.model import TransformersTarget
from forerun.types import LAST_HIDDEN
from training.ttt import (
    HIDDEN,
    VOCABULARY,
    agrees_with_what_is_written_out,
    all_learn,
    batch_of,
    features,
    hydra,
    mlp_speculator,
    model,
    reads,
    taught,
    tokens,
    two_texts,
)

Make = Callable[..., RecurrentHead]
HEADS: list[tuple[Make, dict[str, Any]]] = [
    (hydra, {}),
    (hydra, {"num_hidden_layers": 0, "num_layers": 1}),
    (hydra, {"num_heads": 1, "qk_norm": True}),
    (hydra, {"sliding_window": 3}),
    (mlp_speculator, {}),
    (mlp_speculator, {"scale_input": True, "inner_dim": 40}),
    (mlp_speculator, {"tie_weights": True}),
    (mlp_speculator, {"n_predict": 1}),
]
NAMES = [f"{make.__name__}-{options}" for make, options in HEADS]


def objective(made: RecurrentHead, **settings: Any) -> RecurrentObjective:
    return RecurrentObjective(made, FrozenTarget.of(model()), RecurrentSettings(**settings))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("make", "options"), HEADS, ids=NAMES)
def test_every_depth_equals_drafting(make: Make, options: dict[str, Any], checkpointed: bool) -> None:
    """Of the second of two documents, behind every token; a twin of another token at each depth must not be read."""
    made, first, text = make(**options), tokens(6, seed=9), tokens(14)
    depths = made.config.max_depth or 0
    outputs = objective(made, gradient_checkpointing=checkpointed).outputs(
        batch_of([first, text], (LAST_HIDDEN,), padding=2)
    )
    trained = [made.logits(output, depth)[0, len(first) :].detach() for depth, output in enumerate(outputs)]
    runner = RecurrentRunner(made, TransformersTarget(model(), rows=1, slots=64), rows=2, slots=64)
    seen = features(text, (LAST_HIDDEN,))
    for index in range(len(text) - 1 - depths):
        reads(runner, 1, text, index + 1, seen)
        assert runner.lengths == [0, index + 1]

        def levels(logits: torch.Tensor, index: int = index) -> list[torch.Tensor]:
            found, parents = [logits[0, 0]], torch.tensor([[0, 0]])
            for depth in range(1, depths):
                token = text[index + 1 + depth]
                logits = runner.descend(torch.tensor([[(token + 1) % VOCABULARY, token]]), parents)
                assert not torch.allclose(logits[0, 0], logits[0, 1]), "every depth reads what was drafted above it"
                found.append(logits[0, 1])
                parents = torch.tensor([[0, 1]])
            return found

        for depth, own in enumerate(runner.unroll([1], 6, levels)):
            torch.testing.assert_close(own.detach(), trained[depth][index], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [hydra, mlp_speculator])
def test_the_loss_equals_a_written_out_reference(make: Make) -> None:
    made, batch = make(), two_texts((LAST_HIDDEN,))
    of = objective(made)
    report = of(batch)
    logits = [made.logits(output, depth)[0] for depth, output in enumerate(of.outputs(batch))]
    agrees_with_what_is_written_out(report, batch, 3, lambda entry, depth: logits[depth][entry], taught(batch))
    assert all_learn(report, made)


def test_a_hydra_depth_is_what_the_paper_writes() -> None:
    """Its blocks, written out: state and embeddings joined, then one block again and again, then its output head."""
    made, generator = hydra(), torch.Generator().manual_seed(0)
    state, *embeds = (torch.randn(1, 1, HIDDEN, generator=generator) for _ in range(4))
    weights, memory = dict(made.named_parameters()), state
    for depth in range(3):
        stepped = made.step(depth, embeds[depth], memory)
        memory, name = stepped.memory, f"heads.{depth}"
        joined = torch.cat([state, *embeds[: depth + 1]], -1)
        block = {part: (weights[f"{name}.{part}.weight"], weights[f"{name}.{part}.bias"]) for part in PARTS}
        wanted = linear(joined, *block["first.res_connection"]) + silu(linear(joined, *block["first.linear"]))
        for _ in range(2):
            wanted = wanted + silu(linear(wanted, *block["rest.linear"]))
        torch.testing.assert_close(stepped.output, wanted)
        wanted = linear(wanted, weights[f"lm_heads.{depth}.weight"], weights[f"lm_heads.{depth}.bias"])
        torch.testing.assert_close(made.logits(stepped.output, depth), wanted)


PARTS = ("first.res_connection", "first.linear", "rest.linear")


@pytest.mark.parametrize("options", [{}, {"tie_weights": True}, {"scale_input": True}], ids=str)
def test_an_mlp_speculator_is_what_vllm_computes(options: dict[str, Any]) -> None:
    """vLLM divides both sides of the sum by the state's weight and lets the norm take care of it."""
    made, generator = mlp_speculator(**options), torch.Generator().manual_seed(0)
    raw = torch.randn(1, 1, HIDDEN, generator=generator)

    def normed(states: torch.Tensor) -> torch.Tensor:
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6)

    state = normed(raw) / math.sqrt(2) if made.config.scale_input else raw
    memory = made.prefix(raw, torch.zeros(1, 1), lambda *given: raw)
    torch.testing.assert_close(memory, state)
    state_weight = 0.5 ** (0.5 / 3)
    emb_weight = math.sqrt((1 - state_weight**2) * (24 / 2))
    for depth, token in enumerate((3, 7, 1)):
        last = 0 if made.config.tie_weights else depth
        embedding, norm, project = made.emb[last], made.ln[last], made.proj[min(depth, 1) if last == 0 else depth]
        mixed = project(state) + embedding(torch.tensor([[token]])) * (emb_weight / state_weight)
        state = gelu(normed(mixed) * norm.weight + norm.bias)
        stepped = made.step(depth, made.embed(torch.tensor([[token]]), depth), memory)
        memory = stepped.memory
        torch.testing.assert_close(stepped.output, state, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(made.logits(stepped.output, depth), made.head[last](state), atol=1e-5, rtol=1e-4)


def test_a_fresh_hydra_head_predicts_at_every_depth_what_the_target_does() -> None:
    options = {"num_hidden_layers": 0, "num_layers": 3}
    made = HydraHead.initial(model(), HydraConfig.for_target("hydra", model(), options=options))
    state, embeds = torch.randn(2, 1, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    own, memory = model().get_output_embeddings()(state).detach(), state
    for depth in range(4):
        stepped = made.step(depth, embeds, memory)
        memory = stepped.memory
        torch.testing.assert_close(made.logits(stepped.output, depth).detach(), own)
