"""Prompts that a chat model writes itself: where its users' turns are, what is held back, and on after a stop."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Forerun, forerun
from engine.conftest import checkpoint, tiny_tokenizer
from forerun.errors import ArgumentError, DataError
from forerun.training.data.drawn import PromptDraw, PromptSieve, UserTurn

__all__ = ["Forerun", "checkpoint", "forerun"]

CHATML = "{% for m in messages %}{{ '<pad>' + m['role'] + '\n' + m['content'] + '<end>\n' }}{% endfor %}"


def turn_of(template: str | None) -> UserTurn:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return UserTurn.of(tokenizer)


def test_the_turn_of_a_user_ends_with_a_control_token_or_with_text() -> None:
    assert turn_of(CHATML) == UserTurn(begins="<pad>user\n", stop_token_ids=(0,))
    text = "{% for m in messages %}{{ '[Q] ' + m['content'] + ' [A] ' }}{% endfor %}"
    assert turn_of(text) == UserTurn(begins="[Q]", stop=("[A]",))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template"),
        ("hello", "0 times, and not once"),
        ("{{ messages[0]['content'] }}", "does not mark where"),
        ("{{ messages[0]['content'] ~ messages[0]['content'] }}", "2 times"),
    ],
)
def test_templates_that_show_no_turn_are_refused(template: str | None, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        turn_of(template)


def test_the_sieve_lets_every_usable_prompt_through_once() -> None:
    held_out = "Please tell me how many legs the seven spiders of my aunt have together."
    sieve = PromptSieve([held_out])
    assert sieve.takes("What is it?", (), ended=True)
    assert not sieve.takes("what is IT", (), ended=True)
    assert sieve.takes("What is it to you?", (), ended=True)
    assert not sieve.takes("So tell me how many legs the seven spiders of my aunt have.", (), ended=True)
    assert not sieve.takes("...", (), ended=True)
    assert not sieve.takes("A question that never", (), ended=False)
    assert not sieve.takes("ha ha ha", [5] * 60, ended=True)
    assert sieve.refused == {"like another one": 2, "empty": 1, "too long": 1, "in circles": 1}


def test_a_stopped_command_goes_on_with_other_prompts(forerun: Forerun, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "drawn.jsonl"
    words: list[Any] = ["data", "draw-prompts", checkpoint, "--output", output, "-n", 24]
    assert forerun(*words, "--count", 3).code == 0
    first = output.read_text()
    output.write_text(first + '{"id": "drawn-9')  # The power failed
    ran = forerun(*words, "--count", 5, "--json")
    assert ran.code == 0, ran.err
    assert (found := json.loads(ran.out))["prompts"] == 5 and found["resumed"] == 3
    assert output.read_text().startswith(first)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({line["prompt"] for line in lines}) == len({line["id"] for line in lines}) == 5
    assert {line["source"] for line in lines} == {"drawn"}
    assert "5 were there already" in forerun(*words, "--count", 5).out
    with pytest.raises(DataError, match="is no drawn prompt"):
        PromptDraw(output=Path(__file__), count=1)
