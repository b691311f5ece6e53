"""What `forerun doctor` says of architectures' names is what vLLM's registry has."""

from __future__ import annotations

import json
import subprocess

import pytest

from forerun.heads.block_files import ARCHITECTURES
from forerun.heads.eagle_engines import vllm_name
from forerun.heads.eagle_files import FIRST_GENERATION, LATENT, LLAMA, QWEN3
from forerun.heads.eagle_findings import VLLM_NAMES
from forerun.heads.medusa import ENGINE

GIVEN = ["LlamaForCausalLM", "Qwen3ForCausalLM", "EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM", "PEagleDraftModel"]
GIVEN += ["Qwen3Eagle3Model", FIRST_GENERATION, LATENT, LLAMA, QWEN3, "Qwen3ForCausalLMEagle3"]
ASKED = """
import json, sys
from transformers import LlamaConfig
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS
from vllm.transformers_utils.configs.eagle import EAGLEConfig

def made(name, method):
    return EAGLEConfig(LlamaConfig(architectures=[name]), method=method).architectures[0]

names = {method: {name: made(name, method) for name in sys.argv[1:]} for method in ("eagle", "eagle3")}
print(json.dumps({"registry": sorted(_SPECULATIVE_DECODING_MODELS), **names}))
"""


def test_the_table_is_vllms_registry(request: pytest.FixtureRequest) -> None:
    python = str(request.config.getoption("--vllm"))
    ran = subprocess.run([python, "-c", ASKED, *GIVEN], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    registry = set(told["registry"])
    assert {name for name in registry if name.startswith("Eagle") or name.endswith("Eagle3")} == VLLM_NAMES
    assert told["eagle"] == {name: vllm_name(name, 1) for name in GIVEN}
    assert told["eagle3"] == {name: vllm_name(name, 3) for name in GIVEN}
    assert {*ENGINE["architectures"], *ARCHITECTURES.values()} <= registry
