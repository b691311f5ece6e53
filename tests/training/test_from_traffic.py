"""A head is trained on what a server recorded, and swapped in: more of its drafts are accepted on that traffic."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.errors import DataError
from forerun.serve.traffic import Traffic, files_of
from forerun.training.data.datastore import build
from forerun.training.data.prepare import prepare
from forerun.training.data.records import BadRecords, read_records
from forerun.training.data.regenerate import Director
from forerun.writing import TokenizerIdentity
from training.conftest import Trainer
from training.ttt import VOCABULARY

GREEDY = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
PROMPTS = [{"prompt_token_ids": [first, 3]} for first in range(VOCABULARY)]


@pytest.fixture(scope="module")
def traffic(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target answered, recorded; the server was killed in the middle of a line."""
    folder = tmp_path_factory.mktemp("served") / "traffic"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    recorder = Traffic(folder, most_bytes=10**6, vocabulary=TokenizerIdentity.of(tokenizer).vocabulary)
    llm = LLM(str(target), dtype="float32")
    for number, output in enumerate(llm.generate(PROMPTS, GREEDY)):
        recorder.record(f"key{number % 2}", output)
    recorder.close()
    with files_of(folder, "key1")[0].open("ab") as file:
        file.write(b'{"prompt_token_ids":[3')
    return folder


def trained(train: Trainer, traffic: Path, steps: int, *more: str, into: str = "run") -> list[str]:
    """The command that trains on traffic."""
    line = train.eagle3(steps, into=into)
    place = line.index("--data")
    own = ("evaluation.", "draft.") if "--draft" in more else ("evaluation.",)  # a head has a shape of its own
    kept = [word for word in line if not word.startswith(own)]
    return [*kept[:place], "--from-traffic", str(traffic), *kept[place + 2 :], *more]


def test_a_head_learns_from_traffic_and_is_swapped_in(train: Trainer, traffic: Path) -> None:
    heads = []
    for name, steps, more in (("first", 2, ()), ("second", 60, ("--draft", str(train.folder / "first" / "head")))):
        assert main(trained(train, traffic, steps, *more, into=name)) == 0
        said = train.capsys.readouterr()
        heads.append(json.loads(said.out)["head"])
        assert "skipped: " in said.err and "broken JSON" in said.err
    config = {"method": "eagle3", "model": heads[0], "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(str(train.target), dtype="float32", speculative_config=config)

    def accepted() -> tuple[list[list[int]], float]:
        found = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
        return [one.token_ids for one in found], sum(one.speculation.num_accepted_draft_tokens for one in found)

    texts, before = accepted()
    llm.load_drafter(heads[1])
    same, after = accepted()
    assert same == texts and after > 1.25 * before, (before, after)


def test_data_and_traffic_are_one_way_in(train: Trainer, traffic: Path) -> None:
    """One key's file, and the same output again: what an earlier run prepared is what a later one goes on with."""
    mine, _ = files_of(traffic, "key0")
    for _ in range(2):
        train([*trained(train, mine, 1), "--dry-run"])
        counts = json.loads((train.folder / "run" / "traffic" / "manifest.json").read_text())["counts"]
        assert counts["documents"] == len(PROMPTS) // 2
    (empty := train.folder / "empty").mkdir()
    for wrong, said in ((["--data", "x"], "either --data or --from-traffic"), ([], "holds no recorded traffic")):
        assert said in train.refused([*trained(train, empty, 1, into="other"), *wrong])


def test_recorded_ids_are_read_by_their_own_tokenizer_alone(target: Path, traffic: Path, tmp_path: Path) -> None:
    """By all that takes data; what would answer anew is told that the target has."""
    mine, _ = files_of(traffic, "key0")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    [first, *_] = read_records(mine, BadRecords(skip=False))
    line = json.loads(mine.read_text().splitlines()[0])
    assert list(first.tokens) == line["prompt_token_ids"] + line["token_ids"] and first.prompt_tokens == 2
    data = prepare([mine], tokenizer, tmp_path / "data").data
    tokens, mask = data.document(0)
    assert tokens.tolist() == list(first.tokens) and mask.tolist() == [0, 0] + [1] * len(line["token_ids"])
    assert build([mine], tokenizer, tmp_path / "store").documents == len(PROMPTS) // 2
    with pytest.raises(DataError, match="the target's own answers"):
        Director(tokenizer=None).script(first)
    tokenizer.add_tokens(["another"])
    for read in (prepare, build):
        with pytest.raises(DataError, match=r"line 1: .*recorded with another tokenizer"):
            read([mine], tokenizer, tmp_path / "other")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"token_ids": [1], "vocabulary": "v"}, "'prompt_token_ids' must be a list"),
        ({"prompt_token_ids": [1], "token_ids": [], "vocabulary": "v"}, "'token_ids' must be a list"),
        ({"prompt_token_ids": [1], "token_ids": [-1], "vocabulary": "v"}, "'token_ids' must be a list"),
        ({"prompt_token_ids": [True], "token_ids": [1], "vocabulary": "v"}, "'prompt_token_ids' must be a list"),
        ({"prompt_token_ids": [1], "token_ids": [1]}, "need 'vocabulary'"),
    ],
)
def test_ids_that_cannot_be_used_are_named(entry: object, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(entry) + "\n")
    with pytest.raises(DataError, match=said):
        list(read_records(tmp_path / "a.jsonl", BadRecords(skip=False)))
