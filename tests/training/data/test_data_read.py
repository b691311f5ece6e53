"""Every input format gives the same records; what cannot be read is named by file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import DataError
from forerun.training.data.records import BadRecords, Record, read_records
from training.data.conftest import write_lines

TALK = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"})


def records(path: Path, *, skip: bool = False) -> list[Record]:
    return list(read_records(path, BadRecords(skip=skip)))


@pytest.mark.parametrize(
    "entry",
    [
        {"messages": list(TALK)},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"conversations": list(TALK)},
        {"prompt": "hi", "completion": "yes"},
        {"prompt": "hi", "response": "yes"},
        {"prompt": [TALK[0]], "completion": [TALK[1]]},
        {"question": "hi", "answer": "yes"},
        {"question": "hi", "response": "yes"},
        {"prompt": "hi", "response": "yes", "messages": None, "text": None},
    ],
)
def test_every_kind_of_conversation_is_the_same_record(tmp_path: Path, entry: Any) -> None:
    (record,) = records(write_lines(tmp_path / "a.jsonl", [entry]))
    assert record.messages == TALK and record.text == "" and record.id == "a.jsonl:1"


def test_ids_tools_and_other_keys_of_messages_are_kept(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    entry = {"id": 7, "tools": [{"name": "add"}], "messages": [TALK[0], call, {"role": "tool", "content": "4"}]}
    (record,) = records(write_lines(tmp_path / "a.jsonl", [entry]))
    assert (record.id, record.tools) == ("7", ({"name": "add"},))
    assert [message["role"] for message in record.messages] == ["user", "assistant", "tool"]
    assert record.messages[1]["tool_calls"] == call["tool_calls"] and record.messages[1]["content"] == ""


def test_layouts_of_benchmarks_say_what_is_asked_and_of_which_category(tmp_path: Path) -> None:
    entries = [
        {"question_id": 81, "category": "writing", "turns": ["hi", "and?"], "reference": []},
        {"question": "hi"},
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "    pass", "entry_point": "f"},
    ]
    found = records(write_lines(tmp_path / "a.jsonl", entries))
    asked = [[message["content"] for message in record.messages] for record in found]
    assert asked == [["hi", "and?"], ["hi"], ["def f():"]]
    assert {message["role"] for record in found for message in record.messages} == {"user"}
    assert [record.id for record in found] == ["81", "a.jsonl:2", "HumanEval/0"]
    assert [record.category for record in found] == ["writing", "", ""]


@pytest.mark.parametrize("entry", [{"turns": []}, {"turns": ["hi", ""]}, {"turns": "hi"}, {"question": 3}])
def test_a_layout_with_nothing_to_ask_is_refused_by_line(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(DataError, match=r"a.jsonl, line 1: .*string"):
        records(write_lines(tmp_path / "a.jsonl", [entry]))


def test_text_records_and_text_files(tmp_path: Path) -> None:
    (record,) = records(write_lines(tmp_path / "a.jsonl", [{"text": "a b", "prompt_tokens": 2, "id": "x"}]))
    assert (record.text, record.prompt_tokens, record.id, record.messages) == ("a b", 2, "x", ())
    for name in ("a.txt", "a.py", "README"):
        (tmp_path / name).write_text("def f():\n    pass\n", encoding="utf-8")
        (record,) = records(tmp_path / name)
        assert record.text == "def f():\n    pass\n" and record.id == name


def test_a_json_file_may_hold_an_array_one_object_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, count in (
        (json.dumps([{"text": "a"}, {"text": "b"}], indent=1), 2),
        (json.dumps({"text": "a"}, indent=1), 1),
        ('{"text": "a"}\n\n{"text": "b"}\n{"text": "c"}', 3),
    ):
        path.write_text(content, encoding="utf-8")
        assert [record.text for record in records(path)] == ["a", "b", "c"][:count]


def test_parquet_rows_are_records(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": list(TALK), "text": None}, {"messages": None, "text": "plain"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    chat, plain = records(tmp_path / "a.parquet")
    assert chat.messages == TALK and plain.text == "plain" and plain.id == "a.parquet:2"
    (tmp_path / "b.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match=r"b\.parquet"):
        records(tmp_path / "b.parquet")


BROKEN = ['{"text": "good"}', '{"text": "go', "", "[1, 2]", '{"words": "x"}', '{"text": "also good"}']


def test_a_bad_line_is_named_and_the_rest_can_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(BROKEN), encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: broken JSON.*--skip-bad"):
        records(path)
    bad = BadRecords(skip=True)
    assert [record.text for record in read_records(path, bad)] == ["good", "also good"]
    assert bad.count == 3 and "line 4" in bad.examples[1] and "words" in bad.examples[2]


@pytest.mark.parametrize(
    "entry",
    [
        {"text": "abc\ud800"},
        {"prompt": "abc\ud800", "completion": "yes"},
        {"messages": [TALK[0], {"role": "assistant", "content": "abc\ud800d"}]},
        {"turns": ["abc\ud800"]},
    ],
)
def test_half_a_surrogate_pair_is_named_and_the_rest_can_be_kept(tmp_path: Path, entry: Any) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "\U0001f600 whole"}, entry])
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: character 4 is half of a surrogate pair, U\+D800"):
        records(path)
    assert [record.text for record in records(path, skip=True)] == ["\U0001f600 whole"]


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\xff\xfe\n')
    with pytest.raises(DataError, match="line 2"):
        records(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        records(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "empty"),
        ("a.txt", "", "empty"),
        ("a.txt", " \n ", "white space"),
        ("a.jsonl", "\n\n", "no record"),
        ("a.json", "[]", "no record"),
        ("a.json", '[\n{"text": "a"},\n{"text" "b"}]', "line 3"),
        ("a.json", '{\n"text": "a"\n"id": 1}', "line 3"),
        ("a.jsonl", '{"messages": []}', "at least one message"),
        ("a.jsonl", '{"messages": [{"role": "wizard", "content": "x"}]}', "'wizard'"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "no content"),
        ("a.jsonl", '{"messages": ["hi"]}', "message 1 must be an object"),
        ("a.jsonl", '{"text": 3}', "'text'"),
        ("a.jsonl", '{"text": "a", "prompt_tokens": -1}', "'prompt_tokens'"),
        ("a.jsonl", '{"text": " \\n"}', "'text' must be a string that is not blank"),
        ("a.jsonl", '{"prompt": 5}', "'prompt' must be a string, or a list of messages, got '5'"),
        ("a.jsonl", '{"prompt": ""}', "line 1: a prompt, a message of the user, is blank"),
        ("a.jsonl", '{"question": " ", "answer": "yes"}', "is blank"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\n"}]}]}', "is blank"),
        ("a.jsonl", '{"turns": ["hi", " "]}', "is blank"),
    ],
)
def test_every_other_defect_has_its_own_words(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        records(tmp_path / name)
    assert name in str(caught.value)


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        records(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="directory"):
        records(tmp_path)


CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}


def called(arguments: Any) -> dict[str, Any]:
    return {**CALLED, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


def test_openai_s_messages_are_read_as_chat_templates_want_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i", "image_url": None}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        called('{"a": [1]}'),
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": ""}]},
        called({"a": 1}),
        TALK[1],
    ]
    (record,) = records(write_lines(tmp_path / "a.jsonl", [{"messages": messages}]))
    assert record.messages[0] == {"role": "system", "content": "be brief"}
    assert record.messages[1] == TALK[0]
    assert record.messages[2]["tool_calls"] == called({"a": [1]})["tool_calls"]
    assert record.messages[3]["tool_calls"] == [{"name": "f", "arguments": {}}]
    assert record.messages[4]["tool_calls"] == called({"a": 1})["tool_calls"]


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_a_system_prompt_beside_the_conversation_is_its_first_message(tmp_path: Path, key: str) -> None:
    system = {"role": "system", "content": "be brief"}
    entries = [
        {key: "be brief", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {key: "be brief", "question": "hi", "response": "yes"},
        {key: "be brief", "prompt": "hi", "response": "yes"},
        {key: "be long", "messages": [system, *TALK]},
    ]
    found = records(write_lines(tmp_path / "a.jsonl", entries))
    assert [record.messages for record in found] == [(system, *TALK)] * 4
    assert not any(record.pair for record in found), "a pair would leave it out"
    (record,) = records(write_lines(tmp_path / "b.jsonl", [{key: "", "question": "hi", "response": "yes"}]))
    assert record.messages == TALK


@pytest.mark.parametrize("tools", ['[{"name": "add"}]', [{"name": "add"}]])
def test_tools_may_be_json_text(tmp_path: Path, tools: Any) -> None:
    (record,) = records(write_lines(tmp_path / "a.jsonl", [{"messages": list(TALK), "tools": tools}]))
    assert record.tools == ({"name": "add"},)
    for none in ("", "[]", []):
        (record,) = records(write_lines(tmp_path / "a.jsonl", [{"messages": list(TALK), "tools": none}]))
        assert record.tools == ()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "message 1 has a part .* 'image_url'"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "message 1 has a part of the type 'str'"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 must be a string, got int"),
        ({"messages": [TALK[0], called('{"a"')]}, "message 2 calls a tool with arguments that are no JSON"),
        ({"messages": [TALK[0], called("[1]")]}, "message 2 calls a tool with arguments that are no JSON object"),
        ({"messages": [TALK[0], {**CALLED, "tool_calls": "f()"}]}, "'tool_calls' of message 2 must be a list"),
        ({"messages": list(TALK), "tools": "add"}, "'tools' is text, but no JSON"),
        ({"messages": list(TALK), "tools": '{"name": "add"}'}, "'tools' must be a list of objects"),
        ({"messages": list(TALK), "tools": ["add"]}, "'tools' must be a list of objects"),
        ({"messages": list(TALK), "system": 3}, "must be a string, got int"),
    ],
)
def test_what_a_chat_template_would_garble_is_refused(tmp_path: Path, entry: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1: .*{message}"):
        records(write_lines(tmp_path / "a.jsonl", [entry]))
