"""Asks a model the same prompts plainly and with drafters, in turns, and says how much faster it was and
how sure that is.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from forerun.certify.reference import Difference, difference
from forerun.intervals import CONFIDENCE, t_factor
from forerun.training.data.store import runs_in_circles
from forerun.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

PLAIN = "plain"
TEMPERATURES = (0.0, 1.0)
WARM_UP_TOKENS = 24
STANDSTILL_S = 2.0  # A process that has not run for so long was stopped, or its machine slept
ATTEMPTS = 3  # For a prompt while which the process stood still; then it is left out
FEWEST = 5  # Prompts below which there is no interval
DECIDING = 10  # Prompts that are run however long that takes, and below which there is no winner


_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupArm:
    """One way to decode: plainly, or with a drafter."""

    name: str
    speculative: Mapping[str, Any] | Literal[False] | None = False
    """`LLM.generate` takes it: False decodes plainly, None as the engine is configured."""

    def options(self) -> dict[str, Any]:
        """Return the keywords of one request that is completed in this way.

        Each request has an isolation domain of its own: a drafter that remembers would copy the answer of another arm,
        and a prompt in the cache would not be read.
        """
        return {"speculative": self.speculative, "cache_salt": f"arm {next(_NUMBERS)}"}


def ask_arms(
    llm: LLM, arms: Sequence[SpeedupArm], prompt: Any, params: SamplingParams, *, first: int = 0
) -> dict[str, RequestOutput]:
    """Return a completion of `prompt` by each arm, by the arms' names; arm `first` begins, and the others follow in
    turn.
    """
    order = (*arms[first:], *arms[:first])
    return {arm.name: llm.generate([prompt], params, **arm.options())[0] for arm in order}


def find_parting(llm: LLM, plain: RequestOutput, other: RequestOutput) -> Difference | None:
    """Return where two completions of one prompt part; None where they are the same."""
    return difference(llm, plain.prompt_token_ids, plain.outputs[0].token_ids, other.outputs[0].token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedPrompt:
    """A prompt as the engine takes it."""

    digest: str
    category: str
    prompt: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerTiming:
    """One completion of one arm, with its time and passes."""

    digest: str
    category: str
    arm: str
    temperature: float
    tokens: int
    passes: int
    seconds: float  # From the question to the last token, reading the prompt included
    decode_s: float  # From the first token to the last
    same: bool  # The text is plain decoding's, or parts from it at a numeric tie; above temperature 0 not compared
    empty: bool  # Nothing was written
    circle: bool  # It ends in a circle (`runs_in_circles`)


class PauseDetector:
    """Notices how long the process did not run at all: times measured meanwhile say nothing."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last = time.monotonic()
        self._ended = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(STANDSTILL_S / 10):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now


class SideBySide:
    """Asks prompts with several arms, which take turns prompt by prompt."""

    def __init__(self, llm: LLM, arms: Sequence[SpeedupArm], *, max_tokens: int, fewest: int = DECIDING) -> None:
        """Compare `arms`, of which the first decodes plainly, on at least the `fewest` prompts."""
        self.llm, self.arms, self.max_tokens, self.fewest = llm, arms, max_tokens, fewest

    def ask(
        self,
        prompts: Sequence[AskedPrompt],
        *,
        seconds: float,
        done: Sequence[AnswerTiming] = (),
        tell: Callable[[list[AnswerTiming]], None] = lambda timings: None,
    ) -> list[AnswerTiming]:
        """Run the prompts in order, at least the fewest, until the time is spent, and return all completions.

        `done` are those of an earlier call, which are not run again. `tell` is called after each prompt.
        """
        timings = list(done)
        done_before = {one.digest for one in timings}
        waiting = [prompt for prompt in prompts if prompt.digest not in done_before]
        deadline = time.monotonic() + seconds
        if waiting:
            ask_arms(self.llm, self.arms, waiting[0].prompt, self._params(0.0, min(WARM_UP_TOKENS, self.max_tokens)))
        for number, prompt in enumerate(waiting):
            if len(done_before) + number >= self.fewest and time.monotonic() > deadline:
                break
            for _ in range(ATTEMPTS):
                with PauseDetector() as still:
                    answers = self._ask(prompt, number)
                if still.longest_s < STANDSTILL_S:
                    timings += answers
                    break
                deadline += still.longest_s
            tell(timings)
        return timings

    def _ask(self, prompt: AskedPrompt, number: int) -> list[AnswerTiming]:
        """Answer one prompt with every arm at every temperature; who goes first changes from prompt to prompt."""
        timings = list[AnswerTiming]()
        first = number % len(self.arms)
        for temperature in TEMPERATURES:
            params = self._params(temperature, self.max_tokens)
            outputs = ask_arms(self.llm, self.arms, prompt.prompt, params, first=first)
            plain = outputs[self.arms[0].name]
            timings += [self._timing(prompt, temperature, name, output, plain) for name, output in outputs.items()]
        return timings

    def _params(self, temperature: float, tokens: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=tokens, seed=7)

    def _timing(
        self, prompt: AskedPrompt, temperature: float, arm: str, output: RequestOutput, plain: RequestOutput
    ) -> AnswerTiming:
        answer = output.outputs[0]
        parted = find_parting(self.llm, plain, output) if temperature == 0 and output is not plain else None
        return AnswerTiming(
            digest=prompt.digest,
            category=prompt.category,
            arm=arm,
            temperature=temperature,
            tokens=len(answer.token_ids),
            passes=answer.speculation.num_passes,
            seconds=output.seconds,
            decode_s=output.decode_s or 0.0,
            same=parted is None or parted.tie,
            empty=not answer.text.strip(),
            circle=runs_in_circles(np.array(answer.token_ids, np.int32)),
        )


def summarise_arm(
    timings: Sequence[AnswerTiming],
    arm: str,
    temperature: float,
    *,
    category: str | None = None,
    base: str = PLAIN,
    comparisons: int = 1,
) -> dict[str, Any] | None:
    """Return an arm's tokens per second, its speed over plain decoding's (or that of another `base`) and its tokens per
    pass, with intervals, over the prompts of a category or all; None where no completion has two tokens.

    ``speedup_sure`` is the lower end of an interval that also holds for the best of so many `comparisons` (Bonferroni);
    None for fewer than `DECIDING` prompts.
    """
    chosen = [
        one for one in timings if one.temperature == temperature and (category is None or one.category == category)
    ]
    by_digest = {one.digest: one for one in chosen if one.arm == arm}
    plain = {one.digest: one for one in chosen if one.arm == base}
    # A completion of one token comes with its prompt: nothing can make it faster.
    digests = [name for name in by_digest if name in plain and min(by_digest[name].tokens, plain[name].tokens) > 1]
    if not digests:
        return None
    # Sums by prompt, (prompts,): prompts are the samples.
    tokens, passes, seconds = (_column(by_digest, digests, name) for name in ("tokens", "passes", "seconds"))
    plain_tokens, plain_seconds = (_column(plain, digests, name) for name in ("tokens", "seconds"))
    speed, plain_speed = tokens.sum() / seconds.sum(), plain_tokens.sum() / plain_seconds.sum()
    decoded = decode_speed([by_digest[one] for one in digests]) / decode_speed([plain[one] for one in digests])
    columns = (tokens, plain_seconds), (seconds, plain_tokens)
    sure = None if len(digests) < DECIDING else ratio_interval(*columns, 1 - (1 - CONFIDENCE) / comparisons)
    return {
        "prompts": len(digests),
        "tokens_per_second": round(float(speed), 2),
        "plain_tokens_per_second": round(float(plain_speed), 2),
        "speedup": round(float(speed / plain_speed), 4),
        "speedup_interval": ratio_interval(*columns),
        "speedup_sure": sure and sure[0],
        "decode_speedup": round(float(decoded), 4),
        "tokens_per_pass": round(float(tokens.sum() / passes.sum()), 4),
        "tokens_per_pass_interval": ratio_interval((tokens,), (passes,)),
        "worst_prompt": round(float((tokens / seconds * plain_seconds / plain_tokens).min()), 4),
        "slower_prompts": int((tokens / seconds * plain_seconds / plain_tokens < 1).sum()),
        "unlike_plain": sum(not by_digest[digest].same for digest in digests),
    }


def _column(timings: Mapping[str, AnswerTiming], digests: Sequence[str], name: str) -> Any:
    return np.array([max(1e-9, getattr(timings[digest], name)) for digest in digests])


def decode_speed(timings: Sequence[AnswerTiming]) -> float:
    """Return the tokens behind the first by the time behind the first."""
    return sum(one.tokens - 1 for one in timings) / max(1e-9, sum(one.decode_s for one in timings))


def ratio_interval(above: Sequence[Any], below: Sequence[Any], confidence: float = CONFIDENCE) -> list[float] | None:
    """Return the interval of a ratio of sums over prompts, the product of the sums `above` over that of those `below`,
    each (prompts,); None for fewer than `FEWEST` prompts.

    It is Student's t for the ratio's logarithm, with the jackknife's standard error: resampling ten prompts (bootstrap)
    would promise 95 % and hold 90 %.
    """
    count = len(above[0])
    if count < FEWEST:
        return None

    def logarithm(of: Callable[[Any], Any]) -> Any:
        return sum(np.log(of(column)) for column in above) - sum(np.log(of(column)) for column in below)

    without = logarithm(lambda column: column.sum() - column)  # Each prompt left out in turn
    error = math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    middle, reach = logarithm(lambda column: column.sum()), t_factor(count - 1, confidence) * error
    return [round(math.exp(middle - reach), 4), round(math.exp(middle + reach), 4)]


def summarise(timings: Sequence[AnswerTiming], arms: Sequence[SpeedupArm]) -> dict[str, Any]:
    """Return the figures of each arm by temperature, over all prompts and by category."""
    categories, temperatures = sorted({one.category for one in timings}), sorted({one.temperature for one in timings})
    comparisons = max(1, len(temperatures) * sum(arm.speculative is not False for arm in arms))
    found = dict[str, Any]()
    for arm in arms:
        if arm.speculative is False:
            continue
        found[arm.name] = {
            f"{temperature:g}": {
                "all": summarise_arm(timings, arm.name, temperature, comparisons=comparisons),
                "categories": {
                    name: figures
                    for name in categories
                    if (figures := summarise_arm(timings, arm.name, temperature, category=name)) is not None
                },
            }
            for temperature in temperatures
        }
    return found


def mean_speedup(figures: Mapping[str, Any]) -> float:
    """Return the geometric mean of an arm's speed-ups over all temperatures; 0 where it completed nothing."""
    found = [one["all"]["speedup"] if one["all"] is not None else 0.0 for one in figures.values()]
    return float(math.prod(found) ** (1 / len(found)))
