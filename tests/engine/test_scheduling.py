"""Whose turn it is: prompts in pieces between decoding steps, rows shared fairly, answers whose time is up."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loads import DRAFTERS, TEXT, alike, drafter, engine, greedy, run, sampled, streamed
from engine.test_hidden_states import LISTENER, Heard
from forerun import LLM
from forerun.engine import core
from forerun.engine.scheduling import Scheduling, next_in_line
from forerun.errors import ArgumentError
from forerun.types import LAST_HIDDEN, OutputToken, RequestOutput, Source


class Clock:
    """Stands still unless told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(core, "time", made)
    return made


def passes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, tuple[int, int]]]:
    """For each pass over prompts: row -> where its piece began and ended."""
    seen, prefill = list[dict[int, tuple[int, int]]](), llm.target.prefill

    def noted(rows: Sequence[int], tokens: Sequence[Sequence[int]], **more: Any) -> Any:
        begins = [llm.target.lengths[row] for row in rows]
        ends = [begin + len(piece) for begin, piece in zip(begins, tokens, strict=True)]
        seen.append(dict(zip(rows, zip(begins, ends, strict=True), strict=True)))
        return prefill(rows, tokens, **more)

    monkeypatch.setattr(llm.target, "prefill", noted)
    return seen


@pytest.mark.parametrize("name", [*DRAFTERS, None])
def test_a_long_prompt_delays_others_by_one_piece(checkpoint: Path, draft_checkpoint: Path, name: str | None) -> None:
    config = None if name is None else drafter(name, draft_checkpoint)
    llm = engine(checkpoint, config, max_num_seqs=3, max_num_batched_tokens=8)
    first = llm.submit("the cat", sampled(40))
    while not llm.engine.step():
        pass
    late = llm.submit(TEXT, sampled(12, seed=12))
    outputs, steps = run(llm)
    gaps = [any(chunk.request_id == first for chunk in step) for step in steps]
    gaps = gaps[: len(gaps) - gaps[::-1].index(True)]
    assert gaps.count(False) >= len(outputs[late].prompt_token_ids) // 8
    assert all(gaps[place] or gaps[place + 1] for place in range(len(gaps) - 1)), "never two passes without a token"
    alone = engine(checkpoint, config)
    assert outputs[first].outputs[0].token_ids == alone.generate("the cat", sampled(40))[0].outputs[0].token_ids
    alike(outputs[late].outputs[0], alone.generate(TEXT, sampled(12, seed=12))[0].outputs[0])


def test_short_prompts_share_a_pass(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(checkpoint, max_num_seqs=4, max_num_batched_tokens=16, enable_prefix_caching=False)
    seen = passes(llm, monkeypatch)
    for prompt in ("the cat", "the dog", "the mat", TEXT):
        llm.submit(prompt, greedy(4))
    run(llm)
    assert len(seen[0]) == 3 and len(seen[1]) == 1


def test_a_prompt_of_one_piece_takes_one_pass_with_its_token(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(checkpoint)
    seen = passes(llm, monkeypatch)
    llm.submit("the dog", greedy(30))
    assert [len(chunk.tokens) for chunk in llm.engine.step()] == [1]
    llm.submit(TEXT, greedy(4))
    newcomer = [len(seen), *(len(seen) for _ in range(3) if llm.engine.step())]
    assert newcomer == [1, 1, 2, 2], "they take turns"
    run(llm)


def same_prompt_logprobs(found: RequestOutput, expected: RequestOutput) -> None:
    assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == len(expected.prompt_token_ids)
    for one, other in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert one.keys() == other.keys()
        assert all(abs(one[token].logprob - other[token].logprob) < 1e-4 for token in one)


def test_prompt_log_probabilities_and_states_come_in_pieces(checkpoint: Path, heard: Heard) -> None:
    llm = engine(checkpoint, LISTENER, max_num_seqs=3, max_num_batched_tokens=5)
    llm.submit("the mat", greedy(30))
    while not llm.engine.step():
        pass
    request_id = llm.submit(TEXT, greedy(8, prompt_logprobs=2))
    outputs, _ = run(llm)
    found = outputs[request_id]
    [whole] = engine(checkpoint).generate(TEXT, greedy(8, prompt_logprobs=2))
    same_prompt_logprobs(found, whole)
    text = [*found.prompt_token_ids, *found.outputs[0].token_ids]
    with torch.no_grad():
        states = llm.target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    notes = heard[tuple(found.prompt_token_ids)]
    assert sorted(notes) == list(range(len(notes))) and len(notes) > len(found.prompt_token_ids)
    for place in (place for place in notes if place < len(text) - 1):
        torch.testing.assert_close(notes[place][LAST_HIDDEN], states[-1][0, place], atol=2e-5, rtol=1e-4)


def test_few_states_of_a_long_prompt_are_kept(checkpoint: Path, heard: Heard) -> None:
    """Of 64,000 tokens of an 8 B model they would be 1.5 GB for EAGLE-3. Answers that share a prompt share its states,
    too, and are shown it at the end."""
    kept, answers = [], []
    for several in (1, 2):
        heard.clear()
        llm, most = engine(checkpoint, LISTENER, max_num_batched_tokens=5), [0]
        request_id = llm.submit(TEXT, greedy(4, n=several))
        outputs = {}
        while llm.engine.busy:
            outputs |= {chunk.request_id: chunk.output for chunk in llm.engine.step() if chunk.output is not None}
            texts = [*llm.engine._prefilling, *llm.engine._unread]
            most += [sum(map(len, parts)) for text in texts for parts in text.states.values()]
        kept.append(max(most))
        answers.append(outputs[request_id].outputs[0].token_ids)
    assert kept[0] <= 6 and kept[1] > 50
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_answers_read_their_prompt_once(
    checkpoint: Path, draft_checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = drafter(name, draft_checkpoint)
    llm = engine(checkpoint, config, max_num_seqs=4, max_num_batched_tokens=16)
    seen = passes(llm, monkeypatch)
    [output] = llm.generate(TEXT, sampled(10, seed=103, n=3))
    assert sum(end - begin for passing in seen for begin, end in passing.values()) == len(output.prompt_token_ids)
    [expected] = engine(checkpoint, config, max_num_seqs=1).generate(TEXT, sampled(10, seed=103, n=3))
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    for found, other in zip(output.outputs, expected.outputs, strict=True):
        alike(found, other)


def beginnings(llm: LLM) -> list[str]:
    """Request ids in the order in which their answers got their first tokens."""
    begun, order = set[tuple[str, int]](), list[str]()
    for chunks in run(llm)[1]:
        for chunk in chunks:
            if (chunk.request_id, chunk.index) not in begun:
                begun.add((chunk.request_id, chunk.index))
                order.append(chunk.request_id)
    return order


def test_a_request_of_many_answers_shares_the_rows(checkpoint: Path) -> None:
    llm = engine(checkpoint, max_num_seqs=2)
    many = llm.submit("the cat", sampled(6, n=8))
    few = [llm.submit(prompt, greedy(6)) for prompt in ("the dog", "the log", "the mat")]
    order = beginnings(llm)
    assert order[:2] == [many, few[0]]
    assert max(order.index(request_id) for request_id in few) <= 6
    assert order.count(many) == 8


def orders(checkpoint: Path, wishes: list[tuple[str, str | None]]) -> list[int]:
    """Which of the requests of a client and its user gets its first token when, with two rows for all of them."""
    llm = engine(checkpoint, max_num_seqs=2)
    ids = [llm.submit("the cat", greedy(6), client=client, user=user) for client, user in wishes]
    return list(map(ids.index, beginnings(llm)))


@pytest.mark.parametrize(
    ("wishes", "order"),
    [
        ([("eager", None)] * 6 + [("patient", None)], [0, 6, 1, 2, 3, 4, 5]),
        *(
            ([*(("a", user) for user in users), *[("b", None)] * 4], [0, 4, 1, 5, 2, 6, 3, 7])
            for users in ([None] * 4, ["one"] * 4, ["one", "two", "three", "four"])
        ),
        ([("a", "eager")] * 4 + [("a", None)], [0, 4, 1, 2, 3]),
    ],
    ids=["a burst", "no users", "one user", "many users", "users of a client"],
)
def test_clients_share_the_rows_and_users_those_of_their_client(
    checkpoint: Path, wishes: list[tuple[str, str | None]], order: list[int]
) -> None:
    assert orders(checkpoint, wishes) == order


def test_nobody_who_holds_nothing_waits_behind_who_came_later(checkpoint: Path) -> None:
    llm = engine(checkpoint)
    ids = [llm.submit("the cat", greedy(4)) for _ in range(3)]
    waiting = [answer for request_id in reversed(ids) for answer in llm.engine._requests[request_id].completions]
    assert next_in_line(waiting, []).request.id == ids[0]
    waiting[0].tokens.append(OutputToken(id=3, text="", step=0, source=next(iter(Source))))
    assert next_in_line(waiting, []).request.id == ids[2], "who has begun goes on first"


def test_an_answer_whose_time_is_up_ends_with_what_there_is(checkpoint: Path, clock: Clock) -> None:
    llm = engine(checkpoint, max_num_seqs=1)
    [whole] = llm.generate("the cat", greedy(40))
    late = llm.submit("the cat", greedy(40, stop=["\x00 never"]), timeout_s=2.0)
    never = llm.submit("the dog", greedy(40, n=2), timeout_s=1.5)
    other = llm.submit("the log", greedy(5), timeout_s=50.0)
    for _ in range(6):
        llm.engine.step()
    clock.now += 1.9
    first = llm.engine.step()
    assert [chunk.output.finished for chunk in first if chunk.output is not None] == [True]
    clock.now += 0.1
    outputs, steps = run(llm)
    outputs.update({chunk.request_id: chunk.output for chunk in first if chunk.output is not None})
    found, [unborn, twin] = outputs[late].outputs[0], outputs[never].outputs
    assert found.finish_reason == unborn.finish_reason == twin.finish_reason == "abort"
    assert found.token_ids == whole.outputs[0].token_ids[:7] and unborn.token_ids == []
    assert whole.outputs[0].text.startswith(found.text) and outputs[never].time_to_first_token_s is None
    assert outputs[other].outputs[0].finish_reason == "length"
    assert streamed(steps, other)[0] == outputs[other].outputs[0].token_ids


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prompt_may_be_scored_in_part_when_its_time_is_up(checkpoint: Path, clock: Clock, steps: int) -> None:
    llm = engine(checkpoint, max_num_batched_tokens=4)
    llm.submit(TEXT, greedy(5, prompt_logprobs=1), timeout_s=1.0)
    assert not any(llm.engine.step() for _ in range(steps))
    clock.now += 1.0
    [last] = llm.engine.step()
    assert last.output is not None and last.output.outputs[0].finish_reason == "abort"
    assert last.prompt_logprobs is None and last.output.prompt_logprobs is None, "all of them or none"
    assert last.prompt_token_ids == last.output.prompt_token_ids, "its first chunk, too"


def test_text_that_was_held_back_comes_with_the_last_chunk(checkpoint: Path, clock: Clock) -> None:
    llm = engine(checkpoint)
    text = llm.generate("the cat", greedy(12))[0].outputs[0].text
    request_id = llm.submit("the cat", greedy(40, stop=[text + "\x00"]), timeout_s=1.0)
    chunks = [chunk for _ in range(5) for chunk in llm.engine.step()]
    assert "".join(chunk.text for chunk in chunks) == ""
    clock.now += 1.0
    [last] = llm.engine.step()
    assert last.request_id == request_id and last.text and text.startswith(last.text) and not last.tokens
    assert last.output is not None and last.output.outputs[0].text == last.text and not llm.engine.busy


def test_nonsense_is_refused(checkpoint: Path) -> None:
    for name in ("max_num_batched_tokens", "kv_cache_tokens"):
        with pytest.raises(ArgumentError, match=name):
            Scheduling(**{name: 0})
    with pytest.raises(ArgumentError, match="timeout_s"):
        engine(checkpoint).submit("x", greedy(), timeout_s=0.0)


def test_a_clients_priorities_order_its_own_requests_alone(checkpoint: Path) -> None:
    llm = engine(checkpoint, max_num_seqs=2)
    wishes = [("a", 0), ("a", 2), ("a", -1), ("b", 5), ("b", 1), (None, -9)]
    ids = [llm.submit("the cat", greedy(4), client=client, priority=priority) for client, priority in wishes]
    waiting, order = [answer for one in ids for answer in llm.engine._requests[one].completions], []
    while waiting:
        waiting.remove(best := next_in_line(waiting, []))
        order.append(ids.index(best.request.id))
    assert [place for place in order if wishes[place][0] == "a"] == [2, 0, 1]
    assert [place for place in order if wishes[place][0] == "b"] == [4, 3]
    assert order.index(5) == 5, "its priority says nothing of others' requests"
    run(llm)


@pytest.mark.parametrize("name", [*DRAFTERS, None])
def test_an_answer_of_no_tokens_reads_its_prompt(checkpoint: Path, draft_checkpoint: Path, name: str | None) -> None:
    config = None if name is None else drafter(name, draft_checkpoint)
    llm = engine(checkpoint, config, max_num_seqs=3, max_num_batched_tokens=8)
    other, scored = llm.submit("the dog", greedy(12)), llm.submit(TEXT, greedy(0, prompt_logprobs=1, n=2))
    outputs, _ = run(llm)
    found = outputs[scored]
    [whole] = engine(checkpoint).generate(TEXT, greedy(4, prompt_logprobs=1))
    assert [answer.finish_reason for answer in found.outputs] == ["length"] * 2
    assert all(answer.token_ids == [] and answer.text == "" for answer in found.outputs)
    same_prompt_logprobs(found, whole)
    [alone] = engine(checkpoint).generate("the dog", greedy(12))
    assert outputs[other].outputs[0].token_ids == alone.outputs[0].token_ids
    again = llm.generate(TEXT, greedy(4))[0]
    assert (again.num_cached_tokens > 0) == (name != "eagle3"), "a head that was shown nothing reads all of it"
    assert again.outputs[0].token_ids == whole.outputs[0].token_ids
    longest = [3] * llm.max_model_len
    assert llm.generate([longest], greedy(0))[0].outputs[0].finish_reason == "length"
    with pytest.raises(ArgumentError, match="the context holds"):
        llm.generate([longest], greedy(1))


def test_a_prompt_is_cut_to_what_is_wanted_or_fits(checkpoint: Path) -> None:
    llm = engine(checkpoint)
    [whole] = llm.generate(TEXT, greedy(4))
    for most, kept in ((3, 3), (len(whole.prompt_token_ids), None), (10_000, None)):
        [found] = llm.generate(TEXT, greedy(4, truncate_prompt_tokens=most))
        assert found.prompt_token_ids == whole.prompt_token_ids[-(kept or 10_000) :]
        assert found.prompt == (None if kept else TEXT)
    [fitted] = llm.generate(TEXT * 40, greedy(7, truncate_prompt_tokens=-1))
    assert len(fitted.prompt_token_ids) == llm.max_model_len - 7 and len(fitted.outputs[0].token_ids) == 7
