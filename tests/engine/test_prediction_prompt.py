"""A prediction travels from the prompt to the drafter, by every door, and never changes an answer."""

from pathlib import Path
from typing import Any

import pytest

from engine.conftest import tiny_tokenizer
from forerun import LLM, SamplingParams, SpeculativeConfig
from forerun.cli import main
from forerun.errors import ArgumentError
from forerun.types import CompletionOutput, RequestOutput

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = "the cat"


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, speculative_config={"method": "prediction", "adaptive": False}, max_num_seqs=3)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[int]:
    return answer(llm, {"prompt": PROMPT}).token_ids


def answer(llm: LLM, prompt: dict[str, object]) -> CompletionOutput:
    return llm.generate([prompt], PARAMS)[0].outputs[0]


@pytest.mark.parametrize(
    ("predict", "drafted", "accepted"),
    [
        (lambda plain, _: plain, 20, 20),
        (lambda plain, other: [*plain[:6], other, *plain[7:14], *plain[16:]], 13, 12),
        (lambda _, other: [other] * 50, 0, 0),
        (lambda *_: "", 0, 0),
        (lambda *_: None, 0, 0),
    ],
    ids=["right", "edited", "diverges at once", "empty", "none"],
)
def test_predictions_bring_what_is_right(llm: LLM, plain: list[int], predict: Any, drafted: int, accepted: int) -> None:
    other = next(token for token in range(20, 200) if token not in plain)
    found = answer(llm, {"prompt": PROMPT, "prediction": predict(plain, other)})
    assert found.token_ids == plain
    counts = found.speculation.num_draft_tokens, found.speculation.num_accepted_draft_tokens
    assert counts[0] >= drafted and counts[1] >= accepted
    assert drafted or counts == (0, 0)
    assert drafted != 20 or counts[0] == counts[1], "kept whole"


def test_text_is_read_by_the_tokenizer(llm: LLM) -> None:
    text = "the cat sat on the mat"
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    for prediction in (text, ids):
        llm.submit({"prompt": PROMPT, "prediction": prediction}, PARAMS)
        assert list(llm.engine._waiting[-1].row.prediction) == ids
    while llm.engine.busy:
        llm.engine.step()


def test_each_row_has_its_own_prediction(llm: LLM, plain: list[int]) -> None:
    prompts = [{"prompt": PROMPT, "prediction": plain}, {"prompt": PROMPT}, {"prompt": PROMPT, "prediction": plain}]
    outputs = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    assert [output.speculation.num_draft_tokens > 0 for output in outputs] == [True, False, True]
    assert all(output.token_ids == plain for output in outputs)


def test_bad_predictions_are_refused(llm: LLM, checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match="prediction holds token id -1"):
        answer(llm, {"prompt": PROMPT, "prediction": [1, -1]})
    bare = LLM(checkpoint, tokenizer=False, speculative_config={"method": "prediction"})
    with pytest.raises(ArgumentError, match="no tokenizer"):
        answer(bare, {"prompt_token_ids": [1, 2], "prediction": "text"})


def test_the_command_line_takes_a_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, object]] = []

    def generate(self: LLM, prompts: object, params: SamplingParams) -> list[RequestOutput]:
        seen.append((self.speculative, prompts))
        return original(self, prompts, params)

    original = LLM.generate
    monkeypatch.setattr(LLM, "generate", generate)
    (tmp_path / "old.txt").write_text("the dog", encoding="utf-8")
    common = ["generate", str(checkpoint), "--raw", "--prompt", PROMPT, "-t", "0", "-n", "4", "--json"]
    assert main([*common, "--prediction-file", str(tmp_path / "old.txt")]) == 0
    assert main(common) == 0
    config = SpeculativeConfig.parse({"method": "prediction"})
    assert seen == [(config, [{"prompt": PROMPT, "prediction": "the dog"}]), (None, [{"prompt": PROMPT}])]
    assert main([*common, "--prediction-file", str(tmp_path / "missing.txt")]) != 0
    assert "missing.txt" in capsys.readouterr().err
