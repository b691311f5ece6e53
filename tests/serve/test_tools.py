"""Tool calls: read from any text however it is cut, forced by grammars, and offered through the official client."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI
from tokenizers import AddedToken
from transformers import AutoTokenizer

from contract.harness import word_tokenizer
from forerun import LLM, SamplingParams
from forerun.engine.grammar import GrammarCompiler
from forerun.engine.prompts import template_messages
from forerun.errors import ArgumentError
from forerun.model.templates import read_template
from forerun.serve.completing import ChatWriter, MessageWriter
from forerun.serve.handling import ChatFormat, Tagged
from forerun.serve.items import MessagesWriter
from forerun.serve.protocol.anthropic import MessagesRequest
from forerun.serve.protocol.requests import ChatRequest, Message
from forerun.serve.settings import ServeSettings
from forerun.serve.tools.base import NO_PARAMETERS, Function, Lark, ToolFormat
from forerun.serve.tools.formats import CALL, CALL_END, CALLS, CALLS_END, FORMATS, SEPARATOR, find_format
from forerun.serve.tools.incoming import Kind, Piece, PieceReader
from forerun.shipped import FOLDER
from forerun.types import StructuredOutputs
from serve.conftest import NAME, TEMPLATE, Live, both, output, serving, stream_chunk, with_template

SCHEMA: dict[str, Any] = {
    **{"type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "deep": {"type": "boolean"}}},
    **{"required": ["unit"], "additionalProperties": False},
}
WEATHER, CLOCK = Function("weather", SCHEMA, strict=True), Function("clock", {"type": "object", "properties": {}})
CLOSED = Function("clock", NO_PARAMETERS)
PARIS = {"city": 'Paris, "F" {x}', "days": 2}
JSON = json.dumps(PARIS)
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>'
LLAMA = f'{{"name": "weather", "parameters": {JSON}}}'
MISTRAL = f'{{"name": "weather", "arguments": {JSON}}}'
XML = (
    f"<tool_call>\n<function=weather>\n<parameter=city>\n{PARIS['city']}\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{PARIS['city']}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
FENCED = f"{CALLS}{CALL}function{SEPARATOR}weather\n```json\n{JSON}\n```{CALL_END}{CALLS_END}"
PLAIN = f"{CALLS}{CALL}weather{SEPARATOR}{JSON}{CALL_END}\n{CALL}clock{SEPARATOR}{{}}{CALL_END}{CALLS_END}"
ONE, TWO = [("weather", PARIS)], [("weather", PARIS), ("clock", {})]
NOW = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'

TEXTS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"Let me see.\n\n{HERMES}\n{NOW}\n", "Let me see.", TWO),
    ("hermes", f"{HERMES} and so on", " and so on", ONE),
    ("hermes", '<tool_call>{"arguments": {"a": "}"}, "id": 7, "name": "f"}</tool_call>', "", [("f", {"a": "}"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}\n{"name": "g"}</tool_call>', "", [("f", {}), ("g", {})]),
    ("hermes", "a < b, and <tool_call is no mark\n", "a < b, and <tool_call is no mark\n", []),
    ("hermes", "see <tool_call>nothing</tool_call>", "see <tool_call>nothing</tool_call>", []),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    ("hermes", '<tool_call> {"name": "f', '<tool_call> {"name": "f', []),
    ("mistral", f"[TOOL_CALLS] [{MISTRAL}, {{\"name\": \"clock\", \"arguments\": {{}}}}]", "", TWO),
    ("mistral", f"Yes[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]clock[CALL_ID]a1b2c3d4e[ARGS]{{}}", "Yes", TWO),
    ("mistral", f"[TOOL_CALLS]weather{JSON}", "", ONE),
    ("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    ("llama3_json", f'{LLAMA}; {{"name": "clock", "parameters": {{}}}}', "", TWO),
    ("llama3_json", f"Well <|python_tag|>{LLAMA}", "Well", ONE),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", f"text {LLAMA}", f"text {LLAMA}", []),
    ("qwen3_coder", f"Hm\n{XML}", "Hm", ONE),
    ("qwen3_coder", "<tool_call>\n<function=clock>\n</function>\n</tool_call>", "", [("clock", {})]),
    ("qwen3_coder", "<tool_call>\n<fun", "<tool_call>\n<fun", []),
    ("glm45", f"{GLM}\n<tool_call>clock\n</tool_call>", "", TWO),
    ("glm45", "<tool_call>clock<arg_key>a</arg_key>{<tool_call></tool_call> so", " so", [("clock", {})]),
    ("glm45", "<tool_call>what is this?</tool_call>", "<tool_call>what is this?</tool_call>", []),
    ("deepseek_v3", f"So: {FENCED}", "So:", ONE),
    ("deepseek_v3", PLAIN, "", TWO),
    ("deepseek_v3", f"{CALLS}{CALL}nothing", f"{CALLS}{CALL}nothing", []),
]  # fmt: skip
FUNCTIONS = [Function("weather", {"type": "object", "properties": {"city": {"type": "string"}}}), CLOCK]
FRAGMENTS = sorted({part for _, text, _, _ in TEXTS for part in (text, text[: len(text) // 2], text[-9:])})
MARKS = sorted({mark for one in FORMATS.values() for mark in (one.mark, *one.marks, *one.signs)} | {"clock", "{", "}"})


def reader(name: str) -> PieceReader:
    return PieceReader(FORMATS[name]("", FUNCTIONS).read)


def read(name: str, *pieces: str) -> list[Piece]:
    """All pieces of a text that comes in these parts, runs of one kind joined."""
    one = reader(name)
    found = [piece for part in pieces for piece in one.feed(part)] + one.close()
    joined: list[Piece] = []
    for piece in found:
        if joined and joined[-1].kind is piece.kind is not Kind.CALL:
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize(("name", "text", "content", "calls"), TEXTS)
class TestTexts:
    def test_content_and_calls(self, name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
        message = MessageWriter(lambda: "id").message(read(name, text))
        found = [call["function"] for call in message.get("tool_calls", [])]
        assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
        assert (message["content"] or "") == content and (message["content"] is None) == (bool(calls) and not content)

    def test_wherever_it_is_cut(self, name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
        whole = read(name, text)
        assert read(name, *text) == whole
        for cut in range(len(text)):
            assert read(name, text[:cut], text[cut:]) == whole, cut

    def test_a_text_that_breaks_off(self, name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
        """As at max_tokens: no error, no call that was none, and what was certain before stays."""
        for cut in range(len(text)):
            found = [piece.text for piece in read(name, text[:cut]) if piece.kind is Kind.CALL]
            assert found == [call for call, _ in calls][: len(found)]


def content_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.kind is Kind.CONTENT)


@pytest.mark.parametrize(("name", "text", "content", "calls"), [one for one in TEXTS if one[3]])
def test_no_mark_leaks_where_the_length_cuts(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    """Behind a call, and everywhere where it has to be one: whole, and as a stream of single characters."""
    for cut in range(len(text)):
        for forced in (False, True):
            one, stream = (PieceReader(FORMATS[name]("", FUNCTIONS).read, forced=forced) for _ in range(2))
            found = one.whole(text[:cut], cut=True)
            streamed = [piece for letter in text[:cut] for piece in stream.feed(letter)] + stream.close(cut=True)
            assert content_of(found) == content_of(streamed)
            if forced or any(piece.kind is Kind.CALL for piece in found):
                assert content.startswith(content_of(found).rstrip() and content_of(found)), (cut, found)


def test_every_endpoint_says_where_the_length_cuts() -> None:
    """A call whose closing mark is cut off."""
    cut = HERMES[:-3]
    chat_format = ChatFormat(prompt={}, format=FORMATS["hermes"]("", [WEATHER]))
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "stream": True}
    ended = replace(output([1, 2], ended="length").outputs[0], text=cut)
    whole = replace(output([1]), outputs=[ended])
    writer = ChatWriter(ChatRequest.model_validate(chat), NAME, word_tokenizer(), chat_format)
    assert writer.choice(0, whole, ended)["message"]["content"] is None
    writer = ChatWriter(ChatRequest.model_validate(chat), NAME, word_tokenizer(), chat_format)
    *_, last = writer.events(Tagged(job=0, chunk=stream_chunk(cut, finish_reason="length")))
    assert last["choices"][0]["delta"]["tool_calls"] and "content" not in last["choices"][0]["delta"]
    message = MessagesRequest.model_validate({**chat, "max_tokens": 9})
    items = MessagesWriter(message, NAME, chat_format).whole([whole])
    assert [block["type"] for block in items["content"]] == ["tool_use"]
    streaming = MessagesWriter(message, NAME, chat_format)
    events = [*streaming.events(Tagged(job=0, chunk=stream_chunk(cut, output=whole))), *streaming.closing_events()]
    assert [one["content_block"]["type"] for one in events if one["type"] == "content_block_start"] == ["tool_use"]


def test_a_call_in_the_last_chunk_is_the_reason_to_finish() -> None:
    chat_format = ChatFormat(prompt={}, format=FORMATS["hermes"]("", [WEATHER]))
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}], "stream": True})
    writer = ChatWriter(body, NAME, word_tokenizer(), chat_format)
    *_, last = writer.events(Tagged(job=0, chunk=stream_chunk(HERMES, finish_reason="stop")))
    assert last["choices"][0]["delta"]["tool_calls"] and last["choices"][0]["finish_reason"] == "tool_calls"


@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(
        st.one_of(*map(st.sampled_from, (FRAGMENTS, MARKS)), st.text('{}[]",:<> \n\\atn', max_size=6)), max_size=8
    ),
    seed=st.integers(0, 1000),
)
def test_malformed_texts_however_they_are_cut(name: str, parts: list[str], seed: int) -> None:
    text, draw = "".join(parts), random.Random(seed)
    cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(8))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, *pieces) == read(name, text)


def test_arguments_are_streamed_as_they_come() -> None:
    one = reader("hermes")
    assert one.feed('<tool_call>{"name": "weather", "arguments": {"ci') == [
        Piece(Kind.CALL, "weather"),
        Piece(Kind.ARGUMENTS, '{"ci'),
    ]
    assert one.feed('ty": 1') == [Piece(Kind.ARGUMENTS, 'ty": 1')]
    assert one.feed("}}</tool_") == [Piece(Kind.ARGUMENTS, "}")] and one.feed("call>") == []


TEMPLATES = {
    "hermes": '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>',
    "qwen3_coder": "<tool_call><function=f><parameter=p></parameter></function></tool_call>",
    "glm45": "<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value></tool_call>",
    "mistral": '{{ "[TOOL_CALLS] [" }}',
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name}',
    "deepseek_v3": CALLS,
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_template_shows_the_format(name: str) -> None:
    assert find_format("auto", TEMPLATES[name]) is FORMATS[name]
    assert find_format(name, "") is FORMATS[name] and find_format("none", TEMPLATES[name]) is None


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    """The tiny model, offline."""
    return LLM(str(checkpoint), dtype="float32", max_num_seqs=2, device="cpu")


MARKS = sorted({mark for kind in FORMATS.values() for mark in (kind.mark, *kind.marks)})


@pytest.fixture(scope="module", params=["special", "not special", "text"])
def compiler(request: pytest.FixtureRequest, checkpoint: Path) -> GrammarCompiler:
    """Grammars for tokenizers that have a special token for every mark (as Mistral's), one that is not special (as
    those of Qwen, GLM and DeepSeek R1), and none."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if request.param != "text":
        special = request.param == "special"
        tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS], special_tokens=special)
        assert len(tokenizer.encode("".join(MARKS))) == len(MARKS)
    return GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def spelled(compiler: GrammarCompiler, grammar: str, text: str) -> str:
    """The beginning of a text that a grammar allows."""
    tokenizer = compiler.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    valid = compiler.processor(StructuredOutputs(grammar=grammar), 0).valid([], ids)
    return str(tokenizer.decode(ids[:valid]))


VERSIONS = [(name, "") for name in sorted(FORMATS)] + [("mistral", "[ARGS]"), ("deepseek_v3", "```json")]


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize(("name", "template"), VERSIONS)
def test_whatever_a_grammar_forces_is_a_call(llm: LLM, name: str, template: str, many: bool) -> None:
    """A random model at temperature 1.5, with drafts: what comes out reads back as calls that obey their schemas."""
    kind = FORMATS[name](template, [WEATHER, CLOSED])
    form = StructuredOutputs(grammar=grammar_of(kind, llm.reader.grammars.mark, many=many))
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=210, structured_outputs=form) for seed in (1, 2)]
    for one_output in llm.generate(
        ["the cat"] * 2, params, speculative={"method": "ngram", "num_speculative_tokens": 3}
    ):
        answer = one_output.outputs[0]
        one = PieceReader(kind.read)
        message = MessageWriter(kind.new_id).message([*one.feed(answer.text), *one.close()])
        calls = [call["function"] for call in message["tool_calls"]]
        assert many or (len(calls) == 1 and answer.finish_reason == "stop")
        for call in calls if answer.finish_reason == "stop" else calls[:-1]:
            assert obeys(call["name"], json.loads(call["arguments"]))


def obeys(name: str, arguments: dict[str, Any]) -> bool:
    if name == "clock":
        return True
    return (
        name == "weather" and arguments.pop("unit") in ("C", "F") and arguments in ({}, {"deep": True}, {"deep": False})
    )


def grammar_of(kind: ToolFormat, mark: Any, *, forced: bool = True, many: bool = False) -> str:
    lark = Lark(mark)
    return lark.text(kind.grammar(lark, forced=forced, many=many))


def described(compiler: GrammarCompiler, name: str, template: str, *, forced: bool) -> tuple[ToolFormat, str]:
    """A format of the two functions, and its grammar."""
    kind = FORMATS[name](template, [WEATHER, CLOSED])
    return kind, grammar_of(kind, compiler.mark, forced=forced, many=True)


def of_one_value(compiler: GrammarCompiler, name: str, unit: Any, *, strict: bool = True) -> tuple[str, list[str]]:
    """The grammar of a call with one argument, and what is written before and behind it."""
    schema = {"type": "object", "properties": {"unit": unit}, "required": ["unit"]}
    schema["$defs"] = {"T": {"type": "string"}, "N": {"type": "integer"}}
    kind = FORMATS[name]("", [Function("weather", schema, strict=strict)])
    return grammar_of(kind, compiler.mark), CALLS_WRITTEN[name, ""].split("C")


@pytest.mark.parametrize(("name", "template"), VERSIONS)
def test_a_strict_function_is_obeyed_behind_the_mark_only(compiler: GrammarCompiler, name: str, template: str) -> None:
    _, grammar = described(compiler, name, template, forced=False)
    free, call = 'no { call < at all: {"a": 1}', CALLS_WRITTEN[name, template]
    lead = "" if name == "llama3_json" else free
    assert spelled(compiler, grammar, free) == free
    assert spelled(compiler, grammar, lead + call) == lead + call
    place = call.rindex("C")
    assert spelled(compiler, grammar, f"{lead}{call[:place]}X{call[place + 1 :]}") == lead + call[:place]


@pytest.mark.parametrize(("name", "template"), VERSIONS)
def test_a_forced_call_is_allowed_from_first_to_last_token(compiler: GrammarCompiler, name: str, template: str) -> None:
    (_, grammar), call = described(compiler, name, template, forced=True), CALLS_WRITTEN[name, template]
    assert spelled(compiler, grammar, call) == call
    assert spelled(compiler, grammar, f"Well. {call}") == "", "nothing but a call"


@pytest.mark.parametrize(("name", "template"), VERSIONS)
def test_a_mark_spelled_out_does_not_free_a_strict_function(
    compiler: GrammarCompiler, name: str, template: str
) -> None:
    """A reader takes the characters of a mark for the mark, whichever tokens they are."""
    kind, grammar = described(compiler, name, template, forced=False)
    ids = [token for character in f"So: {kind.mark} who" for token in compiler.tokenizer.encode(character)]
    valid = compiler.processor(StructuredOutputs(grammar=grammar), 0).valid([], ids)
    assert len(f"So: {kind.mark}") - 1 <= valid < len(ids)


DEGREES = '{"unit": "C"}'
CALLS_WRITTEN = {
    ("hermes", ""): f'<tool_call>\n{{"name": "weather", "arguments": {DEGREES}}}\n</tool_call>',
    ("qwen3_coder", ""): "<tool_call>\n<function=weather>\n<parameter=unit>\nC\n</parameter>\n"
    "</function>\n</tool_call>",
    ("glm45", ""): "<tool_call>weather\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>",
    ("mistral", ""): f'[TOOL_CALLS][{{"name": "weather", "arguments": {DEGREES}}}]',
    ("mistral", "[ARGS]"): f"[TOOL_CALLS]weather[ARGS]{DEGREES}",
    ("llama3_json", ""): f'{{"name": "weather", "parameters": {DEGREES}}}',
    ("deepseek_v3", ""): f"{CALLS}{CALL}weather{SEPARATOR}{DEGREES}{CALL_END}{CALLS_END}",
    ("deepseek_v3", "```json"): f"{CALLS}{CALL}function{SEPARATOR}weather\n```json\n{DEGREES}\n```"
    f"{CALL_END}{CALLS_END}",
}  # fmt: skip


def test_strings_that_a_field_cannot_enforce_are_refused() -> None:
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}, "required": ["a"]}
    with pytest.raises(ArgumentError, match="'pattern' cannot be enforced"):
        grammar_of(FORMATS["qwen3_coder"]("", [Function("f", pattern, strict=True)]), json.dumps)


VALUES_WRITTEN: list[tuple[Any, str, str]] = [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "Paris, <b> </b> 42", ""),
    ({"$ref": "#/$defs/T"}, 'an "odd" text', ""),
    ({"enum": ["a", "b", 7, None]}, "b", "c"),
    ({"enum": ["a", "b", 7, None]}, "7", "8"),
    ({"enum": ["a", "b", 7, None]}, "null", "nil"),
    ({"anyOf": [{"const": "no"}, {"type": "integer"}]}, "no", "so"),
    ({"anyOf": [{"const": "no"}, {"type": "integer"}]}, "12", "[]"),
    ({"allOf": [{"$ref": "#/$defs/N"}]}, "12", "so"),
    ({"type": ["boolean", "null"]}, "true", '"true"'),
]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(("schema", "right", "wrong"), VALUES_WRITTEN)
def test_a_forced_value_is_written_as_it_is_read(
    compiler: GrammarCompiler, name: str, schema: Any, right: str, wrong: str
) -> None:
    """Strings as they are, all else as JSON, whatever the schema says it in."""
    grammar, (front, back) = of_one_value(compiler, name, schema)
    assert spelled(compiler, grammar, f"{front}{right}{back}") == f"{front}{right}{back}"
    assert spelled(compiler, grammar, f"{front}{wrong}{back}") != f"{front}{wrong}{back}" or not wrong


def test_a_forced_value_ends_at_its_mark_on_whatever_line(compiler: GrammarCompiler) -> None:
    """A model that does not know the format may leave out the break before it: the value would never end."""
    grammar, (front, back) = of_one_value(compiler, "qwen3_coder", {"type": "string"}, strict=False)
    for value in ("C", "C\nD", ""):
        written = f"{front}{value}{back[1:]}"
        assert spelled(compiler, grammar, written) == written


@pytest.mark.parametrize(
    ("name", "inner"),
    [("qwen3_coder", "</parameter> <parameter=x>"), ("glm45", "</arg_value> <arg_key>x")],
)
def test_no_forced_value_holds_the_end_of_its_field(compiler: GrammarCompiler, name: str, inner: str) -> None:
    """A reader would end the value there and read arguments that the schema does not have."""
    encode = compiler.tokenizer.encode
    grammar, (front, back) = of_one_value(compiler, name, {"type": "string"})
    whole = [*encode(front), *(token for character in f"C{inner}" for token in encode(character)), *encode(back)]
    valid = compiler.processor(StructuredOutputs(grammar=grammar), 0).valid([], whole)
    assert len(encode(front)) < valid < len(whole) - len(encode(back))


TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "How warm", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ASK: Any = [{"role": "user", "content": "the cat"}]


def ask(live: Live, **more: Any) -> Any:
    asked = {"messages": ASK, "tools": TOOLS, "max_tokens": 100, "temperature": 1.2, "seed": 3, **more}
    return both(live, **asked).choices[0]


class TestServer:
    def test_a_named_function_is_called(self, templated: Live) -> None:
        choice = ask(templated, tool_choice=NAMED)
        [call] = choice.message.tool_calls
        assert call.function.name == "weather" and obeys("weather", json.loads(call.function.arguments))
        assert choice.finish_reason == "tool_calls" and choice.message.content is None and call.id.startswith("call_")

    def test_a_call_that_a_stop_cut_off_is_no_reason_to_finish(self, templated: Live) -> None:
        tokenizer = templated.llm.tokenizer
        brace, end = tokenizer.encode("}")[0], tokenizer.eos_token_id
        for more, reason in (({"stop": ['"unit']}, "stop"), ({"extra_body": {"stop_token_ids": [brace]}}, "stop")):
            choice = ask(templated, tool_choice=NAMED, **more)
            [call] = choice.message.tool_calls
            assert call.function.name == "weather" and choice.finish_reason == reason
            with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
                json.loads(call.function.arguments)
        choice = ask(templated, tool_choice=NAMED, extra_body={"stop_token_ids": [end]})
        assert choice.finish_reason == "tool_calls", "clients name the model's own end, too"

    @pytest.mark.parametrize("name", ["weather", "clock"])
    def test_a_required_call_is_the_models_choice(self, templated: Live, name: str) -> None:
        tokenizer = templated.llm.tokenizer
        liked = {str(tokenizer.encode(name[0])[0]): 40.0}
        choice = ask(templated, tool_choice="required", parallel_tool_calls=False, logit_bias=liked)
        [call] = choice.message.tool_calls
        assert call.function.name == name and obeys(name, json.loads(call.function.arguments))

    def test_several_calls(self, templated: Live) -> None:
        """The end made unlikely, the model calls until it may not go on; the last call is cut off."""
        tokenizer = templated.llm.tokenizer
        choice = ask(templated, tool_choice="required", logit_bias={str(tokenizer.eos_token_id): -100}, max_tokens=150)
        assert len(choice.message.tool_calls) > 1 and choice.finish_reason == "length"
        assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
        for call in choice.message.tool_calls[:-1]:
            assert obeys(call.function.name, json.loads(call.function.arguments))

    def test_a_model_that_does_not_call_writes_text(self, templated: Live) -> None:
        choice = ask(templated, max_tokens=12, extra_body={"ignore_eos": True})
        assert choice.message.tool_calls is None and choice.message.content and choice.finish_reason == "length"

    def test_a_strict_function_or_the_form_of_the_text(self, templated: Live) -> None:
        strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
        ask(templated, tools=strict, max_tokens=12)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "so"}}}
        choice = ask(templated, response_format=form)
        calls = choice.message.tool_calls or []
        assert [obeys(call.function.name, json.loads(call.function.arguments)) for call in calls] or (
            json.loads(choice.message.content) == "so"
        )

    def test_a_conversation_with_results(self, templated: Live) -> None:
        """The model's message goes back as the client got it; templates read arguments as an object."""
        with templated.client() as client:
            first = client.chat.completions.create(
                model=NAME, messages=ASK, tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False, max_tokens=100
            )
            message = first.choices[0].message
            assert message.tool_calls is not None
            result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20"}
            messages: Any = [*ASK, message.model_dump(), result]
            second = client.chat.completions.create(model=NAME, messages=messages, tools=TOOLS, max_tokens=4)
        arguments = message.tool_calls[0].function.arguments
        prompt = (
            f"weather clock user: the cat\nassistant: weather{json.loads(arguments)['unit']}\ntool: 20\nassistant: "
        )
        tokenizer = templated.llm.tokenizer
        assert second.usage is not None
        assert second.usage.prompt_tokens == len(tokenizer.encode(prompt))

    def test_none_hides_the_tools(self, templated: Live) -> None:
        asked: dict[str, Any] = {"model": NAME, "messages": ASK, "max_tokens": 4}
        with templated.client() as client:
            plain = client.chat.completions.create(**asked)
            hidden = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
        assert hidden.usage.prompt_tokens == plain.usage.prompt_tokens

    @pytest.mark.parametrize(
        ("param", "more"),
        [
            ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "other"}}}),
            ("tool_choice", {"tool_choice": "required", "response_format": {"type": "json_object"}}),
            ("tools", {"tools": [*TOOLS, *TOOLS]}),
            ("tools", {"tools": [{"type": "function", "function": {"name": "a<b"}}]}),
            ("messages", {"messages": [{"role": "tool", "content": "x"}]}),
            ("messages", {"messages": [{"role": "user", "content": None}]}),
        ],
    )
    def test_what_is_refused(self, templated: Live, param: str, more: dict[str, Any]) -> None:
        body = {"model": NAME, "messages": ASK, "tools": TOOLS, **more}
        answer = templated.post("/v1/chat/completions", {key: own for key, own in body.items() if own is not None})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param)

    def test_a_schema_that_no_grammar_takes(self, templated: Live) -> None:
        odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}, "required": ["a"]}
        tools = [{"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}]
        answer = templated.post("/v1/chat/completions", {"messages": ASK, "tools": tools, "tool_choice": "required"})
        assert answer.status_code == 400 and "not accepted" in answer.json()["error"]["message"]

    def test_a_model_without_tools(self, live: Live, client: OpenAI) -> None:
        with pytest.raises(BadRequestError, match=r"takes no tools; .* --chat-template hermes") as caught:
            client.chat.completions.create(model=NAME, messages=ASK, tools=TOOLS)
        assert caught.value.param == "tools"


def test_the_template_that_is_shipped() -> None:
    """It takes tools, tells their format, and writes calls and results as ``hermes`` reads them."""
    template = str(read_template("hermes"))
    assert find_format("auto", template) is FORMATS["hermes"]
    tokenizer = word_tokenizer()
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in TWO]
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        *({"role": "tool", "content": content} for content in ("rain", "noon")),
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=TOOLS, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    system, user, assistant, results, opened = str(text).split("<|im_start|>")[1:]
    assert system.startswith("system\nBe short.\n\n# Tools") and json.dumps(TOOLS[0]) in system
    assert user == "user\nWeather?<|im_end|>\n" and opened == "assistant\n"
    assert re.findall(r"<tool_response>\n(.*)\n</tool_response>", results) == ["rain", "noon"]
    written = assistant.removeprefix("assistant\n").removesuffix("<|im_end|>\n")
    message = MessageWriter(lambda: "id").message(read("hermes", written))
    told = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert told == TWO and message["content"] == "Let me see."
    plain = tokenizer.apply_chat_template(messages[1:2], chat_template=template, tokenize=False)
    assert plain == "<|im_start|>user\nWeather?<|im_end|>\n"


SMOLLM2 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Its turns, which join a message's content to other texts: None would be an error."""
DEMO = FOLDER / "target" / "chat_template.jinja"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("template", [SMOLLM2, DEMO.read_text(), str(read_template("hermes"))])
def test_a_message_of_calls_needs_no_content(template: str, content: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call], **content}).plain()
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    [before, after] = [
        str(tokenizer.apply_chat_template(template_messages(tokenizer, [*ASK, one]), tokenize=False))
        for one in ({"role": "assistant", "content": ""}, message)
    ]
    written = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert "None" not in after and after.replace(written, "").replace("assistant\n\n", "assistant\n") == before
    assert (written in after) == ("tool_call" in template)


def test_the_operators_choice_wins(checkpoint: Path, tmp_path: Path) -> None:
    folder = with_template(checkpoint, tmp_path, TEMPLATE)
    with serving(folder, tool_call_parser="mistral") as running:
        choice = ask(running, tool_choice=NAMED, parallel_tool_calls=False)
        assert len(choice.message.tool_calls[0].id) == 9, "Mistral's templates want nine characters"
    with serving(folder, tool_call_parser="none") as running, pytest.raises(BadRequestError, match="parser none"):
        ask(running)
    with pytest.raises(ArgumentError, match="Did you mean 'hermes'"):
        ServeSettings(model_names=("x",), tool_call_parser="hermess")
