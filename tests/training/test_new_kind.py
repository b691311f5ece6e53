"""A kind of head is one file and one entry: the page that says so is taken at its word."""

import json
import os
import subprocess
import sys
from pathlib import Path

from examples.printed import ROOT, markdown
from training.conftest import words

PAGE = "docs/write-a-head.md"
RUN = """
import importlib, json, sys
import forerun.drafters
from forerun.drafters.kinds import KINDS, HeadKind

kind = eval(sys.argv[1], {"HeadKind": HeadKind})
KINDS[kind.name] = kind  # as if its entry stood there
importlib.reload(forerun.drafters)

from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.heads import read_head

assert main(json.loads(sys.argv[2])) == 0
target, folder = sys.argv[3:]
assert read_head(folder).config.kind == kind.name
llm = LLM(target, speculative_config={"method": kind.name, "model": folder, "adaptive": False})
prompt, params = {"prompt_token_ids": [3]}, SamplingParams(temperature=0, max_tokens=24, detokenize=False)
drafted, plain = (llm.generate(prompt, params, speculative=on)[0].outputs[0] for on in (None, False))
assert drafted.token_ids == plain.token_ids
print("mean", drafted.speculation.mean_acceptance_length)
"""


def test_the_printed_head_is_trained_written_read_and_drafts(target: Path, prepared: Path, tmp_path: Path) -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    [file] = [block.text for block in markdown(PAGE, text) if block.python]
    (tmp_path / "linear_head.py").write_text(file)
    entry = text.partition("```text\n")[2].partition("```")[0]
    line = words(target, prepared, tmp_path / "run", 25)
    line = ["train", "linear", *(word for word in line[2:] if not word.startswith(("objective.", "draft.")))]
    done = subprocess.run(
        [sys.executable, "-c", RUN, entry, json.dumps(line), str(target), str(tmp_path / "run" / "head")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split("mean ")[1]) > 1.2
