"""What a training step of an EAGLE-3 head costs, beside its matrix products run alone: ``python step_cost.py``.

The step is the loop's own (`forerun.training.loop`). Its products are recorded while one step runs and then replayed:
the same shapes and strides, in bfloat16, not prepacked, nothing between them. Attention of the frozen target is one
fused operator; it is replayed as its two dense products. Products that the step computes twice (scores of attention in
the backward pass) are in both; Muon's own products are not counted. Replayed operands are shared by shape, so they are
warmer in the cache than in the step: the share is a lower bound. Steps and products take turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
from common import Clock, WindowBatches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.suite.goals import at_least
from forerun.heads.eagle import Eagle3Objective, Eagle3Settings, EagleConfig, EagleHead, UnrolledStep
from forerun.losses.objective import FeatureBatch, FrozenTarget, LossReport
from forerun.training.features.online import OnlineFeatures
from forerun.training.loop.distributed import Parallel, wrap_parallel
from forerun.training.loop.update import backward, build_optimizers, scale, set_rate
from forerun.training.recipe import TrainSettings

GOAL = 0.3
"""Share of a step's time that its matrix products take at least."""
PHASES = ("features", "unroll", "loss", "backward", "optimizer")
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


class TimedObjective(Eagle3Objective):
    """Splits its forward pass: the head's layers, and the rest, which is the loss and its gradients."""

    def __init__(self, clock: Clock, *parts: Any) -> None:
        super().__init__(*parts)
        self.clock = clock

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """As it is; ``loss`` is what the head's layers leave of it."""
        layers = self.clock.seconds["unroll"]
        with self.clock.phase("loss"):
            report = super().__call__(batch)
        self.clock.seconds["loss"] -= self.clock.seconds["unroll"] - layers
        return report

    def unroll(self, batch: FeatureBatch) -> Iterator[UnrolledStep]:
        """Step by step, each timed."""
        steps = super().unroll(batch)
        while True:
            with self.clock.phase("unroll"):
                step = next(steps, None)
            if step is None:
                return
            yield step


class Step:
    """One optimizer step of the training loop, on the next windows."""

    def __init__(self, arguments: argparse.Namespace, model: Any, windows: Tensor, steps: int) -> None:
        self.clock = Clock(arguments.device)
        self.settings = TrainSettings(steps=10_000, optimizer=arguments.optimizer)
        head = EagleHead.initial(
            model, EagleConfig.for_target("eagle3", model, None, {"own_lm_head": arguments.lm_head == "own"})
        )
        self.head = head.to(model.device).train()
        settings = Eagle3Settings(steps=steps, gradient_checkpointing=arguments.gradient_checkpointing)
        objective = TimedObjective(self.clock, self.head, FrozenTarget.of(model), settings)
        source = OnlineFeatures(model, self.head.config.boundaries)
        self.batches = WindowBatches(windows=windows, rows=arguments.rows, source=source, clock=self.clock)
        self.parallel = Parallel(device=model.device)
        self.model = wrap_parallel(objective, self.parallel)
        self.optimizers = build_optimizers(self.head, self.settings)
        self.position = 0

    def __call__(self) -> None:
        """Move the weights once."""
        self.move(self.gradient())
        self.position += 1

    def gradient(self) -> float:
        """Features, forward and backward; the number of counted predictions."""
        before = dict(self.clock.seconds)
        with self.clock.phase("backward"):
            sums = backward(self.model, self.batches, self.position, 0.0, self.settings, self.parallel)
        inner = sum(self.clock.seconds[name] - before.get(name, 0.0) for name in ("features", "unroll", "loss"))
        self.clock.seconds["backward"] -= inner
        return sums.weight

    def move(self, weight: float) -> None:
        """Clip and let the optimizers step."""
        with self.clock.phase("optimizer"):
            scale(self.head, 1 / weight, self.settings.gradient_clip)
            set_rate(self.optimizers, 1.0, {})
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix product, (n, k) @ (k, m) or the same with a batch in front."""

    left: Layout
    right: Layout
    attention: bool = False

    @property
    def flop(self) -> float:
        """Multiplications and additions."""
        size = 1.0
        for extent in (*self.left[0], self.right[0][-1]):
            size *= extent
        return 2 * size


class Recorder(TorchDispatchMode):
    """Notes the matrix products of what runs inside, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self._note(args[0], args[1])
        elif name in ("addmm", "baddbmm"):
            self._note(args[1], args[2])
        elif name == "linear":
            flat = args[0].flatten(0, -2)
            self._note(flat, args[1].T)
        elif name.startswith("_scaled_dot_product"):
            self._attention(*args[:3])
        return func(*args, **(kwargs or {}))

    def _note(self, left: Tensor, right: Tensor) -> None:
        self.products.append(Product(left=_layout(left), right=_layout(right)))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        rows, queries, keys = query.shape[0] * query.shape[1], query.shape[2], key.shape[2]
        shapes = [((queries, query.shape[3]), (query.shape[3], keys)), ((queries, keys), (keys, value.shape[3]))]
        for left, right in shapes:
            pair = (_dense((rows, *left)), _dense((rows, *right)))
            self.products.append(Product(left=pair[0], right=pair[1], attention=True))


def _layout(tensor: Tensor) -> Layout:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return (shape, strides) if 0 not in strides else _dense(shape)


def _dense(shape: tuple[int, ...]) -> Layout:
    return shape, tuple(torch.empty(shape, device="meta").stride())


def replayed(products: Sequence[Product], device: str) -> Callable[[], None]:
    """A function that runs the products, in their order, in bfloat16."""
    operands: dict[Layout, Tensor] = {}
    for layout in {layout for product in products for layout in (product.left, product.right)}:
        operands[layout] = torch.empty_strided(*layout, dtype=torch.bfloat16, device=device).normal_()
    calls = [(torch.mm if len(p.left[0]) == 2 else torch.bmm, operands[p.left], operands[p.right]) for p in products]

    @torch.no_grad()
    def run() -> None:
        for multiply, left, right in calls:
            multiply(left, right)

    return run


@dataclass(kw_only=True, slots=True)
class Arm:
    """One number of unrolled steps T: the training step and its products."""

    steps: int
    step: Step
    products: Sequence[Product]
    replay: Callable[[], None]
    step_seconds: list[float]
    product_seconds: list[float]
    phases: list[Mapping[str, float]]

    def measure(self) -> None:
        """One step and one replay."""
        clock = self.step.clock
        clock.seconds.clear()
        self.step_seconds.append(_seconds(self.step, clock))
        self.phases.append(dict(clock.seconds))
        self.product_seconds.append(_seconds(self.replay, clock))

    def report(self, tokens: int) -> dict[str, Any]:
        """Medians."""
        step, products = statistics.median(self.step_seconds), statistics.median(self.product_seconds)
        flop = sum(product.flop for product in self.products)
        phases = {name: statistics.median(found[name] for found in self.phases) * 1e3 for name in PHASES}
        return {
            "T": self.steps,
            "step_ms": step * 1e3,
            "step_ms_quartiles": [value * 1e3 for value in _quartiles(self.step_seconds)],
            "tokens_per_second": tokens / step,
            "products_ms": products * 1e3,
            "products_gflop": flop / 1e9,
            "products_tflop_per_second": flop / products / 1e12,
            "products": len(self.products),
            "share": products / step,
            "phases_ms": phases,
        }


def _seconds(work: Callable[[], None], clock: Clock) -> float:
    clock.wait()
    began = time.perf_counter()
    work()
    clock.wait()
    return time.perf_counter() - began


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4)[::2] if len(values) > 1 else [values[0], values[0]]


def prepare(arguments: argparse.Namespace, model: Any, windows: Tensor, steps: int) -> Arm:
    """Warm up, and record the products of one step."""
    step = Step(arguments, model, windows, steps)
    for _ in range(arguments.warmup):
        step()
    with Recorder() as recorder:
        weight = step.gradient()
    step.move(weight)
    replay = replayed(recorder.products, arguments.device)
    replay()
    return Arm(
        steps=steps,
        step=step,
        products=recorder.products,
        replay=replay,
        step_seconds=[],
        product_seconds=[],
        phases=[],
    )


def operators(arm: Arm, count: int) -> str:
    """The operators of one step by their own time, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    on_device = arm.step.clock.device.startswith("cuda")
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=kinds) as profiler:
        arm.step()
    order = "self_cuda_time_total" if on_device else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=order, row_limit=count, max_name_column_width=40))


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--target", default="demo", help="directory, hub id or shipped model")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 7], help="T, how often the head is unrolled")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--rows", type=int, default=2, help="windows of a step")
    parser.add_argument("--repeats", type=int, default=30, help="measured steps for each T")
    parser.add_argument("--warmup", type=int, default=5, help="steps before that")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--lm-head", choices=("own", "shared"), default="own", help="trained, or the target's, frozen")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--operators", type=int, default=0, help="also list so many operators by their own time")
    return parser.parse_args(words)


def main() -> None:
    """Measure, and write the entry ``step_cost`` of training.json."""
    arguments = arguments_of()
    machine = common.start(arguments)
    model, tokenizer = common.load_target(arguments.target, arguments.device, "bfloat16")
    windows = common.text_windows(tokenizer, 32 * arguments.rows, arguments.length)
    arms = [prepare(arguments, model, windows, steps) for steps in arguments.steps]
    for number in range(arguments.repeats):
        common.say(f"round {number + 1} of {arguments.repeats}")
        for arm in arms if number % 2 else reversed(arms):
            arm.measure()
    found = [arm.report(arguments.rows * arguments.length) for arm in arms]
    goals = [
        at_least(
            f"matrix products alone / training step, T = {line['T']}",
            GOAL,
            line["share"],
            f"{line['products_ms']:.0f} ms of {line['step_ms']:.0f} ms",
        )
        for line in found
    ]
    head = arms[0].step.head
    report = {
        "machine": machine,
        "settings": vars(arguments),
        "products": "of features, forward and backward as recorded, not of the optimizer; same shapes and strides, "
        "bfloat16, not prepacked; the target's attention as two dense products",
        "trainable_parameters": sum(weight.numel() for weight in head.trainable().values()),
        "steps": found,
        "goals": goals,
    }
    if arguments.operators:
        report["operators"] = {arm.steps: operators(arm, arguments.operators) for arm in arms}
    common.finish("step_cost", arguments, report, _tables(found, goals))
    for text in report.get("operators", {}).values():
        common.say(text)


def _tables(found: Sequence[Mapping[str, Any]], goals: Sequence[Any]) -> list[Any]:
    names = ("T", "step_ms", "tokens_per_second", "products_ms", "products_gflop", "share")
    costs = [{name: line[name] for name in names} for line in found]
    phases = [{"T": line["T"], **line["phases_ms"]} for line in found]
    note = "loss: teacher's and student's distributions and the gradients of the vocabulary, formed in the forward pass"
    return [
        common.rows_table("A training step, median", costs, "products: bfloat16, not prepacked, as recorded in a step"),
        common.rows_table("Its phases, ms (median)", phases, note),
        common.goals_table(goals),
    ]


if __name__ == "__main__":
    main()
