"""The local engine writes the same answers as the engine asked directly, whatever else is in the batch."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import checkpoint
from forerun import LLM, SamplingParams
from forerun.engine.completion import Request
from forerun.training.data.prepare import prepare
from forerun.training.data.regenerate import AnswerRun, Director, with_engine
from training.data.conftest import write_lines

__all__ = ["checkpoint"]

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, max_num_seqs=2)


def run(llm: LLM, folder: Path, records: list[Any], **more: Any) -> list[dict[str, Any]]:
    source = write_lines(folder / "in.jsonl", records)
    director = Director(tokenizer=llm.tokenizer, prompt_tokens=4, **{"params": GREEDY, **more})
    with_engine(AnswerRun(source, folder / "out.jsonl", director), llm, concurrency=3)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]


def test_conversations_are_answered_as_by_chat(llm: LLM, tmp_path: Path) -> None:
    records = [{"id": str(n), "prompt": f"the cat {n}"} for n in range(5)]
    found = {line["id"]: line["messages"] for line in run(llm, tmp_path, records)}
    params = SamplingParams(temperature=0, max_tokens=6)
    for record in records:
        question = {"role": "user", "content": record["prompt"]}
        text = llm.chat([question], params)[0].outputs[0].text
        assert found[record["id"]] == [question, {"role": "assistant", "content": text}]
    assert not llm.engine.busy


def test_texts_are_continued_and_only_the_continuation_counts(llm: LLM, tmp_path: Path) -> None:
    (line,) = run(llm, tmp_path, [{"text": "the cat sat on the mat and the dog"}])
    given = llm.tokenizer.decode(llm.tokenizer("the cat sat on the mat and the dog")["input_ids"][:4])
    expected = llm.generate([given], SamplingParams(temperature=0, max_tokens=6))[0].outputs[0]
    assert line["text"] == given + expected.text
    data = prepare([tmp_path / "out.jsonl"], llm.tokenizer, tmp_path / "data").data
    tokens, mask = data.document(0)
    assert llm.tokenizer.decode(tokens[mask == 0].tolist()) == given and mask.any()


def test_a_seed_makes_sampling_repeatable(llm: LLM, tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        sampled = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
        lines = run(llm, tmp_path / name, [{"prompt": "the cat"}, {"prompt": "the"}], params=sampled)
        texts.append(sorted(line["messages"][1]["content"] for line in lines))
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_that_does_not_fit_costs_only_itself(llm: LLM, tmp_path: Path) -> None:
    found = run(llm, tmp_path, [{"prompt": "the cat " * 200}, {"id": "good", "prompt": "the cat"}])
    assert [line["id"] for line in found] == ["good"]


def test_an_unwritable_answer_costs_only_itself(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, outputs = Request.output, count()

    def output(request: Request) -> Any:
        if next(outputs) == 0:
            raise ValueError("no output")
        return whole(request)

    monkeypatch.setattr(Request, "output", output)
    found = run(llm, tmp_path, [{"id": "first", "prompt": "the cat"}, {"id": "second", "prompt": "the cat"}])
    assert len(found) == 1 and not llm.engine.busy


def test_interrupted_it_leaves_whole_lines_and_is_idle(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, whole = 0, llm.engine.step

    def step() -> Any:
        nonlocal steps
        steps += 1
        if steps == 8:
            raise KeyboardInterrupt
        return whole()

    records = [{"id": str(n), "prompt": f"the cat {n}"} for n in range(6)]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", step)
        with pytest.raises(KeyboardInterrupt):
            run(llm, tmp_path, records)
    before = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert 0 < len(before) < 6 and not llm.engine.busy
    assert sorted(line["id"] for line in run(llm, tmp_path, records)) == [str(n) for n in range(6)]


def test_variables_of_the_chat_template_reach_it(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = llm.tokenizer.chat_template + "{{ 'the dog' if thinking else 'the cat' }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    (line,) = run(llm, tmp_path, [{"prompt": "the log"}], variables={"thinking": True})
    prompt = llm.chat_prompt(line["messages"][:1], thinking=True)
    assert prompt["prompt"].endswith("the dog")
    assert line["messages"][1]["content"] == llm.generate(prompt, GREEDY)[0].outputs[0].text


def test_an_answer_whose_text_hides_a_control_token_is_a_failure(llm: LLM, tmp_path: Path) -> None:
    """A reasoning model's marks, for example, without which its answer would be another text."""
    hidden, shown = llm.tokenizer.pad_token_id, llm.tokenizer("a")["input_ids"][0]
    sampled = SamplingParams(max_tokens=16, temperature=50.0, seed=1, allowed_token_ids=[hidden, shown])
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the cat"}])
    plan = AnswerRun(source, tmp_path / "out.jsonl", Director(tokenizer=llm.tokenizer, params=sampled))
    with_engine(plan, llm, concurrency=1)
    assert (plan.failed, plan.written) == (1, 0)
    assert "'<pad>' within its answer" in plan.complaints[0] and "--endpoint" in plan.complaints[0]
    at_the_end = SamplingParams(max_tokens=3, temperature=0, allowed_token_ids=[hidden])
    assert [line["messages"][1]["content"] for line in run(llm, tmp_path, [{"prompt": "a"}], params=at_the_end)] == [""]
