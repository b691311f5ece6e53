"""In vLLM's environment: its own parser reads command lines, a JSON list of words each on stdin; on stdout, JSON,
the keys of ``--speculative-config`` that its configuration lacks."""

from __future__ import annotations

import dataclasses
import json
import sys

from vllm.config import SpeculativeConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
known = {one.name for one in dataclasses.fields(SpeculativeConfig)}
parsed = [parser.parse_args(words) for words in json.load(sys.stdin)]
lost = sorted({key for one in parsed for key in one.speculative_config or ()} - known)
sys.stdout.write(f"\n{json.dumps(lost)}\n")
