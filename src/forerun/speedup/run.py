"""Runs the stages of ``forerun speedup``, each of which leaves one file that says that it is done.

Every stage is made of what other verbs do: the planner measures passes and drafters, ``forerun data`` lets the model
answer, ``forerun train`` trains, ``forerun export`` and ``forerun deploy`` write for other engines. A run that was
stopped goes on at the first stage without its file.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forerun.control.config import SpeculativeConfig
from forerun.control.measuring import load_or_measure
from forerun.devices import processor_name
from forerun.errors import ArgumentError, DataError, ForerunError, first_line
from forerun.model.gguf_files import file_of
from forerun.model.load import read_header, weight_files
from forerun.model.support import text_config
from forerun.model.transformers_target import require_layers
from forerun.plan.measured import EncodedPrompts, measure_drafter
from forerun.plan.planner import plan as make_plan
from forerun.speedup.budget import StageBudget
from forerun.speedup.compare import (
    DECIDING,
    PLAIN,
    TEMPERATURES,
    AnswerTiming,
    AskedPrompt,
    SideBySide,
    SpeedupArm,
    decode_speed,
    mean_speedup,
    summarise,
    summarise_arm,
)
from forerun.speedup.page import serving_lines, verdict_of, write_page
from forerun.speedup.prompts import (
    FEW,
    PROMPT_TOKENS,
    SpeedupPrompt,
    answer_prompts,
    prepare_answers,
    read_prompts,
    split_drawn,
    split_prompts,
    take_turns,
)
from forerun.speedup.settings import MIX, SETTINGS, SpeedupRequest
from forerun.speedup.training import FreeSpeed, HeadChoice, choose_for, read_history, recipe_of
from forerun.training.data.drawn import SOURCE, DrawSettings, PromptDraw, read_words
from forerun.training.features.store import find_loaded, target_hash
from forerun.training.loop.distributed import Parallel
from forerun.training.run import TrainingRun
from forerun.writing import alone, hash_file, read_sealed, replace_folder, tidy, write_file, write_sealed

if TYPE_CHECKING:
    from forerun.control.costs import CostModel
    from forerun.engine.llm import LLM

FREE: tuple[SpeedupArm, ...] = (
    SpeedupArm(name="ngram", speculative={"method": "ngram"}),
    SpeedupArm(name="suffix", speculative={"method": "suffix"}),
    SpeedupArm(name="recycling", speculative={"method": "recycling"}),
    SpeedupArm(name="auto", speculative={"method": "auto"}),
)
"""Drafters that need no training. The plan forecasts all but `auto`, which chooses among them at every step."""
RESULT, TIMINGS, ATTEMPTS = "result", "timings.json", "attempts"
FEWEST_DRAWN = 10  # Prompts that are drawn, however long that takes; fewer are none


class SpeedupConsole(Protocol):
    """Shows what a run does."""

    def say(self, words: str) -> None:
        """Print a line that stays."""

    def busy(self, words: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show that something takes time; the yielded function says how far it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupStage:
    """One step on the way, named by its file."""

    name: str
    words: str
    work: Callable[[SpeedupRun], dict[str, Any]]  # Returns what its file holds
    share: float = 0.0  # Of the budget; 0: as long as it takes
    again_for: tuple[str, ...] = ()  # Settings of the request that make it anew where they differ from the last run's


class SpeedupRun:
    """Goes through the stages in one folder: `STAGES`, which stands at the end of this file, names its methods in
    their order.
    """

    def __init__(self, request: SpeedupRequest, load: Callable[[], LLM], console: SpeedupConsole) -> None:
        """Open the folder; ArgumentError where it holds a run for another model or other prompts.

        `load` loads the model, with rows for `SpeedupSettings.rows` completions and no prefix cache.
        """
        self.request, self.console, self._load = request, console, load
        self.folder = request.output
        self._llm: LLM | None = None
        self._open()

    @property
    def llm(self) -> LLM:
        """Return the model, which is loaded when a stage first needs it."""
        if self._llm is None:
            self._llm = self._load()
        return self._llm

    def release(self) -> None:
        """Let go of the model: training loads its own."""
        self._llm = None

    def cost(self) -> CostModel:
        """Return what passes cost here, as the first stage measured it."""
        return load_or_measure(self.llm.target, rows=(1,))

    def run(self) -> dict[str, Any]:
        """Go through the stages that are not done, and return the result."""
        with alone(self.folder) as free:
            if not free:
                raise ArgumentError(f"another run is at work in {self.folder}: wait for it, or take another --output")
            tidy(self.folder)
            self._begin()
            for number, stage in enumerate(STAGES, start=1):
                if not self.done(stage.name):
                    if self.budget is not None:
                        self.budget.check()
                    self._announce(number, stage)
                    with self._saying_what_is_kept(stage):
                        self._do(stage)
        return self.read(RESULT)

    def prepare(self) -> None:
        """Go through the first two stages alone, as far as they take seconds, for a plan of the others."""
        if not self.path("run").is_file():
            write_sealed(self.path("run"), self._settings)
        for number, stage in enumerate(STAGES[:2], start=1):
            # Drawing prompts would take minutes, which is what the plan is to say.
            if not self.done(stage.name) and not self._share(stage):
                self._announce(number, stage)
                self._do(stage)
        if self.budget is not None:
            self.budget.check()

    def plan(self) -> list[dict[str, Any]]:
        """Return the stages with the minutes that each is expected to take, or took."""
        stages = list[dict[str, Any]]()
        waiting = {name: max(0.0, self._time_for(name)) for name in self.allotted() if not self.done(name)}
        left = self.request.budget_s - self.spent(without="training") - sum(waiting.values())
        for stage in STAGES:
            seconds = waiting.get(stage.name, 0.0)
            if stage.name == "training":
                seconds = self._training_seconds(max(0.0, left))
            done = self.done(stage.name)
            minutes = round((self.read(stage.name)["seconds"] if done else seconds) / 60, 2)
            stages.append({"stage": stage.name, "what": stage.words, "minutes": minutes, "done": done})
        return stages

    @property
    def budget(self) -> StageBudget | None:
        """Return how the time is divided; None before the machine is measured."""
        if not self.done("machine"):
            return None
        about: dict[str, Any] = {"free_arms": 1 + len(FREE)}
        if self.done("prompts"):
            about["prompts"] = max(1, min(DECIDING, self.read("prompts")["held_out"]))
            about["unanswered"] = not all(prompt.answered for prompt in self.part("train"))
        elif self._draws():
            about["drawn_tokens"] = DrawSettings().max_tokens * math.ceil(FEWEST_DRAWN / SETTINGS.rows)
        return StageBudget.of(self.read("machine"), self.request, **about)

    @property
    def _with_head(self) -> bool:
        """Return whether a head is compared, too, as far as is known by now."""
        if self.done("choice"):
            return bool(self.read("choice")["train"])
        return self.budget is None or self.budget.trains

    def allotted(self) -> dict[str, float]:
        """Return the seconds of the stages with a share."""
        shares = {stage.name: share for stage in STAGES if (share := self._share(stage))}
        if self.budget is None:
            return {name: share * self.request.budget_s for name, share in shares.items()}
        return self.budget.allot(shares, head=self._with_head)

    def _time_for(self, name: str) -> float:
        """Return the seconds that a stage may still take: less than are allotted where earlier attempts took some."""
        return self.allotted().get(name, 0.0) - self._attempts().get(name, 0.0)

    def _tokens_for(self, seconds: float, completions: int) -> int:
        """Return the tokens of each of so many compared completions."""
        assert self.budget is not None, "the machine is measured first"
        limits = {"least": SETTINGS.least_tokens, "most": SETTINGS.compared_tokens}
        return self.budget.tokens_within(seconds, completions, **limits)

    def _share(self, stage: SpeedupStage) -> float:
        """Return the share of the budget that a stage may take; 0: as long as it takes."""
        if stage.name == "prompts" and not self._draws():
            return 0.0
        return stage.share

    def _draws(self) -> bool:
        """Return whether prompts are to be drawn from the model: none are given, and it knows users."""
        return not self.request.prompts and (not self.done("machine") or self.read("machine")["template"])

    def _training_seconds(self, expected: float) -> float:
        """Return the seconds of the training, as they are chosen or else `expected`."""
        if not self.done("choice"):
            return expected
        choice = self.read("choice")
        return float(choice["training_seconds"]) / SETTINGS.steps_share if choice["train"] else 0.0

    # --- the folder -----------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """Return the file of a stage."""
        return self.folder / f"{name}.json"

    def done(self, name: str) -> bool:
        """Return whether a stage is done."""
        return self.path(name).is_file() and name not in self._again

    def read(self, name: str) -> dict[str, Any]:
        """Return what a stage that is done found."""
        return read_sealed(self.path(name), f"delete {self.path(name)}, and the same command makes it again")

    def _open(self) -> None:
        """Compare the folder with the present request."""
        settings = {
            "model": Path(self.request.model).name,
            "weights": target_hash(find_loaded(self.request.model))[:16],
            "prompts": sorted(hash_file(path)[:16] for path in self.request.files),
            "max_tokens": self.request.max_tokens,
            "dtype": self.request.dtype,
        }
        self._settings = {**settings, "budget_s": self.request.budget_s, "kind": self.request.kind}
        self._again: tuple[str, ...] = ()  # Stages that another budget or kind of head makes anew
        if self.path("run").is_file():
            former = read_sealed(self.path("run"), f"choose another --output, or delete {self.folder}")
            other = [name for name, value in settings.items() if former.get(name) != value]
            if other:
                shown = "; ".join(f"{name} was {former.get(name)!r}, is {settings[name]!r}" for name in other)
                raise ArgumentError(f"{self.folder} holds a run with other settings: {shown}. Take another --output")
            changed = {name for name in ("budget_s", "kind") if former[name] != self._settings[name]}
            self._again = tuple(stage.name for stage in STAGES if changed.intersection(stage.again_for))
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise ArgumentError(f"{self.folder} exists and is no run of forerun speedup; choose another --output")

    def _begin(self) -> None:
        """Write down the request, and forget the stages that another budget changes."""
        if self._again:
            what_stays = "measurements, prompts and completions that are written stay"
            self.console.say(f"the budget or the kind of head has changed since the last run: {what_stays}")
            attempts = {name: seconds for name, seconds in self._attempts().items() if name not in self._again}
            write_sealed(self.path(ATTEMPTS), attempts)
            for path in (*(self.path(name) for name in self._again), self.folder / TIMINGS):
                path.unlink(missing_ok=True)
            self._again = ()
        write_sealed(self.path("run"), self._settings)

    @contextmanager
    def _saying_what_is_kept(self, stage: SpeedupStage) -> Iterator[None]:
        """Say what to do where the disk runs full, or somebody stops the run."""
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stopped in the stage {stage.name!r} ({stage.words}); what is done is safe in {self.folder}: the same "
                "command goes on there"
            ) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DataError(
                f"the disk is full ({error}) in the stage {stage.name!r}; what is done is safe in {self.folder}: make "
                "room, and the same command goes on there"
            ) from error

    def _announce(self, number: int, stage: SpeedupStage) -> None:
        if stage.name == "training" and not self.read("choice")["train"]:
            return
        following = f"; next: {STAGES[number].words}" if number < len(STAGES) else ""
        [planned] = [one for one in self.plan() if one["stage"] == stage.name]
        about = f" (about {planned['minutes']:.1f} min)" if planned["minutes"] >= 0.1 else ""
        self.console.say(f"{number}/{len(STAGES)} {stage.words}{about}{following}")

    def _do(self, stage: SpeedupStage) -> None:
        began, earlier = time.monotonic(), self._attempts().get(stage.name, 0.0)

        def seconds() -> float:
            return round(earlier + time.monotonic() - began, 2)

        try:
            found = stage.work(self)
        except BaseException:
            with suppress(OSError):  # the disk may be full
                write_sealed(self.path(ATTEMPTS), {**self._attempts(), stage.name: seconds()})
            raise
        write_sealed(self.path(stage.name), {**found, "seconds": seconds()})

    def _attempts(self) -> dict[str, float]:
        """Return the seconds of stages that were interrupted."""
        return self.read(ATTEMPTS) if self.path(ATTEMPTS).is_file() else {}

    def spent(self, *, without: str = "") -> float:
        """Return the seconds of all stages, of interrupted ones, too, but not of one."""
        known = self._attempts() | {
            stage.name: self.read(stage.name)["seconds"] for stage in STAGES if self.done(stage.name)
        }
        return sum(seconds for name, seconds in known.items() if name != without)

    # --- the stages -----------------------------------------------------------------------------------------------

    def _machine(self) -> dict[str, Any]:
        target = require_layers(self.llm.target, "forerun speedup")
        with self.console.busy("measuring passes") as tell:
            cost = load_or_measure(target, rows=(1,), force=True, tell=tell)  # the machine may be busier than it was
        text = text_config(target.model)
        plain_ms = cost.pass_ms(1)
        v = [[nodes, round(cost.v(nodes), 3)] for nodes in cost.nodes]
        [wide] = [value for nodes, value in v if nodes == min(cost.nodes, key=lambda one: abs(one - 8))]
        self.console.say(f"  plain: {1000 / plain_ms:.1f} tokens/s; a pass over 8 tokens costs {wide:.2f} plain ones")
        return {
            "processor": processor_name(),
            "device": str(target.device),
            "runs_as": target.runs_as,
            "parameters": count_weights(find_loaded(self.request.model)),
            "layers": text.num_hidden_layers,
            "hidden_size": text.hidden_size,
            "vocab_size": text.vocab_size,
            "template": self.llm.has_chat_template,
            "pass_ms": round(plain_ms, 3),
            "tokens_per_second": round(1000 / plain_ms, 2),
            "v": v,
        }

    def _prompts(self) -> dict[str, Any]:
        template, notes = self.read("machine")["template"], list[str]()
        prompts, skipped = read_prompts(self.request.files, template=template)
        drawn = self._drawn(notes) if self._draws() else []
        split = split_drawn(drawn, prompts) if drawn else split_prompts(prompts, skipped=skipped)
        parts = {"train": split.train, "trial": split.trial, "held_out": split.held_out}
        for name, part in parts.items():
            write_file(self.folder / "prompts" / f"{name}.jsonl", "".join(prompt.line for prompt in part))
        if not self.request.prompts and not drawn:
            notes.append(
                "the prompts are the built-in mix: yours say more about your use, and train a head (--prompts)"
            )
        if not template:
            notes.append("the model has no chat template: it goes on with the text of each prompt")
        if skipped:
            notes.append(f"{skipped:,} entries could not be used and are left out")
        counts = {name: len(part) for name, part in parts.items()}
        listed = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
        self.console.say(f"  {listed}")
        if len(split.held_out) < FEW:
            self.console.say(f"  {len(split.held_out)} held-out prompts are few: the intervals will be wide")
        for note in notes:
            self.console.say(f"  {note}")
        categories = sorted({prompt.category for prompt in (*prompts, *drawn)})
        files = [path.name for path in self.request.prompts] or [
            *(["prompts that the model itself wrote"] if drawn else []),
            "the built-in mix",
        ]
        return {**counts, "files": files, "categories": categories, "notes": notes}

    def _drawn(self, notes: list[str]) -> list[SpeedupPrompt]:
        """Return prompts that the model itself wrote, as many as the time allows, and note what they are; none where
        it writes no usable prompt.
        """
        path = self.folder / "prompts" / "drawn.jsonl"
        deadline = time.monotonic() + self._time_for("prompts")
        with self.console.busy("drawing prompts from the model") as tell:
            draw = PromptDraw(
                output=path,
                count=SETTINGS.most_drawn,
                settings=DrawSettings(concurrency=SETTINGS.rows),
                held_out=read_words([MIX]),
                tell=lambda found: tell(f"{found.kept:,} prompts drawn from the model"),
            )
            try:
                draw.run(self.llm, go_on=lambda: draw.kept < FEWEST_DRAWN or time.monotonic() < deadline)
            except (ArgumentError, DataError) as error:
                notes.append(f"no prompts were drawn from the model: {first_line(error)}")
        if draw.kept < FEWEST_DRAWN:
            return []
        notes.append(
            f"{draw.kept:,} prompts were drawn from the model itself: they show what it was tuned on, not what your "
            f"users ask (--prompts takes yours). The category {SOURCE!r} holds those of them that were not learned; "
            "the other categories are the built-in mix, of which nothing was learned"
        )
        return read_prompts([path], template=True)[0]

    def part(self, name: str) -> list[SpeedupPrompt]:
        """Return the prompts of a part."""
        lines = (self.folder / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [SpeedupPrompt.parse(line) for line in lines]

    def _answers(self) -> dict[str, Any]:
        assert self.budget is not None, "the machine is measured first"
        if not self._with_head:
            enough = self.budget.enough(head=True)
            reason = f"the budget is too short to train a head: --budget {enough} and more leave time for one"
            return {"answered": 0, "tokens": 0, "empty": 0, "circles": 0, "notes": [], "reason": reason}
        seconds = self._time_for("answers")
        parts = {"trial": self.part("trial"), "train": self.part("train")}
        folder = self.folder / "answers"
        with self.console.busy("answering") as tell:
            last_s = self.request.max_tokens * self.budget.wide_s
            counts = answer_prompts(self.llm, parts, folder, self.request, seconds=seconds, last_s=last_s, tell=tell)
        counts |= prepare_answers(self.llm, folder, self.folder / "prepared", name=self.request.model)
        tokens = counts["tokens"]
        self.console.say(f"  {counts['answered']:,} completions, {tokens:,} tokens to learn")
        for note in counts["notes"]:
            self.console.say(f"  {note}")
        return counts

    def _free(self) -> dict[str, Any]:
        assert self.budget is not None, "the machine is measured first"
        seconds, allotted = self._time_for("free"), self.allotted()["free"]
        prompts = self.asked_prompts("trial")
        deadline = time.monotonic() + seconds
        arms = (SpeedupArm(name=PLAIN), *FREE)
        cost = self.cost()
        forecasts = dict[str, Any]()
        with self.console.busy("trying") as tell:
            for arm in FREE:
                if arm.name != "auto":
                    forecasts[arm.name] = self._forecast(arm, prompts, cost, tell, seconds=allotted)
            tokens = self.budget.tokens_within(
                allotted * (1 - len(forecasts) * SETTINGS.forecast_share),
                SETTINGS.least_trials * len(arms) * len(TEMPERATURES),
                least=SETTINGS.least_trial_tokens,
                most=SETTINGS.trial_tokens,
            )
            compared = SideBySide(self.llm, arms, max_tokens=tokens, fewest=SETTINGS.least_trials)
            left = deadline - time.monotonic()
            timings = compared.ask(prompts, seconds=left, tell=lambda found: tell(_count(found, arms)))
        figures = summarise(timings, arms)
        best = max(figures, key=lambda name: mean_speedup(figures[name]))
        names = ", ".join(
            f"{name} {mean_speedup(figures[name]):.2f} x"
            for name in sorted(figures, key=lambda n: -mean_speedup(figures[n]))
        )
        self.console.say(f"  over plain decoding: {names}")
        return {"best": best, "figures": figures, "forecasts": forecasts, "prompts": len({t.digest for t in timings})}

    def _forecast(
        self,
        arm: SpeedupArm,
        prompts: list[AskedPrompt],
        cost: CostModel,
        tell: Callable[[str], None],
        *,
        seconds: float,
    ) -> dict[str, Any]:
        """Return what the plan expects of a drafter, from its acceptance on the first of these prompts; of so many
        that it takes a small share of the `seconds`.
        """
        config = SpeculativeConfig.parse(arm.speculative or None)
        assert config is not None
        tokens = max(2, self._tokens_for(SETTINGS.forecast_share * seconds, 1))
        how: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens}
        chosen = [prompt.prompt for prompt in prompts]
        each_s = tokens * cost.pass_ms(1) / 1000
        most = max(1, min(SETTINGS.forecast_prompts, int(SETTINGS.forecast_share * seconds / each_s)))
        answers = EncodedPrompts.of(self.llm, chosen, limit=most, **how)
        try:
            measured = measure_drafter(self.llm, config, answers, tell)
        except ForerunError as error:
            return {"reason": first_line(error)}
        best = make_plan(measured.load(cost, rows=1)).best
        return {
            "speedup": round(best.speedup, 4),
            "draft_length": best.k,
            "tokens_per_pass": round(best.tokens_per_pass, 4),
            "acceptance": [round(rate, 4) for rate in measured.trial.survival[:8]],
            "fixed_ms": round(measured.draft.fixed_ms, 4),
            "level_ms": round(measured.draft.level_ms, 4),
        }

    def asked_prompts(self, name: str) -> list[AskedPrompt]:
        """Return the prompts of a part as the engine takes them; those that are too long are left out."""
        asked = list[AskedPrompt]()
        room = self.llm.max_model_len - self.request.compared_tokens
        for prompt in take_turns(self.part(name)):
            try:
                ids = self._ids(prompt)
            except ForerunError:
                continue
            if 0 < len(ids) <= room:
                taken = {"prompt_token_ids": ids}
                asked.append(AskedPrompt(digest=prompt.digest, category=prompt.category, prompt=taken))
        if not asked:
            raise DataError(f"none of the {name.replace('_', ' ')} prompts fits {room} tokens; give shorter ones")
        return asked

    def _ids(self, prompt: SpeedupPrompt) -> list[int]:
        if prompt.answered:
            return list(prompt.entry["prompt_token_ids"])
        if prompt.asked:
            return list(self.llm.chat_prompt(prompt.asked, prompt.entry.get("tools"))["prompt_token_ids"])
        return self.llm.encode(prompt.entry["text"])[:PROMPT_TOKENS]

    def _choice(self) -> dict[str, Any]:
        answers, free = self.read("answers"), self.read("free")
        began = time.monotonic()
        left = self.request.budget_s - self.allotted()["comparison"] - self.spent()
        left *= SETTINGS.steps_share
        if answers["reason"]:
            choice = HeadChoice(best=None, train=False, reason=answers["reason"])
            considered = list[dict[str, Any]]()
        else:
            speeds = free_speeds(free)
            with self.console.busy("measuring an untrained head") as tell:
                choice, considered = choose_for(
                    self.llm,
                    self.request,
                    self.cost(),
                    self.folder,
                    parameters=self.read("machine")["parameters"],
                    seconds=left,
                    free=speeds,
                    tell=tell,
                )
                self.release()
        self.console.say(f"  {'train' if choice.train else 'train nothing'}: {choice.reason}")
        left = max(1.0, left - (time.monotonic() - began))  # Choosing took some of it
        return {**choice.record(), "training_seconds": round(left, 1), "considered": considered}

    def _training(self) -> dict[str, Any]:
        choice = self.read("choice")
        if not choice["train"]:
            return {"head": None}
        self.release()
        recipe = recipe_of(self.request, choice, self.folder)
        outcome = TrainingRun(recipe, Parallel.from_environment("ddp")).train()
        if outcome["interrupted"]:
            raise KeyboardInterrupt
        with replace_folder(self.folder / "head") as fresh:
            shutil.copytree(outcome["head"], fresh, dirs_exist_ok=True)
        return {"head": "head", "kind": choice["kind"], **read_history(Path(recipe.output)), "steps": outcome["steps"]}

    def _comparison(self) -> dict[str, Any]:
        free, trained = self.read("free"), self.read("training")
        arms = [SpeedupArm(name=PLAIN), *(arm for arm in FREE if arm.name == free["best"])]
        prompts, forecasts = self.asked_prompts("held_out"), dict(free["forecasts"])
        if trained["head"] is not None:
            head = str((self.folder / trained["head"]).resolve())
            alone_ = SpeedupArm(name=trained["kind"], speculative={"method": trained["kind"], "model": head})
            arms += [alone_, SpeedupArm(name=f"auto + {alone_.name}", speculative={"method": "auto", "model": head})]
        # As long in every attempt; where stages took longer than planned, fewer prompts are compared.
        path, allotted = self.folder / TIMINGS, self.allotted()["comparison"]
        seconds = min(self._time_for("comparison"), self.request.budget_s - self.spent())
        with self.console.busy("measuring") as tell:
            if trained["head"] is not None:
                forecasts[alone_.name] = self._forecast(alone_, prompts, self.cost(), tell, seconds=allotted)

            def keep(found: list[AnswerTiming]) -> None:
                write_file(path, json.dumps([asdict(one) for one in found]))
                tell(_count(found, arms))

            tokens = self._tokens_for(allotted, min(DECIDING, len(prompts)) * len(arms) * len(TEMPERATURES))
            compared = SideBySide(self.llm, arms, max_tokens=tokens)
            timings = compared.ask(prompts, seconds=seconds, done=_kept(path, arms), tell=keep)
        plain = [one for one in timings if one.arm == PLAIN and one.temperature == 0]
        return {
            "arms": {arm.name: arm.speculative or None for arm in arms},
            "figures": summarise(timings, arms),
            "over_free": {
                arm.name: {f"{one:g}": summarise_arm(timings, arm.name, one, base=free["best"]) for one in TEMPERATURES}
                for arm in arms[2:]
            },
            "forecasts": {arm.name: forecasts[arm.name] for arm in arms if arm.name in forecasts},
            "prompts": len(plain),
            "plain_tokens_per_second": round(decode_speed(plain), 2),
            "empty": sum(one.empty for one in plain),
            "circles": sum(one.circle for one in plain),
        }

    def _result(self) -> dict[str, Any]:
        outcomes = {stage.name: self.read(stage.name) for stage in STAGES if stage.name != RESULT}
        verdict = verdict_of(outcomes)
        lines = serving_lines(self.request.model, self.folder.resolve(), verdict, outcomes["comparison"]["forecasts"])
        result = {
            "model": self.request.model,
            "output": str(self.folder),
            "budget_s": self.request.budget_s,
            "seconds_spent": round(self.spent(), 1),
            **verdict,
            "serve": lines,
            "page": str(self.folder / "page.html"),
        }
        write_page(self.folder, result, outcomes)
        return result


STAGES = (
    SpeedupStage(name="machine", words="measure the machine and the model", work=SpeedupRun._machine),
    SpeedupStage(
        name="prompts",
        words="read and split the prompts",
        work=SpeedupRun._prompts,
        share=SETTINGS.drawing_share,
    ),
    SpeedupStage(
        name="answers",
        words="let the model complete the prompts",
        work=SpeedupRun._answers,
        share=SETTINGS.answers_share,
        again_for=("budget_s",),
    ),
    SpeedupStage(
        name="free",
        words="try what needs no training",
        work=SpeedupRun._free,
        share=SETTINGS.free_share,
        again_for=("budget_s",),
    ),
    SpeedupStage(
        name="choice",
        words="choose what is worth training",
        work=SpeedupRun._choice,
        again_for=("budget_s", "kind"),
    ),
    SpeedupStage(name="training", words="train it", work=SpeedupRun._training, again_for=("budget_s", "kind")),
    SpeedupStage(
        name="comparison",
        words="measure on held-out prompts, side by side",
        work=SpeedupRun._comparison,
        share=SETTINGS.comparison_share,
        again_for=("budget_s", "kind"),
    ),
    SpeedupStage(
        name=RESULT,
        words="write the page and the lines that serve it",
        work=SpeedupRun._result,
        again_for=("budget_s", "kind"),
    ),
)


def count_weights(directory: Path) -> int:
    """Return the number of weights in a checkpoint's files, or in a GGUF file."""
    if (file := file_of(directory)) is not None:
        return sum(math.prod(tensor.shape) for tensor in file.everything)
    headers = (read_header(path).values() for path in weight_files(directory) if path.suffix == ".safetensors")
    return sum(math.prod(entry["shape"]) for header in headers for entry in header)


def free_speeds(free: Mapping[str, Any]) -> dict[str, FreeSpeed]:
    """Return how fast each category is with the best free drafter at T = 0, and its share of plain decoding's time."""
    speeds = dict[str, FreeSpeed]()
    for category, figures in free["figures"][free["best"]]["0"]["categories"].items():
        share = figures["prompts"] / figures["plain_tokens_per_second"]
        speeds[category] = FreeSpeed(speedup=max(1.0, figures["speedup"]), share=share)
    return speeds


def _count(timings: list[AnswerTiming], arms: list[SpeedupArm] | tuple[SpeedupArm, ...]) -> str:
    return f"{len({one.digest for one in timings}):,} prompts with {len(arms)} ways to decode"


def _kept(path: Path, arms: list[SpeedupArm]) -> list[AnswerTiming]:
    """Return the completions that an interrupted measurement left, unless they are of other arms."""
    if not path.is_file():
        return []
    timings = [AnswerTiming(**one) for one in json.loads(path.read_text(encoding="utf-8"))]
    return timings if {one.arm for one in timings} == {arm.name for arm in arms} else []
