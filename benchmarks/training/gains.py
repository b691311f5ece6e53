"""What training brings on the demo models, each in so many seconds of wall time, beside its goal.

    .venv/bin/python recipes/demo/make.py heads      # once: makes the data (and the leader board)
    .venv/bin/python benchmarks/training/gains.py --seconds 900

DistillSpec on the draft model that ships, AdaSPEC for as many steps, LayerSkip on the target, and EAGLE-3 with and
without text that target and head write together, from the start or going on from --head: beside one that never sees
such text, and one for which the target answers prompts before, within the same time. Every run is a `forerun train`
into --work; Ctrl-C ends it after its step, and the same command goes on for the seconds that are left. What is finished
is only measured anew.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.nn.functional import cross_entropy

from benchmarks.suite.acceptance import AcceptanceLine, AcceptancePlan, Way, measure_way, ratio
from benchmarks.suite.goals import Goal, at_least, at_most
from benchmarks.training.common import BUILD, ROOT, finish, goals_table, load_target, parser, rows_table, say, start
from forerun import LLM
from forerun.cli import main as forerun
from forerun.demo import contexts, edits
from forerun.training.loop.checkpoint import checkpoints

TEMPERATURES = (0.0, 1.0)
CHAIN = 5
"""Tokens drafted, by whomever."""
ANSWER = 250
"""Most tokens of an answer to a prompt for an edit."""
ANSWERED, TIMES = 1000, 4
"""Prompts for edits that the target answers before training, in about a minute, and how often each answer stands in the
data: together as often as all 4,000 prompts stand in those of train-with-decode."""
LOOP = ("windows={length: 512, rows: 2}", "training={schedule: linear, warmup_steps: 20, save_every_s: 120}")
"""How every run trains."""
FRESH = "draft.options={fc_norm: true, norm_output: true}"
"""The shape of a head that goes on from none."""
HEAD = (
    "objective={steps: 5, decay: 0.8}",
    "training.optimizer=muon",
    "training.muon_learning_rate=2.0e-3",
    "training.learning_rate=1.0e-3",
)
DRAFT = ("training.optimizer=muon", "training.muon_learning_rate=3.0e-3", "training.learning_rate=1.5e-3")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "distill": ("distill", DRAFT),
    "adaspec": ("distill", DRAFT),
    "layerskip": (
        "layerskip",
        (
            "training.optimizer=muon",
            "training.muon_learning_rate=2.0e-3",
            "training.learning_rate=6.0e-4",
            "objective={exit_scale: 1.0, curriculum: all, dropout: 0.5}",
        ),
    ),
    "eagle3": ("eagle3", HEAD),
    "eagle3-decode": (
        "eagle3",
        (*HEAD, "objective.writer=target", "objective.written=0", "objective.reuse=2", "objective.at_once=64"),
    ),
    "eagle3-answered": ("eagle3", HEAD),
}
"""Name of a run -> the kind that is trained, and what its recipe says besides `LOOP`."""


@dataclass(kw_only=True)
class Bench:
    """The models, the runs and what was measured."""

    arguments: argparse.Namespace
    goals: list[Goal] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Who drafts for whom, at which temperature, how well."""

    @property
    def plan(self) -> AcceptancePlan:
        """How much is decoded."""
        return AcceptancePlan(new_tokens=self.arguments.tokens, seeds=(1, 2) if self.arguments.prompts >= 8 else (1,))

    @cached_property
    def target(self) -> LLM:
        """The target as it ships."""
        return self.engine(self.arguments.target)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Of held-out files."""
        return contexts(self.target.tokenizer, count=self.arguments.prompts, length=256)

    @cached_property
    def edits(self) -> list[list[int]]:
        """As many prompts, or all there are, for edits of held-out functions: those with the longest answers."""
        chosen = sorted(edits(), key=lambda edit: -len(edit.answer))[: self.arguments.prompts]
        asked = {"add_generation_prompt": True, "return_dict": True}
        template = self.target.tokenizer.apply_chat_template
        return [list(template([*edit.messages], **asked)["input_ids"]) for edit in chosen]

    def engine(self, model: str) -> LLM:
        """A target that is decoded."""
        return LLM(model, max_num_seqs=8, max_model_len=1024 + self.arguments.tokens, enable_prefix_caching=False)

    def made_of(self, part: str) -> Path:
        """A part of what the data were made of, as it is: nobody has let the target answer it."""
        found: Path = self.arguments.data.parent / f"{part}.jsonl"
        return found

    def texts(self, name: str, *more: Path) -> Path:
        """The files as training data, and `more` beside them."""
        output = self.arguments.work / name
        if not output.exists():
            files = [str(path) for path in (self.made_of("pieces"), self.made_of("library"), *more)]
            self._forerun("data", "prepare", *files, "--target", self.arguments.target, "--output", str(output),
                          "--max-length", "512", "--split-long", "--answer-tokens", str(ANSWER))  # fmt: skip
        return output

    def answered(self) -> tuple[list[Path], float]:
        """`ANSWERED` prompts for edits with the target's answers, `TIMES` files of them, and the seconds that answering
        took."""
        output = self.arguments.work / "answered.jsonl"
        took = output.with_suffix(".seconds")
        if not took.exists():
            began = time.perf_counter()
            self._forerun("data", "regenerate", str(self.made_of("edits")), "--target", self.arguments.target,
                          "--output", str(output), "--limit", str(ANSWERED), "--max-tokens", str(ANSWER),
                          "--temperature", "1", "--concurrency", "64")  # fmt: skip
            took.write_text(f"{time.perf_counter() - began:.1f}")
        copies = [output.with_stem(f"answered-{number}") for number in range(TIMES)]
        for copy in copies:
            shutil.copyfile(output, copy)
        return copies, float(took.read_text())

    def run(
        self, name: str, *words: str, data: Path | None = None, steps: int | None = None, spent: float = 0.0
    ) -> Path:
        """Train for the seconds that are asked for, less those `spent`, or so many steps; the output. SystemExit: it
        was stopped, or failed and has said why."""
        asked, output = self.arguments, self.arguments.work / name
        kind, own = RUNS[name]
        given = [word.removeprefix(f"{name}:") for word in asked.set if word.startswith(f"{name}:")]
        budget = f"training.seconds={asked.seconds - spent:g}" if steps is None else f"training.steps={steps}"
        self._forerun("train", kind, *LOOP, *own, budget, *words, *given,
                      "--target", asked.target, "--data", str(data or asked.data), "--output", str(output))  # fmt: skip
        return output

    def _forerun(self, *words: str) -> None:
        say(f"forerun {shlex.join(words)}")
        with redirect_stdout(sys.stderr):  # what is printed there is the report's
            code = forerun([*words])
        if code:
            raise SystemExit(code)

    def measure(
        self,
        what: str,
        config: Mapping[str, Any],
        llm: LLM | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> dict[float, AcceptanceLine]:
        """How well chains are accepted, by temperature; behind the held-out files where no other prompts are given."""
        prompts = self.prompts if prompts is None else prompts
        found = {}
        for temperature in TEMPERATURES:
            fixed = {**config, "num_speculative_tokens": CHAIN, "adaptive": False}
            way = Way(label=what, method=config["method"], form="chain", temperature=temperature, config=fixed)
            line = found[temperature] = measure_way(llm or self.target, way, prompts, self.plan, say)
            self.rows.append({"drafter": what, "T": temperature, "acceptance": rate(line), "length": line.length})
        return found

    def compare(
        self,
        what: str,
        goal: float,
        after: Mapping[float, AcceptanceLine],
        before: Mapping[float, AcceptanceLine],
        of: Callable[[AcceptanceLine], float] | None = None,
    ) -> None:
        """A goal for each temperature: by `of` each line, or, without, by mean acceptance lengths."""
        for temperature in TEMPERATURES:
            one, other = after[temperature], before[temperature]
            lengths = ratio(one, other)
            value = lengths.value if of is None else of(one) / max(of(other), 1e-9)
            note = f"lengths {one.length:.2f} over {other.length:.2f}, 95 % interval of their ratio "
            note += f"{lengths.low:.2f} to {lengths.high:.2f}"
            if of is not None:
                note = f"{of(one):.3f} over {of(other):.3f}; {note}"
            self.goals.append(at_least(f"{what}, T = {temperature:g}", goal, value, note))


def rate(line: AcceptanceLine) -> float:
    """Accepted over judged drafted tokens: the first of a chain is always judged, each other where the one before it
    was accepted."""
    return sum(line.depths) / (1 + sum(line.depths[:-1]))


def distill(bench: Bench) -> None:
    """DistillSpec against the draft model as it ships, AdaSPEC against DistillSpec."""
    draft = bench.arguments.draft
    output = bench.run("distill", "--draft", draft)
    steps = checkpoints(output)[-1][0]
    filtered = bench.run("adaspec", f"objective.reference={output / 'draft'}", "--draft", draft, steps=steps)
    models = {"as it ships": draft, "DistillSpec": output / "draft", f"AdaSPEC, {steps} steps": filtered / "draft"}
    before, distilled, chosen = (
        bench.measure(f"draft model, {name}", {"method": "draft_model", "model": str(model)})
        for name, model in models.items()
    )
    bench.compare("acceptance, DistillSpec / draft model as it ships", 1.10, distilled, before, rate)
    bench.compare("acceptance, AdaSPEC / DistillSpec at equal steps", 1.0, chosen, distilled, rate)


def layerskip(bench: Bench) -> None:
    """Exits of the trained target against those of the target as it ships, and what both say of held-out text."""
    trained = str(bench.run("layerskip") / "model")
    after, layers = bench.engine(trained), bench.target.target.num_layers
    for place in sorted({max(1, layers * quarter // 4) for quarter in (1, 2, 3)}):
        config = {"method": "early_exit", "exit_layer": place}
        old = bench.measure(f"exit after {place} of {layers} layers, as it ships", config)
        new = bench.measure(f"exit after {place} of {layers} layers, LayerSkip", config, after)
        if all(rate(line) * 1.3 < 1 for line in old.values()):  # else there is no room for the goal
            bench.compare(f"acceptance, exit after {place} layers, LayerSkip / before", 1.30, new, old, rate)
    texts = min(24, 2 * bench.arguments.prompts)
    losses = [held_out_loss(name, bench.arguments.device, texts) for name in (trained, bench.arguments.target)]
    note = f"{losses[0]:.3f} over {losses[1]:.3f} nats per token"
    bench.goals.append(at_most("target's held-out loss, LayerSkip / before", 1.02, losses[0] / losses[1], note))


def decode(bench: Bench) -> None:
    """EAGLE-3 that learns from files and from what target and head write together behind prompts for edits, of which
    nobody has answers, against one that learns from the files alone, and one that also has the answers which the target
    gave before, in a part of the time."""
    start = bench.arguments.head
    begin = FRESH if start is None else f"draft.start={start}"
    prompts = bench.made_of("edits")
    answers, spent = bench.answered()
    runs = {
        "eagle3-decode": bench.run("eagle3-decode", begin, data=bench.texts("texts-and-prompts", prompts)),
        "eagle3": bench.run("eagle3", begin, data=bench.texts("texts")),
        "eagle3-answered": bench.run(
            "eagle3-answered", begin, data=bench.texts("texts-and-answers", *answers), spent=spent
        ),
    }
    heads = {name: str(output / "head") for name, output in runs.items()}
    if start is not None:
        heads["eagle3, all before"] = start
    judged = {"": [*bench.prompts, *bench.edits], ", files": bench.prompts, ", edits": bench.edits}
    for where, texts in judged.items():
        found = [
            bench.measure(name + where, {"method": "eagle3", "model": head}, prompts=texts)
            for name, head in heads.items()
        ]
        if not where:
            what = "mean acceptance length, EAGLE-3 with train-with-decode / "
            bench.compare(what + "without", 1.05, found[0], found[1])
            bench.compare(what + "prompts answered before", 1.0, found[0], found[2])


EXPERIMENTS: dict[str, Callable[[Bench], None]] = {"distill": distill, "layerskip": layerskip, "decode": decode}


@torch.inference_mode()
def held_out_loss(name: str, device: str, texts: int, length: int = 512) -> float:
    """Nats per token of a causal LM on excerpts of held-out files."""
    model, tokenizer = load_target(name, device)
    losses = []
    for ids in contexts(tokenizer, count=texts, length=length):
        tokens = torch.tensor([ids], device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        losses.append(float(cross_entropy(logits, tokens[0, 1:])))
    return sum(losses) / len(losses)


def main(words: Sequence[str] | None = None) -> None:
    found = parser(__doc__)
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    found.add_argument("--seconds", type=float, default=900.0, help="of training, for each run (default: 900)")
    found.add_argument("--only", nargs="*", default=[*EXPERIMENTS], choices=[*EXPERIMENTS], help="what is trained")
    found.add_argument("--target", default="demo", help="a Llama: demo or a folder")
    found.add_argument("--draft", default="demo-draft", help="a draft model of its vocabulary")
    found.add_argument("--head", help="an EAGLE-3 head that both runs of decode go on from (default: none)")
    found.add_argument("--data", type=Path, default=ROOT / "build/demo/head-data/train", help="prepared data")
    found.add_argument("--work", type=Path, default=BUILD / "gains", help="folder of the runs")
    found.add_argument("--set", action="append", default=[], metavar="RUN:KEY=VALUE", help=f"of {', '.join(RUNS)}")
    found.add_argument("--prompts", type=int, default=16, help="held out, that are decoded")
    found.add_argument("--tokens", type=int, default=96, help="of each answer")
    arguments = found.parse_args(words)
    for word in arguments.set:
        if word.partition(":")[0] not in RUNS or "=" not in word:
            found.error(f"--set {word}: expected RUN:KEY=VALUE with a run of {', '.join(RUNS)}")
    machine, bench = start(arguments), Bench(arguments=arguments)
    for name in arguments.only:
        EXPERIMENTS[name](bench)
        gc.collect()  # models of the runs
    report = {"machine": machine, "seconds": arguments.seconds, "lines": bench.rows, "goals": bench.goals}
    tables = [rows_table(f"Chains of {CHAIN}, held-out prompts", bench.rows), goals_table(bench.goals)]
    finish("gains", arguments, report, tables)


if __name__ == "__main__":
    main()
