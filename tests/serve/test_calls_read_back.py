"""Calls written by templates as the models' own write them are read back as they were: any values, any cuts."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from engine.conftest import tiny_tokenizer
from forerun.serve.completing import MessageWriter
from forerun.serve.handling import ChatFormat
from forerun.serve.reasoning import Marks
from forerun.serve.tools.base import Function
from forerun.serve.tools.formats import CALL, CALL_END, CALLS, CALLS_END, FORMATS, SEPARATOR

TEXT: dict[str, Any] = {"type": "string"}
NULL: dict[str, Any] = {"type": "null"}
DEFINITIONS: dict[str, Any] = {
    **{"T": TEXT, "N": {"type": "integer"}, "Maybe": {"anyOf": [{"$ref": "#/$defs/T"}, NULL]}},
    **{"Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]}, "a/b": {"type": "boolean"}},
}
TYPED: list[tuple[Any, str, Any]] = [
    ({"anyOf": [TEXT, NULL]}, "42", "42"),
    ({"anyOf": [TEXT, NULL]}, "null", None),
    ({"anyOf": [TEXT, NULL]}, "None", None),
    ({"anyOf": [TEXT, NULL]}, "none", "none"),
    ({"oneOf": [TEXT, NULL]}, "1.5", "1.5"),
    ({"oneOf": [{"type": "integer"}, TEXT]}, "42", 42),
    ({"oneOf": [{"type": "integer"}, TEXT]}, "007", "007"),
    ({"allOf": [TEXT, {"maxLength": 3}]}, "42", "42"),
    ({"allOf": [{"$ref": "#/$defs/T"}], "description": "a name"}, "true", "true"),
    ({"allOf": [{"type": ["string", "integer"]}, TEXT]}, "42", "42"),
    ({"type": ["string", "null"]}, "true", "true"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": "string", "nullable": True}, "[1]", "[1]"),
    ({"$ref": "#/$defs/T"}, "42", "42"),
    ({"$ref": "#/$defs/N"}, "42", 42),
    ({"$ref": "#/$defs/Maybe"}, "42", "42"),
    ({"$ref": "#/$defs/Loop"}, "42", 42),
    ({"$ref": "#/$defs/a~1b"}, "True", True),
    ({"$ref": "#/properties/twin"}, "42", "42"),
    ({"$ref": "#/$defs/missing"}, "42", 42),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "boolean"}, "FALSE", False),
    (TEXT, "42", "42"),
    (TEXT, "True", "True"),
    (TEXT, "null", "null"),
    (TEXT, '"quoted"', '"quoted"'),
    (TEXT, "  spaces ", "  spaces "),
    ({"type": "integer"}, "42", 42),
    ({"type": "integer"}, " 42\n", 42),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "number"}, "5.5", 5.5),
    ({"type": "number"}, "1e3", 1e3),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": ["1", "2"]}, '"1"', "1"),
    ({"enum": ["a", 1, None]}, "1", 1),
    ({"enum": ["a", 1, None]}, "None", None),
    ({"enum": ["a", 1, None]}, "a", "a"),
    ({"const": "7"}, "7", "7"),
    ({"type": "object"}, '{"a": 1.50}', {"a": 1.5}),
    ({"type": "object"}, '{"a": "two\nlines"}', {"a": "two\nlines"}),
    ({"anyOf": [{"type": "array"}, TEXT]}, "[1, 2", "[1, 2"),
    ({"anyOf": [{"type": "array"}, TEXT]}, "[1, 2]", [1, 2]),
    ({}, "42", 42),
    (True, "so", "so"),
    ({"type": "integer"}, "forty", "forty"),
    ({"type": "boolean"}, "1", 1),
    ({"enum": ["a", "b"]}, "42", "42"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "array"}, "[" * 100_000, "[" * 100_000),
]  # fmt: skip


def parameters(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**properties, "twin": TEXT}, "$defs": DEFINITIONS}


def told(chat_format: ChatFormat, *pieces: str) -> dict[str, Any]:
    """The message that an answer in these pieces becomes."""
    reader, writer, found = chat_format.reader(), MessageWriter(lambda: "id"), list[Any]()
    for piece in pieces:
        found += reader.feed(piece)
    return writer.message([*found, *reader.close()])


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments, which parse as strictly as JSON can be."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(one["name"], json.loads(one["arguments"], parse_constant=pytest.fail)) for one in functions]


def reading(name: str, functions: list[Function]) -> ChatFormat:
    return ChatFormat(prompt={}, format=FORMATS[name]("", functions))


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


FIELDS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", sorted(FIELDS))
@pytest.mark.parametrize(("schema", "wrote", "right"), TYPED, ids=str)
def test_an_argument_written_as_text_is_what_its_schema_says(name: str, schema: Any, wrote: str, right: Any) -> None:
    [(_, found)] = calls_of(told(reading(name, [Function("f", parameters(x=schema))]), FIELDS[name].format(wrote)))
    assert same(found, {"x": right})


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({"$ref": "#/$defs/A", "$defs": {"A": parameters(x=TEXT)}}, "42"),
        ({"allOf": [{"type": "object"}, {"properties": {"x": TEXT}}]}, "42"),
        ({"anyOf": [{"properties": {"x": TEXT}}, {"properties": {"x": NULL}}]}, "42"),
        ({"type": "object", "additionalProperties": TEXT}, "42"),
        ({"type": "object", "additionalProperties": True}, 42),
        ({"type": "object", "properties": {"x": 3}, "required": 5}, 42),
        ({}, 42),
    ],
)
def test_the_schema_of_an_argument_is_found_wherever_it_is(schema: Any, right: Any) -> None:
    for name, written in FIELDS.items():
        assert calls_of(told(reading(name, [Function("f", schema)]), written.format("42"))) == [("f", {"x": right})]


def test_schemas_that_would_take_long_to_look_at() -> None:
    """References that fork at every step, and a chain of thousands."""
    fork = {f"T{n}": {"anyOf": [{"$ref": f"#/$defs/T{n + 1}"}] * 2} for n in range(60)} | {"T60": NULL}
    chain = {f"T{n}": {"$ref": f"#/$defs/T{n + 1}"} for n in range(5000)} | {"T5000": TEXT}
    for definitions, right in ((fork, "so"), (chain, "so")):
        schema = {"properties": {"x": {"$ref": "#/$defs/T0"}}, "$defs": definitions}
        written = FIELDS["glm45"].format("so")
        assert calls_of(told(reading("glm45", [Function("f", schema)]), written)) == [("f", {"x": right})]


# --- marks within values ----------------------------------------------------------------------------------------------

HELD = [
    "use </parameter> here", "use </arg_value> here", "</parameter>", "</arg_value>", "a\n</parameter>\nb",
    "<parameter=x>", "<arg_key>k</arg_key>", "</function>", "</tool_call>", "<tool_call>", "</function>\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "<think>", "</think>", "\n", "",
]  # fmt: skip
BOTH = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n<parameter=path>\na.md\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>path</arg_key>\n"
    "<arg_value>a.md</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", sorted(FIELDS))
@pytest.mark.parametrize("value", HELD)
def test_a_mark_within_a_value_is_text_of_the_value(name: str, value: str) -> None:
    chat_format = reading(name, [Function("f", parameters(x=TEXT, path=TEXT))])
    for written, right in ((FIELDS, {"x": value}), (BOTH, {"x": value, "path": "a.md"})):
        text = written[name].format(value)
        for message in (told(chat_format, text), told(chat_format, *text)):
            assert calls_of(message) == [("f", right)] and message["content"] is None


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_call_that_breaks_off_leaves_nothing_in_the_content(name: str) -> None:
    """As at max_tokens: the arguments are incomplete, and no part of the call is shown as text."""
    chat_format = reading(name, [Function("f", parameters(x=TEXT, path=TEXT))])
    text = BOTH[name].format("use </parameter> here")
    for cut in range(text.index("x</arg_key>" if name == "glm45" else "<parameter"), len(text)):
        message = told(chat_format, text[:cut])
        if "tool_calls" in message:
            assert message["content"] is None, cut


def test_fields_may_lack_what_models_forget() -> None:
    written = "<tool_call><function=f><parameter=x>1</parameter><parameter=path>a</parameter></tool_call> so"
    message = told(reading("qwen3_coder", [Function("f", parameters(x={"type": "integer"}))]), written)
    assert calls_of(message) == [("f", {"x": 1, "path": "a"})] and message["content"] == " so"


@pytest.mark.parametrize(
    ("wrote", "right"),
    [
        ('{"x": "two\nlines\tand a tab"}', "two\nlines\tand a tab"),
        ('{"x": "make \\\n  all"}', "make \\\n  all"),
        (r'{"x": "\d+\.\w \' \u00e9 \\ \""}', "\\d+\\.\\w \\' \u00e9 \\ \""),
    ],
)
def test_what_models_forget_to_escape_in_json(wrote: str, right: str) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {wrote}}}\n</tool_call>'
    for message in (told(reading("hermes", []), text), told(reading("hermes", []), *text)):
        assert calls_of(message) == [("f", {"x": right})]


# --- calls within reasoning -------------------------------------------------------------------------------------------

CALL_WRITTEN = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"I look it up.\n{CALL_WRITTEN}", "I look it up.", None, 1),
        (f"I look it up.\n{CALL_WRITTEN}\n{CALL_WRITTEN}\n", "I look it up.", None, 2),
        (f"I look it up.\n</think>\n\n{CALL_WRITTEN}", "I look it up.", None, 1),
        (f"So: {CALL_WRITTEN}? No.</think>Nothing.", f"So: {CALL_WRITTEN}? No.", "Nothing.", 0),
        (f"So: {CALL_WRITTEN}? Yes.</think>{CALL_WRITTEN}", f"So: {CALL_WRITTEN}? Yes.", None, 1),
        ("A <tool_call> would do. Or <tool_call>?", "A <tool_call> would do. Or <tool_call>?", "", 0),
        (f"A <tool_call> would do.\n{CALL_WRITTEN} so", "A <tool_call> would do.", " so", 1),
    ],
)
def test_a_call_within_reasoning_that_is_never_closed_is_a_call(
    inside: bool, text: str, reasoning: str, content: str | None, calls: int
) -> None:
    hermes, whole = FORMATS["hermes"]("", [Function("f", {})]), text if inside else f"<think>\n{text}"
    chat_format = ChatFormat(prompt={}, format=hermes, marks=Marks("<think>", "</think>"), inside=inside)
    for pieces in ([whole], list(whole), [whole[:20], whole[20:]]):
        message = told(chat_format, *pieces)
        assert calls_of(message) == [("f", {"x": 1})] * calls
        assert (message["reasoning"], message["content"]) == (reasoning, content)


# --- a thousand calls in each format ----------------------------------------------------------------------------------


def template(each: str, between: str = "") -> str:
    """Of all calls of all messages, each of which is written in this way."""
    front = "{% for m in messages %}{% for c in m.tool_calls %}{% set f = c.function %}{% set a = f.arguments %}"
    return f"{front}{{{{ '' if loop.first else '{between}' }}}}{each}{{% endfor %}}{{% endfor %}}"


FIRST, LAST = f"{{{{ '{CALLS}' if loop.first else '' }}}}", f"{{{{ '{CALLS_END}' if loop.last else '' }}}}"
NAMED = '{"name": "{{ f.name }}", "arguments": {{ a | tojson }}'
TEMPLATES: list[tuple[str, str, str]] = [
    ("qwen3_coder", "", template(
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in a.items() %}<parameter={{ k }}>\n"
        "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>", "\\n")),
    ("glm45", "", template(
        "<tool_call>{{ f.name }}\n{% for k, v in a.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>", "\\n")),
    ("hermes", "", template(f"<tool_call>\n{NAMED}}}\n</tool_call>", "\\n")),
    ("mistral", "", template(
        f"{{{{ '[TOOL_CALLS] [' if loop.first }}}}{NAMED}, \"id\": \"a1b2c3d4e\"}}{{{{ ']' if loop.last }}}}", ", ")),
    ("mistral", "[ARGS]", template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ a | tojson }}")),
    ("deepseek_v3", "", template(
        f"{FIRST}{CALL}{{{{ f.name }}}}{SEPARATOR}{{{{ a | tojson }}}}{CALL_END}{LAST}")),
    ("deepseek_v3", "```json", template(
        f"{FIRST}{CALL}function{SEPARATOR}{{{{ f.name }}}}\n"
        f"```json\n{{{{ a | tojson }}}}\n```{CALL_END}{LAST}", "\\n")),
    ("llama3_json", "", template('{"name": "{{ f.name }}", "parameters": {{ a | tojson }}}', "; ")),
]  # fmt: skip
PARTS = [
    "use </parameter> here", "</parameter>", "<parameter=x>", "</function>", "<function=f>", "</tool_call>",
    "<tool_call>", "<arg_key>k</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "]", "}", "{", '"',
    "\\", "'", "; ", "```", "\n", "\n\n", " ", "\t", "a", "Paris", "42", "true", "None", "null", '{"a": 1}', "<think>",
    "</think>", CALLS, CALL_END, SEPARATOR, "ünï 你好 \U0001f600", "\\n", "\\u00e9", "\x7f", "<|im_end|>", "&lt;",
]  # fmt: skip
Draw = Callable[[random.Random], Any]


def any_text(draw: random.Random) -> str:
    """Any text but one that holds a whole end of a field, which nobody could tell from the end itself."""
    while True:
        text = "".join(draw.choices(PARTS, k=draw.randrange(6)))
        ends = r"</parameter>\s*(<parameter=|</function>|</tool_call>)|</arg_value>\s*(<arg_key>|</tool_call>)"
        if not re.search(ends, text):
            return text


def some_text(draw: random.Random) -> str:
    """A text that is nothing else."""
    return f"{any_text(draw)}x{any_text(draw)}" if draw.random() < 0.9 else "no"


def some_number(draw: random.Random) -> float:
    return draw.choice([0.5, -1e-7, 1e30, draw.random(), draw.randrange(99)])


def some_json(draw: random.Random, depth: int = 2) -> Any:
    kind = draw.randrange(8) if depth else 0
    if kind == 1:
        return [some_json(draw, depth - 1) for _ in range(draw.randrange(3))]
    if kind == 2:
        return {any_text(draw): some_json(draw, depth - 1) for _ in range(draw.randrange(3))}
    return draw.choice([any_text, some_number, NOTHING, WHOLE, EITHER])(draw)


def some_list(draw: random.Random) -> list[Any]:
    return [some_json(draw) for _ in range(draw.randrange(4))]


def some_object(draw: random.Random) -> dict[str, Any]:
    return {any_text(draw): some_json(draw) for _ in range(draw.randrange(4))}


def one_of(*draws: Draw) -> Draw:
    return lambda draw: draw.choice(draws)(draw)


NOTHING: Draw = lambda draw: None  # noqa: E731
WHOLE: Draw = lambda draw: draw.randrange(-(10**12), 10**12)  # noqa: E731
EITHER: Draw = lambda draw: draw.random() < 0.5  # noqa: E731
VALUES: list[tuple[Any, Draw]] = [
    (TEXT, any_text),
    ({"$ref": "#/$defs/T"}, any_text),
    ({"allOf": [{"$ref": "#/$defs/T"}]}, any_text),
    ({"anyOf": [TEXT, NULL]}, one_of(some_text, NOTHING)),
    ({"$ref": "#/$defs/Maybe"}, one_of(some_text, NOTHING)),
    ({"type": ["string", "integer"]}, one_of(some_text, WHOLE)),
    ({"oneOf": [TEXT, {"type": "array"}, {"type": "object"}]}, one_of(some_text, some_list, some_object)),
    ({"type": "integer"}, WHOLE),
    ({"$ref": "#/$defs/Loop"}, WHOLE),
    ({"type": "number"}, some_number),
    ({"anyOf": [{"type": "number"}, NULL]}, one_of(some_number, NOTHING)),
    ({"type": "boolean"}, EITHER),
    ({"type": ["boolean", "null"]}, one_of(EITHER, NOTHING)),
    ({"type": "array"}, some_list),
    ({"type": "object"}, some_object),
    ({"enum": ["a", "42", "true", 7, None]}, lambda draw: draw.choice(["a", "42", "true", 7, None])),
    ({}, one_of(some_list, some_object)),
]


def some_call(draw: random.Random) -> tuple[Function, dict[str, Any]]:
    keys = draw.sample(["text", "path", "a-b", "größe", "x.y", "n", "unit"], draw.randrange(5))
    chosen = {key: draw.choice(VALUES) for key in keys}
    arguments = {key: values(draw) for key, (_, values) in chosen.items()}
    schema = parameters(**{key: schema for key, (schema, _) in chosen.items()})
    return Function(draw.choice(["weather", "get_time", "a.b-c", "f"]), schema), arguments


@pytest.mark.parametrize(("name", "version", "written"), TEMPLATES)
def test_a_thousand_calls_are_read_back_as_they_were_written(name: str, version: str, written: str) -> None:
    draw, tokenizer = random.Random(7), tiny_tokenizer()
    for _ in range(700):  # messages, of one to three calls
        named = {function.name: (function, arguments) for function, arguments in map(some_call, [draw] * 3)}
        calls = list(named.values())[: draw.randint(1, 3)]
        told_calls = [{"function": {"name": one.name, "arguments": arguments}} for one, arguments in calls]
        messages = [{"role": "assistant", "content": None, "tool_calls": told_calls}]
        text = str(tokenizer.apply_chat_template(messages, chat_template=written, tokenize=False))
        lead = draw.choice(["", "Let me see.\n", "2 < 3 "]) if name != "llama3_json" else ""
        chat_format = ChatFormat(prompt={}, format=FORMATS[name](version, [one for one, _ in calls]))
        message = told(chat_format, lead + text)
        assert same(calls_of(message), [(one.name, arguments) for one, arguments in calls]), text
        assert (message["content"] or "") == lead.rstrip(), text
        cuts = sorted(draw.sample(range(len(text)), min(len(text), draw.randrange(9))))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert told(chat_format, lead, *pieces) == message, (text, cuts)
