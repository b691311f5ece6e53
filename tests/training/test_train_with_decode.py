"""Train with decode: the target writes while what is trained drafts for it; resumed to the bit, and worth its time."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from forerun.drafters.kinds import kind_named
from forerun.errors import ArgumentError, DataError
from forerun.losses.objective import ObjectiveSettings, TokenBatch
from forerun.training.data.on_policy import AnswerWriter
from forerun.training.data.store import UNWRITTEN, write_prepared
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import make_recipe
from forerun.training.run import TrainingRun
from forerun.training.trained import trained_class
from forerun.writing import TokenizerIdentity
from training.conftest import Trainer, goes_on, same_weights
from training.ttt import VOCABULARY, model

WRITTEN = ("objective.writer=target", "objective.prompt_tokens=4", "objective.temperature=0.0", "windows.length=32")


@pytest.fixture(scope="module")
def foreign(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that the target would never write: tokens at random."""
    folder, random = tmp_path_factory.mktemp("foreign") / "prepared", np.random.default_rng(0)
    texts = random.integers(0, VOCABULARY, (60, 24)).tolist()
    identity = TokenizerIdentity.of(PreTrainedTokenizerFast.from_pretrained(target))
    write_prepared(folder, [(text, [False] + [True] * 23) for text in texts], identity)
    return folder


def run_of(target: Path, data: Path, output: Path, **objective: Any) -> TrainingRun:
    values = {
        **{"target": str(target), "data": str(data), "output": str(output), "target_dtype": "float32"},
        "objective": {"writer": "target", "prompt_tokens": 4, **objective},
        "draft": {"options": {"boundaries": [1, 2, 3]}},
        "windows": {"length": 32, "rows": 3},
    }
    return TrainingRun(make_recipe("eagle3", values), Parallel())


def text_of(batch: TokenBatch) -> list[list[int]]:
    return [
        batch.tokens[row, documents == document].tolist()
        for row, documents in enumerate(batch.documents)
        for document in range(int(documents.max()) + 1)
    ]


def is_written(run: TrainingRun, text: list[int], prompt: int) -> bool:
    """Whether the target goes on so from the prompt, token by token."""
    found = text[:prompt]
    while len(found) < len(text):
        found.append(int(run.model(torch.tensor([found])).logits[0, -1].argmax()))
    return found == text


def test_the_text_is_the_targets_whoever_drafts_and_follows_its_weights(
    target: Path, foreign: Path, tmp_path: Path
) -> None:
    """At temperature 0 plain decoding's, token by token, above it that of the seed; a head changes where it counts."""
    run = run_of(target, foreign, tmp_path, temperature=0.0, accepted=0.0)
    before = run.batches.batch(0, 0, 1).batch
    assert all(is_written(run, text, 4) for text in text_of(before))
    given = run.batches.windows.batch(0)
    assert not torch.equal(before.tokens, given.tokens) and torch.equal(before.documents, given.documents)
    with torch.no_grad():
        for weight in run.module.parameters():
            weight.normal_()
    after = run.batches.batch(0, 0, 1).batch
    assert torch.equal(after.tokens, before.tokens) and not torch.equal(after.loss_mask, before.loss_mask)
    assert 0 < int(after.loss_mask.sum()) < int(given.loss_mask.sum()), "only rejected drafts count"
    report = run.objective(run.batches.batch(0, 0, 1))
    report.loss.backward()
    learning = [weight for weight in run.module.parameters() if weight.requires_grad]
    assert float(report.weight) > 0 and all(weight.grad is not None for weight in learning)

    sampled = run_of(target, foreign, tmp_path, temperature=1.0).batches
    assert sampled.writer is not None
    one, _, _, last = [sampled.batch(step, 0, 1).batch.tokens for step in range(4)]
    settings = ObjectiveSettings(prompt_tokens=4)
    plain = AnswerWriter(model(), settings, seed=0, length=32, rows=3)
    assert torch.equal(last, plain.batch(sampled.windows.batch, 3, 0).tokens), "in whatever company"
    with torch.no_grad():
        sampled.source.model.lm_head.weight.neg_()
    assert not torch.equal(one, sampled.batch(0, 0, 1).batch.tokens), "another target writes other text"


@pytest.fixture(scope="module")
def unanswered(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of six tokens with room for ten, one longer than a window, and texts that are whole."""
    folder, random = tmp_path_factory.mktemp("unanswered") / "prepared", np.random.default_rng(1)
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in (*[6] * 8, 40)]
    texts = random.integers(0, VOCABULARY, (4, 16)).tolist()
    documents = [(prompt + [UNWRITTEN] * 10, [False] * len(prompt) + [True] * 10) for prompt in prompts]
    documents += [(text, [True] * 16) for text in texts]
    identity = TokenizerIdentity.of(PreTrainedTokenizerFast.from_pretrained(target))
    write_prepared(folder, documents, identity, {"counts": {"unwritten": len(prompts)}})
    return folder


@pytest.mark.parametrize("written", [0.0, 1.0])
def test_prompts_without_answers_are_answered_whatever_else_is_written(
    target: Path, unanswered: Path, tmp_path: Path, written: float
) -> None:
    """By the target, behind the whole prompt; one for whose answer a window has no room is not seen."""
    run = run_of(target, unanswered, tmp_path, temperature=0.0, written=written, prompt_tokens=8)
    given, seen = [], []
    for step in range(run.batches.steps_per_epoch):
        given += text_of(run.batches.windows.batch(step))
        batch = run.batches.batch(step, 0, 1).batch
        assert int(batch.tokens.min()) >= 0
        seen += text_of(batch)
    kept = {tuple(text) for text in given if UNWRITTEN not in text} & {tuple(text) for text in seen}
    assert bool(kept) is not bool(written), "whole texts are written anew where that is asked for"
    answered = [text for text in seen if tuple(text) not in kept and len(text) == 16]
    prompts = {tuple(text[:6]) for text in given if UNWRITTEN in text}
    mine = [text for text in answered if tuple(text[:6]) in prompts]
    assert len({tuple(text[:6]) for text in mine}) == len(prompts) == 8
    assert all(is_written(run, text, 6) for text in mine)


def test_prompts_without_answers_are_refused_where_nobody_writes_them(train: Trainer, unanswered: Path) -> None:
    with pytest.raises(DataError, match=r"9 documents are prompts.*objective.writer=target.*data regenerate"):
        run_of(train.target, unanswered, train.folder / "run", writer="data")
    places = ("--target", str(train.target), "--data", str(unanswered), "--output", str(train.folder / "features"))
    assert "9 documents are prompts" in train.refused(["features", "--kind", "eagle3", *places])


def test_batches_come_again_from_disk_to_any_number_of_processes(target: Path, foreign: Path, tmp_path: Path) -> None:
    """Five batches of three rows are written at once, or as many as a setting says; each is seen three times."""
    seven = run_of(target, foreign, tmp_path, temperature=0.0, at_once=7).batches.writer
    assert seven is not None and seven.together == 2
    batches = run_of(target, foreign, tmp_path, temperature=0.0, reuse=3).batches
    assert batches.writer is not None and batches.writer.together == 5
    made = [batches.batch(step, 0, 1).batch for step in range(16)]
    for step, batch in enumerate(made):
        number = 5 if step == 15 else step % 5
        assert torch.equal(batch.tokens, made[15 if number == 5 else number].tokens)
        assert torch.equal(batch.documents, batches.windows.batch(number).documents), "no window is passed over"
    assert len({tuple(batch.tokens.flatten().tolist()) for batch in made}) == 6
    halves = run_of(target, foreign, tmp_path, temperature=0.0, reuse=3).batches
    halves.windows.rows = 1
    for rank in range(3):
        found = halves.batch(7, rank, 3).batch
        assert torch.equal(found.tokens[0], made[7].tokens[rank]) and found.tokens.shape[0] == 1
    shutil.rmtree(tmp_path / "written")
    with pytest.raises(DataError, match=r"lacks rows 0 to 2 of written batch 2"):
        run_of(target, foreign, tmp_path, temperature=0.0, reuse=3).batches.batch(7, 0, 1)


def test_what_a_resumed_run_may_ask_for_stays_and_nothing_else(target: Path, foreign: Path, tmp_path: Path) -> None:
    batches = run_of(target, foreign, tmp_path, temperature=0.0, reuse=1).batches

    def held(first_step: int) -> list[int]:
        batches.batch(first_step, 0, 1)
        return sorted(int(path.name.partition("-")[0]) for path in (tmp_path / "written").iterdir())

    assert held(0) == [*range(5)] and held(5) == [*range(10)], "there is no checkpoint, so it would begin anew"
    for step in (7, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert held(10) == [*range(5, 15)], "the seventh step reads batch 7"


def written_by(train: Trainer, steps: int, data: Path, *more: str, into: str) -> list[str]:
    return train.eagle3(steps, f"data={data}", "training.log_every_steps=1", *WRITTEN, *more, into=into)


@pytest.mark.parametrize("reuse", [1, 2])
def test_a_run_goes_on_to_the_bit(train: Trainer, foreign: Path, reuse: int) -> None:
    """At temperature 1; a part of the documents stay."""
    more = ["objective.temperature=1.0", f"objective.reuse={reuse}", "objective.written=0.8", "objective.accepted=0.5"]
    more += ["evaluation.prompts=null"]
    one, two = goes_on(train, lambda into: written_by(train, 6, foreign, *more, into=into))
    assert same_weights(*(folder / "head" / "model.safetensors" for folder in (one, two)))


@pytest.mark.slow
def test_it_lifts_acceptance_over_the_same_steps_without_it(train: Trainer, foreign: Path) -> None:
    """On texts that are not the target's: by 0.5 tokens a pass at least, half of the batches written before."""
    lengths, evaluation = [], ["draft.vocab_size=null", "evaluation.count=8"]
    for name, more in (("without", ["objective.writer=data"]), ("with", ["objective.reuse=2"])):
        lengths.append(train(written_by(train, 60, foreign, *evaluation, *more, into=name))["best"])
    assert lengths[1] > lengths[0] + 0.5, lengths


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("eagle3", {"objective": {"writer": "draft"}}, "eagle3 trains does not write alone: objective.writer=target"),
        ("layerskip", {"objective": {"writer": "draft"}}, "layerskip trains does not write alone"),
        ("medusa", {"objective": {"writer": "target"}, "mode": "offline", "features": "f"}, "is online"),
        ("hydra", {"objective": {"writer": "target"}, "target_parallel": "tp"}, "needs the whole target"),
        ("eagle3", {"objective": {"reuse": 0}}, r"objective\.reuse must be greater than or equal to 1"),
    ],
)
def test_what_contradicts_itself_is_refused(kind: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        trained_class(kind_named(kind))(make_recipe(kind, {"target": "a", "data": "b", "output": "c", **given}))
