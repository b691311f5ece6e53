"""Options to the Python API's arguments."""

import io
import json
from pathlib import Path

import pytest

from forerun.cli.options import SamplingOptions, SpeculationOptions, key_value, read_prompt
from forerun.errors import ArgumentError, DataError


def test_short_form_and_vllm_json_say_the_same() -> None:
    said = {"method": "draft_model", "model": "X", "num_speculative_tokens": 5}
    short = SpeculationOptions(drafter="draft_model", drafter_model="X", num_speculative_tokens=5)
    assert short.config() == SpeculationOptions(speculative_config=json.dumps(said)).config() == said
    assert SpeculationOptions().config() is None


def test_short_form_wins_over_json_and_options_are_typed() -> None:
    options = SpeculationOptions(
        speculative_config='{"method": "ngram", "num_speculative_tokens": 3}',
        num_speculative_tokens=7,
        rule="sample_walk",
        drafter_option=("prompt-lookup-max=4", "shape=[2,1]", "draw=iid"),
    )
    own = {"prompt_lookup_max": 4, "shape": [2, 1], "draw": "iid"}
    assert options.config() == {"method": "ngram", "num_speculative_tokens": 7, "rule": "sample_walk", **own}


def test_key_value_keeps_what_is_not_json() -> None:
    assert key_value("model=org/name") == ("model", "org/name")
    assert key_value("a=b=c") == ("a", "b=c")


def test_sampling_options_become_sampling_params() -> None:
    params = SamplingOptions(temperature=0.5, top_k=3, stop=("\n",), seed=4).params()
    assert (params.temperature, params.top_k, params.stop_strings, params.seed) == (0.5, 3, ("\n",), 4)
    assert params.max_tokens == 256 and params.top_p is None
    with pytest.raises(ArgumentError, match="top_p"):
        SamplingOptions(top_p=2.0).params()


def test_prompt_from_option_file_or_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert read_prompt("given", None) == "given"
    assert read_prompt(None, file) == "from a file\n"
    assert read_prompt(None, None) == "from a pipe"


def test_no_prompt_two_prompts_and_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(ArgumentError, match="no prompt"):
        read_prompt(None, None)
    with pytest.raises(ArgumentError, match="not both"):
        read_prompt("x", tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "bytes", tmp_path / "missing"):
        with pytest.raises(DataError, match="cannot read"):
            read_prompt(None, path)
