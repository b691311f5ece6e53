"""A prompt that begins like what a row holds is read from there on only, and answered as on a fresh engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loads import DRAFTERS, TEXT, alike, drafter, engine, greedy, run, sampled
from engine.test_hidden_states import LISTENER, Heard
from forerun import LLM
from forerun.core.tree import TokenTree
from forerun.engine.prefix_cache import BLOCK, PrefixCache
from forerun.types import LAST_HIDDEN, RequestOutput


def read_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass over prompts runs, as they come."""
    counts, prefill = list[int](), llm.target.prefill

    def counted(rows: Sequence[int], tokens: Sequence[Sequence[int]], **more: Any) -> Any:
        counts.append(sum(map(len, tokens)))
        return prefill(rows, tokens, **more)

    monkeypatch.setattr(llm.target, "prefill", counted)
    return counts


def next_turn(output: RequestOutput) -> dict[str, list[int]]:
    """The conversation so far, and a few words more."""
    return {"prompt_token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids, *range(40, 52)]}


@pytest.mark.parametrize(("name", "make"), [*((name, sampled) for name in (*DRAFTERS, None)), ("draft_model", greedy)])
def test_the_next_turn_reads_what_is_new(
    checkpoint: Path, draft_checkpoint: Path, name: str | None, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = None if name is None else drafter(name, draft_checkpoint)
    llm, fresh = engine(checkpoint, config, max_num_seqs=3), engine(checkpoint, config, max_num_seqs=3)
    [first] = llm.generate(TEXT[:60], make())
    counts = read_tokens(llm, monkeypatch)
    [second] = llm.generate(next_turn(first), make())
    held = len(first.prompt_token_ids) + 19
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == (held - 1) // BLOCK * BLOCK
    assert counts == [len(second.prompt_token_ids) - second.num_cached_tokens]
    [expected] = fresh.generate(next_turn(first), make())
    alike(second.outputs[0], expected.outputs[0])
    assert second.outputs[0].speculation == expected.outputs[0].speculation
    [third] = llm.generate(next_turn(second), make())
    alike(third.outputs[0], fresh.generate(next_turn(second), make())[0].outputs[0])
    assert llm.engine.prefix_hits == second.num_cached_tokens + third.num_cached_tokens
    assert llm.engine.prefix_queries == sum(len(turn.prompt_token_ids) for turn in (first, second, third))


def test_a_head_that_does_not_hold_the_row_sees_the_whole_prompt(checkpoint: Path, draft_checkpoint: Path) -> None:
    config = drafter("eagle3", draft_checkpoint)
    llm = engine(checkpoint, config)
    [first] = llm.generate(TEXT[:60], greedy(), speculative=False)
    [second] = llm.generate(next_turn(first), sampled())
    alike(second.outputs[0], engine(checkpoint, config).generate(next_turn(first), sampled())[0].outputs[0])
    assert second.num_cached_tokens == 0 and second.outputs[0].speculation.num_spec_steps > 0
    [third] = llm.generate(next_turn(second), greedy(), speculative=False)
    assert third.num_cached_tokens > 0, "plain decoding needs no head"
    [fourth] = llm.generate(next_turn(third), sampled())
    assert fourth.num_cached_tokens == 0, "the head had to forget the row"
    alike(fourth.outputs[0], engine(checkpoint, config).generate(next_turn(third), sampled())[0].outputs[0])


def test_states_of_a_reused_prefix_come_once_and_are_right(checkpoint: Path, heard: Heard) -> None:
    llm = engine(checkpoint, LISTENER, max_num_batched_tokens=7)
    [first] = llm.generate(TEXT[:60], greedy())
    [second] = llm.generate(next_turn(first), greedy())
    text = [*second.prompt_token_ids, *second.outputs[0].token_ids]
    with torch.no_grad():
        states = llm.target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    notes = heard[tuple(second.prompt_token_ids)]
    assert second.num_cached_tokens >= BLOCK and min(notes) == second.num_cached_tokens
    assert sorted(notes) == list(range(min(notes), min(notes) + len(notes))) and len(notes) > 12
    for place in (place for place in notes if place < len(text) - 1):
        for boundary, entry in ((0, 0), (1, 1), (LAST_HIDDEN, -1)):
            torch.testing.assert_close(notes[place][boundary], states[entry][0, place], atol=2e-5, rtol=1e-4)


def test_a_running_row_lends_its_beginning(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(checkpoint, max_num_seqs=2)
    llm.submit(TEXT[:70] + "cat", greedy(40))
    llm.engine.step()
    llm.engine.step()
    counts = read_tokens(llm, monkeypatch)
    request_id = llm.submit(TEXT[:70] + "dog", greedy())
    outputs, _ = run(llm)
    found = outputs[request_id]
    assert found.num_cached_tokens >= BLOCK
    assert counts == [len(found.prompt_token_ids) - found.num_cached_tokens]
    alike(found.outputs[0], engine(checkpoint).generate(TEXT[:70] + "dog", greedy())[0].outputs[0])


@pytest.mark.parametrize("more", [{"enable_prefix_caching": False}, {"reproducible": True}])
def test_it_can_be_switched_off(checkpoint: Path, more: dict[str, Any]) -> None:
    llm = engine(checkpoint, **more)
    [first] = llm.generate(TEXT, greedy())
    [second] = llm.generate(TEXT, greedy())
    assert second.num_cached_tokens == 0 == llm.engine.prefix_queries
    assert first.outputs[0].text == second.outputs[0].text


def test_who_wants_the_whole_prompt_gets_it_read(checkpoint: Path) -> None:
    llm = engine(checkpoint)
    scored = greedy(4, prompt_logprobs=0)
    first, again = llm.generate(TEXT, scored)[0], llm.generate(TEXT, scored)[0]
    assert again.num_cached_tokens == 0
    assert len(again.prompt_logprobs) == len(again.prompt_token_ids)
    assert llm.generate(TEXT, greedy(4), trace=True)[0].num_cached_tokens == 0
    assert llm.generate(TEXT, greedy(4))[0].num_cached_tokens == (len(first.prompt_token_ids) - 1) // BLOCK * BLOCK


def test_a_row_that_was_written_to_serves_nobody(checkpoint: Path) -> None:
    llm = engine(checkpoint)
    expected = llm.generate(TEXT, greedy())[0].outputs[0]
    for row in range(llm.target.rows):
        llm.target.score([row], [TokenTree(7)])
        llm.target.truncate([row], [0])
    [again] = llm.generate(TEXT, greedy())
    assert again.num_cached_tokens == 0
    alike(again.outputs[0], expected)


def test_an_aborted_answer_leaves_its_prefix(checkpoint: Path) -> None:
    llm = engine(checkpoint)
    request_id = llm.submit(TEXT, greedy(40))
    for _ in range(5):
        llm.engine.step()
    llm.abort(request_id)
    assert not llm.engine.busy and llm.target.lengths == [0] * 8
    assert llm.generate(TEXT, greedy())[0].num_cached_tokens >= BLOCK


def test_a_beginning_serves_its_own_domain_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither from a free row nor from a running one; no salt is a domain, too."""
    llm = engine(checkpoint, max_num_seqs=3)
    salts = ["a", "b", None]
    for salt in salts:
        assert llm.generate(TEXT, greedy(), cache_salt=salt)[0].num_cached_tokens == 0
    whole = (len(llm.generate(TEXT, greedy())[0].prompt_token_ids) - 1) // BLOCK * BLOCK
    assert [llm.generate(TEXT, greedy(), cache_salt=salt)[0].num_cached_tokens for salt in salts] == [whole] * 3
    llm = engine(checkpoint, max_num_seqs=3)
    llm.submit(TEXT, greedy(40), cache_salt="a")
    llm.engine.step()
    counts = read_tokens(llm, monkeypatch)
    for salt in ("b", "a"):
        llm.submit(TEXT, greedy(4), cache_salt=salt)
    run(llm)
    prompt = len(llm.tokenizer.encode(TEXT))
    assert sum(counts) == 2 * prompt - whole, "one of the two reads it all"


def test_beginnings_are_shared_in_whole_blocks(checkpoint: Path) -> None:
    """A guess that is right for one token more than another is told from it once in a block at most."""
    llm = engine(checkpoint)
    text = [7 + place % 30 for place in range(60)]
    for right in range(1, 60):
        llm.generate({"prompt_token_ids": [*text, 5, 6]}, greedy(1))
        [output] = llm.generate({"prompt_token_ids": [*text[:right], *[3] * 8]}, greedy(1))
        assert output.num_cached_tokens == max(0, right - 1) // BLOCK * BLOCK


def test_rows_are_chosen_by_text_then_by_their_neighbours_then_by_age(checkpoint: Path) -> None:
    target = engine(checkpoint, max_num_seqs=5).target
    prefixes, texts = PrefixCache(target, enabled=True), [list(range(row, row + 30)) for row in range(5)]
    for _ in range(5):
        prefixes.acquire((), {})
    assert len(prefixes) == 0
    for row in (3, 0, 4, 1, 2):
        prefixes.release(row, (texts[row], None), None)
    assert prefixes.acquire([*texts[4], 99], {}).row == 4
    assert prefixes.acquire([99] * 30, {}).row == 3, "the oldest"
    busy = {3: ([], None), 4: ([], None)}
    assert prefixes.acquire([*texts[0][:BLOCK], 99], busy).row == 2, "next to the busy ones"
    assert prefixes.drop(40) == [] and prefixes.held == 30, "the older one goes"


@pytest.mark.parametrize(("records", "most"), [(True, 8), (False, 20)])
def test_where_passes_are_recorded_a_lone_request_stays_among_the_first_rows(
    checkpoint: Path, records: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded pass runs all rows up to the last, in powers of two: in row 19 it would run 32 of them."""
    target = engine(checkpoint, max_num_seqs=20).target
    monkeypatch.setattr(type(target), "records", records)
    prefixes, rows = PrefixCache(target, enabled=True), list[int]()
    for number in range(40):
        rows.append(prefixes.acquire([number] * 30, {}).row)
        prefixes.release(rows[-1], ([number] * 30, None), None)
    assert {*rows} == {*range(most)}, "each in turn: what it holds is the next one's prefix"
