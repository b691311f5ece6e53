"""The server as the sampling half of reinforcement learning: token ids in and out, log-probabilities of the policy."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_neighbouring_seeds_share_no_answer(rollouts: Live) -> None:
    found = [choices(rollouts, n=3, seed=seed) for seed in (1, 2, 3)]
    assert len({tuple(one["token_ids"]) for one in itertools.chain(*found)}) == 9


def test_what_a_lossy_rule_sampled_has_no_log_probabilities_of_its_own(rollouts: Live) -> None:
    lossy = {"prompt": IDS, "logprobs": 0, **SAMPLED, "speculative": {"rule": "typical"}}
    refused = rollouts.post("/v1/completions", lossy)
    assert refused.status_code == 400 and "allow_biased" in refused.json()["error"]["message"]
    for more in ({"allow_biased": True}, {"logprobs_mode": "raw_logprobs"}, {"temperature": 0}):
        told = rollouts.post("/v1/completions", {**lossy, **more}).json()["choices"][0]["logprobs"]["token_logprobs"]
        assert len(told) == 8 and all(math.isfinite(value) for value in told)
