"""Proof in vLLM: the same models and drafts here and there, greedy, in float32. `make test-vllm` runs this.

Every arm is answered by vLLM, in an environment of its own, and by forerun. vLLM's text must be ours without
speculation, token for token: in float32 only a fault should part them (in bfloat16 the two engines' rounding would, at
every near tie), so drafts are compared on the same text. Features that vLLM captures must be the target's own hidden
states. The exit code is 1 if anything disagrees.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import compare
import features
import heads
from rich.console import Console
from rich.table import Table

from forerun import LLM, SamplingParams
from forerun.certify.reference import difference
from forerun.demo import FOLDER, prompts
from forerun.types import CompletionOutput

ROOT = Path(__file__).parents[1]
CONTEXT, ROWS, LENGTH, MAX_MODEL_LEN = 300, 4, 5, 1024
"""Tokens of a prompt; answers at once; tokens of a draft; most tokens of prompt and answer in vLLM."""
FITTED = 1000
"""Tokens behind each prompt that a stand-in head is fitted to."""
SAME_DRAFTER = ("draft_model", "eagle3")
"""Arms in which both engines run the same network. Prompt lookup differs in one point: of several earlier occurrences
vLLM copies behind the first, forerun behind the last, so there only the rates can be compared."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}
"""Of vLLM's processes, where the caller has not said otherwise."""
NOTED = ("ERROR", "Model Runner", "Resolved architecture", "Sharing target model", "auxiliary layers")
"""Lines of vLLM's log with one of these are shown."""


def main() -> int:
    """Run all arms and report."""
    arguments = _arguments()
    console = Console()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    ours = LLM(FOLDER / "target", dtype="float32", max_num_seqs=ROWS, max_model_len=MAX_MODEL_LEN)
    texts = [ours.tokenizer.encode(prompt.text, add_special_tokens=False, verbose=False) for prompt in prompts()]
    behind = [text[CONTEXT : CONTEXT + FITTED] for text in texts]
    head, whose = heads.exported_head(arguments.head, FOLDER / "target", behind, work)
    console.print(f"eagle3: {whose}", soft_wrap=True, highlight=False)
    plan = {
        "target": str(FOLDER / "target"),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_tokens": arguments.tokens,
        "rows": ROWS,
        "prompts": [text[:CONTEXT] for text in texts[: arguments.prompts]],
        "arms": _arms(head),
    }
    (work / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    mine = {arm: _forerun(ours, plan, arm) for arm in plan["arms"]}
    theirs = _vllm(arguments.python, plan, work, console)
    wrong = features.differences(arguments.python, work / "features", ENVIRONMENT, console)
    return _report(console, work, ours, plan, mine, theirs, wrong=wrong)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=Path, help="directory of an EAGLE-3 head; default: the shipped one")
    parser.add_argument("--prompts", type=int, default=15, help="how many of the shipped prompts")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--work", type=Path, default=ROOT / "build/vllm", help="where exports, answers and logs go")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-vllm/bin/python", help="of vLLM's environment")
    return parser.parse_args()


def _arms(head: Path) -> dict[str, dict[str, Any]]:
    """Name -> what each engine is told, forerun besides to draft as vLLM does, the same at every step; None is plain
    decoding."""
    ngram = {"method": "ngram", "num_speculative_tokens": LENGTH, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    draft = {"method": "draft_model", "num_speculative_tokens": LENGTH, "model": str(FOLDER / "draft")}
    eagle = {"method": "eagle3", "num_speculative_tokens": LENGTH, "model": str(head)}
    fixed = {"adaptive": False}
    return {
        "plain": {"vllm": None, "forerun": False},
        "ngram": {"vllm": ngram, "forerun": ngram | fixed},
        # vLLM gives a draft model the target's number format, forerun the one of its checkpoint.
        "draft_model": {"vllm": draft, "forerun": {**draft, **fixed, "dtype": "float32"}},
        "eagle3": {"vllm": eagle, "forerun": eagle | fixed},
    }


def _forerun(llm: LLM, plan: dict[str, Any], arm: str) -> list[compare.Answer]:
    params = SamplingParams(temperature=0.0, max_tokens=plan["max_tokens"], ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in plan["prompts"]]
    outputs = llm.generate(requests, params, speculative=plan["arms"][arm]["forerun"], trace=True)
    return [_answer(output.outputs[0]) for output in outputs]


def _answer(output: CompletionOutput) -> compare.Answer:
    steps = [step for step in output.trace if step.nodes]
    return compare.Answer(
        token_ids=list(output.token_ids),
        text=output.text,
        drafted=[len(step.nodes) for step in steps],
        accepted=[len(step.path) for step in steps],
    )


def _vllm(python: Path, plan: dict[str, Any], work: Path, console: Console) -> dict[str, dict[str, Any]]:
    """What `vllm_answers.py` found; what vLLM says of note goes to the console, everything to logs.

    Raises:
        SystemExit: vLLM failed.
    """
    for arm in plan["arms"]:
        (work / f"{arm}.json").unlink(missing_ok=True)
    command = [python, Path(__file__).with_name("vllm_answers.py"), work / "plan.json", work]
    began = time.monotonic()
    with (work / "vllm.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=log, env={**ENVIRONMENT, **os.environ}, check=False)
    console.print(f"vLLM took {time.monotonic() - began:.0f} s", highlight=False)
    found = {}
    for arm in plan["arms"]:
        output, log_file = work / f"{arm}.json", work / f"{arm}.log"
        lines = (log_file if log_file.exists() else work / "vllm.log").read_text(encoding="utf-8").splitlines()
        shown = [line for line in lines if any(word in line for word in NOTED)] if output.exists() else lines[-30:]
        console.print(f"[bold]vLLM says, {arm}[/]")
        for line in shown:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if not output.exists():
            raise SystemExit(f"vLLM failed at the arm {arm}; all it said is in {work}")
        found[arm] = json.loads(output.read_text(encoding="utf-8"))
        found[arm]["answers"] = [compare.Answer(**answer) for answer in found[arm]["answers"]]
    return found


def _report(
    console: Console,
    work: Path,
    llm: LLM,
    plan: dict[str, Any],
    mine: dict[str, list[compare.Answer]],
    theirs: dict[str, dict[str, Any]],
    *,
    wrong: Sequence[str],
) -> int:
    """The comparison on the console and in results.json; `wrong` is what was found wrong before."""
    wrong = list(wrong)
    for arm in plan["arms"]:
        wrong += _texts(llm, plan, arm, mine, theirs[arm]["answers"])
    speculative = [arm for arm in plan["arms"] if arm != "plain"]
    lines = [line for arm in speculative for line in compare.positions(arm, mine[arm], theirs[arm]["answers"], LENGTH)]
    steps = {arm: compare.same_steps(mine[arm], theirs[arm]["answers"], LENGTH) for arm in SAME_DRAFTER}
    limit = compare.bound(lines)
    wrong += [f"{line.arm}: position {line.index} differs beyond noise" for line in lines if line.chance < limit]
    wrong += [
        f"{arm}: only {found.same} of {found.compared} steps agree" for arm, found in steps.items() if not found.agree
    ]
    for arm in speculative:
        wrong += _counters(arm, theirs[arm])
    versions = ", ".join(sorted({f"{found['version']}, model runner {found['runner']}" for found in theirs.values()}))
    console.print(_table(lines, limit, f"Accepted at each position, greedy, float32, vLLM {versions}"))
    answers = sum(len(found["answers"]) for found in theirs.values())
    console.print(f"{answers} answers of {plan['max_tokens']} tokens by vLLM in {len(theirs)} arms", highlight=False)
    for arm, found in steps.items():
        console.print(f"{arm}: {found.same} of {found.compared} comparable steps accept the same", highlight=False)
    for sentence in wrong:
        console.print(f"[red]wrong[/] {sentence}", highlight=False, soft_wrap=True)
    results = {"lines": [asdict(line) | {"chance": line.chance} for line in lines], "wrong": wrong}
    results |= {"steps": {arm: asdict(found) for arm, found in steps.items()}, "versions": versions}
    (work / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console.print("[red]vLLM and forerun differ[/]" if wrong else "[green]vLLM and forerun agree[/]")
    return 1 if wrong else 0


def _texts(
    llm: LLM,
    plan: dict[str, Any],
    arm: str,
    mine: dict[str, list[compare.Answer]],
    theirs: Sequence[compare.Answer],
) -> list[str]:
    """A sentence for every answer of vLLM's, and for every speculative one of ours, that is not our plain one."""
    found = []
    for whose, answers in (("vLLM", theirs), ("forerun", mine[arm])):
        for parted in compare.text_differences(arm, mine["plain"], answers):
            where = "the same tokens, another text"
            if parted.position is not None:
                both = mine["plain"][parted.prompt].token_ids, answers[parted.prompt].token_ids
                gap = difference(llm, plan["prompts"][parted.prompt], both, parted.prompt)
                where = f"from token {parted.position}, where the two are {gap.gap if gap else 0:.2g} nats apart"
            found.append(f"{whose}, {arm}: answer {parted.prompt} is not forerun's plain one: {where}")
    return found


def _counters(arm: str, found: dict[str, Any]) -> list[str]:
    """vLLM's metrics must tell what its outputs tell; otherwise one of them was misread."""
    answers, counters = found["answers"], found["counters"]
    told = [sum(kept > index for answer in answers for kept in answer.accepted) for index in range(LENGTH)]
    metric = counters.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    steps = sum(len(answer.accepted) for answer in answers), counters.get("vllm:spec_decode_num_drafts")
    if told == metric and steps[0] == steps[1] and steps[0] > 0:
        return []
    return [f"{arm}: vLLM's metrics say {metric} of {steps[1]} drafts, its outputs {told} of {steps[0]}"]


def _table(lines: Sequence[compare.Position], limit: float, title: str) -> Table:
    caption = (
        f"Noise: two binomial counts of the same rate lie this far apart with chance p (Fisher's exact test); p below "
        f"{limit:.1g} ({compare.SIGNIFICANCE:g} / {len(lines)} lines) is a difference."
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("drafter")
    for name in ("position", "forerun", "rate", "vLLM", "rate", "p"):
        table.add_column(name, justify="right")
    for line in lines:
        counts = [f"{kept} / {tried}" for kept, tried in zip(line.accepted, line.drafted, strict=True)]
        rates = [
            f"{kept / tried:.3f}" if tried else "-" for kept, tried in zip(line.accepted, line.drafted, strict=True)
        ]
        style = "red" if line.chance < limit else None
        cells = [counts[0], rates[0], counts[1], rates[1], f"{line.chance:.2g}"]
        table.add_row(line.arm, str(line.index + 1), *cells, style=style)
    return table


if __name__ == "__main__":
    sys.exit(main())
