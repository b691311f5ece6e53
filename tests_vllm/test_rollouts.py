"""The plug-in where vLLM samples for a trainer: what requests wish in ``extra_args``, and weights that change.

Greedily: at other temperatures vLLM's own rejection sampler computes nothing right without Triton, which CPUs lack.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from both import ENVIRONMENT
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun import LLM, SamplingParams
from forerun.deploy.engines.vllm import PLUG_IN, VARIABLE
from forerun.deploy.trials.try_vllm import ENVIRONMENT as VLLM
from forerun.shipped import FOLDER
from ports import free_ports

TARGET = FOLDER / "target"
SCRIPT = Path(__file__).with_name("rollout_answers.py")
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
START_S = 200


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a trainer has made of the target."""
    folder, generator = tmp_path_factory.mktemp("trained"), torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TARGET)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
    return folder


def environment(config: dict[str, Any], **more: str) -> dict[str, str]:
    return {**os.environ, **VLLM, **ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "0", VARIABLE: json.dumps(config), **more}


def ours(folder: Path) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    [output] = LLM(folder, dtype="float32", max_model_len=256).generate(PROMPT, params)
    return output.outputs[0].token_ids


def test_predictions_of_requests_and_weights_that_change(request: pytest.FixtureRequest, trained: Path) -> None:
    python = str(request.config.getoption("--vllm"))
    words, own = [python, str(SCRIPT), str(TARGET), str(trained)], environment({"method": "prediction"})
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, env=own, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    for name, folder in (("plain", TARGET), ("trained", trained)):
        assert found[name]["token_ids"] == ours(folder), f"{name} weights answer"
    assert found["trained"]["token_ids"] != found["plain"]["token_ids"] and found["trained"]["drafted"] > 0
    for name in ("token_ids", "text", "back"):
        assert found[name]["token_ids"] == found["plain"]["token_ids"] and found[name]["accepted"] >= 20
    assert found["plain"]["drafted"] == found["wrong"]["drafted"] == 0, "who brings no prediction that can be read"
    assert found["wrong"]["token_ids"] == found["plain"]["token_ids"]


@contextmanager
def serving(python: str, log: Path) -> Iterator[str]:
    """The address of ``vllm serve`` with the plug-in, as a trainer starts it; vLLM for CPUs has no such command."""
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    drafter = {"method": "custom_class", "model": PLUG_IN, "num_speculative_tokens": 5}
    words = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(TARGET),
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    words += ["--max-model-len", "256", "--max-num-seqs", "4", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--no-async-scheduling", "--logprobs-mode", "processed_logprobs"]
    words += ["--speculative-config", json.dumps(drafter)]
    own = environment({"method": "merge", "drafters": ["prediction", "suffix"]}, VLLM_SERVER_DEV_MODE="1")
    own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with log.open("w") as said, subprocess.Popen([python, *words], env=own, stdout=said, stderr=said) as server:
        try:
            end = time.monotonic() + START_S
            while server.poll() is None and time.monotonic() < end:
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            yield url
        finally:
            server.terminate()


def test_a_trainer_asks_over_http(request: pytest.FixtureRequest, trained: Path, tmp_path: Path) -> None:
    """``VLLM_SERVER_DEV_MODE``: sleep, other weights and waking up between two rollouts, whose wishes go along."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompt, before = tokenizer.encode(PROMPT), ours(TARGET)
    body = {"model": str(TARGET), "prompt": prompt, "temperature": 0, "max_tokens": 32, "ignore_eos": True}
    body |= {"logprobs": 0, "return_token_ids": True, "vllm_xargs": {"group": "g", "prediction": before}}
    with serving(str(request.config.getoption("--vllm")), tmp_path / "vllm.log") as url:

        def post(path: str, sent: Any = None) -> Any:
            answer = httpx.post(url + path, json=sent, timeout=120)
            assert answer.status_code == 200, answer.text
            return answer.json() if answer.content else None

        def accepted() -> float:
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            return sum(
                float(one.split()[-1]) for one in lines if one.startswith("vllm:spec_decode_num_accepted_tokens_t")
            )

        first = post("/v1/completions", body)["choices"][0]
        assert first["token_ids"] == before and first["prompt_token_ids"] == prompt and accepted() >= 20
        assert len(first["logprobs"]["token_logprobs"]) == 32
        post("/sleep?level=1")
        post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(trained)}})
        post("/wake_up")
        post("/reset_prefix_cache")
        assert post("/v1/completions", body)["choices"][0]["token_ids"] == ours(trained)
