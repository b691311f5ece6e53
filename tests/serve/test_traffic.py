"""What a server records of its traffic, and how it is given another drafter."""

import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from forerun.cli import main
from forerun.errors import ArgumentError
from forerun.serve.settings import ServeSettings
from forerun.serve.traffic import UNNAMED, Traffic, files_of, owner_of
from forerun.training.data.records import BadRecords, read_records
from forerun.writing import TokenizerIdentity
from serve.conftest import Live, output, sent, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def written(folder: Path, owner: str) -> list[list[int]]:
    """The answers that are recorded of an owner, oldest first."""
    files = [path for path in reversed(files_of(folder, owner)) if path.exists()]
    return [json.loads(line)["token_ids"] for path in files for line in path.read_bytes().splitlines()]


@pytest.fixture
def traffic(tmp_path: Path) -> Iterator[Traffic]:
    made = Traffic(tmp_path / "traffic", most_bytes=2000, vocabulary="v")
    yield made
    made.close()


class TestFiles:
    def test_the_newest_are_kept_within_the_bound_and_no_other_owner_pays(self, traffic: Traffic) -> None:
        folder = traffic._folder
        traffic.record("quiet", output([7]))
        for count in range(200):
            traffic.record("busy", output([count]))
        traffic.record("busy", output(list(range(5000))))  # more than there is room for
        traffic.close()
        found = [tokens[0] for tokens in written(folder, "busy")]
        assert found == list(range(200 - len(found), 200)) and len(found) >= 10
        assert 800 <= sum(path.stat().st_size for path in files_of(folder, "busy")) <= 2000
        assert written(folder, "quiet") == [[7]]
        assert {path.stat().st_mode & 0o777 for path in folder.glob("*.jsonl")} == {0o600}

    def test_what_a_killed_server_left_of_a_line_is_cut_off(self, tmp_path: Path) -> None:
        path, _ = files_of(tmp_path, "k")
        path.write_bytes(b'{"token_ids":[1]}\n{"token_ids":[2')
        for count in (3, 4):
            traffic = Traffic(tmp_path, most_bytes=2000, vocabulary="v")
            traffic.record("k", output([count]))
            traffic.close()
        assert written(tmp_path, "k") == [[1], [3], [4]]
        path.write_bytes(b'{"token_ids":[2')
        traffic = Traffic(tmp_path, most_bytes=2000, vocabulary="v")
        traffic.record("k", output([5]))
        traffic.close()
        assert written(tmp_path, "k") == [[5]]

    def test_a_full_disk_leaves_whole_lines_and_is_told_once(
        self, traffic: Traffic, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        traffic.record("k", output([1]))
        traffic._thread.submit(lambda: None).result()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (files_of(traffic._folder, "k")[0].stat().st_size + 10, before[1]))
        try:
            traffic.record("k", output([2]))
            traffic.record("k", output([3]))
            traffic._thread.submit(lambda: None).result()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert written(traffic._folder, "k") == [[1]] and len(caplog.records) == 1
        traffic.record("k", output([4]))
        traffic.close()
        assert written(traffic._folder, "k") == [[1], [4]]

    def test_only_answers_that_came_to_an_end_are_recorded(self, traffic: Traffic) -> None:
        traffic.record("k", output([1], [2]))
        traffic.record("k", output([3], ended="abort"))
        traffic.record("k", output([]))
        traffic.close()
        assert written(traffic._folder, "k") == [[1], [2]]
        traffic.record("k", output([4]))  # after the end: left out, no error

    def test_a_folder_belongs_to_one_server(self, traffic: Traffic) -> None:
        with pytest.raises(ArgumentError, match="another server records"):
            Traffic(traffic._folder, most_bytes=2000, vocabulary="v")

    def test_a_deleted_key_is_gone_and_the_server_goes_on(
        self, traffic: Traffic, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder, keys = traffic._folder, ("one", "two", None)
        for key in keys:
            for count in range(25):
                traffic.record(owner_of(key), output([count]))
        traffic._thread.submit(lambda: None).result()
        assert all(path.exists() for key in keys for path in files_of(folder, owner_of(key)))
        assert main(["data", "delete-traffic", str(folder), "--api-key", "one"]) == 0
        assert not written(folder, owner_of("one")) and written(folder, owner_of("two")) and written(folder, UNNAMED)
        traffic.record(owner_of("one"), output([9]))
        traffic.close()
        assert written(folder, owner_of("one")) == [[9]]
        assert main(["data", "delete-traffic", str(folder)]) == 0 and not written(folder, UNNAMED)
        capsys.readouterr()
        assert main(["data", "delete-traffic", str(folder), "--api-key", "three"]) == 2
        assert "holds no traffic of this key" in capsys.readouterr().err
        assert main(["data", "delete-traffic", str(folder / "none")]) == 2


class TestServer:
    def test_each_key_has_its_conversations_and_what_is_not_to_be_kept_is_not(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        folder, asked = tmp_path / "traffic", dict[str, int]()
        limits = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        requests: dict[str, tuple[dict[str, Any], int]] = {
            TEXT: ({"prompt": ["the cat", "a dog"], "n": 2, "temperature": 0.8, "max_tokens": 6}, 4),
            CHAT: ({"messages": HELLO, **limits}, 1),
            "/v1/responses": ({"input": "hi", "max_output_tokens": 6}, 1),
            "/v1/messages": ({"messages": HELLO, "max_tokens": 6, "model": "tiny"}, 1),
        }
        with serving(checkpoint, api_keys=("key-a", "key-b"), record_traffic=folder) as live:
            for path, (body, count) in requests.items():
                headers = {"Authorization": "Bearer key-a"}
                assert live.post(path, body, headers=headers).status_code == 200
                asked["key-a"] = asked.get("key-a", 0) + count
                if path != "/v1/messages":
                    assert live.post(path, {**body, "store": False}, headers=headers).status_code == 200
            stream = {"prompt": "the log", "stream": True, "return_token_ids": True, **limits}
            events = live.post(TEXT, stream, headers={"Authorization": "Bearer key-b"}).text
        found = {key: read(files_of(folder, owner_of(key))[0]) for key in ("key-a", "key-b")}
        assert len(found["key-a"]) == asked["key-a"] and len(found["key-b"]) == 1
        answer = [token for event in sent(events) for token in event["choices"][0].get("token_ids") or ()]
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        [record] = found["key-b"]
        assert list(record.tokens) == [*tokenizer("the log")["input_ids"], *answer]
        assert record.prompt_tokens == len(record.tokens) - len(answer)
        assert record.vocabulary == TokenizerIdentity.of(tokenizer).vocabulary
        assert sorted(path.name for path in folder.glob("*.jsonl")) == sorted(f"{owner_of(k)}.jsonl" for k in found)
        assert not any("key-" in path.name or "key-" in path.read_text() for path in folder.glob("*.jsonl"))

    def test_nothing_is_recorded_where_nobody_asked_for_it(self, live: Live, tmp_path: Path) -> None:
        assert live.session._traffic is None

    def test_requests_of_nobody_in_particular_are_not_recorded(self) -> None:
        with pytest.raises(ArgumentError, match="--record-traffic keeps apart"):
            ServeSettings(record_traffic=Path("here"))
        assert ServeSettings(record_traffic=Path("here"), share_unnamed=True).record_traffic
        with pytest.raises(ArgumentError, match="--admin-api-key is a key of its own") as refused:
            ServeSettings(api_keys=("secret",), admin_api_key="secret")
        assert "secret" not in str(refused.value)


LOAD = "/v1/load_drafter"


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_the_operator_loads_another_drafter_and_nobody_else_does(checkpoint: Path, draft_checkpoint: Path) -> None:
    drafter = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 4, "adaptive": False}
    ask = {"prompt": "the cat sat", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with serving(checkpoint, speculative=drafter, api_keys=("client",), admin_api_key="operator") as live:

        def accepted() -> tuple[str, float]:
            answer = live.post(TEXT, ask, **bearer("client")).json()
            return answer["choices"][0]["text"], answer["metrics"]["speculative_decoding"]["draft_acceptance_rate"]

        text, before = accepted()
        body = {"model": str(checkpoint)}  # the target itself is always right
        for other in (bearer("client"), bearer("x"), {}):
            assert live.post(LOAD, body, **other).status_code == 401
        assert live.post(TEXT, ask, **bearer("operator")).status_code == 401
        refused = live.post(LOAD, {"model": str(checkpoint / "nowhere")}, **bearer("operator"))
        assert refused.status_code == 400
        assert f"there is no directory {checkpoint}/nowhere" in refused.json()["error"]["message"], "his own path"
        assert refused.json()["error"]["param"] == "model"
        assert live.post(LOAD, {"model": ""}, **bearer("operator")).status_code == 400
        assert accepted() == (text, before) and before < 1
        loaded = live.post(LOAD, body, **bearer("operator"))
        assert loaded.status_code == 200 and loaded.json()["success"] is True
        assert accepted() == (text, 1.0)
        # The server names its drafter for requests that change something of it.
        shorter = live.post(TEXT, {**ask, "speculative": {"num_speculative_tokens": 2}}, **bearer("client"))
        assert shorter.json()["metrics"]["speculative_decoding"]["draft_acceptance_rate"] == 1.0
        assert len(live.llm.engine.drafting._active) == len({"own", "auto", "ngram", "prediction"})


def test_without_an_admin_key_nobody_loads_a_drafter(live: Live, draft_checkpoint: Path) -> None:
    answer = live.post(LOAD, {"model": str(draft_checkpoint)})
    assert answer.status_code == 403 and "--admin-api-key" in answer.json()["error"]["message"]


def read(path: Path) -> list[Any]:
    return list(read_records(path, BadRecords(skip=False)))
