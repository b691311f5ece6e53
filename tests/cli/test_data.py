"""``forerun data``: figures on stdout, one JSON line if asked for, one clear error for bad input."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.scripted import Script, scripted
from cli.conftest import Forerun
from forerun.cli import console
from forerun.training.data.store import PreparedData

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + '\n{"broken\n' + json.dumps({"text": "the cat"}) + "\n")
    return path


def test_prepare_writes_data_and_says_what_is_in_it(forerun: Forerun, chats: Path, tmp_path: Path) -> None:
    arguments: list[Any] = ["data", "prepare", chats, "--target", "demo", "--skip-bad", "--draft-vocab-size", 4000]
    arguments += ["--chat-template-kwargs", '{"enable_thinking": false}']
    ran = forerun(*arguments, "--output", tmp_path / "a", "--json")
    said = json.loads(ran.out)
    assert ran.code == 0 and ran.out.count("\n") == 1 and "line 2" in ran.err
    data = PreparedData(tmp_path / "a")
    assert (said["documents"], said["tokens"], said["skipped"]) == (2, data.num_tokens, 1)
    assert said["hash"] == data.hash and 0 < said["draft_vocabulary"]["coverage"] <= 1
    assert data.tokenizer.name == "demo"
    assert data.manifest["options"]["chat_template_kwargs"] == {"enable_thinking": False}
    words = forerun(*arguments, "--output", tmp_path / "b")
    assert words.code == 0 and "2 documents" in words.out and "covers" in words.out and "1 records skipped" in words.out


def test_progress_in_a_file_says_how_fast_it_goes_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.0)
    with console.progress_bar("answering") as update:
        update(completed=4, total=10)  # those of an earlier run
        update(completed=6, total=10, description="answering at 7 tokens/s")
    first, second = capsys.readouterr().err.splitlines()
    assert "answering: 4 of 10 after" in first and "left" not in first
    assert "answering at 7 tokens/s: 6 of 10 after" in second and second.endswith("left")


def test_regenerate_here_then_prepare(forerun: Forerun, checkpoint: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"text": f"the cat sat on {word}"}) + "\n" for word in ("the mat", "a log")))
    arguments: list[Any] = ["data", "regenerate", source, "--target", checkpoint, "--output", output]
    arguments += ["--prompt-tokens", 3, "-n", 6, "-t", 0, "--drafter", "ngram", "--json"]
    first = json.loads(forerun(*arguments, "--limit", 1).out)
    assert (first["written"], first["total"], first["answers"]) == (1, 1, 1)
    ran = forerun(*arguments)
    second = json.loads(ran.out)
    assert ran.code == 0 and (second["written"], second["resumed"], second["total"]) == (1, 1, 2)
    done = forerun("data", "prepare", output, "--target", checkpoint, "--output", tmp_path / "data", "--json")
    assert done.code == 0 and 0 < json.loads(done.out)["counted_tokens"] < json.loads(done.out)["tokens"]


def answering(body: dict[str, Any]) -> tuple[int, str]:
    """Everything is answered with its length, and what contains "no" is refused."""
    asked, thinking = body["messages"][-1]["content"], body.get("chat_template_kwargs", {}).get("thinking", "")
    message = {"role": "assistant", "content": f"{len(asked)}{thinking}"}
    answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
    return 422 if "no" in asked else 200, json.dumps(answer)


@pytest.fixture
def server() -> Iterator[str]:
    with scripted(Script(answering)) as url:
        yield url


def test_regenerate_at_an_endpoint(forerun: Forerun, server: str, tmp_path: Path) -> None:
    pytest.importorskip("httpx")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "four"}\n{"prompt": "not this"}\n')
    arguments: list[Any] = ["data", "regenerate", source, "--endpoint", server, "--model", "m", "--output", output]
    ran = forerun(*arguments)
    assert ran.code == 1 and "1 records written" in ran.out and "1 records failed" in ran.out
    assert "in.jsonl, line 2" in ran.err and "422" in ran.err
    written = json.loads(output.read_text())
    assert written["messages"] == [{"role": "user", "content": "four"}, {"role": "assistant", "content": "4"}]
    limited = forerun(*arguments, "--limit", 1)
    assert limited.code == 0 and "1 were there already" in limited.out
    output.unlink()
    forerun(*arguments, "--limit", 1, "--chat-template-kwargs", '{"thinking": "on"}')
    assert json.loads(output.read_text())["messages"][1]["content"] == "4on"
