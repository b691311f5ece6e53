"""What `forerun deploy sglang` prints is read by SGLang's own parser."""

from __future__ import annotations

import argparse

import pytest
from sglang.srt import plugins
from sglang.srt.server_args import ServerArgs

from launch_lines import arguments_of


@pytest.mark.parametrize("words", arguments_of("sglang", "python -m sglang.launch_server"), ids=" ".join)
def test_sglang_parses_every_launch_line(words: list[str]) -> None:
    plugins.load_plugins()
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(words)
    assert found.model_path == words[1] and found.port == 8000
