"""What is counted of a step's waits for the device: drafters of the shipped models, and how requests sample."""

from typing import Any

from forerun import SamplingParams

EAGLE3: dict[str, Any] = {"method": "eagle3", "model": "demo-eagle3"}
DRAFT_MODEL: dict[str, Any] = {"method": "draft_model", "model": "demo-draft"}
TREE: dict[str, Any] = {"top_k": 4, "nodes": 16}
ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "suffix": {"method": "suffix"},
    "recycling": {"method": "recycling"},
    "draft_model": DRAFT_MODEL | {"num_speculative_tokens": 5},
    "draft_model-tree": DRAFT_MODEL | {"shape": (3, 2, 1)},
    "eagle3": EAGLE3 | {"num_speculative_tokens": 5},
    "eagle3-tree": EAGLE3 | {"num_speculative_tokens": 5, **TREE},
    "early_exit": {"method": "early_exit", "exit_layer": 2, "num_speculative_tokens": 3},
    "merge": {"method": "merge", "drafters": [EAGLE3, {"method": "ngram"}]},
    "auto": {"method": "auto", "model": "demo-eagle3"},
}
PARAMS = {
    "T=0": SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True),
    "T=0.8 top-p": SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, ignore_eos=True, seed=1),
    "penalties": SamplingParams(
        **{"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
        **{"logit_bias": {3: 1.0}, "max_tokens": 32, "ignore_eos": True, "seed": 1},
    ),
    "logprobs": SamplingParams(temperature=0.8, logprobs=3, max_tokens=32, ignore_eos=True, seed=1),
}
MOST_READS = {"plain": 1, "ngram": 1, "suffix": 1, "recycling": 1}
"""Per step, of arms that run no model of their own. Others may read twice: once to fetch a draft, once to verify it."""
MOST_LAUNCHES = {"plain": 52, "eagle3": 105}
"""Per step, beside recordings, in any setting: of a sampled step without the recording of the verdicts it is 700."""
PROMPT = """\
def read_lines(path):
    with open(path) as file:
        return file.read().splitlines()


def read_words(path):
    with open(path) as file:
        return file."""
