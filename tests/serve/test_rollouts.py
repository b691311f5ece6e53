"""The server as the sampling half of reinforcement learning: token ids in and out, log-probabilities of the policy."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.errors import ArgumentError
from forerun.serve.settings import ServeSettings
from serve.conftest import Live, sent, serving

IDS = [5, 17, 33, 8, 21]
SAMPLED = {"temperature": 1.3, "max_tokens": 8, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module")
def rollouts(checkpoint: Path) -> Iterator[Live]:
    drafter = {"method": "ngram", "num_speculative_tokens": 3}
    with serving(checkpoint, speculative=drafter, share_unnamed=True, logprobs_mode="processed_logprobs") as running:
        yield running


def choices(live: Live, **asked: Any) -> list[dict[str, Any]]:
    """The choices of a completion of token ids, which is streamed, too, and says the same."""
    body = {"prompt": IDS, "return_token_ids": True, "logprobs": 0, **SAMPLED, **asked}
    answer = live.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    chunks = [
        one for event in sent(live.post("/v1/completions", {**body, "stream": True}).text) for one in event["choices"]
    ]
    for choice in found:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"] == IDS
        assert [token for chunk in own for token in chunk.get("token_ids", ())] == choice["token_ids"]
        told = [value for chunk in own if chunk["logprobs"] for value in chunk["logprobs"]["token_logprobs"]]
        assert told == choice["logprobs"]["token_logprobs"] and len(told) == len(choice["token_ids"])
    return found


def test_several_answers_as_token_ids_with_log_probabilities_of_the_policy(rollouts: Live) -> None:
    found = choices(rollouts, n=4)
    assert len({tuple(one["token_ids"]) for one in found}) == 4
    model: Any = rollouts.llm.target.model
    for mode, temperature in (("processed_logprobs", SAMPLED["temperature"]), ("raw_logprobs", 1.0)):
        for choice in choices(rollouts, n=2, logprobs_mode=mode):
            ids = torch.tensor([[*IDS, *choice["token_ids"]]])
            with torch.inference_mode():
                logits = model(input_ids=ids, use_cache=False).logits[0, len(IDS) - 1 : -1].float() / temperature
            expected = logits.log_softmax(-1).gather(1, ids[0, len(IDS) :, None]).squeeze(1).tolist()
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)


def test_what_a_lossy_rule_sampled_has_no_log_probabilities_of_its_own(rollouts: Live) -> None:
    lossy = {"prompt": IDS, "logprobs": 0, **SAMPLED, "speculative": {"rule": "typical"}}
    refused = rollouts.post("/v1/completions", lossy)
    assert refused.status_code == 400 and "allow_biased" in refused.json()["error"]["message"]
    for more in ({"allow_biased": True}, {"logprobs_mode": "raw_logprobs"}, {"temperature": 0}):
        told = rollouts.post("/v1/completions", {**lossy, **more}).json()["choices"][0]["logprobs"]["token_logprobs"]
        assert len(told) == 8 and all(math.isfinite(value) for value in told)


OPERATOR = {"Authorization": "Bearer operator"}
CLIENT = {"Authorization": "Bearer client"}
ASKED = {"prompt": IDS, "temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a trainer has made of the checkpoint; it has saved no tokenizer."""
    folder, generator = tmp_path_factory.mktemp("trained"), torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def trainable(checkpoint: Path) -> Iterator[Live]:
    keys = {"api_keys": ("client",), "admin_api_key": "operator", "allow_weight_updates": True}
    with serving(checkpoint, speculative={"method": "suffix"}, enable_prompt_tokens_details=True, **keys) as running:
        yield running


def answer(live: Live, **more: Any) -> list[int]:
    found = live.post("/v1/completions", {**ASKED, **more}, headers=CLIENT)
    assert found.status_code == 200, found.text
    ids: list[int] = found.json()["choices"][0]["token_ids"]
    return ids


def update(live: Live, folder: Path, **more: Any) -> httpx.Response:
    return live.post("/update_weights_from_disk", {"model_path": str(folder), **more}, headers=OPERATOR)


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """The answer of transformers' own generate."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    found = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None)
    return [int(token) for token in found[0, len(prompt) :]]


def test_a_trainer_changes_the_weights(trainable: Live, checkpoint: Path, trained: Path) -> None:
    """Cached prefixes go with the former weights: a prompt of several blocks is read anew."""
    prompt = {"prompt": IDS * 8}
    before = answer(trainable, **prompt)
    assert before == greedy(checkpoint, IDS * 8)
    assert trainable.get("/get_weight_version", headers=OPERATOR).json() == {"weight_version": "default"}
    told = update(trainable, trained, weight_version="step-1").json()
    assert told["success"] is True and told["weight_version"] == "step-1"
    assert trainable.get("/get_weight_version", headers=OPERATOR).json() == {"weight_version": "step-1"}
    first = trainable.post("/v1/completions", {**ASKED, **prompt}, headers=CLIENT).json()
    assert first["choices"][0]["token_ids"] == greedy(trained, IDS * 8) != before
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = trainable.post("/update_weights_from_path", {"model_path": str(checkpoint)}, headers=OPERATOR)
    assert again.status_code == 200 and answer(trainable, **prompt) == before


@pytest.mark.parametrize(("how", "reason"), [({}, "length"), ({"abort_all_requests": True}, "abort")])
def test_answers_that_run_end_as_trainers_ask(trainable: Live, trained: Path, how: dict[str, Any], reason: str) -> None:
    body = {**ASKED, "max_tokens": 150, "stream": True}
    with httpx.stream("POST", f"{trainable.url}/v1/completions", json=body, headers=CLIENT, timeout=30) as stream:
        lines = stream.iter_lines()
        events = [next(lines) for _ in range(3)]
        assert update(trainable, trained, **how).status_code == 200
        events += list(lines)
    [choice] = sent("\n".join(events))[-1]["choices"]
    assert choice["finish_reason"] == reason
    assert answer(trainable) == greedy(trained, IDS)


def test_what_does_not_fit_is_told_and_changes_nothing(trainable: Live, tmp_path: Path) -> None:
    before = answer(trainable)
    refused = update(trainable, tmp_path / "missing", mode="abort")
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and "missing" in message and "there is no directory" in message
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "vocab_size": 7}))
    refused = update(trainable, tmp_path)
    assert refused.status_code == 400 and "hidden_size 64, served is 32" in refused.json()["error"]["message"]
    assert update(trainable, tmp_path, mode="keep").status_code == 400
    assert answer(trainable) == before


def test_the_server_sleeps_and_wakes_up(trainable: Live, trained: Path) -> None:
    answer(trainable)
    assert trainable.post("/sleep?level=2", None, headers=OPERATOR).status_code == 400
    assert trainable.post("/sleep?level=1&mode=wait", None, headers=OPERATOR).status_code == 200
    assert trainable.get("/is_sleeping", headers=OPERATOR).json() == {"is_sleeping": True}
    refused = trainable.post("/v1/completions", ASKED, headers=CLIENT)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "sleeping"
    assert trainable.get("/health").status_code == trainable.get("/v1/models", headers=CLIENT).status_code == 200
    assert trainable.post("/wake_up?tags=weights", None, headers=OPERATOR).status_code == 200
    assert update(trainable, trained).status_code == 200
    assert trainable.get("/is_sleeping", headers=OPERATOR).json() == {"is_sleeping": True}
    assert trainable.post("/wake_up?tags=everything", None, headers=OPERATOR).status_code == 400
    assert trainable.post("/wake_up", None, headers=OPERATOR).status_code == 200
    assert answer(trainable) == greedy(trained, IDS)


def test_nobody_else_may(trainable: Live, rollouts: Live, trained: Path) -> None:
    paths = [("POST", "/update_weights_from_disk"), ("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]
    for method, path in paths:
        for live, status in ((trainable, 401), (rollouts, 403)):
            for headers in (CLIENT, {}):
                body = {"model_path": str(trained)} if method == "POST" else None
                assert httpx.request(method, live.url + path, json=body, headers=headers).status_code == status
    with pytest.raises(ArgumentError, match="--allow-weight-updates needs --admin-api-key"):
        ServeSettings(allow_weight_updates=True)
