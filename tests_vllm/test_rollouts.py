"""The plug-in where vLLM samples for a trainer: what requests wish in ``extra_args``, and weights that change."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from both import ENVIRONMENT
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun import LLM, SamplingParams
from forerun.deploy.engines.vllm import VARIABLE
from forerun.deploy.trials.try_vllm import ENVIRONMENT as VLLM
from forerun.shipped import FOLDER

TARGET = FOLDER / "target"
SCRIPT = Path(__file__).with_name("rollout_answers.py")


def test_predictions_of_requests_and_weights_that_change(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    model, generator = AutoModelForCausalLM.from_pretrained(TARGET), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(trained)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(trained)
    own = {**os.environ, **VLLM, **ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    own[VARIABLE] = json.dumps({"method": "prediction"})
    python = str(request.config.getoption("--vllm"))
    ran = subprocess.run(
        [python, str(SCRIPT), str(TARGET), str(trained)],
        capture_output=True,
        text=True,
        timeout=300,
        env=own,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompt = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
    for name, folder in (("plain", TARGET), ("trained", trained)):
        [output] = LLM(folder, dtype="float32", max_model_len=256).generate(prompt, params)
        assert found[name]["token_ids"] == output.outputs[0].token_ids, f"{name} weights answer"
    assert found["trained"]["token_ids"] != found["plain"]["token_ids"] and found["trained"]["drafted"] > 0
    for name in ("token_ids", "text", "back"):
        assert found[name]["token_ids"] == found["plain"]["token_ids"] and found[name]["accepted"] >= 20
    assert found["plain"]["drafted"] == found["wrong"]["drafted"] == 0, "who brings no prediction that can be read"
    assert found["wrong"]["token_ids"] == found["plain"]["token_ids"]
