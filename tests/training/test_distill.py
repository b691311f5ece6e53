"""Distillation of draft models: the loss and AdaSPEC's filter written out, on-policy text, resuming, and drafting."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from forerun.errors import ArgumentError, UnsupportedModelError, VocabularyMismatchError
from forerun.losses.chunked_loss import Divergence
from forerun.losses.objective import FeatureBatch, FrozenTarget, ObjectiveSettings, TokenBatch
from forerun.training.data.on_policy import AnswerWriter
from forerun.training.distill import DistillObjective, DistillSettings, DraftStates, most_to_gain
from forerun.training.features.online import OnlineFeatures
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import make_recipe
from forerun.training.run import make_writer
from forerun.training.trained import TrainedModel
from llamas import tiny_llama
from selection import slow
from training.conftest import Trainer, drafts, evaluated, goes_on, in_two_processes, same_weights
from training.divergences import divergence_of
from training.ttt import VOCABULARY, model


def draft(seed: int = 1, **changes: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_llama(VOCABULARY, seed, **{"initializer_range": 0.3, **sizes, "num_hidden_layers": 1, **changes})


def windows() -> TokenBatch:
    """Two rows: two documents and padding, one document; the first tokens of each are the user's."""
    documents = torch.tensor([[0] * 9 + [1] * 6 + [-1] * 3, [0] * 18])
    positions = torch.tensor([[*range(9), *range(6), 0, 0, 0], [*range(18)]])
    tokens = torch.randint(0, VOCABULARY, (2, 18), generator=torch.Generator().manual_seed(3))
    return TokenBatch(
        tokens=tokens, loss_mask=(documents >= 0) & (positions > 2), documents=documents, positions=positions
    )


def batch() -> FeatureBatch:
    return OnlineFeatures(model(), ()).features(windows())


@torch.no_grad()
def alone(lm: Any, tokens: TokenBatch) -> dict[tuple[int, int], Tensor]:
    """`graphed` without a graph."""
    return graphed(lm, tokens)


def graphed(lm: Any, tokens: TokenBatch) -> dict[tuple[int, int], Tensor]:
    """(row, column) of each counted token -> its log-probabilities (V,), document by document."""
    found = {}
    for row, numbers in enumerate(tokens.documents):
        for number in range(int(numbers.max()) + 1):
            where = (numbers == number).nonzero().flatten().tolist()
            logs = lm(tokens.tokens[row, where].unsqueeze(0)).logits[0].float().log_softmax(-1)
            places = ((column, logs[index - 1]) for index, column in enumerate(where) if index)
            found |= {(row, column): one for column, one in places if tokens.loss_mask[row, column]}
    return found


def objective(lm: Any, **settings: Any) -> DistillObjective:
    return DistillObjective(lm, FrozenTarget.of(model()), DistillSettings(**settings))


@pytest.mark.parametrize("divergence", list(Divergence), ids=str)
def test_loss_and_gradient_equal_a_written_out_reference(divergence: Divergence) -> None:
    """Documents one by one through transformers' own forward, without packing."""
    lm, tokens = draft().requires_grad_(True), windows()
    report = objective(lm, divergence=divergence)(batch())
    report.loss.backward()
    ours = {name: weight.grad.clone() for name, weight in lm.named_parameters()}
    lm.zero_grad()
    own, target, ids = graphed(lm, tokens), alone(model(), tokens), list(range(VOCABULARY))
    losses = [divergence_of(target[place].exp(), own[place], ids, divergence) for place in own]
    torch.stack(losses).sum().backward()
    assert report.weight == len(losses) == tokens.loss_mask.sum()
    torch.testing.assert_close(report.loss, torch.stack(losses).sum(), atol=1e-4, rtol=1e-4)
    for name, weight in lm.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, atol=1e-5, rtol=1e-3, msg=name)
    overlap = sum(float(torch.minimum(own[place].detach().exp(), target[place].exp()).sum()) for place in own)
    assert float(report.metrics["overlap_0"][0]) == pytest.approx(overlap, rel=1e-4)


@pytest.mark.parametrize("size", [VOCABULARY - 6, VOCABULARY + 6])
def test_a_vocabulary_padded_otherwise_counts_as_the_drafter_reads_it(size: int) -> None:
    """What a draft model lacks is lost; what it has beyond the target's is never drafted."""
    lm, tokens = tiny_llama(size, 1, num_hidden_layers=1, initializer_range=0.3), windows()
    tokens = dataclasses.replace(tokens, tokens=tokens.tokens.clamp_max(VOCABULARY - 7))
    report = objective(lm, divergence="total_variation")(OnlineFeatures(model(), ()).features(tokens))
    total, known = 0.0, min(size, VOCABULARY)
    own, target = alone(lm, tokens), alone(model(), tokens)
    for place, logs in own.items():
        probs = torch.zeros(VOCABULARY)
        probs[:known] = logs[:known].softmax(-1).detach()
        total += float((probs - target[place].exp()).abs().sum() / 2)
    assert float(report.loss.detach()) == pytest.approx(total, rel=1e-4)


def test_adaspec_keeps_the_tokens_with_most_to_gain(tmp_path: Path) -> None:
    """Of each window the ceiling of 40 %, by KL of the draft less KL of the reference; the loss counts them alone."""
    reference, lm, tokens = draft(seed=7), draft(), windows()
    reference.save_pretrained(tmp_path)
    settings = {"reference": str(tmp_path), "keep": 0.4, "divergence": "reverse_kl"}
    report = objective(lm, **settings)(batch())
    own, other, target = (alone(one, tokens) for one in (lm, reference, model()))
    kept, losses = 0, 0.0
    for row in range(2):
        gains = {}
        for place in [place for place in own if place[0] == row]:
            probs = target[place].exp()
            gains[place] = float((probs * (other[place] - own[place])).sum())
        count = -(-len(gains) * 4 // 10)
        for place in sorted(gains, key=lambda place: -gains[place])[:count]:
            losses += float((own[place].exp() * (own[place] - target[place])).sum())
        kept += count
    assert float(report.weight) == kept < len(own) / 2 and float(report.loss.detach()) == pytest.approx(
        losses, rel=1e-4
    )
    everything = objective(lm)(batch())
    for name, (value, count) in everything.metrics.items():
        assert report.metrics[name] == (pytest.approx(float(value)), count), "figures are over all tokens"


def test_the_filter_keeps_one_token_at_least_and_none_that_does_not_count() -> None:
    losses = torch.tensor([[5.0, 4.0, 3.0, 2.0], [1.0, 1.0, 1.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    counts = torch.tensor([[False, True, True, True], [True, True, True, False], [False] * 4])
    kept = most_to_gain(losses, torch.zeros(3, 4), counts, 0.3)
    assert kept.nonzero().tolist() == [[0, 1], [1, 0]]


def test_biases_and_scales_of_output_heads_are_a_part_of_the_loss() -> None:
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64)).eval()
    lm.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))
    states = DraftStates(lm)
    hidden, weight = states.linear(states.states(windows()), VOCABULARY)
    logs = (hidden @ weight.T).log_softmax(-1).view(2, 18, -1)
    for (row, column), own in alone(lm, windows()).items():
        torch.testing.assert_close(logs[row, column - 1], own, atol=1e-5, rtol=1e-4)


def test_logits_that_are_no_linear_map_are_refused() -> None:
    lm = draft()
    lm.config.final_logit_softcapping = 30.0
    with pytest.raises(UnsupportedModelError, match=r"llama cannot be distilled: .*final_logit_softcapping: 30"):
        DraftStates(lm)
    other = draft()
    other.lm_head.register_forward_hook(lambda *call: call[-1] ** 2)
    with pytest.raises(UnsupportedModelError, match=r"linear map of its last states, and are off by \d"):
        DraftStates(other)


def writing(lm: Any, *, seed: int = 0, **settings: Any) -> AnswerWriter:
    return AnswerWriter(lm, ObjectiveSettings(**settings), seed=seed, length=18, rows=2)


def test_a_writer_goes_on_from_each_prompt_as_the_model_alone_would() -> None:
    tokens, lm = windows(), draft()
    writer = writing(lm, temperature=0.0, prompt_tokens=2)
    found = writer([tokens], 0, 0)[0]
    for row, first, end, begin in ((0, 3, 9, 0), (0, 12, 15, 9), (1, 3, 18, 0)):
        text = tokens.tokens[row, begin:first].tolist()
        while len(text) < end - begin:
            text.append(int(lm(torch.tensor([text])).logits[0, -1].argmax()))
        assert found.tokens[row, begin:end].tolist() == text
    assert torch.equal(found.loss_mask, tokens.loss_mask) and torch.equal(found.documents, tokens.documents)
    assert not torch.equal(found.tokens, tokens.tokens)


def test_an_answer_that_ends_leaves_padding_and_longer_prompts_do_not_count() -> None:
    tokens, lm = windows(), draft()
    written = writing(lm, temperature=0.0, prompt_tokens=8)([tokens], 0, 0)[0]
    assert not written.loss_mask[1, :8].any() and written.loss_mask[1, 8:].all()
    assert torch.equal(written.tokens[0, 9:15], tokens.tokens[0, 9:15]), "a document of six tokens is all prompt"
    lm.generation_config.eos_token_id = [int(written.tokens[1, 9])]
    ended = writing(lm, temperature=0.0, prompt_tokens=8)([tokens], 0, 0)[0]
    stop = 9 if written.tokens[1, 8] == written.tokens[1, 9] else 10
    assert ended.loss_mask[1].nonzero().flatten().tolist() == list(range(8, stop))
    assert (ended.documents[1, stop:] == -1).all() and not ended.positions[1, stop:].any()


def test_what_is_drawn_follows_seed_batch_and_row_and_the_models_distribution() -> None:
    tokens, lm = windows(), draft()
    writer = writing(lm, seed=5, prompt_tokens=2)
    one = writer([tokens], 3, 0)[0].tokens
    assert torch.equal(one, writer([tokens], 3, 0)[0].tokens) and not torch.equal(one, writer([tokens], 4, 0)[0].tokens)
    second = TokenBatch(**{f.name: getattr(tokens, f.name)[1:] for f in dataclasses.fields(tokens)})
    assert torch.equal(writer([second], 3, 1)[0].tokens[0], one[1]), "a process with that row alone draws the same"
    many = TokenBatch(**{f.name: getattr(tokens, f.name)[1:, :4].repeat(600, 1) for f in dataclasses.fields(tokens)})
    expected = lm(tokens.tokens[1:, :3]).logits[0, -1].softmax(-1).detach()
    found = writer([many], 0, 0)[0].tokens[:, 3].bincount(minlength=VOCABULARY) / 600
    assert float((found - expected).abs().sum() / 2) < 0.12
    some = writing(lm, seed=5, prompt_tokens=2, written=0.5)
    changed = some([many], 0, 0)[0].tokens[:, 3] != many.tokens[:, 3]
    assert 0.3 < float(changed.float().mean()) < 0.7
    assert int(writing(lm, prompt_tokens=2, accepted=0.5)([many], 0, 0)[0].loss_mask.sum()) in range(240, 360)


def words(train: Trainer, steps: int, *more: str, into: str = "run") -> list[str]:
    return train.line("distill", steps, "training.log_every_steps=1", "objective.prompt_tokens=2", *more, into=into)


@pytest.fixture(scope="module")
def start(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained draft model with the target's tokenizer."""
    folder = tmp_path_factory.mktemp("draft")
    draft(max_position_embeddings=128).save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "way", ["cross_entropy draft", *slow("reverse_kl data", "total_variation data", "jensen_shannon target")]
)
def test_a_distilled_draft_overlaps_more_with_its_target_and_drafts(way: str, train: Trainer, start: Path) -> None:
    """In 40 steps the overlap on the data's texts rises by 0.1 at least, on-policy from its own texts."""
    divergence, writer = way.split()
    more = [f"objective.divergence={divergence}", f"objective.writer={writer}", "--draft", str(start)]
    more += [*evaluated(train.prepared, "max_tokens: 16, nodes: 10"), "training.eval_every_steps=20"]
    outcome, overlaps = train(words(train, 40, *more)), train.log("overlap_0")
    assert sum(overlaps[-10:]) / 10 > sum(overlaps[:3]) / 3 + 0.1, (overlaps[:3], overlaps[-10:])
    for name in ("chain_t0", *(f"acceptance_{of}_1" for of in ("tree_t0", "chain_t1", "tree_t1"))):
        assert len(train.log(f"eval/{name}")) == 2
    assert outcome["best"] > 1.2
    lengths = [drafts(train.target, "draft_model", folder) for folder in (outcome["draft"], start)]
    assert lengths[0] > lengths[1] + 0.05
    assert type(AutoModelForCausalLM.from_pretrained(outcome["draft"])) is LlamaForCausalLM


@pytest.mark.slow
def test_a_shrunk_target_is_planned_trained_in_bfloat16_and_drafts(train: Trainer) -> None:
    more = ["draft.options={layers: 2, intermediate_size: 32}", "training.dtype=bfloat16", "objective.writer=draft"]
    made = words(train, 60, *more, "training.gradient_checkpointing=true")
    assert train([*made, "--dry-run"])["trainable_parameters"] > 5000 and not (train.folder / "run").exists()
    outcome, overlaps = train(made), train.log("overlap_0")
    assert sum(overlaps[-10:]) / 10 > sum(overlaps[:3]) / 3 + 0.03, "it has half of the target's layers already"
    assert same_weights(*(train.folder / "run" / name / "model.safetensors" for name in ("draft", "checkpoint-60")))
    assert drafts(train.target, "draft_model", outcome["draft"]) > 1.2


def test_a_run_goes_on_to_the_bit_with_texts_of_its_own_and_a_reference(train: Trainer, start: Path) -> None:
    """Six steps at once, and three of them in another run; its draft writes most texts, its reference picks tokens."""
    more = ["--draft", str(start), f"objective.reference={start}", "objective.writer=draft", "objective.written=0.7"]
    one, two = goes_on(train, lambda into: words(train, 6, *more, into=into))
    assert not same_weights(one / "draft" / "model.safetensors", start / "model.safetensors")
    assert same_weights(*(folder / "draft" / "model.safetensors" for folder in (one, two)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"there is no draft model: name one with --draft DIRECTORY, or .*draft\.options={layers: 4}"),
        ({"draft": {"start": "x", "options": {"layers": 1}}}, "leave draft.options away"),
        ({"draft": {"start": "x", "vocab_size": 8}}, "leave draft.vocab_size away"),
        ({"draft": {"start": "x"}, "mode": "offline", "features": "f", "objective": {"writer": "draft"}}, "is online"),
        ({"draft": {"start": "x"}, "target_parallel": "tp", "objective": {"writer": "target"}}, "the whole target"),
        ({"draft": {"options": {"layers": 1}}, "target_parallel": "fsdp"}, "shrunk from its whole weights"),
        ({"draft": {"start": "x"}, "objective": {"keep": 0}}, r"objective\.keep must be greater than 0"),
        ({"draft": {"start": "x"}, "objective": {"writer": "teacher"}}, "'data', 'draft' or 'target'"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_is_loaded(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TrainedModel(make_recipe("distill", {"target": "a", "data": "b", "output": "c", **given}))


def test_another_tokenizer_is_refused(start: Path, target: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(start, tmp_path / "other"))
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"x7"'))
    given = {"target": "a", "data": "b", "output": "c", "draft": {"start": str(other)}}
    with pytest.raises(VocabularyMismatchError, match="differ in 2 tokens"):
        TrainedModel(make_recipe("distill", given)).start(model(), AutoTokenizer.from_pretrained(target), None)


def test_a_spread_draft_model_does_not_write() -> None:
    for kind, writer in (("distill", "draft"), ("eagle3", "target")):
        given = {"target": "a", "data": "b", "output": "c", "objective": {"writer": writer}}
        recipe, nothing = make_recipe(kind, given), cast(Any, None)
        with pytest.raises(ArgumentError, match=rf"objective\.writer={writer} needs the whole .*--parallel ddp"):
            make_writer(recipe, Parallel(mode="fsdp"), nothing, nothing, nothing)


@pytest.mark.slow
def test_two_processes_distil_the_draft_that_one_distils(train: Trainer, start: Path) -> None:
    """Whole, with texts of its own and a reference, and sharded beside a sharded target; to 1e-5 in float32."""
    own = ["objective.writer=draft", "objective.written=0.7", f"objective.reference={start}"]
    ways = {"whole": own, "sharded": []}
    spread = {"whole": [], "sharded": ["--parallel", "fsdp", "target_parallel=fsdp"]}

    def line(name: str, *more: str) -> list[str]:
        evaluation = ["evaluation.count=2", "evaluation.settings={max_tokens: 8}"]
        prompts = f"evaluation.prompts={train.prepared}"
        return words(train, 4, "--draft", str(start), prompts, *evaluation, *more, into=name)

    for name, more in ways.items():
        train(line(f"{name}-one", *more))
    in_two_processes([line(name, *more, *spread[name], "windows.rows=2") for name, more in ways.items()])
    for name in ways:
        one, two = (load_file(train.folder / folder / "draft/model.safetensors") for folder in (f"{name}-one", name))
        for key, weight in one.items():
            torch.testing.assert_close(two[key], weight, atol=1e-5, rtol=1e-4, msg=key)
