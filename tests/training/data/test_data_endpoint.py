"""Against an endpoint: concurrent, patient, resumable, and clear when it is refused. The server is in this process."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.endpoints import ServerError
from forerun.errors import ArgumentError, DataError
from forerun.training.data.regenerate import AnswerRun, Director, Endpoint, with_endpoint
from forerun.types import SamplingParams
from training.data.conftest import byte_tokenizer, write_lines

httpx = pytest.importorskip("httpx")

Trouble = Callable[[int, dict[str, Any]], Any]


class Server:
    """Answers every conversation with how many messages it has; keeps what it was asked.

    Args:
        trouble: told the number of the request and its body; a response, an exception to raise, or None.
    """

    def __init__(self, trouble: Trouble | None = None) -> None:
        self.trouble = trouble or (lambda number, body: None)
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[Any] = []
        self.running = self.most_running = 0

    async def __call__(self, request: Any) -> Any:
        body = json.loads(request.content)
        self.requests.append(request)
        self.bodies.append(body)
        trouble = self.trouble(len(self.bodies), body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        if isinstance(trouble, BaseException):
            raise trouble
        return trouble or answered(body)


def answered(body: dict[str, Any], *, finish: str = "stop") -> Any:
    """A proper response."""
    if "messages" in body:
        content = f"answer {len(body['messages'])}"
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": content}, "finish_reason": finish}
    else:
        choice = {"text": " and on", "finish_reason": finish}
    return httpx.Response(200, json={"choices": [choice]})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def todo(folder: Path, records: list[Any], **more: Any) -> AnswerRun:
    source = write_lines(folder / "in.jsonl", records)
    params = SamplingParams(**{"max_tokens": 1024, **more.pop("sampling", {})})
    variables, weights, tokenizer = more.pop("variables", {}), more.pop("weights", ""), byte_tokenizer()
    tokenizer.chat_template = more.pop("template", tokenizer.chat_template)
    director = Director(tokenizer=tokenizer, prompt_tokens=4, params=params, variables=variables, weights=weights)
    return AnswerRun(source, folder / "out.jsonl", director, **more)


def ask(work: AnswerRun, server: Server, *, concurrency: int = 4) -> Any:
    endpoint = Endpoint(url="http://here", model="m", retries=3, first_pause_s=0.001)
    return with_endpoint(work, endpoint, concurrency=concurrency, transport=httpx.MockTransport(server))


def lines(folder: Path) -> list[dict[str, Any]]:
    """Without what was asked."""
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(line.pop("asked")["prompt"] for line in found)
    return found


TALK = [{"role": "system", "content": "s"}, user("a"), assistant("old"), user("b"), assistant("old"), user("c")]


def test_user_turns_are_kept_and_every_answer_builds_on_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    server = Server()
    done = ask(todo(tmp_path, [{"id": "x", "messages": TALK}]), server)
    (line,) = lines(tmp_path)
    assert line == {
        "id": "x",
        "messages": [TALK[0], user("a"), assistant("answer 2"), user("b"), assistant("answer 4"), user("c"),
                     assistant("answer 6")],
    }  # fmt: skip
    assert server.bodies[2]["messages"] == line["messages"][:6]
    assert server.requests[0].url == "http://here/v1/chat/completions"
    assert server.requests[0].headers["Authorization"] == "Bearer k"
    assert (done.written, done.answers, done.failed) == (1, 3, 0)


def test_sampling_is_passed_on_and_each_question_has_a_seed_of_its_own(tmp_path: Path) -> None:
    server = Server()
    sampling = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "seed": 1}
    ask(todo(tmp_path, [{"messages": TALK}, {"messages": TALK}], sampling=sampling), server)
    body = server.bodies[0]
    assert {key: body[key] for key in ("model", "max_tokens", "temperature", "top_p")} == {
        "model": "m", "max_tokens": 9, "temperature": 0.7, "top_p": 0.9,
    }  # fmt: skip
    seeds = {body["seed"] for body in server.bodies}
    assert len(seeds) == 6 and all(0 <= seed < 2**31 for seed in seeds)
    plain = Server()
    (tmp_path / "out.jsonl").unlink()
    ask(todo(tmp_path, [{"messages": TALK}]), plain)
    assert not {"seed", "temperature", "top_p", "tools"} & set(plain.bodies[0])


def test_variables_of_the_chat_template_are_passed_on_with_conversations(tmp_path: Path) -> None:
    server = Server()
    work = todo(tmp_path, [{"prompt": "q"}, {"text": "once upon"}], variables={"enable_thinking": False})
    ask(work, server, concurrency=1)
    assert [body.get("chat_template_kwargs") for body in server.bodies] == [{"enable_thinking": False}, None]
    plain = Server()
    (tmp_path / "out.jsonl").unlink()
    ask(todo(tmp_path, [{"prompt": "q"}]), plain)
    assert "chat_template_kwargs" not in plain.bodies[0]


def test_records_are_asked_at_once_but_not_more_than_allowed(tmp_path: Path) -> None:
    server = Server()
    done = ask(todo(tmp_path, [{"prompt": f"q{n}"} for n in range(40)]), server, concurrency=5)
    assert server.most_running == 5 and done.written == 40
    assert sorted(line["id"] for line in lines(tmp_path)) == sorted(f"in.jsonl:{n}" for n in range(1, 41))


def test_a_busy_or_broken_server_is_asked_again(tmp_path: Path) -> None:
    def trouble(number: int, body: dict[str, Any]) -> Any:
        return {
            1: httpx.Response(429, headers={"Retry-After": "0"}),
            2: httpx.Response(503, text="starting"),
            3: httpx.ReadTimeout("slow"),
        }.get(number)

    server = Server(trouble)
    done = ask(todo(tmp_path, [{"prompt": "q"}]), server)
    assert len(server.bodies) == 4 and done.written == 1 and done.failed == 0


def test_pauses_grow_and_obey_the_server() -> None:
    endpoint = Endpoint(url="http://here", model="m", first_pause_s=1.0)
    pauses = [endpoint._pause(attempt, None) for attempt in range(4)]
    assert all(0.5 * 2**n <= pause <= 2**n for n, pause in enumerate(pauses))
    assert endpoint._pause(0, httpx.Response(429, headers={"Retry-After": "7"})) == 7.0
    assert endpoint._pause(30, None) == 60.0


def test_a_server_that_stays_away_ends_the_run_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"4 times.*503: starting"):
        ask(todo(tmp_path, [{"prompt": "q"}] * 3), Server(lambda number, body: httpx.Response(503, text="starting")))
    with pytest.raises(ServerError, match="401: who"):
        ask(todo(tmp_path, [{"prompt": "q"}] * 3), Server(lambda number, body: httpx.Response(401, text="who")))
    with pytest.raises(ServerError, match="no OpenAI response"):
        ask(todo(tmp_path, [{"prompt": "q"}]), Server(lambda number, body: httpx.Response(200, text="<html>")))


def test_one_record_that_does_not_fit_costs_only_itself(tmp_path: Path) -> None:
    def trouble(number: int, body: dict[str, Any]) -> Any:
        return httpx.Response(400, text="too long") if body["messages"][0]["content"] == "q1" else None

    work = todo(tmp_path, [{"prompt": f"q{n}"} for n in range(3)])
    done = ask(work, Server(trouble))
    assert (done.written, done.failed, done.done) == (2, 1, 3) and "too long" in done.complaints[0]
    assert "in.jsonl, line 2" in done.complaints[0] and len(lines(tmp_path)) == 2


def test_a_stopped_run_goes_on_where_it_was_and_repairs_a_line_cut_short(tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    records = [{"prompt": f"q{n}"} for n in range(10)]

    def stop(number: int, body: dict[str, Any]) -> None:
        if number == 6:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        ask(todo(tmp_path, records), Server(stop), concurrency=1)
    assert len(lines(tmp_path)) == 5
    with (tmp_path / "out.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"id": "in.jsonl:6", "mess')
    server = Server()
    done = ask(todo(tmp_path, records), server)
    assert (done.resumed, done.written, len(server.bodies)) == (5, 5, 5)
    assert Counter(line["id"] for line in lines(tmp_path)) == Counter(f"in.jsonl:{n}" for n in range(1, 11))
    again = Server()
    assert ask(todo(tmp_path, records), again).resumed == 10 and not again.bodies


def test_another_prompt_of_the_same_id_is_answered_too(tmp_path: Path) -> None:
    """Files of one name in two folders, whose records are named by file and line, into one output."""
    for text in ("q", "r", "q"):
        ask(todo(tmp_path, [{"prompt": text}, {"text": text * 3}]), Server())
    assert [line["messages"][0]["content"] for line in lines(tmp_path) if "messages" in line] == ["q", "r"]
    assert sorted(line["text"] for line in lines(tmp_path) if "text" in line) == ["qqq and on", "rrr and on"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": {"max_tokens": 9}}, "max_tokens was 1024, is 9"),
        ({"sampling": {"temperature": 0.5, "seed": 3}}, "temperature was None, is 0.5; seed was None, is 3"),
        ({"variables": {"thinking": True}}, r"chat_template_kwargs was None, is \{'thinking': True\}"),
    ],
)
def test_what_was_answered_under_other_settings_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    records = [{"prompt": "q"}, {"prompt": "r"}]
    ask(todo(tmp_path, records[:1]), Server())
    with pytest.raises(ArgumentError, match=rf"in\.jsonl, line 1 under other settings: {named}\. Give the former"):
        todo(tmp_path, records, **change)
    ask(todo(tmp_path, [{"prompt": "s"}], **change), Server())  # another prompt need not be asked for alike
    assert len(lines(tmp_path)) == 2


def test_another_model_of_the_same_name_has_not_answered(tmp_path: Path) -> None:
    """Weights and chat template are compared; lines that say nothing of them count, and are counted."""
    records = [{"prompt": "q"}]
    ask(todo(tmp_path, records), Server())
    assert (todo(tmp_path, records).unidentified, todo(tmp_path, records).resumed) == (0, 1)
    known = todo(tmp_path, records, weights="a1")
    assert (known.unidentified, known.resumed) == (1, 1)
    (tmp_path / "out.jsonl").unlink()
    ask(todo(tmp_path, records, weights="a1"), Server())
    assert (todo(tmp_path, records, weights="a1").unidentified, todo(tmp_path, records).unidentified) == (0, 1)
    with pytest.raises(ArgumentError, match=r"weights was 'a1', is 'b2'\. Give the former"):
        todo(tmp_path, records, weights="b2")
    with pytest.raises(ArgumentError, match="settings: chat_template was "):
        todo(tmp_path, records, weights="a1", template="{{ messages[0].content }}")


def test_a_cut_off_answer_ends_the_conversation_and_is_marked(tmp_path: Path) -> None:
    server = Server(lambda number, body: answered(body, finish="length"))
    ask(todo(tmp_path, [{"messages": TALK}]), server)
    (line,) = lines(tmp_path)
    assert line["truncated"] is True and len(line["messages"]) == 3 and len(server.bodies) == 1


def test_reasoning_is_kept_beside_the_answer(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    response = {"choices": [{"message": message, "finish_reason": "stop"}]}
    ask(todo(tmp_path, [{"prompt": "q"}]), Server(lambda number, body: httpx.Response(200, json=response)))
    assert lines(tmp_path)[0]["messages"][1] == message


def test_plain_text_is_continued_from_its_first_tokens(tmp_path: Path) -> None:
    server = Server()
    ask(todo(tmp_path, [{"text": "once upon a time"}]), server)
    assert server.bodies[0]["prompt"] == "once" and server.requests[0].url == "http://here/v1/completions"
    assert lines(tmp_path) == [{"id": "in.jsonl:1", "text": "once and on", "prompt_tokens": 4}]


def test_a_text_that_the_target_ends_at_once_is_answered(tmp_path: Path) -> None:
    response = {"choices": [{"text": "", "finish_reason": "stop"}]}
    plan = todo(tmp_path, [{"text": "once upon a time"}])
    ask(plan, Server(lambda number, body: httpx.Response(200, json=response)))
    assert lines(tmp_path) == [{"id": "in.jsonl:1", "text": "once", "prompt_tokens": 4}]
    assert (plan.written, plan.failed) == (1, 0)


def test_conversations_end_before_a_tool_is_called(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    tail = [user("c"), call, {"role": "tool", "content": "1"}, assistant("old")]
    server = Server()
    done = ask(todo(tmp_path, [{"messages": [*TALK[1:3], *tail]}, {"messages": tail}]), server)
    assert [line["messages"] for line in lines(tmp_path)] == [[user("a"), assistant("answer 1")]]
    assert done.failed == 1 and "tool" in done.complaints[0] and len(server.bodies) == 1


def test_limit_and_equal_ids(tmp_path: Path) -> None:
    server = Server()
    ask(todo(tmp_path, [{"id": "x", "prompt": "q"}] * 3, limit=2), server, concurrency=1)
    assert [line["id"] for line in lines(tmp_path)] == ["x", "x#2"]


def test_bad_input_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="limit"):
        todo(tmp_path, [{"prompt": "q"}], limit=0)
    with pytest.raises(ArgumentError, match="is the input"):
        AnswerRun(tmp_path / "in.jsonl", tmp_path / "in.jsonl", Director(tokenizer=None))
    for others in ('{"no": "id"}\n', '{"somebody": "else, without a line break"}'):
        (tmp_path / "out.jsonl").write_text(others, encoding="utf-8")
        with pytest.raises(DataError, match=r"out\.jsonl, line 1"):
            todo(tmp_path, [{"prompt": "q"}])
    (tmp_path / "new").mkdir()
    with pytest.raises(ArgumentError, match="http://"):
        with_endpoint(todo(tmp_path / "new", [{"prompt": "q"}]), Endpoint(url="here:8000", model="m"), concurrency=1)
    for wrong in ({"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            Director(tokenizer=None, params=SamplingParams(**wrong))
