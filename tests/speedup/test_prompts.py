"""Prompts: in which forms they come and how they are split."""

import json
from collections import Counter
from pathlib import Path

import pytest

from forerun.errors import DataError
from forerun.speedup.prompts import read_prompts, split_prompts, take_turns
from forerun.speedup.settings import MIX


def written(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_the_built_in_mix_has_six_categories_and_holds_out_half() -> None:
    prompts, skipped = read_prompts([MIX], template=True)
    assert len(prompts) == 48 and skipped == 0
    assert set(Counter(prompt.category for prompt in prompts).values()) == {8}
    split = split_prompts(prompts)
    assert (len(split.train), len(split.trial), len(split.held_out)) == (20, 4, 24)
    assert set(Counter(prompt.category for prompt in split.held_out).values()) == {4}


def test_the_split_follows_from_the_text_alone(tmp_path: Path) -> None:
    entries = [{"source": f"c{number % 3}", "prompt": f"question {number}"} for number in range(60)]
    one, _ = read_prompts([written(tmp_path / "one.jsonl", *entries)], template=True)
    other, _ = read_prompts([written(tmp_path / "other.jsonl", *reversed(entries), entries[0])], template=True)
    assert take_turns(one) == take_turns(other)
    assert split_prompts(one) == split_prompts(other)
    assert {prompt.category for prompt in one} == {"c0", "c1", "c2"}


def test_answers_are_left_out_and_what_asks_nothing_is_skipped(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    path = written(
        tmp_path / "some.jsonl", asked, {"messages": [{"role": "assistant", "content": "ho"}]}, {"text": "x"}
    )
    prompts, skipped = read_prompts([path], template=True)
    assert skipped == 1 and [prompt.entry for prompt in prompts] == [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"text": "x"},
    ]
    plain, _ = read_prompts([path], template=False)
    assert plain[0].entry == {"text": "hi"}


def test_what_a_server_recorded_keeps_its_answers(tmp_path: Path) -> None:
    line = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "vocabulary": "v"}
    [prompt], _ = read_prompts([written(tmp_path / "some.jsonl", line)], template=True)
    assert prompt.answered and prompt.entry == line
    assert type(prompt).parse(prompt.line) == prompt


def test_too_few_prompts_are_refused(tmp_path: Path) -> None:
    prompts, _ = read_prompts([written(tmp_path / "some.jsonl", {"prompt": "a"}, {"prompt": "b"})], template=True)
    with pytest.raises(DataError, match="2 different prompts are too few"):
        split_prompts(prompts)
    with pytest.raises(DataError, match="no entry could be used"):
        read_prompts(
            [written(tmp_path / "none.jsonl", {"messages": [{"role": "assistant", "content": "x"}]})], template=True
        )
