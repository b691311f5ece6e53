"""`forerun train eagle3` from prepared data to a head that drafts."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from forerun.cli import main
from forerun.errors import ArgumentError, DataError, OutOfMemoryError
from forerun.heads.files import HeadCheckpoint, TargetFacts, read_head, write_head
from forerun.model.identity import fingerprint
from forerun.training import run
from forerun.training.data.store import UNWRITTEN, about_answers, runs_in_circles, write_prepared
from forerun.training.dry_run import plan
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import EvaluationRecipe, EvaluationSettings, read_recipe
from forerun.training.run import open_frozen_target
from forerun.training.trained import TRAINED, Trained, TrainedHead, head_shapes, metric_names
from forerun.types import SpeculationStats
from forerun.writing import TokenizerIdentity, alone
from llamas import tiny_llama
from selection import slow
from training.conftest import Trainer, drafts, in_two_processes, logged, words
from training.data.conftest import store
from training.ttt import VOCABULARY, head, model, tokens


def test_training_makes_a_head_that_drafts_and_resumes(train: Trainer) -> None:
    early = train(train.eagle3(2))
    late = train(train.eagle3(40, "--allow-changes"))
    assert late["steps"] == 40
    assert late["best"] > max(1.5, early["best"]), "it started well already"
    assert train.log("eval/tree_t1")
    assert drafts(train.target, "eagle3", late["head"], top_k=2, nodes=6) > 1.2
    assert read_head(late["head"]).target == fingerprint(train.target)


def test_a_head_that_was_trained_for_other_weights_is_loaded_with_a_warning(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = HeadCheckpoint.of(head())
    for trained_for, warns in ((fingerprint(target), 0), ("another", 1), (None, 0)):
        caplog.clear()
        facts = TargetFacts.read(target)
        written = write_head(replace(stored, target=trained_for), tmp_path / str(trained_for), "flat", facts)
        drafts(target, "eagle3", written, top_k=2, nodes=6)
        assert caplog.text.count("another revision of the model") == warns


@pytest.mark.parametrize(
    ("kind", "more", "named"),
    [
        ("eagle3", (), ["target"]),
        ("distill", ("draft.start={}", "objective.reference={}"), ["draft.start", "target", "objective.reference"]),
        ("layerskip", (), ["target", "target"]),
    ],
)
def test_models_that_do_not_fit_beside_each_other_are_told_of_before_one_is_loaded(
    kind: str, more: tuple[str, ...], named: list[str], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained one with gradients and AdamW's moments: four times its weights."""
    places = {"target": str(target), "data": "nowhere", "output": "nowhere"}
    recipe = read_recipe(kind, None, ["target_dtype=float32", *(word.format(target) for word in more)], places)
    weights = sum(tensor.nbytes for tensor in load_file(target / "model.safetensors").values())
    needed = weights * sum(4 if place == 0 and len(named) > 1 else 1 for place in range(len(named)))
    monkeypatch.setattr(run, "open_frozen_target", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setattr(run, "available_bytes", lambda _device: needed - 1)
    with pytest.raises(OutOfMemoryError, match=", ".join(rf"[\d.]+ for {name} \(.*" for name in named)):
        run.TrainingRun(recipe, Parallel())
    monkeypatch.setattr(run, "available_bytes", lambda _device: needed)
    with pytest.raises(pytest.fail.Exception, match="the target was loaded"):
        run.TrainingRun(recipe, Parallel())


def test_evaluation_drafts_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that does not pay: what is asked is how often the head is right."""
    measured, stats = list[list[SpeculationStats]](), run._stats
    monkeypatch.setattr(run, "_stats", lambda *given: measured.append(stats(*given)) or measured[-1])
    prompts, settings = [tokens(3), tokens(5)], EvaluationSettings(max_tokens=24, num_speculative_tokens=3, nodes=6)
    found = run.evaluate(head_shapes(head(), model(), settings), model(), prompts, settings)
    known = set(metric_names(TrainedHead.drafts_by, 3))
    assert {name for name in found if not name.endswith("_interval")} == known
    assert {"chain_t0", "tree_t0", "chain_t1", "tree_t1", "acceptance_0", "acceptance_2"} <= found.keys()
    assert len(measured) == 4
    assert 0 <= found["chain_t0_interval"] < 3, "of two prompts"
    for each, of in zip(measured, ("", "tree_t0_", "chain_t1_", "tree_t1_"), strict=True):
        one = SpeculationStats.sum(each)
        assert [found[f"acceptance_{of}{depth}"] for depth in range(3)] == one.acceptance_per_depth
        assert one.num_plain_steps <= len(prompts), "an answer's last token needs no draft"
        assert one.num_spec_steps > 20 and one.drafted_per_depth[0] == one.num_spec_steps


def test_a_prompt_ends_where_the_answer_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a conversation; of plain text it is the beginning. What is too long is left out, not cut in the middle."""
    answered = [([*range(9), 20, 21], [False] * 9 + [True] * 2), ([1, 2, 3, 4, 5, 6], [False] * 3 + [True] * 3)]
    asked, text = ([5, 6, UNWRITTEN], [False, False, True]), ([*range(10, 17)], [True] * 7)
    identity = TokenizerIdentity(name="other", vocab_size=40, vocabulary="v", template="t")
    data = write_prepared(tmp_path / "data", [*answered, asked, text], identity)
    prompts = [[*range(9)], [1, 2, 3], [5, 6], [*range(10, 16)]]
    assert run.select_prompts(data, EvaluationRecipe(prompt_tokens=6)) == prompts[1:]
    assert "3 of 4 documents" in caplog.text
    assert run.select_prompts(data, EvaluationRecipe(prompt_tokens=9, count=3)) == prompts[:3]
    only = write_prepared(tmp_path / "long", answered, identity)
    with pytest.raises(DataError, match="prompt_tokens=2; the shortest has 3 tokens"):
        run.select_prompts(only, EvaluationRecipe(prompt_tokens=2))


@pytest.mark.parametrize(
    ("kind", "words", "named"),
    [
        ("eagle3", ["training.best_metric=chain"], "best_metric='chain' is not .* Did you mean 'chain_t"),
        ("layerskip", ["training.best_metric=chain_half_t2"], "Did you mean 'chain_half_t"),
        ("distill", ["draft.start=a", "training.best_metric=acceptance_5"], "acceptance_4, "),
    ],
)
def test_a_metric_that_no_evaluation_gives_is_told_before_loading(kind: str, words: list[str], named: str) -> None:
    places = {"target": "nowhere", "data": "nowhere", "output": "nowhere"}
    recipe = read_recipe(kind, None, [*words, "evaluation.prompts=x"], places)
    with pytest.raises(ArgumentError, match=named):
        run.TrainingRun(recipe, Parallel())


VARIANTS = {
    "3.1": "{fc_norm: true, norm_output: true}",
    "speculators": "{norm_before_fc: true, norm_before_residual: true, qk_norm: true}",
    "own-embedding": "{own_embedding: true, num_hidden_layers: 2}",
    "no-lm-head": "{own_lm_head: false}",
}


@pytest.mark.parametrize(
    ("given", "training", "variant"),
    [
        *(("bfloat16", "bfloat16", variant) for variant in ("speculators", "own-embedding")),
        *(("float16", "float32", "no-lm-head"), ("float32", "bfloat16", "3.1")),
    ],
)
def test_every_dtype_of_both_is_planned_and_trained(given: str, training: str, variant: str, train: Trainer) -> None:
    """Online, where the features have the target's dtype."""
    more = [f"target_dtype={given}", "objective.steps=2", "draft.vocab_size=null", f"draft.options={VARIANTS[variant]}"]
    is_planned_and_trained(train, training, *more)


def is_planned_and_trained(train: Trainer, dtype: str, *more: str) -> None:
    line = train.eagle3(2, f"training.dtype={dtype}", "evaluation.prompts=null", *more)
    assert main([*line, "--dry-run"]) == 0 and not (train.folder / "run").exists()
    assert main(line) == 0
    losses = train.log("loss")
    assert losses and all(0 < loss < 10 for loss in losses)


@pytest.mark.parametrize(
    ("stored", "training"),
    [("bfloat16", "float32"), ("float8", "bfloat16"), *slow(("float16", "float32"), ("float32", "bfloat16"))],
)
def test_every_stored_dtype_is_planned_and_trained(stored: str, training: str, train: Trainer) -> None:
    """Offline, where the features have the store's dtype."""
    store = train.folder / "features"
    where = ("--target", str(train.target), "--data", str(train.prepared), "--output", str(store))
    assert main(["features", *where, "--boundaries", "1,2,3", "--dtype", stored, "--no-probe", "--yes"]) == 0
    is_planned_and_trained(train, training, "mode=offline", f"features={store}")


def test_prompts_of_another_tokenizer_are_refused(train: Trainer, tmp_path: Path) -> None:
    identity = TokenizerIdentity(name="other", vocab_size=40, vocabulary="v", template="t")
    write_prepared(tmp_path / "prompts", [([1, 2, 3], [False, True, True])], identity)
    said = train.refused(train.eagle3(1, f"evaluation.prompts={tmp_path / 'prompts'}"))
    assert "was prepared with the tokenizer of 'other'" in said


def test_tokens_beyond_an_embedding_are_told_of_before_training(train: Trainer, tmp_path: Path) -> None:
    """Of the target, and of a draft model with the target's own tokenizer; whether they are trained on or decoded."""
    tokenizer = TokenizerIdentity.of(PreTrainedTokenizerFast.from_pretrained(train.target))
    for name, token in (("beyond", VOCABULARY), ("last", VOCABULARY - 1)):
        write_prepared(tmp_path / name, [([1, token, 3], [False, True, True])], tokenizer)
    for key in ("data", "evaluation.prompts"):
        said = train.refused(train.eagle3(1, f"{key}={tmp_path / 'beyond'}"))
        assert f"holds token id {VOCABULARY}, and the target" in said and f"has {VOCABULARY}" in said
    small = shutil.copytree(train.target, tmp_path / "small")
    tiny_llama(VOCABULARY - 1, num_hidden_layers=2).save_pretrained(small)
    said = train.refused(train.line("distill", 1, f"data={tmp_path / 'last'}", "--draft", str(small)))
    assert f"holds token id {VOCABULARY - 1}, and the draft model" in said


def test_a_second_run_into_one_output_is_refused(train: Trainer, tmp_path: Path) -> None:
    made = train.eagle3(1, "evaluation.prompts=null")
    with alone(tmp_path / "run") as first:
        assert first and "another run is training into" in train.refused(made)
        assert main([*made, "--dry-run"]) == 0
    assert main(made) == 0


def test_a_recipe_file_yields_to_flags_and_words(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("target: a\ndata: b\noutput: c\ntraining: {learning_rate: 1e-3, steps: 5}\n")
    words = ["training.steps=9", "objective.divergence=lk"]
    recipe = read_recipe("eagle3", file, words, {"target": "z", "features": None})
    assert (recipe.target, recipe.data, recipe.training.steps) == ("z", "b", 9)
    assert recipe.training.learning_rate == 1e-3
    assert recipe.objective.divergence.value == "lk"


def test_a_section_in_a_word_leaves_what_it_does_not_name(tmp_path: Path) -> None:
    """`training.seconds` before it, or a file's, must not be lost silently."""
    file = tmp_path / "recipe.yaml"
    file.write_text("training: {learning_rate: 1e-3}\ndraft: {options: {fc_norm: true, norm_output: true}}\n")
    words = ["training.seconds=6", "training={warmup_steps: 7}", "draft={options: {norm_output: false}}"]
    recipe = read_recipe("eagle3", file, words, {"target": "a", "data": "b", "output": "c"})
    training = recipe.training
    assert (training.learning_rate, training.warmup_steps, training.seconds) == (1e-3, 7, 6)
    assert recipe.draft.options == {"fc_norm": True, "norm_output": False}


LEAST = {
    **{f"evaluation.settings.{name}": 1 for name in ("num_speculative_tokens", "top_k", "nodes", "rows")},
    **{f"evaluation.{name}": 1 for name in ("count", "prompt_tokens")},
    **{"evaluation.settings.max_tokens": 2, "evaluation.settings.seed": 0, "draft.vocab_size": 1},
    **{"windows.length": 2, "windows.rows": 1, "windows.min_tokens": 1},
    **{"objective.lk_decay": 0, "objective.noise": 0},
}
"""Key of a recipe -> the least that it may be."""


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("training.learning_rat=1", r"unknown key 'training\.learning_rat'\. Did you mean 'training\.learning_rate'"),
        ("learning_rat=1", r"unknown key 'learning_rat'\. Did you mean 'training\.learning_rate'"),
        ("steps=5", r"Did you mean 'objective\.steps' or 'training\.steps'"),
        ("training={learning_rat: 1, steps: 0}", r"training\.steps must be .*1, or none, got 0\..*learning_rat'"),
        ("training.learning_rate=-1", r"training\.learning_rate must be greater than 0, got -1"),
        ("training=5", "training holds further keys, got 5"),
        ("data=null", "data must be a valid string, got None"),
        ("trackers=wandb", "trackers must be a valid array, got 'wandb'"),
        ("objective.divergence=kl", "cross_entropy"),
        ("mode=ofline", "'online' or 'offline', got 'ofline'. Did you mean 'offline'"),
        ("target_parallel=pp", "'fsdp' or 'tp'"),
        ("steps", "key=value"),
        *((f"{key}={low - 1}", rf"{key} must be .*{low}.*, got {low - 1}") for key, low in LEAST.items()),
        ("objective.mix=7", r"objective\.mix must be less than or equal to 1, got 7"),
        ("training.eval_every_steps=5", "name prepared data, held out, in evaluation.prompts"),
        ("training.best_metric=chain_t0", "name prepared data, held out, in evaluation.prompts"),
        ("windows.length=long", "windows.length"),
        ("training.steps=0", "steps"),
        ("training.steps.more=1", r"training\.steps must be a valid integer, or none, got \{'more': 1\}"),
    ],
)
def test_a_wrong_word_is_refused_by_name(word: str, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        read_recipe("eagle3", None, [word], {"target": "a", "data": "b", "output": "c"})


SPREADS = {
    "ddp": [],
    "fsdp": ["target_parallel=fsdp", "--parallel", "fsdp"],
    "tp": ["target_parallel=tp"],
    "tp-fsdp": ["target_parallel=tp", "--parallel", "fsdp"],
}
"""How two processes share the head and the target."""


def lines_of(target: Path, prepared: Path, output: Path, rows: int, *more: str) -> list[str]:
    return [*words(target, prepared, output, 5), f"windows.rows={rows}", "training.log_every_steps=1", *more]


@pytest.fixture(scope="module")
def trained(target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process trains, in ``one``, and what two do, in a directory for each of `SPREADS`; two plans."""
    folder = tmp_path_factory.mktemp("spread")
    assert main(lines_of(target, prepared, folder / "one", 4)) == 0
    runs = [lines_of(target, prepared, folder / name, 2, *more) for name, more in SPREADS.items()]
    shutil.copytree(folder / "one", folder / "resumed")
    runs += [lines_of(target, prepared, folder / "resumed", 2, "--parallel", "fsdp")]
    runs += [lines_of(target, prepared, folder / "none", 2, *SPREADS[name], "--dry-run") for name in ("ddp", "tp-fsdp")]
    (folder / "said").write_text(in_two_processes(runs))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
def test_two_processes_train_the_head_that_one_trains(trained: Path, spread: str) -> None:
    """In float32: losses and norms of the gradient to 1e-5, weights to 2e-5 (they moved by 1e-2)."""
    one, other = (load_file(trained / name / "head" / "model.safetensors") for name in ("one", spread))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=2e-5, rtol=1e-4, msg=name)
    for value in ("loss", "gradient_norm", "acceptance_0", "tokens"):
        found = logged(trained / spread, value)
        assert len(found) == 5
        assert found == pytest.approx(logged(trained / "one", value), rel=1e-5)
    assert logged(trained / spread, "eval/chain_t0") == logged(trained / "one", "eval/chain_t0")


@pytest.mark.slow
def test_a_plan_counts_what_all_processes_take(trained: Path) -> None:
    planned = re.findall(r'"steps": (\d+),\s*"tokens_per_step": (\d+)', (trained / "said").read_text())
    assert planned == [("5", "256")] * 2
    assert not (trained / "none").exists()


@pytest.mark.slow
def test_two_processes_go_on_with_half_the_rows_of_one(trained: Path) -> None:
    assert re.findall(r'"reason": "(\w+)"', (trained / "said").read_text()) == ["finished"] * 4 + ["already_finished"]


def test_a_target_whose_heads_cannot_be_split_is_refused(target: Path) -> None:
    with pytest.raises(ArgumentError, match="3 processes as many key-value heads, but the target has 2"):
        open_frozen_target(str(target), "float32", "tp", Parallel(world=3))


@pytest.mark.parametrize("trained", TRAINED.values())
def test_a_new_run_replaces_no_folder_that_no_run_has_written(trained: type[Trained], tmp_path: Path) -> None:
    trained.check_output(tmp_path)
    (tmp_path / trained.folder).mkdir()
    (tmp_path / trained.folder / "weights.bin").write_text("somebody's")
    with pytest.raises(ArgumentError, match=r"would be (replaced|deleted)"):
        trained.check_output(tmp_path)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "hydra", "kangaroo", "mlp_speculator", "peagle"])
def test_a_fresh_head_is_planned_from_its_configuration(
    kind: str, train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for word in train.line(kind, 300)[3:] if "=" in word]
    places = {"target": str(train.target), "data": str(train.prepared), "output": str(train.folder / "run")}
    options = ["draft.options={boundaries: [1, 2, 3]}"] if kind in ("eagle3", "peagle") else []
    recipe = read_recipe(kind, None, [*words, *options], places)
    loaded = run.TrainingRun(recipe, Parallel())
    trainable = sum(weight.numel() for weight in loaded.module.parameters() if weight.requires_grad)
    monkeypatch.setattr(run, "open_frozen_target", lambda *_: pytest.fail("the target was loaded"))
    found = plan(recipe, Parallel())
    assert found["trainable_parameters"] == trainable and found["seconds_per_step"] > 0
    assert found["passes"] == pytest.approx(300 / loaded.batches.steps_per_epoch)
    assert any("passes over the data" in sentence for sentence in found["advice"])


def test_many_passes_long_documents_and_what_is_not_held_out_are_told(train: Trainer) -> None:
    more = ["windows.length=16", "objective.steps=7", "draft.options={boundaries: [1, 2, 3]}", "draft.vocab_size=8"]
    assert main([word for word in train.line("eagle3", 2000, *more, "--dry-run") if word != "--json"]) == 0
    said = train.capsys.readouterr().out
    for part in ("2,000 steps are", "overfits", "splits", "evaluation.prompts", "objective.steps=5", "vocabulary of 8"):
        assert part in said
    assert json.loads(said[said.index("{") :])["training"]["steps"] == 2000


def test_prompts_that_are_trained_on_are_told_of(train: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    own = [f"evaluation.prompts={train.prepared}", "evaluation.count=2", "training.seconds=1e-6"]
    more = ["draft.options={boundaries: [1, 2, 3]}", *own]
    line = [
        word
        for word in train.line("eagle3", 1, *more, "--dry-run")
        if not word.startswith(("--json", "training.steps"))
    ]
    assert main(line) == 0
    said = " ".join(train.capsys.readouterr().out.split())
    assert "2 of 2 prompts of evaluation.prompts begin documents of" in said and "1 step is" in said
    assert "A single step takes longer than training.seconds=1e-06" in said


def test_circles_and_silence_are_told_of(tmp_path: Path) -> None:
    circle, text = [*range(20), *[5, 6, 7] * 20], [*range(90)]
    assert runs_in_circles(np.array(circle)) and not runs_in_circles(np.array(text))
    assert not runs_in_circles(np.array([1] * 20)), "too short to say"
    documents = [(ids, [False] + [True] * (len(ids) - 1)) for ids in (circle, text, [1, 2])]
    circles, silence = about_answers(store(tmp_path / "odd", documents))
    assert circles.startswith("33% of the answers run in circles") and silence.startswith("33% of the answers have two")
    assert list(about_answers(store(tmp_path / "plain", documents[1:2]))) == []
