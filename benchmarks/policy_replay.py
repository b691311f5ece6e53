"""The policy on answers that are known, with passes that take what they are said to take.

No pass is run, and nothing is timed but the host's own work: thousands of steps take a second, and what else a machine
does hardly matters. Acceptance is exact: copies are walked, so a draft is accepted as far as the answer goes on with
it. What reads scores or hidden states, or runs a model, is not replayed.

``python -m benchmarks.policy_replay smollm2 --questions FILE --answers KEPT --passes 1:6.8 2:7.0 8:11.7 16:19.2``
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from forerun import LLM, SamplingParams
from forerun.control.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig, arms_of
from forerun.control.costs import CostModel, PassCost
from forerun.control.measuring import load_or_measure
from forerun.control.policy import Policy, policy_for
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DrafterSetup
from forerun.decode.row import Row
from forerun.decode.step import Emitted, context_for, propose_trees
from forerun.types import Source, StepTrace

JITTER = 0.03  # Standard deviation of a pass's time, as a share; what disturbs a pass only adds to it
GREEDY = Sampler(SamplingParams(temperature=0.0), ())


@dataclass(kw_only=True)
class Sum:
    """The steps of some answers."""

    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    host_ms: float = 0.0
    ms: float = 0.0
    plain_ms: float = 0.0
    answers: list[float] = field(default_factory=list)  # Plain decoding's time over the policy's, by answer

    def line(self) -> dict[str, float]:
        """Return what is shown."""
        return {
            "plain over policy": round(self.plain_ms / self.ms, 3),
            "worst answer": round(min(self.answers), 2),
            "tokens a pass": round(self.tokens / self.steps, 2),
            "nodes a pass": round(self.nodes / self.steps, 2),
            "host ms": round(self.host_ms / self.steps, 2),
        }


def answers_of(options: argparse.Namespace, llm: LLM) -> list[dict[str, Any]]:
    """Return the answers at all temperatures, asked for as far as the file does not hold them."""
    path, found = Path(options.answers), list[dict[str, Any]]()
    if path.exists():
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    known = {(one["question"], one["temperature"]) for one in found}
    by_category = defaultdict[str, list[dict[str, Any]]](list)
    for line in Path(options.questions).read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        by_category[question["category"]].append(question)
    wanted = [(name, one) for name, every in by_category.items() for one in every[: options.limit]]
    for temperature in options.temperature:
        asked = [(name, one) for name, one in wanted if (one["question_id"], temperature) not in known]
        chats = [[{"role": "user", "content": one["turns"][0]}] for _, one in asked]
        params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=3)
        for (name, one), output in zip(asked, llm.chat(chats, params, use_tqdm=bool(asked)), strict=True):
            ids = {"prompt": list(output.prompt_token_ids), "answer": list(output.outputs[0].token_ids)}
            found.append({"question": one["question_id"], "category": name, "temperature": temperature, **ids})
        text = "".join(json.dumps(line) + "\n" for line in found)
        path.write_text(text, encoding="utf-8")
    names = {one["question_id"] for _, one in wanted}
    return [one for one in found if one["question"] in names and one["temperature"] in options.temperature]


class Replay:
    """One engine's policy and its steps over known answers, one after the other."""

    def __init__(self, options: argparse.Namespace, llm: LLM, passes: PassCost, seed: int = 0) -> None:
        self.options, self.passes, self.random, self.steps = options, passes, random.Random(seed), 0
        setup = DrafterSetup(target=llm.target, tokenizer=llm.tokenizer, rows=1, slots=llm.target.slots)
        self.policy: Policy = policy_for(
            arms_of(SpeculativeConfig.parse(options.drafter)),
            setup,
            nodes=MAX_SPECULATIVE_TOKENS,
            costs=passes,
            measure=True,
            chains=llm.target.chains_only,
            clock=self.clock,
        )

    def clock(self) -> float:
        """Return the host's time in seconds, as it is between passes that push its code out of the caches."""
        return float(self.options.host * time.thread_time())

    def answer(self, prompt: Sequence[int], answer: Sequence[int]) -> Sum:
        """Decode one answer, whose first token follows the prompt, and return its steps."""
        policy, text = self.policy, [*prompt, *answer]
        row = Row(
            cache_row=0,
            tokens=text[: len(prompt) + 1],
            prompt_length=len(prompt),
            sampler=GREEDY,
            seed=0,
            stop_ids=frozenset(),
            tokens_left=len(answer) - 1,
        )
        policy.forget([0], [0])
        for arm in policy.arms:
            arm.drafter.extend(context_for([row], [0], [len(row.tokens)], {}))
        total = Sum()
        while row.tokens_left > 0:
            self._step(row, text, total)
        total.plain_ms = total.tokens * (self._pass_ms(0, len(prompt)) + self.options.rest)
        total.answers.append(total.plain_ms / total.ms)
        return total

    def _step(self, row: Row, text: Sequence[int], total: Sum) -> None:
        policy, began = self.policy, self.clock()
        groups = policy.plan([row], [0], [MAX_SPECULATIVE_TOKENS])
        [tree] = policy.admit(propose_trees([row], groups))
        drafting, place = self.clock() - began, len(row.tokens)
        path = _walk(tree, text[place:])
        tokens = list(text[place : place + len(path) + 1])
        verify_ms, began = self._pass_ms(tree.size, place), self.clock()
        row.commit(tokens)
        row.tokens_left -= len(tokens)
        for group in groups:
            context = context_for([row], [*group.members, *group.listeners], [len(tokens)], {})
            group.drafter.extend(context)
        teaching, began = self.clock() - began, self.clock()
        trace = StepTrace(
            step=self.steps,
            position=place,
            drafter=None,
            rule="",
            nodes=(),
            path=path,
            next_token=tokens[-1],
            kind=Source.TARGET,
            draft_ms=1e3 * drafting + self.options.rest / 2,
            verify_ms=verify_ms,
            commit_ms=1e3 * teaching + self.options.rest / 2,
        )
        depth = max(tree.depths)
        policy.learn([Emitted(tokens=tokens, sources=[], drafted=tree.size, depth=depth, logprobs=None, trace=trace)])
        host_ms = 1e3 * (drafting + teaching + self.clock() - began)
        self.steps += 1
        total.steps += 1
        total.tokens += len(tokens)
        total.nodes += tree.size
        total.host_ms += host_ms
        total.ms += host_ms + verify_ms + self.options.rest

    def _pass_ms(self, nodes: int, context: int) -> float:
        return self.passes.pass_ms(1 + nodes, 1, context) * (1 + JITTER * abs(self.random.gauss(0, 1)))


def _walk(tree: TokenTree, rest: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that the answer goes on with; its last token is never drafted."""
    path, node = list[int](), 0
    for token in rest[:-1]:
        children = (child for child in range(1, tree.size + 1) if tree.parents[child] == node)
        found = next((child for child in children if tree.tokens[child] == token), None)
        if found is None:
            break
        path.append(found)
        node = found
    return tuple(path)


def replay(options: argparse.Namespace, llm: LLM, answers: Sequence[Mapping[str, Any]], passes: PassCost) -> Any:
    """Return the sums by (engines, temperature) and category."""
    found: dict[tuple[str, float], dict[str, Sum]] = {}
    for engines in ("one engine", "anew"):
        for temperature in options.temperature:
            sums = found.setdefault((engines, temperature), defaultdict(Sum))
            engine = Replay(options, llm, passes)
            for one in answers:
                if one["temperature"] == temperature and len(one["answer"]) > 1:
                    if engines != "one engine":
                        engine = Replay(options, llm, passes)
                    _add(sums, one["category"], engine.answer(one["prompt"], one["answer"]))
    return found


def _add(sums: dict[str, Sum], category: str, found: Sum) -> None:
    for total in (sums["all"], sums[category]):
        for name, value in vars(found).items():
            setattr(total, name, getattr(total, name) + value)


def passes_of(options: argparse.Namespace, llm: LLM) -> PassCost:
    """Return the passes' times: those given, else those of this model on this machine."""
    if not options.passes:
        return load_or_measure(llm.target, rows=(1,))
    sizes = sorted((int(nodes), float(ms)) for nodes, _, ms in (one.partition(":") for one in options.passes))
    nodes, times = zip(*sizes, strict=True)
    return CostModel(nodes=nodes, rows=(1,), contexts=(0,), pass_times_ms=((times,),), stairs=False)


def lines_of(found: Any) -> Iterator[dict[str, Any]]:
    """Yield one line for each number of engines, temperature and category."""
    for (engines, temperature), sums in found.items():
        for category, total in sums.items():
            yield {"engines": engines, "temperature": temperature, "category": category, **total.line()}


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print plain decoding's time over the policy's, by category, and the figures of all answers."""
    columns = list(dict.fromkeys((line["engines"], line["temperature"]) for line in lines))
    heads = [f"{engines}, T={temperature:g}" for engines, temperature in columns]
    table = Table(Column("plain over policy"), *(Column(head, justify="right") for head in heads))
    cells = {(line["category"], line["engines"], line["temperature"]): line for line in lines}
    for category in dict.fromkeys(line["category"] for line in lines):
        table.add_row(category, *(f"{cells[category, *column]['plain over policy']:.2f}" for column in columns))
    table.add_section()
    for name in ("worst answer", "tokens a pass", "nodes a pass", "host ms"):
        table.add_row(name, *(f"{cells['all', *column][name]:.2f}" for column in columns))
    Console().print(table)


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--questions", required=True, help="questions as Spec-Bench has them")
    parser.add_argument("--answers", required=True, help="file in which the model's answers are kept")
    parser.add_argument("--limit", type=int, default=5, help="questions of each category")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--drafter", type=json.loads, default={"method": "auto"}, help="its configuration, as JSON")
    parser.add_argument("--passes", nargs="+", default=[], metavar="NODES:MS", help="else measured")
    parser.add_argument("--rest", type=float, default=0.9, help="ms of a step that neither passes nor policy take")
    parser.add_argument("--host", type=float, default=2.3, help="slower than in a loop the host's code runs by so much")
    parser.add_argument("--json", action="store_true", help="one line")
    options = parser.parse_args()
    llm = LLM(options.model, speculative_config=None)
    found = list(lines_of(replay(options, llm, answers_of(options, llm), passes_of(options, llm))))
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    show(found)


if __name__ == "__main__":
    main()
