"""A request that comes to the end of a draft model's context goes on without drafts, and the others keep theirs."""

import copy
from contextlib import ExitStack

import pytest
from torch import nn

from contract.harness import Variant, model, variants
from forerun import LLM, SamplingParams
from forerun.heads.base import Head
from forerun.types import RequestOutput
from selection import slow
from simulated.device import SimulatedDevice, moved
from simulated.steps import on_device
from simulated.waits import recording

CONTEXT = 24  # Of the draft model; the target's is longer
SIZES = {"tokenizer": False, "max_model_len": 60, "self_check": False}
PARAMS = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
LONG, SHORT = {"prompt_token_ids": [1, 2, 3, 4] * 4}, {"prompt_token_ids": [1, 5]}


def shortened(module: nn.Module) -> nn.Module:
    """A language model with a short context; heads go with the target's."""
    if isinstance(module, Head):
        return module
    module = copy.deepcopy(module)
    module.config.max_position_embeddings = CONTEXT
    return module


def has_model(variant: Variant) -> bool:
    """Whether there is a language model among a drafter's options."""
    found = list[nn.Module]()

    def noted(module: nn.Module) -> nn.Module:
        found.append(module)
        return module

    on_device(variant.config(), noted)
    return not all(isinstance(module, Head) for module in found)


WITH_MODELS = [variant for variant in variants() if has_model(variant)]


def answers(variant: Variant, prompts: list[dict[str, list[int]]], *, there: bool) -> list[RequestOutput]:
    target, config = model(), {"adaptive": False, **on_device(variant.config(), shortened)}
    if there:
        target, config = moved(target), on_device(config, moved)
    llm = LLM(target, speculative_config=config, max_num_seqs=2, enable_prefix_caching=False, **SIZES)
    return llm.generate(prompts, PARAMS)


def drafted(output: RequestOutput) -> tuple[list[int], int, int]:
    stats = output.outputs[0].speculation
    return output.outputs[0].token_ids, stats.num_draft_tokens, stats.drafter_errors


QUICK = {
    "draft_model-chain": (False, True),
    **dict.fromkeys(("draft_model-tree", "slem-words", "pard-best-first"), (False,)),
    **dict.fromkeys(("tli-chain", "cascade-tail"), (True,)),
}
"""Drafters that others build on, and where they are quick."""
CASES = [
    (one, there) if there in QUICK.get(str(one), ()) else slow((one, there))[0]
    for one in WITH_MODELS
    for there in (False, True)
]


@pytest.mark.parametrize(("variant", "there"), CASES, ids=str)
def test_a_request_at_its_draft_models_end_leaves_the_others_their_drafts(variant: Variant, there: bool) -> None:
    """On the CPU, and where passes are recorded."""
    device = SimulatedDevice()
    with ExitStack() as stack:
        for one in (device, recording(device)) if there else ():
            stack.enter_context(one)
        [alone] = answers(variant, [SHORT], there=there)
        long, beside = answers(variant, [LONG, SHORT], there=there)
    [plain] = LLM(model(), max_num_seqs=1, **SIZES).generate([LONG], PARAMS)
    assert drafted(alone)[1] > 0, "it drafts"
    if variant.method in ("first_of", "merge"):  # How much these draft follows from what was accepted of either request
        assert drafted(beside)[::2] == drafted(alone)[::2] and drafted(beside)[1] > 0
    else:
        assert drafted(beside) == drafted(alone)
    tokens, count, errors = drafted(long)
    assert (tokens, errors) == (plain.outputs[0].token_ids, 0)
    # Read as words, the prompt alone is longer than that context.
    assert count > 0 or str(variant) == "slem-words", "it drafts before its context ends"
