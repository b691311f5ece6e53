"""A decoder that repeats its layers, as the drafter of ``examples/speed.py`` wants it."""

import functools
import sys
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from contract import harness
from contract.harness import Variant

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # what a user has in PYTHONPATH
METHOD = "speed:SpeedDrafter"
SPEED = Variant(METHOD, options={"num_speculative_tokens": 4})
untied = harness.model


def tie(model: Any, block: int) -> Any:
    """Layer i + block gets the weights of layer i: the same parameters, in modules of its own."""
    layers = model.model.layers
    for index in range(block, len(layers)):
        for name, weight in layers[index % block].named_parameters():
            path, _, leaf = name.rpartition(".")
            setattr(layers[index].get_submodule(path), leaf, weight)
    return model


@functools.cache
def tied() -> LlamaForCausalLM:
    """The harness's model, its one layer run twice."""
    made: LlamaForCausalLM = LlamaForCausalLM(untied().config).eval()
    made.load_state_dict(untied().state_dict())
    return tie(made, 1)
