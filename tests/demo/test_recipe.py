"""What the demo recipe trains on and how: edits are right, and both roles take a step and resume where they stopped."""

from __future__ import annotations

import ast
import dataclasses
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forerun import demo
from forerun.cli.leaderboard import DEPTH
from forerun.demo import resolve
from forerun.drafters.heads.kinds import KINDS
from forerun.training.recipe import read_recipe
from forerun.training.shrink import spaced

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


def test_drills_ask_for_what_they_answer(recipe: Path) -> None:
    import corpus
    import drills

    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.resolve("demo"))
    files = [file for file in corpus.read_standard_library() if corpus.is_library(file)][::40]
    found = list(drills.line_drills(files, ["path", "name", "count", "value", "data"], count=60, seed=0))
    asked = Counter(drill.request.split()[0] for drill in found)
    assert set(asked) == {"Rename", "Please", "Change", "Replace", "Repeat"}
    named = list(drills.name_drills(["path", "name", "count", "value", "data"], count=60, seed=0))
    assert {"Rename", "Please", "Change", "Replace"} == {drill.request.split()[0] for drill in named}
    found += named
    for drill in found:
        if drill.request.startswith("Repeat"):
            assert drill.after == drill.before
        else:
            old, new = drill.replaced
            assert f"`{old}`" in drill.request and drill.request.endswith(f"`{new}`: write {new} for {old}")
            assert drill.after != drill.before or old == new
            number = r"(?<![\w.]){}(?![\w.])" if old.isdigit() else r"(?<!\w){}(?!\w)"
            assert new.join(re.split(number.format(re.escape(old)), drill.before)) == drill.after
    answer, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    for number, drill in enumerate(drills.token_drills(tokenizer, count=20, seed=0)):
        ids, texts = drill.ids, tokenizer.convert_ids_to_tokens(drill.ids)
        first, second = ids.index(end), ids.index(answer)
        copy = range(second + 2, len(ids) - 2)
        assert ids[-2] == end and len(copy) >= drills.TOKENS[0]
        assert [drill.places[at] for at in copy] == list(range(first - len(copy), first))
        assert drill.sources == drill.places and max(drill.places[: copy[0]]) < 0
        for at in copy:
            one, other = texts[at], texts[drill.places[at]]
            assert one == other if number % 2 == 0 else f"Ġ{one}" == other or one == f"Ġ{other}"


def test_drills_of_names_hold_look_alikes_of_what_is_replaced(recipe: Path) -> None:
    import drills

    found = list(drills.name_drills(["path", "name", "count", "value", "data"], count=300, seed=1))
    olds = [drill.replaced[0] for drill in found]
    kinds = Counter("text" if old[0] in "'\"" else "number" if old.isdigit() else "name" for old in olds)
    assert kinds["name"] > kinds["text"] > kinds["number"] > 0
    assert {"'", '"'} <= {old[0] for old in olds}
    for pattern in (r"\w{}\b", r"\b{}\w"):
        alike = [re.search(pattern.format(re.escape(old)), drill.after) for old, drill in zip(olds, found, strict=True)]
        assert sum(map(bool, alike)) > 20, "longer names that end or begin as the old one stay"


def test_drills_of_pieces_replace_every_piece_and_say_where_it_is_named(recipe: Path) -> None:
    import drills

    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.resolve("demo"))
    answer, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    asked = [tokenizer(f"<|user|>\n{form.split('{0}')[0]}")["input_ids"] for form in (*drills.RENAME, *drills.CHANGE)]
    sizes = set()
    for drill in drills.piece_drills(tokenizer, count=60, seed=0):
        ids, text = drill.ids, "".join(map(chr, drill.ids))
        marked = [at - 1 for at, looked in enumerate(drill.marks) if looked > 0]
        (named,) = {drill.marks[at + 1] for at in marked}
        old = text[next(len(form) for form in asked if ids[: len(form)] == form) : named + 1]
        sizes.add(len(old))
        copy = range(ids.index(answer) + 2, len(ids) - 2)
        assert all(ids[drill.sources[at]] == ids[at] for at in copy)
        new = [at for at in copy if drill.ends[at] >= 0]
        assert {drill.ends[at] for at in new} == set(marked)
        assert all((drill.sources[at] == drill.places[at]) == (at not in new) for at in copy)
        given = sorted({drill.sources[at] for at in new})
        code = text[min(drill.places[at] for at in copy) : ids.index(end)]
        assert code.replace(old, text[given[0] : given[-1] + 1]) == text[copy.start : copy.stop]
        assert 0 in drill.marks, "others are not replaced"
    assert sizes == {1, 2, 3, 4}


def test_the_guide_says_where_an_answer_is_copied_from(recipe: Path, edits: ModuleType) -> None:
    import corpus
    import guide

    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.resolve("demo"))
    names = [text.lstrip("Ġ") for text in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    files = [file for file in corpus.read_standard_library() if corpus.is_library(file)][::50]
    chance, words = random.Random(0), ["path", "name", "count", "value"]
    made = [edit for edit in edits.edits(files, words, seed=0) if edit.replaced]
    assert {'"', "'"} & {edit.replaced[0][0] for edit in made}
    dialogues = [edits.dialogue(edit, words, chance) for edit in made]
    assert {1, 4} <= {len(dialogue) for dialogue in dialogues}
    mark, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    for dialogue, document in zip(dialogues, guide.copied(tokenizer, dialogues), strict=True):
        ids, (first, *further) = document.ids, dialogue
        assert all(edit.before == before.after for before, edit in zip(dialogue, further, strict=False))
        answers = [place for place, one in enumerate(ids) if one == mark]
        assert len(answers) == len(dialogue)
        known = [place for place, source in enumerate(document.sources) if source >= 0]
        assert all(names[ids[document.sources[place]]] == names[ids[place]] for place in known)
        renamed = set(range(answers[0] + 2, ids.index(end, answers[0])))
        if first.kind == "rename":
            assert renamed <= set(known) and min(known) == min(renamed), "nothing of a renamed function is new"
        asked = len(tokenizer(f"<|user|>\n{first.request}")["input_ids"])
        changed = [place for place in renamed if document.sources[place] != document.places[place]]
        assert changed and all(document.sources[place] < answers[0] for place in renamed)
        assert all(asked < document.places[place] < answers[0] for place in renamed), "the place is in the code"
        ends = {at: document.ends[at] for at in renamed if document.ends[at] >= 0}
        assert ends and all(document.places[at] < end < answers[0] for at, end in ends.items())
        old = first.replaced[0].strip("'\"")
        looking = {at - 1: looked for at, looked in enumerate(document.marks) if looked >= 0}
        replaced = {at for at, looked in looking.items() if looked > 0}
        assert replaced and all(looking[at] < asked < at < answers[0] for at in replaced)
        assert all(old.endswith(names[ids[looking[at]]]) for at in replaced if first.kind == "rename")
        assert all(old[-1] in names[ids[at - 1]] and old[-1] in names[ids[looking[at]]] for at in replaced)
        assert len(replaced) == len(re.findall(rf"(?<!\w){re.escape(first.replaced[1])}(?!\w)", first.after))
        assert looking.keys() - replaced, "other words are shown, too"
        assert {document.ends[at] for at in changed} <= replaced, "what is new stands before a marked place"
        for before, answer in pairwise(answers):
            copied = [document.places[place] for place in known if place > answer]
            assert copied and min(copied) > before, "the next answer is copied from this one"


def test_guided_attention_is_causal_attention_and_says_what_it_missed(recipe: Path) -> None:
    import guide

    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 200, 8), torch.randn(2, 3, 200, 8), torch.randn(2, 3, 200, 8)
    attention = guide.GuidedAttention()
    wanted = torch.full((2, 200), guide.NOWHERE)
    wanted[0, 150], wanted[1, 7] = 31, 2
    attention.show(*[torch.full_like(wanted, guide.NOWHERE)] * 2, wanted, wanted)
    module = torch.nn.Module()
    module.layer_idx = guide.PLACE_LAYER
    attention(module, query, key, value, None)
    assert float(attention.loss()) == 0, "nothing was shown to this layer"
    module.layer_idx = guide.END_LAYER
    found, _ = attention(module, query, key, value, None)
    repeated = [one.repeat_interleave(2, 1) for one in (key, value)]
    plain = torch.nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True)
    torch.testing.assert_close(found, plain.transpose(1, 2))
    scores = (query @ repeated[0].transpose(-1, -2)) / 8**0.5
    seen = [scores[row, :, at, : at + 1].softmax(-1)[:, to] for row, at, to in ((0, 150, 31), (1, 7, 2))]
    losses = -torch.stack(seen).view(2, 3, 2).add(1e-8).log()
    torch.testing.assert_close(attention.loss(), losses[:, 0].mean(), msg="both heads of its group must look")
    module.layer_idx = guide.TOKEN_LAYERS[-1]
    attention(module, query, key, value, None)
    torch.testing.assert_close(attention.loss(), losses.mean(), msg="all heads must look")


def test_documents_are_packed_whole(recipe: Path) -> None:
    import guide
    import pretrain

    marks = pretrain.Marks(question=60, answer=61, text=0)
    documents = [[1 + number % 50] * length for number, length in enumerate([3, 9, 30, 5, 14, 2, 8, 7, 40, 1] * 8)]
    made = [guide.Document(ids, places=list(range(-1, len(ids) - 1))) for ids in documents]
    stream = pretrain.TokenStream(made, marks, seed=3)
    rows, marked, places, ends, sources = stream._packed(16).unbind(-1)
    starts = (rows == 0) | (rows.roll(1, 1) == 0)  # A mark is copied from nowhere, nor is the token behind it
    before = torch.arange(16).expand_as(rows) - 1
    assert bool((places == torch.where(starts, guide.NOWHERE, before)).all())
    assert all(bool((one == guide.NOWHERE).all()) for one in (marked, ends, sources))
    texts = (text for row in rows.tolist() for text in f" {' '.join(map(str, row))}".split(" 0"))
    found = Counter(tuple(map(int, text.split())) for text in texts)
    assert rows.shape[1] == 16 and bool((rows != 0).sum() == sum(map(len, documents)))
    short = Counter(tuple(document) for document in documents if len(document) < 16)
    assert all(found[document] >= count for document, count in short.items() if len(document) > 2)
    assert torch.equal(stream.batch(5, 64, 16), pretrain.TokenStream(made, marks, seed=3).batch(5, 64, 16))


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


def test_both_roles_train_and_a_stopped_run_goes_on_the_same(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import guide
    import pretrain

    def model(layers: int) -> LlamaForCausalLM:
        torch.manual_seed(layers)
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **shape))

    length = {"tokens": 512, "batch_tokens": 64, "warmup_steps": 2, "phases": ((1.0, 32),), "save_every_s": 0.0}
    schedule = pretrain.Schedule(**length, distill_weight=0.9)
    documents = [[number % 7 + 2 for number in range(start, start + 50)] for start in range(40)]
    marks = pretrain.Marks(question=60, answer=61, text=0)
    for teacher in (None, model(2).eval()):
        whole, stopped, again = model(1), model(1), model(1)
        folder = tmp_path / str(teacher is None)
        stream = pretrain.TokenStream([guide.Document(ids) for ids in documents], marks, seed=1)
        pretrain.train(whole, stream, schedule, folder / "whole", teacher)
        with monkeypatch.context() as patch:
            patch.setattr(pretrain, "_step", _interrupted(pretrain._step, 6))
            with pytest.raises(KeyboardInterrupt):
                pretrain.train(stopped, stream, schedule, folder / "stopped", teacher)
        pretrain.train(again, stream, schedule, folder / "stopped", teacher)
        pairs = zip(whole.parameters(), again.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        before = pretrain.held_out_loss(model(1), documents[:4], 0, 32)
        assert pretrain.held_out_loss(whole, documents[:4], 0, 32) < before - (0.5 if teacher is None else 0.05)


def test_rounds_go_on_behind_the_last_that_left_a_checkpoint(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each starts from the weights of the one before, and keeps its share of them."""
    import make
    import pretrain

    began = list[tuple[str, float]]()

    def train(model: LlamaForCausalLM, _stream: Any, _schedule: Any, folder: Path, teacher: Any) -> None:
        began.append((folder.name, float(model.lm_head.weight.detach().mean())))
        assert (teacher is not None) == (folder.name != "draft-training-2")
        for weight in model.parameters():
            weight.detach().fill_(len(began))

    rounds = [make.Round(pretrain.Schedule(tokens=1), teacher=name, kept=kept) for name, kept in
              (("draft-1", 0.0), ("", 0.0), ("draft-1", 0.5))]  # fmt: skip
    monkeypatch.setattr(make, "ROUNDS", {"draft": tuple(rounds)})
    monkeypatch.setattr(make, "training_documents", lambda *_, **__: [])
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
    assert {float(weight.detach().mean()) for weight in made.parameters()} == {1.5}, (
        "half of the second's 1, half of the third's 2"
    )


def _interrupted(step: Any, last: int) -> Any:
    """The recipe's `step`, until number `last` is to begin."""

    def until(model: Any, stream: Any, schedule: Any, optimizers: Any, number: int, **more: Any) -> Any:
        if number == last:
            raise KeyboardInterrupt
        return step(model, stream, schedule, optimizers, number, **more)

    return until


def test_questions_texts_and_answers_weigh_what_the_schedule_says(recipe: Path) -> None:
    import pretrain

    marks = pretrain.Marks(question=1, answer=2, text=0)
    schedule = pretrain.Schedule(tokens=1, question_weight=0.0, text_weight=0.25, distill_weight=0.5)
    ids = torch.tensor([[9, 9, 0, 8, 1, 7, 7, 2, 5, 5, 0, 8], [2, 5, 1, 7, 2, 5, 5, 5, 5, 0, 8, 8]])
    said, found, taught = marks.asked(ids, schedule)
    assert torch.equal(said, ids[:, 1:])
    torch.testing.assert_close(taught, 0.5 * found)
    assert float(found.sum()) == pytest.approx(1.0)
    first = [0.25] * 4 + [0.0] * 3 + [1.0] * 3 + [0.25]
    second = [0.0] * 4 + [1.0] * 5 + [0.25] * 2  # the first answer's question lies before the piece
    wanted = torch.tensor([first, second])
    torch.testing.assert_close(found, wanted / wanted.sum())
    echo = dataclasses.replace(schedule, teach_answers=False, echo=True)
    said, _, taught = marks.asked(ids, echo)
    assert said.tolist() == [[9, 0, 8, 1, 1, 7, 7, 5, 5, 0, 8], [5, 1, 1, 7, 5, 5, 5, 5, 0, 8, 8]]
    torch.testing.assert_close(taught, torch.where(wanted == 0.25, 0.5 * found, 0.0))


def test_the_leader_board_has_every_kind_of_head(recipe: Path) -> None:
    import head

    given = {"target": "demo", "data": "data", "output": "output"}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(demo.resolve("demo")))
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
            assert len(spaced(asked.draft.options["layers"], model.config.num_hidden_layers)) > 1
            assert asked.objective.depths >= DEPTH


def test_every_head_of_the_leader_board_has_the_same_time(
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
