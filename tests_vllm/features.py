"""`forerun features --source vllm` in vLLM's environment, beside the target's own hidden states, document by document.

The command probes itself with the beginning of one document; here every document counts, of lengths that fill blocks
and passes of vLLM in part. The engine has processes of its own, as vLLM's default is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from transformers import AutoModelForCausalLM

from forerun.cli import main as forerun
from forerun.demo import prompts
from forerun.shipped import FOLDER
from forerun.training.data.store import PreparedData
from forerun.training.features.online import COSINE, compare, reference_states
from forerun.training.features.store import FeatureStore

SOURCE = Path(__file__).parents[1] / "src"
MAX_LENGTH, BATCH_TOKENS = 400, 1000
"""Tokens of the longest document and of a pass of vLLM."""
LIMIT = 600
"""Seconds after which vLLM counts as hanging."""


def differences(python: Path, work: Path, environment: Mapping[str, str], console: Console) -> list[str]:
    """A sentence for every document whose features are not the target's own states.

    Args:
        python: of vLLM's environment.
        work: a folder; data, features and vLLM's log go there.
        environment: of vLLM's process, where the caller has not said otherwise.

    Raises:
        SystemExit: the command failed, or took longer than `LIMIT`.
    """
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    texts = [prompt.text[: 100 * (number + 1)] for number, prompt in enumerate(prompts())]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (work / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
    data = work / "prepared"
    prepare = ["data", "prepare", str(work / "texts.jsonl"), "--target", "demo", "--output", str(data)]
    if forerun([*prepare, "--max-length", str(MAX_LENGTH)]) != 0:
        raise SystemExit("forerun data prepare failed")
    began = time.monotonic()
    told = _extract(python, work, data, {**environment, **os.environ})
    console.print(f"forerun features --source {told['source']} took {time.monotonic() - began:.0f} s", highlight=False)
    return _compared(PreparedData(data), FeatureStore(work / "features"), console)


def _extract(python: Path, work: Path, data: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What the command says of itself on stdout."""
    command = [python, "-m", "forerun.cli", "features", "--source", "vllm", "--target", "demo", "--data", data]
    command += ["--output", work / "features", "--target-dtype", "float32", "--dtype", "float32", "--json"]
    command += ["--batch-tokens", str(BATCH_TOKENS)]
    own = {"PYTHONPATH": str(SOURCE), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (work / "features.log").open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, env={**environment, **own}, check=False, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"forerun features --source vllm hangs; its log is {log.name}") from None
    if done.returncode != 0:
        raise SystemExit(f"forerun features --source vllm failed; its log is {log.name}")
    return json.loads(done.stdout)


def _compared(data: PreparedData, store: FeatureStore, console: Console) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype="float32").eval()
    wrong, lowest, tokens = [], 1.0, 0
    for index in range(len(data)):
        ids = data.document(index)[0].tolist()
        checks = compare([store.read(index)], [reference_states(model, ids)])
        wrong += [f"features, document {index}: {check.summary}" for check in checks if not check.passed]
        lowest, tokens = min([lowest, *(check.lowest for check in checks)]), tokens + len(ids)
    said = f"{tokens} tokens of {len(data)} documents, lowest cosine {lowest:.6f} (limit {COSINE})"
    console.print(f"features from vLLM beside the target's own states: {said}", highlight=False, soft_wrap=True)
    return wrong
