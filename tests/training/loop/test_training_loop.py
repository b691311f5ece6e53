"""The loop on one process: gradients, optimizers, schedules, logs, trackers, best weights, and every way to end."""

import io
import json
import math
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from torch.overrides import TorchFunctionMode

from forerun.errors import ArgumentError, NumericError
from forerun.losses.objective import FeatureBatch, LossReport, Objective
from forerun.training.loop import trainer
from forerun.training.loop.checkpoint import weights_of
from forerun.training.loop.distributed import Parallel
from forerun.training.loop.trackers import Bar, JsonLines, tracker
from forerun.training.loop.trainer import choose_factor, rate_factor
from forerun.training.loop.update import Muon, build_optimizers
from forerun.training.recipe import TrainSettings
from training.loop.toy import FLOAT, Head, Numbers, Pressed, Toy, logged, run, settings, train, weights


@pytest.mark.parametrize("emulates", [False, True])
def test_a_cpu_that_emulates_bfloat16_trains_in_float32(monkeypatch: pytest.MonkeyPatch, emulates: bool) -> None:
    for module in ("recipe", "loop.update"):
        monkeypatch.setattr(f"forerun.training.{module}.multiplies", lambda *_: not emulates)
    device = torch.device("cpu")
    assert TrainSettings().halves(device) is not emulates
    assert TrainSettings(dtype="bfloat16").halves(device) and not TrainSettings(dtype="float32").halves(device)
    moved, expected = (nn.Parameter(torch.ones(6, 9)) for _ in range(2))
    moved.grad = expected.grad = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    gradient = moved.grad.clone()
    for one, optimizer in ((moved, Muon), (expected, torch.optim.Muon)):
        with _Products() as products:
            optimizer([one], lr=0.1).step()
        assert products.dtypes == {torch.float32 if emulates and one is moved else torch.bfloat16}
    assert torch.equal(moved.grad, gradient), "orthogonalised in a copy"
    assert torch.equal(moved, expected) is not emulates
    torch.testing.assert_close(moved, expected, atol=2e-3, rtol=0)


class _Products(TorchFunctionMode):
    """While open, what dtypes are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.addmm, torch.Tensor.matmul, torch.Tensor.__matmul__):
            self.dtypes.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


def test_optimizers_share_the_trainable_parameters_and_decay_only_matrices() -> None:
    head = Head()
    muon, adam = build_optimizers(head, TrainSettings(optimizer="muon", weight_decay=0.3))
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    of = [[names[id(p)] for group in optimizer.param_groups for p in group["params"]] for optimizer in (muon, adam)]
    assert isinstance(muon, torch.optim.Muon)
    assert of[0] == ["layers.0.weight", "layers.1.weight"]
    biases = ["layers.0.bias", "layers.1.bias", "norm.weight", "norm.bias"]
    assert of[1] == ["lm_head.weight", "embed_tokens.weight", *biases]
    assert [group["weight_decay"] for group in adam.param_groups] == [0.3, 0.0]
    assert muon.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    (only,) = build_optimizers(head, TrainSettings())
    assert sum(len(group["params"]) for group in only.param_groups) == 8


def test_one_step_follows_the_mean_over_counted_tokens(tmp_path: Path) -> None:
    """Against AdamW by hand, with clipping and warm-up."""
    toy, naive = Toy(), Toy()
    values = {"steps": 1, "warmup_steps": 4, "gradient_clip": 0.05, "weight_decay": 0.0}
    result = train(toy, Numbers(), settings(**values), tmp_path)
    report = naive(Numbers().batch(0, 0, 1))
    mean = report.loss / report.weight
    mean.backward()
    trainable = [p for p in naive.head.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trainable, 0.05)
    torch.optim.AdamW(trainable, lr=0.25e-2, betas=(0.9, 0.95), weight_decay=0.0).step()
    for name, tensor in weights(naive.head).items():
        torch.testing.assert_close(weights(toy.head)[name], tensor, rtol=0, atol=1e-6, msg=name)
    (line,) = logged(tmp_path)
    assert result.loss == pytest.approx(mean.item(), rel=1e-6)
    assert line["loss"] == pytest.approx(mean.item(), rel=1e-6)
    assert line["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert line["learning_rate"] == pytest.approx(0.25e-2)
    assert line["tokens"] == result.tokens == 8 * 4, "padding does not count"
    assert 0 <= line["accuracy"] <= 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulation_equals_one_big_batch(tmp_path: Path, optimizer: str) -> None:
    """The parts hold different numbers of counted tokens, so a mean of means would not pass."""
    whole, parts = Toy(), Toy()
    rates = {"optimizer": optimizer, "muon_learning_rate": 1e-3}
    train(whole, Numbers(), settings(steps=3, **rates), tmp_path / "whole")
    train(parts, Numbers(parts=4), settings(steps=3, accumulation=4, **rates), tmp_path / "parts")
    for name, tensor in weights(whole.head).items():
        torch.testing.assert_close(weights(parts.head)[name], tensor, rtol=0, atol=1e-5, msg=name)
    for one, other in zip(logged(tmp_path / "whole"), logged(tmp_path / "parts"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["accuracy"] == other["accuracy"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_learns_in_bfloat16_with_float32_masters(tmp_path: Path, optimizer: str) -> None:
    toy = Toy(head=Head().bfloat16())
    frozen = toy.head.frozen.weight.clone()

    class Same(Numbers):
        def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
            found = super().batch(0, rank, world)
            return FeatureBatch(batch=found.batch, features={0: found.features[0].bfloat16()})

    train(toy, Same(), settings(steps=25, optimizer=optimizer, dtype="bfloat16", learning_rate=3e-2), tmp_path)
    losses = [line["loss"] for line in logged(tmp_path)]
    assert losses[-1] < 0.5 * losses[0]
    assert toy.head.lm_head.weight.dtype == torch.float32
    assert torch.equal(toy.head.frozen.weight, frozen)
    stored = load_file(tmp_path / "checkpoint-25" / "model.safetensors")
    assert stored["layers.0.weight"].dtype == torch.float32
    assert stored["d2t"].dtype == torch.int64


def test_a_step_in_which_nothing_counts_moves_nothing(tmp_path: Path) -> None:
    toy = Toy()
    before = weights(toy.head)
    result = train(toy, Numbers(blank=True), settings(steps=2), tmp_path)
    assert result.steps == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(toy.head).items())


def test_a_loss_that_is_nan_stops_and_names_batch_rank_and_checkpoint(tmp_path: Path) -> None:
    toy = Toy(poison=7)
    with pytest.raises(NumericError) as caught:
        train(toy, Numbers(), settings(steps=9, accumulation=2, save_every_steps=2), tmp_path)
    message = str(caught.value)
    assert "loss of step 4" in message
    assert "batch 7 of rank 0" in message
    assert "checkpoint-2" in message
    stored = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in stored.values())
    assert all(tensor.isfinite().all() for tensor in weights(toy.head).values()), "the step changed nothing"
    assert not (tmp_path / "checkpoint-3").exists()


def test_an_infinite_gradient_stops_too(tmp_path: Path) -> None:
    class Steep(Toy):
        def __call__(self, batch: FeatureBatch) -> LossReport:
            report = super().__call__(batch)
            edge = torch.sqrt(self.head.norm.bias.sum() * 0)  # finite, with an infinite slope
            return LossReport(loss=report.loss + edge, weight=report.weight)

    with pytest.raises(NumericError, match=r"gradient of step 1 is not finite.*batch 0 of rank 0"):
        train(Steep(), Numbers(), settings(), tmp_path)


def test_nothing_to_train_is_refused(tmp_path: Path) -> None:
    toy = Toy()
    toy.head.requires_grad_(False)
    with pytest.raises(ArgumentError, match="no trainable parameter"):
        train(toy, Numbers(), settings(), tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    former = signal.getsignal(number)
    result = run(tmp_path, Pressed(presses={2: [number]}), steps=6)
    assert result.interrupted
    assert result.reason == "interrupted"
    assert result.steps == 3
    assert result.checkpoint == tmp_path / "checkpoint-3"
    assert (result.checkpoint / "state.json").exists()
    assert signal.getsignal(number) is former, "handlers are given back"


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Pressed(presses={1: [signal.SIGINT, signal.SIGINT]}), steps=6)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_training_works_outside_the_main_thread(tmp_path: Path) -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path, steps=1)))
    thread.start()
    thread.join()
    assert len(results) == 1


def test_time_ends_training_with_a_checkpoint(tmp_path: Path) -> None:
    result = run(tmp_path, steps=10_000, max_seconds=0.3)
    assert result.reason == "time"
    assert result.steps < 10_000
    assert result.checkpoint.name == f"checkpoint-{result.steps}"


def test_seconds_are_spent_once_and_the_rate_falls_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second whenever it is read, which is once in a step."""
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=count().__next__))
    asked: dict[str, Any] = {"schedule": "linear", "warmup_steps": 0, "log_every_steps": 1, "steps": None}
    stopped = run(tmp_path, seconds=8.0, max_seconds=12.0, **asked)
    assert stopped.reason == "time" and 1 < stopped.steps < 8
    ended = run(tmp_path, seconds=8.0, **asked)
    assert (ended.reason, ended.steps) == ("finished", 8)
    rates = [line["learning_rate"] / settings().learning_rate for line in logged(tmp_path)]
    assert rates == pytest.approx([1 - step / 8 for step in range(8)])
    again = run(tmp_path, seconds=8.0, **asked)
    assert (again.reason, again.steps) == ("already_finished", 8)
    with pytest.raises(ArgumentError, match=r"training\.seconds was 8\.0, is 16\.0"):
        run(tmp_path, seconds=16.0, **asked)


def test_the_last_steps_are_logged_however_many(tmp_path: Path) -> None:
    run(tmp_path, steps=5, log_every_steps=3)
    assert [line["step"] for line in logged(tmp_path)] == [3, 5]


def test_the_best_weights_are_kept_and_evaluation_leaves_no_trace(tmp_path: Path) -> None:
    """Higher is better; dropout makes a stray random draw visible."""
    scores = {2: 0.5, 4: 0.9, 6: 0.7}
    seen: dict[int, dict[str, torch.Tensor]] = {}
    toy = Toy(head=Head(dropout=0.5))

    def evaluate(step: int) -> dict[str, float]:
        assert not toy.head.training
        torch.rand(17)
        seen[step] = weights(toy.head)
        return {"speed": -step, "acceptance": scores[step]}

    choice = settings(steps=6, eval_every_steps=2, best_metric="acceptance")
    result = train(toy, Numbers(), choice, tmp_path / "with", evaluate=evaluate)
    assert (result.best, result.best_step) == (0.9, 4)
    stored = load_file(tmp_path / "with" / "best" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in seen[4].items())
    record = json.loads((tmp_path / "with" / "best" / "best.json").read_text())
    assert record == {"step": 4, "values": {"speed": -4.0, "acceptance": 0.9}}
    lines = [line for line in logged(tmp_path / "with") if "eval/acceptance" in line]
    assert [(line["step"], line["eval/acceptance"]) for line in lines] == list(scores.items())
    plain = Toy(head=Head(dropout=0.5))
    train(plain, Numbers(), settings(steps=6), tmp_path / "without")
    assert all(torch.equal(weights(plain.head)[name], tensor) for name, tensor in weights(toy.head).items())


def test_a_metric_that_evaluation_does_not_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"best_metric='tau'.*acceptance"):
        train(
            Toy(), Numbers(), settings(steps=1, best_metric="tau"), tmp_path, evaluate=lambda step: {"acceptance": 1.0}
        )


def test_without_a_name_the_first_value_decides_and_nan_never_wins(tmp_path: Path) -> None:
    values: Iterator[float] = iter([1.0, float("nan")])
    result = train(
        Toy(), Numbers(), settings(steps=2, eval_every_steps=1), tmp_path, evaluate=lambda step: {"a": next(values)}
    )
    assert (result.best, result.best_step) == (1.0, 1)
    assert logged(tmp_path)[-1]["eval/a"] is None, "no bare NaN in JSON"


def test_run_json_says_what_the_run_was_made_of(tmp_path: Path) -> None:
    train(Toy(), Numbers(), settings(steps=1, seed=5), tmp_path, recipe={"data": "abc"})
    train(Toy(), Numbers(), settings(steps=2, seed=5), tmp_path, recipe={"data": "abc"}, allow_changes=True)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["seed"] == record["settings"]["seed"] == 5
    assert record["versions"].keys() == {"forerun", "torch", "transformers", "python"}
    assert record["versions"]["torch"] == torch.__version__.split("+")[0] or record["versions"]["torch"]
    assert record["recipe"]["data"] == "abc" and record["recipe"]["training.seed"] == 5
    assert record["argv"]
    assert record["started"].endswith("+00:00")
    assert record["resumed_from"].endswith("checkpoint-1")
    assert [run["steps"] for run in (record, *record["previous"])] == [2, 1]


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    toy = Toy()
    toy.head.lm_head.weight = toy.head.embed_tokens.weight
    assert "lm_head.weight" not in weights_of(toy.head, Parallel())
    train(toy, Numbers(), settings(steps=1), tmp_path)
    again = Toy()
    again.head.lm_head.weight = again.head.embed_tokens.weight
    train(again, Numbers(), settings(steps=1), tmp_path)
    assert torch.equal(again.head.lm_head.weight, toy.head.lm_head.weight)


def test_only_the_first_process_copies_what_is_saved() -> None:
    head = Toy().head
    copies, held = weights_of(head, Parallel()), head.state_dict()
    assert copies.keys() == held.keys()
    for name, copy in copies.items():
        assert (
            torch.equal(copy, held[name])
            and copy.untyped_storage().data_ptr() != held[name].untyped_storage().data_ptr()
        )
    assert weights_of(head, Parallel(rank=1, world=2)) == {}


def test_an_objective_that_is_a_module_does_not_make_the_target_ours(tmp_path: Path) -> None:
    class Owner(nn.Module):
        rates = Objective.rates

        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(3, 3)
            self.toy_head = Head()
            self.toy = Toy(head=self.toy_head)

        def parameters_module(self) -> nn.Module:
            return self.toy_head

        def forward(self, batch: FeatureBatch) -> LossReport:
            return self.toy(batch)

    train(Owner(), Numbers(), TrainSettings(steps=1, **FLOAT), tmp_path)
    assert not [name for name in load_file(tmp_path / "checkpoint-1" / "model.safetensors") if "target" in name]


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_missing_package_is_named_with_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    with pytest.raises(ArgumentError, match=f"pip install {name}"):
        tracker(name, tmp_path, {})


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'wandbb' is unknown.*Did you mean 'wandb'"):
        tracker("wandbb", tmp_path, {})


def test_wandb_gets_every_value_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    fake = SimpleNamespace(
        init=lambda **keywords: calls.append(keywords),
        log=lambda values, step: calls.append((step, values["loss"])),
        finish=lambda: calls.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    opened = tracker("wandb", tmp_path / "run7", {"seed": 1})
    train(Toy(), Numbers(), settings(steps=2), tmp_path / "run7", trackers=[opened])
    losses = [line["loss"] for line in logged(tmp_path / "run7")]
    begun = {"project": "forerun", "name": "run7", "config": {"seed": 1}}
    assert calls == [begun, (1, losses[0]), (2, losses[1]), "finished"]


def test_lines_are_averaged_over_the_steps_between(tmp_path: Path) -> None:
    train(Toy(), Numbers(), settings(steps=3, learning_rate=1e-30), tmp_path / "each")
    train(Toy(), Numbers(), settings(steps=3, learning_rate=1e-30, log_every_steps=3), tmp_path / "three")
    each, three = logged(tmp_path / "each"), logged(tmp_path / "three")
    counts = [float(Numbers().batch(step, 0, 1).batch.loss_mask.sum()) for step in range(3)]
    pooled = sum(line["loss"] * count for line, count in zip(each, counts, strict=True)) / sum(counts)
    assert [line["step"] for line in three] == [3]
    assert three[0]["loss"] == pytest.approx(pooled, rel=1e-6)


def test_a_log_goes_on_after_the_step_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"st')
    lines = JsonLines(path, step=2)
    lines.log(3, {"a": float("inf")})
    lines.close()
    assert logged(tmp_path) == [{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 3, "a": None}]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_shows_loss_rate_and_speed(terminal: bool) -> None:
    text = io.StringIO()
    bar = Bar(lambda: 10, 0, Console(file=text, force_terminal=terminal, width=160))
    bar.log(3, {"loss": 1.25, "learning_rate": 1e-3, "tokens_per_second": 1234.4})
    bar.log(4, {"eval/acceptance": 2.5})
    bar.close()
    how_far = "3/10" if terminal else "step 3 of 10"
    for part in ("loss 1.2500", "rate 1.00e-03", "1,234 tokens/s", how_far, "step 4: acceptance 2.5"):
        assert part in text.getvalue()


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"learning_rate": 0.0}, "greater than 0"),
        ({"learning_rate": math.nan}, "a finite number"),
        ({"learning_rate": "fast"}, "a valid number"),
        ({"steps": 0}, "greater than or equal to 1, or none"),
        ({"steps": 2.5}, "a valid integer, or none"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"optimizer": "sgd"}, "'adamw' or 'muon'"),
        ({"schedule": "linaer"}, "'cosine', 'linear' or 'constant', got 'linaer'. Did you mean 'linear'"),
        ({"warmup_share": 1.5}, "less than or equal to 1"),
        ({"accumulation": True}, "a valid integer"),
        ({"max_seconds": -1.0}, "greater than 0, or none"),
        ({"dtype": "float16"}, "'auto', 'bfloat16' or 'float32'"),
    ],
)
def test_a_bad_value_is_refused_by_field_value_and_what_is_allowed(values: dict[str, Any], allowed: str) -> None:
    name, value = next(iter(values.items()))
    with pytest.raises(ArgumentError) as caught:
        TrainSettings(**values)
    wrong = value[1] if isinstance(value, tuple) else value
    assert f"{name} must be" in str(caught.value) and f"got {wrong!r}" in str(caught.value)
    assert allowed in str(caught.value)


def test_steps_come_from_epochs_unless_given() -> None:
    assert TrainSettings(epochs=2.0).total_steps(10) == 20
    assert TrainSettings(epochs=0.5, accumulation=2).total_steps(10) == 3
    assert TrainSettings(epochs=0.001).total_steps(10) == 1
    assert TrainSettings(steps=7, epochs=3.0).total_steps(10) == 7


def test_steps_come_from_the_pace_where_seconds_end_a_run() -> None:
    settings = TrainSettings(seconds=60.0)
    assert settings.total_steps(10) == 10, "before the first step"
    assert settings.total_steps(10, step=1, spent=2.0) == 30
    assert settings.total_steps(10, step=50, spent=30.0) == 100
    assert settings.total_steps(10, step=50, spent=59.9) == 51, "there is time left, so there is another step"
    assert settings.total_steps(10, step=50, spent=60.0) == 50


def test_steps_and_seconds_are_not_given_both() -> None:
    with pytest.raises(ArgumentError, match="steps and seconds both say when training ends"):
        TrainSettings(steps=5, seconds=5.0)


def test_warmup_in_steps_beats_the_share() -> None:
    assert TrainSettings(warmup_share=0.25).warmup(40) == 10
    assert TrainSettings(warmup_steps=3, warmup_share=0.25).warmup(40) == 3


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 0.55, 0.2318, 0.1]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedule_values(shape: str, values: list[float]) -> None:
    settings = TrainSettings(warmup_steps=2, schedule=shape, min_rate_share=0.1)
    found = [rate_factor(step, 6, settings) for step in range(7)]
    assert found == pytest.approx(values, abs=1e-4)


def test_no_step_of_a_run_has_rate_zero() -> None:
    for shape in ("cosine", "linear"):
        settings = TrainSettings(warmup_steps=0, schedule=shape)
        assert all(rate_factor(step, 5, settings) > 0 for step in range(5))
        assert rate_factor(0, 1, settings) == 1.0
    assert rate_factor(0, 1, TrainSettings(warmup_steps=1, schedule="linear")) == 1.0


def test_without_a_number_a_tenth_of_the_run_lies_between_evaluations() -> None:
    settings = TrainSettings()
    found, former = list[int](), 0
    for step in range(1, 1001):
        if settings.evaluates(step, former, 1000):
            found.append(step)
            former = step
    assert found == [*range(100, 1001, 100)]
    assert not any(settings.evaluates(step, 0, 40) for step in range(40)), "a short run is evaluated at its end"
    assert not settings.evaluates(100, 0, 1000, share=0.5), "evaluations took half as long as all steps"
    assert not TrainSettings(eval_every_steps=0).evaluates(100, 0, 1000)


def test_training_ends_where_evaluation_no_longer_gains(tmp_path: Path) -> None:
    scores = iter([1.0, 2.0, 1.5, 2.0, 9.0])
    choice = settings(steps=20, eval_every_steps=2, patience=2)
    result = train(Toy(), Numbers(), choice, tmp_path, evaluate=lambda step: {"a": next(scores)})
    assert (result.reason, result.steps, result.best_step) == ("no_gain", 8, 4)
    assert result.checkpoint.name == "checkpoint-8"


def test_a_range_test_takes_what_learns_fastest_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's rate is a factor on the recipe's; from there the run is one that began with that rate."""
    monkeypatch.setattr(trainer, "ALIKE", 0.0)  # the toy learns little in a few steps
    found = run(tmp_path / "found", steps=6, find_rate=True, learning_rate=1e-3)
    lines = logged(tmp_path / "found")
    losses = {name: value for name, value in lines[0].items() if name.startswith("loss at")}
    rate = lines[1]["found_learning_rate"]
    assert len(losses) == 4 and rate > 1e-3
    given = run(tmp_path / "given", steps=6, learning_rate=rate)
    assert found.loss == pytest.approx(given.loss)


@pytest.mark.parametrize(
    ("losses", "best"),
    [({1.0: math.inf}, 1.0), ({1.0: 2.0, 3.0: 1.9, 10.0: 1.0}, 10.0), ({1.0: 2.0, 3.0: 1.9}, 1.0)],
)
def test_of_factors_that_are_alike_the_lowest_is_taken(losses: dict[float, float], best: float) -> None:
    assert choose_factor(losses) == best
