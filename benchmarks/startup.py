"""What starting costs: CPU time and memory of `forerun generate` beside transformers' own load and generate.

    python benchmarks/startup.py --model DIR --dtype bfloat16 --json startup.json

Both are whole processes: imports, tokenizer, weights, one prompt, `--tokens` tokens at T = 0. They take turns,
`--rounds` times, after a start of each that is not counted: it fills the caches (forerun's compiled kernels and what it
found out about the machine; the system's of the files). CPU time is user and system time of the process and its
threads. Memory is the largest resident size, and that when the answer was there; also without what importing torch and
transformers takes, in multiples of the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

SOURCE = Path(__file__).resolve().parents[1] / "src"
PROMPT = "The capital of France is"
IMPORTS = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama  # What every model's module imports, too
"""
TRANSFORMERS = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
name, dtype, tokens, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
inputs = tokenizer(prompt, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=int(tokens), do_sample=False)
print(tokenizer.decode(answer[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
"""
UNCHECKED = """
import sys
from forerun import LLM, SamplingParams
from forerun.cli import session
session.quiet_libraries()
name, dtype, tokens, prompt, drafter = sys.argv[1:]
config = {"method": drafter} if drafter else None
llm = LLM(name, dtype=dtype, self_check=False, max_num_seqs=1, speculative_config=config)
[answer] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=int(tokens)))
print(answer.outputs[0].text)
"""


def started(command: Sequence[str]) -> dict[str, Any]:
    """Run a process to its end: seconds of CPU and of wall time, MiB at most and at the end, and what it wrote."""
    began, resident = time.perf_counter(), 0  # KiB, since the answer was there: later a process shrinks
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=out, stderr=errors, env={**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
        )
        while True:
            if os.fstat(out.fileno()).st_size:
                resident = max(resident, _resident(process.pid))
            done, status, used = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command[:4])} ... failed:\n{errors.read().decode()[-2000:]}")
        return {
            "cpu_s": used.ru_utime + used.ru_stime,
            "wall_s": time.perf_counter() - began,
            "peak_mib": used.ru_maxrss / 1024,
            "resident_mib": resident / 1024,
            "text": out.read().decode().strip(),
        }


def _resident(pid: int) -> int:
    """KiB of a process in memory; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    asked, drafter = [options.model, options.dtype, str(options.tokens), PROMPT], options.drafter or ""
    words = ["--raw", "--dtype", options.dtype, "-n", str(options.tokens), "-t", "0", "-p", PROMPT]
    words += ["--drafter", drafter] if drafter else []
    checked = ["-m", "forerun.cli", "generate", options.model, *words]
    return {
        "transformers": [sys.executable, "-c", TRANSFORMERS, *asked],
        "forerun": [sys.executable, *(checked if options.self_check else ["-c", UNCHECKED, *asked, drafter])],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a checkpoint")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--drafter", help="of forerun; without one it decodes plainly")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--self-check", action=argparse.BooleanOptionalAction, default=True, help="of forerun")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    arms = commands(options)
    floor = started([sys.executable, "-c", IMPORTS])
    first = {name: started(command) for name, command in arms.items()}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for turn in range(options.rounds):
        for name in list(arms)[:: 1 if turn % 2 else -1]:
            runs[name].append(started(arms[name]))
    sys.path.insert(0, str(SOURCE))
    from forerun.model.load import weight_bytes

    weights = weight_bytes(Path(options.model), 4 if options.dtype == "float32" else 2) / 2**20
    figures = ("cpu_s", "wall_s", "peak_mib", "resident_mib")
    found = {name: {key: median(run[key] for run in own) for key in figures} for name, own in runs.items()}
    for name, own in found.items():
        own["first_cpu_s"] = first[name]["cpu_s"]
        own["resident_over_weights"] = own["resident_mib"] / weights
        own["without_imports_over_weights"] = (own["resident_mib"] - floor["peak_mib"]) / weights
    cpu = [ours["cpu_s"] / theirs["cpu_s"] for ours, theirs in zip(runs["forerun"], runs["transformers"], strict=True)]
    result = {
        **{key: getattr(options, key) for key in ("model", "dtype", "drafter", "tokens", "rounds", "self_check")},
        "weights_mib": weights,
        "imports": {key: floor[key] for key in ("cpu_s", "peak_mib")},
        "cpu_over_transformers": median(cpu),
        "arms": found,
        "texts": {name: own[-1]["text"] for name, own in runs.items()},
    }
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")
    return 0


def show(result: dict[str, Any]) -> None:
    table = Table("", "CPU s", "first start", "wall s", "peak MiB", "resident MiB", "over weights", "without imports")
    for name, own in result["arms"].items():
        seconds = [f"{own[key]:.1f}" for key in ("cpu_s", "first_cpu_s", "wall_s")]
        sizes = [f"{own[key]:.0f}" for key in ("peak_mib", "resident_mib")]
        shares = [f"{own[key]:.2f}" for key in ("resident_over_weights", "without_imports_over_weights")]
        table.add_row(name, *seconds, *sizes, *shares)
    console = Console()
    console.print(table)
    console.print(
        f"CPU time over transformers': {result['cpu_over_transformers']:.2f}; weights {result['weights_mib']:.0f} MiB; "
        f"imports alone {result['imports']['cpu_s']:.1f} s, {result['imports']['peak_mib']:.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
