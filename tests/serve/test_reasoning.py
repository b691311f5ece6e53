"""Reasoning: split off wherever the text is cut, counted, and free of the form that only the answer must have."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from forerun.engine.grammar import GrammarCompiler
from forerun.errors import ArgumentError
from forerun.serve.handling import ChatFormat
from forerun.serve.protocol.requests import ChatRequest
from forerun.serve.reasoning import Marks, begins_inside, find_marks, read_reasoning
from forerun.serve.tools.incoming import Incoming, Kind, Piece, PieceReader, Steps
from forerun.types import StructuredOutputs
from serve.conftest import Live, both, serving, with_template

THINK = Marks("<think>", "</think>")
ASK: Any = [{"role": "user", "content": "the cat"}]


def read(text: str, *, inside: bool = False, cut: int = 0) -> tuple[str, str]:
    """Reasoning and content of a text that comes in two parts."""

    def steps(incoming: Incoming) -> Steps[None]:
        yield from read_reasoning(incoming, THINK, None, inside=inside)
        yield from incoming.rest(Kind.CONTENT)

    one = PieceReader(steps)
    pieces: list[Piece] = [*one.feed(text[:cut]), *one.feed(text[cut:]), *one.close()]
    both = [[piece.text for piece in pieces if piece.kind is kind] for kind in (Kind.REASONING, Kind.CONTENT)]
    return "".join(both[0]), "".join(both[1])


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nWell, 2 < 3.\n</think>\n\nYes.\n", False, ("Well, 2 < 3.", "Yes.\n")),
        ("\n<think></think>Yes.", False, ("", "Yes.")),
        (" No <think>marks</think>", False, ("", " No <think>marks</think>")),
        ("Well.</think>Yes.", True, ("Well.", "Yes.")),
        ("<think>Well.</think>Yes.", True, ("Well.", "Yes.")),
        ("Well. </thin", True, ("Well. </thin", "")),
        ("<think>a\n\nb", False, ("a\n\nb", "")),
        ("<thi", False, ("", "<thi")),
    ],
)
def test_texts_wherever_they_are_cut(text: str, inside: bool, expected: tuple[str, str]) -> None:
    for cut in range(len(text) + 1):
        assert read(text, inside=inside, cut=cut) == expected, cut


def test_who_says_which_marks() -> None:
    assert find_marks("auto", "{{ '<think>' }}") == THINK and find_marks("auto", "[THINK]") == Marks(
        "[THINK]", "[/THINK]"
    )
    assert find_marks("auto", "nothing") is None and find_marks("none", "<think>") is None
    assert find_marks("<r> </r>", "") == Marks("<r>", "</r>")
    with pytest.raises(ArgumentError, match="Did you mean 'qwen3'"):
        find_marks("qwen33", "")


def test_where_an_answer_begins() -> None:
    assert begins_inside(THINK, "assistant: <think>\n") and not begins_inside(THINK, "<think> a </think> assistant: ")
    assert begins_inside(Marks("<think>", "</think>", inside=True), "assistant: ")


TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant: "
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of the tiny model with a template that opens or closes the reasoning where it is told to."""
    with serving(with_template(checkpoint, tmp_path_factory.mktemp("thinker"), TEMPLATE)) as running:
        yield running


def ask(live: Live, thinking: bool | None, **more: Any) -> Any:
    kwargs = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    return both(live, **{"messages": ASK, "temperature": 0, "max_tokens": 60, "extra_body": kwargs, **more})


@pytest.fixture(scope="module", params=[True, False])
def compiler(request: pytest.FixtureRequest, checkpoint: Path) -> GrammarCompiler:
    """Of one kind of marks the tokenizer has tokens: special ones, or others as Qwen's and DeepSeek R1's."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    marks = ["[/THINK]"] if request.param else ["<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks], special_tokens=request.param)
    return GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


FORMS = [
    (StructuredOutputs(json={"const": {"a": 7}}), '{"a": 7}'),
    (StructuredOutputs(regex="[ab]{2}/x"), "ab/x"),
    (StructuredOutputs(choice=["yes", "no"]), "no"),
    (StructuredOutputs(grammar='start: A "!"\nA: /b+/'), "bb!"),
]


@pytest.mark.parametrize(("form", "text"), FORMS)
@pytest.mark.parametrize("marks", [THINK, Marks("[THINK]", "[/THINK]")])
@pytest.mark.parametrize("inside", [True, False])
def test_a_form_binds_what_comes_behind(
    compiler: GrammarCompiler, form: StructuredOutputs, text: str, marks: Marks, inside: bool
) -> None:
    chat_format = ChatFormat(prompt={"prompt": "x"}, marks=marks, inside=inside)
    outputs = chat_format.constrained(ChatRequest.model_validate({"messages": ASK}), form, compiler.mark)
    assert outputs is not None

    def allowed(answer: str) -> str:
        ids = compiler.tokenizer.encode(answer)
        return str(compiler.tokenizer.decode(ids[: compiler.processor(outputs, 0).valid([], ids)]))

    thought = f"{'' if inside else marks.open}so {{<{marks.close}"
    assert allowed(f"{thought}\n{text}") == f"{thought}\n{text}"
    assert allowed(f"{thought}?") == thought, "no other answer"
    assert allowed(text) == text, "inside, it is a thought; else the answer, without one"
    if not inside:
        assert allowed("?") == ""


class TestServer:
    def test_an_opened_thought_is_reasoning(self, thinker: Live) -> None:
        """The tiny model never closes it: everything is reasoning, up to the last token."""
        answer = ask(thinker, True, max_tokens=8)
        assert answer.choices[0].message.content == "" and answer.choices[0].message.model_extra["reasoning_content"]
        assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 8

    def test_nobody_who_does_not_want_it_sees_it(self, thinker: Live) -> None:
        sent = {"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": False}
        answer = ask(thinker, True, max_tokens=8, extra_body=sent)
        assert answer.choices[0].message.content == ""
        assert "reasoning_content" not in answer.choices[0].message.model_extra
        assert answer.usage.completion_tokens_details.reasoning_tokens == 8

    def test_a_closed_thought_leaves_an_answer(self, thinker: Live) -> None:
        answer = ask(thinker, False, max_tokens=8)
        assert answer.choices[0].message.content and "reasoning_content" not in answer.choices[0].message.model_extra
        assert answer.usage.completion_tokens_details is None


def test_reasoning_and_an_answer_in_one(checkpoint: Path, tmp_path: Path) -> None:
    """Marks of the operator's choice; the closing one is a letter, so that the tiny model comes to it."""
    folder = with_template(checkpoint, tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %} <r>\n")
    with serving(folder, reasoning_parser="<r> e") as running:
        tokenizer = running.llm.tokenizer
        answer = ask(
            running,
            None,
            **{"temperature": 1, "seed": 1, "logit_bias": {str(tokenizer.encode("e")[0]): 4.0}},
            extra_body={"structured_outputs": {"regex": "[ab/]{3}"}},
        )
    message, usage = answer.choices[0].message, answer.usage
    assert len(message.content) == 3 and set(message.content) <= set("ab/")
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
