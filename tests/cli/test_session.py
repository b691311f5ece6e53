"""Colours, JSON and the line of statistics."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forerun.cli import console, session
from forerun.cli.options import SamplingOptions, SpeculationOptions, key_value, read_prompt
from forerun.errors import ArgumentError, DataError
from forerun.types import CompletionOutput, OutputToken, RequestOutput, Source, SpeculationStats


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_bar_is_a_line_a_minute(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress_bar("answering", total=2_000, done=200) as update:
        for seconds in (0, 40, 30, 20, 50):
            clock[0] += seconds
            update(advance=300)
    lines = [line.partition(" after ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["answering: 1,100 of 2,000", "answering: 1,700 of 2,000"]


def test_a_spinner_is_a_line_a_minute(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with console.telling("certifying") as tell:
        tell("soon")
        clock[0] += 61
        tell("a rule")
        tell("another")
    assert capsys.readouterr().err.splitlines() == ["certifying: a rule"]


SOURCES = (Source.TARGET, Source.DRAFT, Source.DRAFT, Source.RECOVERED, Source.BONUS)
TOKENS = [
    OutputToken(id=i, text=text, source=source, step=0)
    for i, (text, source) in enumerate(zip("a\nbcd", SOURCES, strict=True))
]


def rendered(*, terminal: bool, no_color: bool = False) -> str:
    screen = Console(
        **{"file": io.StringIO(), "force_terminal": terminal, "no_color": no_color},
        **{"color_system": "truecolor" if terminal else None, "soft_wrap": True},
    )
    screen.print(session.colour_tokens(TOKENS, screen), end="")
    return screen.file.getvalue()


def test_text_is_unchanged_and_unescaped_in_a_pipe() -> None:
    assert rendered(terminal=False) == "a\nbcd"


def test_each_source_has_its_own_look_and_line_breaks_are_not_tinted() -> None:
    text = rendered(terminal=True)
    background = "\x1b[48;2;31;77;43m"
    assert text.startswith("a\n") and f"{background}b" in text and f"{background}\n" not in text
    assert "\x1b[4;33mc" in text and "\x1b[38;2;108;182;217md" in text


def test_no_color_keeps_the_shapes() -> None:
    text = rendered(terminal=True, no_color=True)
    assert "\x1b[1mb" in text and "\x1b[4mc" in text and "48;2" not in text and "33m" not in text


def test_a_legend_is_where_colours_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    session.print_legend(console.log())
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    session.print_legend(console.log())
    assert "accepted draft" in capsys.readouterr().err


def test_speed_counts_what_came_after_the_first_token() -> None:
    stats = SpeculationStats()
    stats.begin(1)
    stats.record(tokens=2, drafted=4, depth=4, accepted=2)
    ended: Any = {"finish_reason": "length", "stop_reason": None}
    answer = CompletionOutput(index=0, text="abc", token_ids=[1, 2, 3], tokens=[], speculation=stats, **ended)
    times = {"decode_s": 0.5, "time_to_first_token_s": 0.1}
    output = RequestOutput(request_id="0", prompt="", prompt_token_ids=[1], outputs=[answer], finished=True, **times)
    assert session.tokens_per_second(output) == 4.0
    line = session.statistics_line(output).plain
    assert "4.0 tokens/s" in line and "1.50 tokens per pass" in line and "2 of 4 drafted" in line
    assert session.answer_record(output, with_tokens=True)["speculation"] == {
        **{"tokens_per_pass": 1.5, "passes": 2, "steps": 1, "plain_steps": 0, "drafted": 4, "accepted": 2},
        **{"mean_acceptance_length": 3.0, "draft_acceptance_rate": 0.5, "acceptance_per_depth": [1.0, 1.0, 0.0, 0.0]},
    }


@pytest.mark.parametrize(
    "value", [{}, [], {"a": [1, 2], "b": {"c": None, "d": [{"e": "[ \n]"}]}}, [{"x": True}, {}], "ä", 1.5]
)
def test_pretty_json_is_json(value: object) -> None:
    assert json.loads(console.pretty(value)) == value


def test_numbers_that_json_lacks_become_null() -> None:
    assert json.loads(console.pretty({"a": float("inf"), "b": [float("nan"), 1.0]})) == {"a": None, "b": [None, 1.0]}


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"drafter": "ngram", "speculative_config": '{"method": "suffix"}'},
            "'suffix' (--speculative-config) and 'ngram'",
        ),
        ({"drafter": "ngram", "speculative_config": '{"drafter": "suffix"}'}, "and 'ngram' (--drafter)"),
        ({"drafter": "ngram", "drafter_option": ("method=suffix",)}, "'suffix' (--drafter-option) and 'ngram'"),
        ({"drafter_model": "A", "speculative_config": '{"model": "B"}'}, "'B' (--speculative-config) and 'A'"),
    ],
)
def test_two_drafters_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(said)):
        SpeculationOptions(**options).config()


def test_one_drafter_may_be_named_twice() -> None:
    options = SpeculationOptions(drafter="ngram", speculative_config='{"method": "ngram", "prompt_lookup_max": 3}')
    assert options.config() == {"method": "ngram", "prompt_lookup_max": 3}


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
