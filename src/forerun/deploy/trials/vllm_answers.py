"""This script writes vLLM's greedy answers to the prompts of a plan, and the outcome of every
draft, as JSON per arm.

Usage: ``python vllm_answers.py PLAN FOLDER``. It runs in vLLM's own environment, so it imports
nothing of forerun (vLLM does, where forerun's plug-in drafts). vLLM is imported once; every arm has
a forked process, a fresh engine and a log of its own. An error that vLLM raises is the arm's
answer.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import vllm

COUNTERS = ("vllm:spec_decode_", "vllm:num_preemptions")
"""Metrics with these prefixes are kept."""


def main() -> int:
    """Answer with every arm of the plan; the exit code is the number of arms whose process died."""
    plan_file, folder = map(Path, sys.argv[1:])
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    vllm.LLM, vllm.SamplingParams  # noqa: B018 - loaded here, not in every process
    failed = 0
    for arm in plan["arms"]:
        process = multiprocessing.get_context("fork").Process(target=_run, args=(plan, arm, folder))
        process.start()
        process.join()
        failed += process.exitcode != 0
    return failed


def _run(plan: dict[str, Any], arm: str, folder: Path) -> None:
    with (folder / f"{arm}.log").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(plan["arms"][arm]["environment"])
    try:
        report = answer(plan, arm)
    except Exception as error:
        logging.exception("%s", arm)
        report = {"refused": f"{type(error).__name__}: {error}", "version": vllm.__version__}
    (folder / f"{arm}.json").write_text(json.dumps(report), encoding="utf-8")


def answer(plan: dict[str, Any], arm: str) -> dict[str, Any]:
    """Return the completions in the plan's order, vLLM's counters, its version and the model runner
    that it used.
    """
    target, speculation = plan["arms"][arm]["target"], plan["arms"][arm]["vllm"]
    # The counters are totals; which step accepted how much stands in each output, if requested.
    more = {"speculative_config": speculation, "per_request_spec_decode_metrics": "detailed"} if speculation else {}
    llm = vllm.LLM(
        model=target,
        dtype=plan["dtype"],
        max_num_seqs=plan["rows"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **plan["arms"][arm]["engine"],
        **more,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=plan["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in plan["prompts"]]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return {
        "answers": [_answer(output) for output in outputs],
        "counters": {
            metric.name: metric.values if hasattr(metric, "values") else metric.value
            for metric in llm.get_metrics()
            if metric.name.startswith(COUNTERS)
        },
        "version": vllm.__version__,
        "runner": "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1",
    }


def _answer(output: Any) -> dict[str, Any]:
    steps = output.spec_decode_metrics
    return {
        "token_ids": list(output.token_ids),
        "text": output.text,
        "drafted": steps.per_step_drafted if steps else [],
        "accepted": steps.per_step_accepted if steps else [],
    }


if __name__ == "__main__":
    sys.exit(main())
