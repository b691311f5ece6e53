"""The format of AWS's P-EAGLE heads, which vLLM reads: EAGLE's flat one with ``ptd_token_id`` and
the tensor ``mask_hidden``.

After vLLM's llama_eagle3.py, which takes ``mask_hidden`` of any shape as [1, n x Ht], and its proposer, which looks for
``pard_token`` and then ``ptd_token_id``; speculators' models/peagle keeps it as [1, 1, n x Ht], as here.
"""

from __future__ import annotations

from torch import Tensor

from forerun.checkpoints.base import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.checkpoints.flat import LLAMA, FlatFormat, read_flat
from forerun.drafters.heads.peagle import PEagleConfig
from forerun.errors import CheckpointError
from forerun.head_keys import Keys, architectures

MASK = "mask_hidden"
TOKEN = "ptd_token_id"
TOKENS = (TOKEN, "pard_token", "mask_token_id")
"""Names of the mask token, by publisher."""


class PEagleFormat(Format):
    """Heads of AWS, and of others who write the same format."""

    name = "peagle"
    mark = TOKEN

    def recognises(self, config: Config) -> bool:
        return any(config.get(name) is not None for name in TOKENS[:2]) or "PEagle" in _names(config)

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        if MASK not in tensors:
            return FlatFormat().read(config, tensors, num_layers=num_layers)  # which refuses the key by its name
        keys = Keys(config)
        said = {name: keys.integer(name) for name in TOKENS if keys.get(name) is not None}
        if len(set(said.values())) > 1:
            listed = ", ".join(f"{name} {token}" for name, token in said.items())
            raise CheckpointError(
                f"config.json contradicts itself about the mask token: {listed}; remove the wrong one"
            )
        if not said:
            raise CheckpointError(f"config.json has no {TOKEN}; a P-EAGLE head's configuration needs it")
        if not keys.flag("parallel_drafting", True):
            raise CheckpointError(f"config.json contradicts itself: {MASK} is stored, but parallel_drafting is false")
        plain = {name: value for name, value in config.items() if name not in (*TOKENS, "parallel_drafting")}
        if "PEagle" in _names(config):
            plain["architectures"] = [LLAMA]
        return read_flat(plain, with_mask(tensors), num_layers, PEagleConfig, mask_token_id=next(iter(said.values())))

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        keys, tensors = FlatFormat().write(checkpoint, target)
        return {**keys, TOKEN: checkpoint.config.mask_token_id}, tensors


def with_mask(tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors with the learned state as [1, 1, n x Ht]. Raises CheckpointError if there
    is none.
    """
    if MASK not in tensors:
        raise CheckpointError(f"the file has no {MASK}, what a P-EAGLE head reads in the place of a hidden state")
    return {**tensors, MASK: tensors[MASK].reshape(1, 1, -1)}


def _names(config: Config) -> str:
    return " ".join(architectures(config))
