"""What `forerun deploy vllm` prints is read by vLLM's own parser."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from both import ENVIRONMENT

from forerun.deploy.trials.try_vllm import ENVIRONMENT as VLLM
from launch_lines import arguments_of


def test_vllm_parses_every_launch_line(request: pytest.FixtureRequest) -> None:
    lines = arguments_of("vllm", "vllm serve")
    script = str(Path(__file__).with_name("parse_lines.py"))
    ran = subprocess.run(
        [str(request.config.getoption("--vllm")), script],
        input=json.dumps(lines),
        env={**os.environ, **VLLM, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert lines and ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == []
