"""What a client is told of an error: no path of the server's machine, no place in a library's code, no panic."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.engine.prompts import PromptReader
from forerun.errors import ArgumentError, CheckpointError, EngineError
from forerun.serve.protocol.errors import ApiError, clean_message
from serve.conftest import Live, serving, with_template
from serve.test_logs import Kept, kept, named

__all__ = ["kept"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "hi"}]
TELLING = re.compile(r"site-packages|\.rs\b|\.py\b|panick|/root|/home|/tmp|/usr|/srv|\.cargo|Traceback|0x[0-9a-f]{6}")
SECRET = "/srv/models/very-private"


FORMS: dict[str, list[Any]] = {
    "regex": [
        *("(", "[", "a{9999999999}", "(?<=x)y", "\\p{Nonsense}", "(?P<n>x)(?P=n)", "a" * 9000),
        *("(" * 200, "a{1,100000}b{1,100000}", "[" + "\\u0000-" * 5),
    ],
    "grammar": [
        *("", "start", "start: x", "start: start", "start: /(/", "start: <[999999]>", "%import x.y\nstart: y"),
        *("start: %json {", "start: %llguidance {}", "start: " + "(" * 200 + '"x"' + ")" * 200, "start: " + "(" * 3000),
    ],
    "json": [
        *({"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "file:///etc/passwd"}, {"$ref": "https://example.org/x"}),
        *({"type": "nonsense"}, {"type": 7}, {"enum": []}, {"minimum": 3, "maximum": 2, "type": "integer"}, '{"a'),
        *({"pattern": "(", "type": "string"}, {"pattern": "(?<=x)y", "type": "string"}),
        *({"minItems": 10**9, "type": "array"}, {"properties": {"a": {"$ref": "#/properties/b"}}, "type": "object"}),
        {"properties": {"x": {"$ref": "#/properties/x"}}, "type": "object"},
    ],
    "choice": [[], [""], ["\u0000", "\U0010ffff"]],
}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *(
        (TEXT, {"prompt": "x", "max_tokens": 4, "structured_outputs": {kind: form}})
        for kind, forms in FORMS.items()
        for form in forms
    ),
    (CHAT, {"messages": ASK, "chat_template_kwargs": {"tokenize": True}}),
    (CHAT, {"messages": ASK, "chat_template_kwargs": {"messages": 3}}),
    (CHAT, {"messages": [{"role": "user", "content": "fail"}]}),
    (TEXT, {"prompt": "x", "speculative": {"drafter": "rest"}}),
    (TEXT, {"prompt": "x", "speculative": {"drafter": "draft_model"}}),
    (TEXT, {"prompt": "x", "speculative": {"drafter": "eagle3"}}),
    (TEXT, {"prompt": "x", "speculative": {"drafter": "ngram", "rule": "nonsense"}}),
    (TEXT, {"prompt": "x", "bad_words": [""]}),
    ("/tokenize", {"prompt": "\x00" * 9}),
    ("/detokenize", {"tokens": [-1]}),
]


@pytest.fixture(scope="module")
def offering(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose operator offers what it cannot have, with a template that names files."""
    refused = "{{ raise_exception('no /srv/models/very-private/x.jinja') }}"
    template = "{% if messages[0].content == 'fail' %}" + refused + "{% endif %}hi"
    folder = with_template(checkpoint, tmp_path_factory.mktemp("templated"), template)
    with serving(folder, client_drafters=("ngram", "recycling")) as live:
        yield live


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: str(value)[-60:])
def test_no_answer_tells_of_the_machine(offering: Live, path: str, body: dict[str, Any]) -> None:
    """Streamed or not, and whatever no engine of grammars takes: it is answered or refused, and never long."""
    for more in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
        answer = offering.post(path, body | more)
        assert answer.status_code in (200, 400) and "server_error" not in answer.text, answer.text
        assert not TELLING.search(answer.text) and len(answer.text) < 4000, answer.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FileNotFoundError(2, "No such file or directory", f"{SECRET}/config.json"), 500),
        (RuntimeError(f"{SECRET}/x.py:3 failed"), 500),
        (ValueError(f"cannot read {SECRET}/x"), 400),
        (UnicodeEncodeError("utf-8", f"{SECRET}", 0, 1, "no"), 400),
        (CheckpointError(f"there is no directory {SECRET}/head: expected a checkpoint"), 400),
        (ArgumentError(f"panicked at src/earley/parser.rs:12:3: {SECRET}/a"), 400),
        (EngineError(f"a step failed: {SECRET}/a"), 500),
    ],
)
def test_nor_does_whatever_the_engine_raises(
    live: Live, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    steps: list[tuple[type, str]] = [(PromptReader, "request"), (LLM, "chat_prompt")]
    for (owner, broken), stream in itertools.product(steps, [False, True]):
        with monkeypatch.context() as one:
            one.setattr(owner, broken, fail)
            answer = live.post(CHAT, {"messages": ASK, "max_tokens": 3, "stream": stream})
        assert answer.status_code == status, answer.text
        assert not TELLING.search(answer.text) and "private" not in answer.text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot open /data/models/x/config.json: no", "cannot open (a file): no"),
        ("cannot open '/data/models/x', line 3", "cannot open '(a file)', line 3"),
        ("at ~/models/x and ../a/b and file:///a/b", "at (a file) and (a file) and (a file)"),
        ("at src/earley/lexer.rs:12:3 it", "at (a file) it"),
        ("the schema: $ref #/definitions/a is unknown", "the schema: $ref #/definitions/a is unknown"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("'a/b/c' is no model; n is 1/2; and/or", "'a/b/c' is no model; n is 1/2; and/or"),
        ("the parameter 'panic' is unknown", "the parameter 'panic' is unknown"),
        ("x" * 5000, "x" * 1000 + "..."),
    ],
)
def test_what_is_left_of_a_message(message: str, shown: str) -> None:
    assert clean_message(message) == shown == str(ApiError(400, message))


def test_a_failing_step_is_written_once_and_the_next_request_is_answered(
    checkpoint: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(checkpoint, log_prompts=True) as live:

        def fail() -> Any:
            raise ValueError("begins " + "x" * 50_000 + " ends")

        with monkeypatch.context() as broken:
            broken.setattr(live.llm.engine, "step", fail)
            answer = live.post(TEXT, {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 4}, **named("many"))
        assert answer.status_code == 500
        error = kept.of("many", "a request failed")
        assert live.post(TEXT, {"prompt": "the cat", "max_tokens": 4}).status_code == 200
    assert error["error"] == "ValueError" and error["where"].startswith("fail (")
    assert "begins" in error["message"] and "ends" in error["message"]
    assert all(len(line) < 10_000 for line in kept.lines)
    assert len([one for one in kept.entries() if one["level"] == "error" and one["event"] != "request"]) == 1
