"""MTP layers draft what transformers' own layers say, module by module and recursively; FastMTP's loss, written out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.mtp import Experts, ExpertsConfig, MtpHead, MtpObjective, MtpSettings
from forerun.heads.mtp_files import read_target
from forerun.heads.runner import SequentialRunner
from forerun.losses.objective import FrozenTarget
from forerun.model import TransformersTarget
from llamas import tiny_llama
from mtp_targets import FAMILIES, LAYERS, OF_CLASSES, SINGLE, VOCABULARY, Checkpoint, automatic_class
from selection import in_turn
from training.ttt import HYBRID, INDEXED, agrees_with_what_is_written_out, all_learn, model, mtp, one_hot, two_texts

OWN = [family for family in FAMILIES if family not in OF_CLASSES]
"""Targets whose MTP layers are this repository's."""
TEXT = torch.randint(VOCABULARY, (14,), generator=torch.Generator().manual_seed(3)).tolist()


def runner_of(checkpoint: Checkpoint) -> SequentialRunner:
    head = read_target(checkpoint.folder).build(torch.float32).eval()
    target = TransformersTarget(
        LLM(str(checkpoint.folder), tokenizer=False, self_check=False).engine.target.model, rows=1, slots=64
    )
    return SequentialRunner(head, target, rows=2, slots=64, max_run_nodes=12)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_committed_tokens_read_as_transformers_layer_does(family: str, tmp_path: Path) -> None:
    """So does the state of the target that is handed over."""
    checkpoint = Checkpoint(family, tmp_path)
    runner, states = runner_of(checkpoint), checkpoint.states(TEXT[:-1])
    (boundary,) = runner.head.config.boundaries
    seen = runner.target.prefill([0], [TEXT[:-1]], boundaries={boundary}).hidden_states[boundary]
    torch.testing.assert_close(seen, states, atol=2e-5, rtol=1e-4)
    _, expected = checkpoint.module(0, TEXT[1:], states)
    for start, stop in ((0, 5), (5, 6), (6, 13)):
        runner.ingest([1], [TEXT[start + 1 : stop + 1]], {boundary: states[:, start:stop]})
        found = runner.unroll([1], 1, lambda logits: logits.clone(), levels=1)
        torch.testing.assert_close(found[0, 0], expected[0, stop - 1], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def expected_path(checkpoint: Checkpoint, states: torch.Tensor, path: list[int]) -> list[torch.Tensor]:
    """(V,) for each depth: DeepSeek's equations, each module over a whole text of its own; beyond the last one, its own
    states behind those that it read."""
    last, found = checkpoint.modules - 1, []
    for depth in range(len(path) + 1):
        tokens, given = [*TEXT, *path[:depth]], states
        for module in range(min(depth, last) + 1):
            made, logits = checkpoint.module(module, tokens[1 + module :][: given.shape[1]], given)
            if module < min(depth, last):
                given = made
        for _ in range(depth - last):
            given = torch.cat([given, made[:, -1:]], 1)
            made, logits = checkpoint.module(last, tokens[1 + last :][: given.shape[1]], given)
        found.append(logits[0, -1])
    return found


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "modules"),
    [
        *((family, modules) for family in OWN for modules in (1, 2, 3)),
        *((family, 1 if family in SINGLE else 3) for family in OF_CLASSES),
    ],
)
def test_every_depth_of_every_branch_reads_as_the_equations_say(family: str, modules: int, tmp_path: Path) -> None:
    """Two branches, deeper than there are modules, behind a text that came in three parts."""
    checkpoint = Checkpoint(family, tmp_path, modules)
    runner, states = runner_of(checkpoint), checkpoint.states(TEXT[:-1])
    (boundary,) = runner.head.config.boundaries
    other = [*TEXT[:5], 1, 2, 3]
    runner.ingest([1], [other[1:]], {boundary: checkpoint.states(other[:-1])})
    runner.truncate(1, 3)  # of what follows nothing may be left
    for start, stop in ((3, 4), (4, 9), (9, len(TEXT) - 1)):
        runner.ingest([1], [TEXT[start + 1 : stop + 1]], {boundary: states[:, start:stop]})
    branches = [[11, 12, 13, 14], [21, 22, 23, 24]]

    def levels(logits: torch.Tensor) -> list[torch.Tensor]:
        found = [logits[0].expand(2, -1)]
        for pair in zip(*branches, strict=True):
            found.append(runner.descend(torch.tensor([pair]), torch.tensor([[0, min(1, len(found) - 1)]]))[0])
        return found

    drafted = runner.unroll([1], 12, levels)
    for branch, path in enumerate(branches):
        for own, wanted in zip(drafted, expected_path(checkpoint, states, path), strict=True):
            torch.testing.assert_close(own[branch], wanted, atol=3e-5, rtol=1e-4)


GREEDY = SamplingParams(temperature=0, max_tokens=16, detokenize=False)


def engine(folder: Path, **options: object) -> LLM:
    config = {"method": "mtp", "adaptive": False, **options} if options.pop("draft", True) else None
    return LLM(str(folder), tokenizer=False, speculative_config=config, self_check=False, max_num_seqs=2)


@pytest.mark.parametrize("family", OWN)
def test_a_target_drafts_with_what_its_checkpoint_brings(family: str, tmp_path: Path) -> None:
    """No model is named; more tokens are drafted than there are modules; two prompts of different length."""
    Checkpoint(family, tmp_path)
    prompts = [{"prompt_token_ids": ids} for ids in (TEXT, TEXT[:3])]
    plain = engine(tmp_path, draft=False).generate(prompts, GREEDY)
    drafted = engine(tmp_path, num_speculative_tokens=4).generate(prompts, GREEDY)
    for own, wanted in zip(drafted, plain, strict=True):
        assert own.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert len(own.outputs[0].speculation.drafted_per_depth) == 4


CHAIN, TREE = {"num_speculative_tokens": 4}, {"top_k": 3, "nodes": 8}


@pytest.mark.parametrize(("family", "options"), in_turn(OF_CLASSES, [CHAIN, TREE]), ids=str)
def test_answers_are_those_of_transformers(family: str, options: dict[str, object], tmp_path: Path) -> None:
    Checkpoint(family, tmp_path)
    model = automatic_class(family).from_pretrained(tmp_path, dtype=torch.float32).eval()
    texts = [TEXT, TEXT[:3], TEXT[5:]]
    outputs = engine(tmp_path, **options).generate([{"prompt_token_ids": ids} for ids in texts], GREEDY)
    for text, output in zip(texts, outputs, strict=True):
        ids = torch.tensor([text])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert output.outputs[0].token_ids == made[0, len(text) :].tolist()
        assert output.outputs[0].speculation.drafted_per_depth


def test_a_target_without_mtp_layers_says_so(tmp_path: Path) -> None:
    tiny_llama(VOCABULARY).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"brings no MTP layers.*num_nextn_predict_layers"):
        engine(tmp_path, num_speculative_tokens=2)
    with pytest.raises(ArgumentError, match="name the checkpoint of its MTP layers with model="):
        LLM(tiny_llama(VOCABULARY), tokenizer=False, speculative_config={"method": "mtp"}, self_check=False)


def test_a_layer_that_the_configuration_does_not_announce_is_no_mtp_layer(tmp_path: Path) -> None:
    """transformers knows nothing of either; only what is announced may be there."""
    Checkpoint("glm", tmp_path, modules=2)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"unexpected: model\.layers\.{LAYERS + 1}\."):
        engine(tmp_path, draft=False)


EXPERTS = ExpertsConfig(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_group=3, topk_group=2)


def objective(made: MtpHead, **settings: Any) -> MtpObjective:
    return MtpObjective(made, FrozenTarget.of(model()), MtpSettings(**settings))


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 1.0),
        ({}, 0.6),
        ({"experts": EXPERTS}, 1.0),
        ({"target_keys": HYBRID}, 1.0),
        ({"target_keys": INDEXED, "target_layers": ("indexed_attention",), "target_mlps": ("sparse",)}, 1.0),
    ],
    ids=["dense", "at 0.6", "experts", "hybrid", "indexed"],
)
def test_the_loss_equals_a_written_out_reference(options: dict[str, Any], temperature: float) -> None:
    made = mtp(**options)
    batch = two_texts(made.config.boundaries)
    of = MtpObjective(made, replace(FrozenTarget.of(model()), temperature=temperature))
    report, steps = of(batch), list(of.unroll(batch))

    def own(entry: int, depth: int) -> torch.Tensor:
        return model().get_output_embeddings()(steps[depth].output[0, entry]) / temperature

    agrees_with_what_is_written_out(report, batch, 3, own, one_hot(batch), share=lambda depth: 0.6**depth / 1.96)
    assert all_learn(report, made) and all(parameter.grad is None for parameter in model().parameters())


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_dsa", "ling", "mellum", "nemotron", "glm_ocr", "ernie"])
def test_the_module_that_a_target_brings_learns(family: str, tmp_path: Path) -> None:
    """All of it but an index, which has no gradient, and a norm that is the target's."""
    made = read_target(Checkpoint(family, tmp_path).folder).build(torch.float32)
    frozen = {name for name, weight in made.named_parameters() if not weight.requires_grad}
    kept = {"deepseek_v32": ".indexer.", "glm_dsa": ".indexer.", "ernie": "shared_head.norm."}.get(family)
    assert bool(frozen) == (kept is not None) and all(str(kept) in name for name in frozen)
    assert all_learn(objective(made)(two_texts(made.config.boundaries)), made)


def test_experts_give_the_same_in_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on the host, and gathered where the host must not wait, at once and a few tokens at a time."""
    experts: Experts = mtp(experts=EXPERTS).layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    states, weights = torch.randn(9, 32, generator=generator), torch.rand(9, 2, generator=generator)
    chosen = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(9)])  # the last one is never chosen
    written = []
    for state, ids, shares in zip(states, chosen, weights, strict=True):
        parts = []
        for expert, share in zip(ids, shares, strict=True):
            gate, up = (experts.gate_up_proj[expert] @ state).chunk(2)
            parts.append(share * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)))
        written.append(sum(parts))
    expected = torch.stack(written).detach()
    torch.testing.assert_close(experts(states, chosen, weights).detach(), expected)
    with torch.no_grad():
        torch.testing.assert_close(experts._gathered(states, chosen, weights), expected)
        monkeypatch.setattr("forerun.heads.mtp.GATHERED", 5000)
        there = type("There", (), {"type": "xpu"})
        monkeypatch.setattr(torch.Tensor, "device", property(lambda _: there))
        pieces = experts(states, chosen, weights)
        monkeypatch.undo()
        torch.testing.assert_close(pieces, expected)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ArgumentError, match="this target brings 2, one for each"):
        objective(mtp(num_hidden_layers=2))
    with pytest.raises(ArgumentError, match="attention sinks or output heads of their own"):
        objective(mtp(output_heads=True))
