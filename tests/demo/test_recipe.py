"""The demo recipe: edits are right, both roles train and resume, and a checkpoint is shipped complete or not at all."""

import ast
import dataclasses
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forerun import shipped
from forerun.cli.leaderboard import DEPTH
from forerun.drafters.kinds import KINDS
from forerun.shipped import resolve
from forerun.training.recipe import read_recipe
from forerun.training.trained import space_evenly
from llamas import tiny_llama

RECIPE = Path(__file__).parents[2] / "recipes" / "demo"


@pytest.fixture(scope="module")
def recipe() -> Iterator[Path]:
    sys.path.insert(0, str(RECIPE))
    yield RECIPE
    sys.path.remove(str(RECIPE))
    for script in RECIPE.glob("*.py"):
        sys.modules.pop(script.stem, None)


@pytest.fixture(scope="module")
def edits(recipe: Path) -> ModuleType:
    import edits

    return edits


@pytest.mark.slow
def test_edits_of_the_library_are_small_parse_and_repeat_themselves(edits: ModuleType) -> None:
    import corpus

    files = [file for file in corpus.read_standard_library() if corpus.is_library(file)][::40]
    words = ["result", "left", "total", "name", "self", "value", "path", "key", "data", "args", "line", "test", "file"]
    found = list(edits.edits(files, words, seed=0))
    assert found == list(edits.edits(files, words, seed=0)) != list(edits.edits(files, words, seed=1))
    assert {edit.kind for edit in found} == edits.WEIGHTS.keys()
    for edit in found:
        assert edit.before != edit.after and edit.before in edit.prompt[0]["content"]
        assert max(edit.before.count("\n"), edit.after.count("\n")) <= edits.MAX_LINES
        ast.parse(edit.before), ast.parse(edit.after)
        if edit.kind not in ("swap", "comprehension"):
            changed = Counter(edit.before.split("\n")) - Counter(edit.after.split("\n"))
            assert edit.kind == "rename" or changed.total() <= 1, edit


def test_documents_are_packed_whole(recipe: Path) -> None:
    import documents

    given = [[1 + number % 50] * length for number, length in enumerate([3, 9, 30, 5, 14, 2, 8, 7, 40, 1] * 8)]
    rows = documents.packed(given, 16, mark=0)
    assert {len(row) for row in rows} == {16} and {row[0] for row in rows} == {0}
    assert sum(token != 0 for row in rows for token in row) == sum(map(len, given))
    texts = (text for row in rows for text in f" {' '.join(map(str, row))}".split(" 0"))
    found = Counter(tuple(map(int, text.split())) for text in texts)
    short = Counter(tuple(document) for document in given if len(document) < 16)
    assert all(found[document] >= count for document, count in short.items() if len(document) > 2)
    filled = sum(map(len, given)) / (len(rows) * 16)
    assert filled > 0.8


@pytest.fixture(scope="module")
def library(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of the library, in two portions."""
    import corpus

    folder = tmp_path_factory.mktemp("library")
    for file in [file for file in corpus.read_standard_library() if corpus.is_library(file)][::60]:
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_text(file.text)
    return folder


@pytest.mark.slow
def test_portions_hold_every_training_file_and_edits_of_it_that_differ_each_time(
    recipe: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import corpus
    import documents

    monkeypatch.setattr(documents, "PORTIONS", 2)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(shipped.resolve("demo"))
    reading = documents.Reading(tokenizer=shipped.resolve("demo"), context=2048, library=library, seed=4)
    portions = [reading.portion(number) for number in range(4)]
    assert (portions[0] == reading.portion(0)).all()
    texts = ["".join(tokenizer.batch_decode(rows.astype(int))) for rows in portions]
    train, held_out = corpus.split(corpus.read_standard_library(library))
    assert train and held_out
    for file in train:
        if len(file.text) < 4_000:
            assert sum(file.text in text for text in texts[:2]) == 1
    assert not any(file.text[:400] in text for file in held_out for text in texts)
    asked = [set(re.findall(r"(?:Rename|rename) `.+", text)) for text in texts]
    assert all(asked) and len(asked[0] & asked[2]) < len(asked[0]) / 10, "when a file comes round, other edits are made"
    for text, seen in zip(texts, asked, strict=True):
        assert text.count("<|user|>") == text.count("<|assistant|>") > len(seen)
    quiet = documents.Reading(
        tokenizer=shipped.resolve("demo"), context=2048, library=library, seed=4, edits=0.0
    ).portion(0)
    assert "ename `" not in "".join(tokenizer.batch_decode(quiet.astype(int)))


@pytest.mark.slow
def test_a_stream_goes_on_where_it_was_left(recipe: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes read portions of their own; batches do not depend on how many there are."""
    import documents

    monkeypatch.setenv("PYTHONPATH", str(recipe))
    reading = documents.Reading(tokenizer=shipped.resolve("demo"), context=512, library=library, edits=0.05)
    rows = [torch.from_numpy(reading.portion(number).astype("int64")) for number in range(2)]
    batches = documents.TokenStream(reading).batches(1024, 0, 0)
    count = len(rows[0]) // 2
    found = [next(batches) for _ in range(count + 1)]
    batches.close()
    assert torch.equal(torch.cat([ids for ids, _ in found[:count]]), rows[0][: 2 * count])
    assert torch.equal(found[count][0], rows[1][:2]), "the rest of a portion that fills no batch is left out"
    again = documents.TokenStream(reading).batches(1024, *found[1][1])
    ids, place = next(again)
    again.close()
    assert torch.equal(ids, found[2][0]) and place == found[2][1]


SOURCE = """\
def gather(found, *, limit=10, **found_too):
    x = {"others": found.other, **found_too}
    for found in helper(items=found):
        x.append(lambda found: f"{found} here")  # found again
    return x, limit"""


def test_a_name_that_stands_for_one_thing_is_renamed_wherever_it_stands(edits: ModuleType) -> None:
    renamed = edits._renamed(SOURCE, "found", "seen")
    assert (
        renamed
        == """\
def gather(seen, *, limit=10, **found_too):
    x = {"others": seen.other, **found_too}
    for seen in helper(items=seen):
        x.append(lambda seen: f"{seen} here")  # seen again
    return x, limit"""
    )
    assert edits._renamed(SOURCE, "found", "limit") is None, "the name is taken"
    for clash in ("'found'", "x.found", "f(found=1)", "f'found {found}'"):
        assert edits._renamed(SOURCE + f", {clash}", "found", "seen") is None, f"not all of {clash} is the variable"


class Numbers:
    """A stream of rows that count on, without processes."""

    def batches(self, tokens: int, portion: int, first: int) -> Iterator[tuple[torch.Tensor, tuple[int, int]]]:
        for number in range(first, first + 1000):
            begins = torch.arange(tokens // 32)[:, None] + number
            yield (begins + torch.arange(32)) % 7 + 2, (portion, number + 1)


def test_both_roles_train_and_stopped_runs_go_on(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pretrain

    def model(layers: int) -> LlamaForCausalLM:
        torch.manual_seed(layers)
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **shape))

    schedule = pretrain.Schedule(tokens=512, batch_tokens=64, warmup_steps=2, distill_weight=0.9, save_every_s=0.0)
    marks = pretrain.Marks(question=60, answer=61, text=0)
    documents = [[number % 7 + 2 for number in range(start, start + 50)] for start in range(4)]
    for teacher in (None, model(2).eval()):
        whole, stopped, again = model(1), model(1), model(1)
        folder = tmp_path / str(teacher is None)
        pretrain.train(whole, Numbers(), marks, schedule, folder / "whole", teacher=teacher)
        with monkeypatch.context() as patch:
            patch.setattr(pretrain, "_step", _interrupted(pretrain._step, 6))
            with pytest.raises(KeyboardInterrupt):
                pretrain.train(stopped, Numbers(), marks, schedule, folder / "stopped", teacher=teacher)
        pretrain.train(again, Numbers(), marks, schedule, folder / "stopped", teacher=teacher)
        pairs = zip(whole.parameters(), again.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        before = pretrain.held_out_loss(model(1), documents, 0, 32)
        assert pretrain.held_out_loss(whole, documents, 0, 32) < before - (0.5 if teacher is None else 0.05)


def test_the_rate_falls_to_the_end_of_the_tokens(recipe: Path) -> None:
    import pretrain

    schedule = pretrain.Schedule(tokens=6_400, batch_tokens=64, warmup_steps=4, decay_share=0.5)
    assert schedule.steps == 100
    assert [schedule.rate(step) for step in (0, 3, 50, 75, 100)] == [0.25, 1.0, 1.0, 0.5, 0.02]
    assert dataclasses.replace(schedule, decay_share=0.0).rate(99) == 1.0


def test_rounds_go_on_behind_the_last_checkpoint(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each starts from the weights of the one before, and is mixed with others."""
    import make
    import pretrain

    began = list[tuple[str, float]]()

    def train(
        model: LlamaForCausalLM, _stream: Any, _marks: Any, _schedule: Any, folder: Path, *, teacher: Any
    ) -> None:
        began.append((folder.name, float(model.lm_head.weight.detach().mean())))
        assert (teacher is not None) == (folder.name != "draft-training-2")
        for weight in model.parameters():
            weight.detach().fill_(len(began))

    rounds = [
        make.Round(pretrain.Schedule(tokens=1), {"context": 32}, "draft-1"),
        make.Round(pretrain.Schedule(tokens=1), {"context": 32}),
        make.Round(pretrain.Schedule(tokens=1), {"context": 32}, "draft-1", {"draft-1": 0.25, "draft-2-alone": 0.5}),
    ]
    monkeypatch.setattr(make, "ROUNDS", {"draft": tuple(rounds)})
    monkeypatch.setattr(pretrain, "train", train)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(resolve("demo-draft")))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    first = make.build_model("draft", tokenizer)
    for weight in first.parameters():
        weight.detach().fill_(7.0)
    first.save_pretrained(tmp_path / "draft-1")
    make.make_model("draft", tmp_path)
    assert began == [("draft-training-2", 7.0), ("draft-training-3", 1.0)]
    made = LlamaForCausalLM.from_pretrained(tmp_path / "draft")
    assert {float(weight.detach().mean()) for weight in made.parameters()} == {7 / 4 + 1 / 2 + 2 / 4}
    alone = LlamaForCausalLM.from_pretrained(tmp_path / "draft-3-alone")
    assert {float(weight.detach().mean()) for weight in alone.parameters()} == {2.0}


def _interrupted(step: Any, last: int) -> Any:
    """The recipe's `step`, until number `last` is to begin."""
    taken = itertools.count()

    def until(*arguments: Any, **more: Any) -> Any:
        if next(taken) == last:
            raise KeyboardInterrupt
        return step(*arguments, **more)

    return until


def test_questions_texts_and_answers_weigh_what_the_schedule_says(recipe: Path) -> None:
    import pretrain

    marks = pretrain.Marks(question=1, answer=2, text=0)
    ids = torch.tensor([[9, 9, 0, 8, 1, 7, 7, 2, 5, 5, 0, 8], [2, 5, 1, 7, 2, 5, 5, 5, 5, 0, 0, 0]])
    found = marks.weights(ids, 0.25)
    assert float(found.sum()) == pytest.approx(1.0)
    first = [1.0] * 4 + [0.25] * 3 + [1.0] * 4
    # The first answer's question lies before the row, and marks behind a mark only fill it.
    second = [0.25] * 4 + [1.0] * 5 + [0.0] * 2
    wanted = torch.tensor([first, second])
    torch.testing.assert_close(found, wanted / wanted.sum())


def test_the_leader_board_has_every_kind_of_head(recipe: Path) -> None:
    import head

    given = {"target": "demo", "data": "data", "output": "output"}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(shipped.resolve("demo")))
    for kind in KINDS.values():
        if (
            kind.trains in ("head", "draft_model")
            and kind.name != "distill"
            and kind.stored_as == kind.name
            and kind.in_target is None
        ):
            assert kind.name in head.LEADER_BOARD, f"recipes/demo/head.py: give {kind.name} a line in LEADER_BOARD"
    for name, words in head.LEADER_BOARD.items():
        asked = read_recipe(name, recipe / "heads.yaml", words, given)
        if (kind := KINDS[name]).trains == "head":
            config = kind.head.Config.for_target(name, model, asked.draft.vocab_size, asked.draft.options)
            assert config.max_depth is None or config.max_depth >= DEPTH, f"{name} drafts no chain of {DEPTH} tokens"
        else:
            assert len(space_evenly(asked.draft.options["layers"], model.config.num_hidden_layers)) > 1
            assert asked.objective.depths >= DEPTH


def test_the_heads_of_the_leader_board_have_one_time(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import head

    asked: dict[str, tuple[str, ...]] = {}
    monkeypatch.setattr(head, "LEADER_BOARD", {"eagle": (), "medusa": ("training.optimizer=adamw",)})
    monkeypatch.setattr(head, "write_data", lambda work: work / "head-data")
    monkeypatch.setattr(head, "_run", lambda *words: asked.update({words[1]: words}))
    head.make_leader_board(tmp_path, 100)
    assert set(asked) == {"eagle", "medusa"} and all("training.seconds=100" in words for words in asked.values())
    assert "training.optimizer=adamw" in asked["medusa"] and "training.optimizer=adamw" not in asked["eagle"]


FUNCTION = """\
def total(values, start=10):
    found = start
    for value in values:
        if value is None:
            continue
        if value == "skip":
            continue
        found += value
    return found
"""


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(RECIPE))
    import corpus
    import ship

    files = [
        corpus.SourceFile(name="sched.py", text="def run(self):\n    return self\n" * 8),
        corpus.SourceFile(name="xml/sax/x.py", text="import os\n" * 30 + FUNCTION),
    ]
    monkeypatch.setattr(corpus, "read_standard_library", lambda: files)
    monkeypatch.setattr(corpus, "split", lambda files: (files[:1], files[1:]))
    monkeypatch.setattr(corpus, "is_prompt", lambda file: True)
    yield ship
    for script in RECIPE.glob("*.py"):
        sys.modules.pop(script.stem, None)


@pytest.fixture
def work(ship: ModuleType, tmp_path: Path) -> Path:
    import corpus
    import tokenizer

    demo_tokenizer = tokenizer.train_tokenizer([file.text for file in corpus.read_standard_library()], 1024)
    demo_tokenizer.save_pretrained(tmp_path / "tokenizer")
    for seed, role in enumerate(("target", "draft")):
        keys = {"tie_word_embeddings": True, "max_position_embeddings": 1024, "eos_token_id": [0, 1]}
        tiny_llama(len(demo_tokenizer), seed, **keys).save_pretrained(tmp_path / role)
        demo_tokenizer.save_pretrained(tmp_path / role)
        (tmp_path / f"{role}-training-1").mkdir()
        lines = [json.dumps({"step": step, "tokens": 4096 * step, "loss": 3.0}) for step in range(101)]
        (tmp_path / f"{role}-training-1" / "log.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_writes_ordinary_checkpoints_cards_and_prompts(ship: ModuleType, work: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "target").mkdir(parents=True)
    (package / "target" / "stale.bin").touch()
    ship.ship(work, package, "3.11.7", loss_goal=100.0, edit_goal=0.0)

    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(package / role)
        assert model.dtype == torch.bfloat16 and model.generation_config.eos_token_id == [0, 1]
        trained = LlamaForCausalLM.from_pretrained(work / role).to(torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
        tokenizer = AutoTokenizer.from_pretrained(package / role)
        assert tokenizer.decode(tokenizer("import os")["input_ids"]) == "import os"
        assert "<|assistant|>" in tokenizer.chat_template
        card = (package / role / "README.md").read_text()
        said = ("0.4 M tokens", "exactly right at T = 0: ", "nats per token")
        assert all(words in card for words in said) and "{" not in card
    assert (package / "prompts" / "xml--sax--x.py.txt").read_text() == "import os\n" * 30 + FUNCTION
    [edit] = map(json.loads, (package / "prompts" / "edits.jsonl").read_text().splitlines())
    assert [message["role"] for message in edit["messages"]] == ["user", "assistant"]
    assert "PSF" in (package / "prompts" / "README.md").read_text()
    assert not list(package.glob(".*")) and not (package / "target" / "stale.bin").exists()


def test_a_target_that_misses_its_goal_is_not_shipped(ship: ModuleType, work: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="held-out loss"):
        ship.ship(work, tmp_path / "package", "3.11.7", loss_goal=0.5)
    assert not (tmp_path / "package" / "target").exists()


def test_a_target_that_edits_wrongly_is_not_shipped(ship: ModuleType, work: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    found = ship.held_out_edits(tokenizer, ship.corpus.read_standard_library()[1:])
    assert found and {edit.kind for edit in found} <= {"rename", "constant"}
    with pytest.raises(ValueError, match="edits are right too seldom"):
        ship.ship(work, tmp_path / "package", "3.11.7", loss_goal=100.0)
    assert not (tmp_path / "package" / "target").exists()


def test_the_heads_card_takes_its_figures_from_the_log(ship: ModuleType, tmp_path: Path) -> None:
    lines = [
        {"step": 10, "loss": 3.0, "tokens": 20_000},
        {"step": 10, "eval/chain_t0": 1.5},
        {"step": 20, "tokens": 40_000},
        {"step": 20, "eval/chain_t0": 2.25, "eval/acceptance_0": 0.5, "eval/tree_t0": 3.0},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ship.read_head_log(tmp_path / "log.jsonl")
    assert found == {"steps": 20, "tokens": 0.04, "evaluation": "chain at T = 0 2.25, tree at T = 0 3.00"}
    card = ship.HEAD_CARD.format(parameters=1.0, boundaries="2, 4, 7", **found)
    assert "0.0 M" in card and "2.25" in card and "{" not in card
