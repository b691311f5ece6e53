"""All random numbers of generation are made here, and all tokens are drawn here.

`Rng` is counter-based: a draw depends on (seed, position, stream, index) only, not on other requests in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.devices import widest
from forerun.errors import NumericError

TOLERANCE = 1e-3  # The sum of a distribution's probabilities may differ from 1 by this
HINT = "check logit_bias, the processors and the checkpoint"
_BLOCK = 128  # Tokens of a block; first a block is drawn, so that a large vocabulary needs few random numbers


class Stream(IntEnum):
    """Independent streams of random numbers of one sequence."""

    TARGET = 0  # The token at a position: recovered, bonus, walked and plain tokens
    ACCEPT = 1  # Acceptance decisions of a rule
    DRAFT = 2  # All draws of a drafter; the inner steps of a cascade use 3, 4, ...


class Rng:
    """Counter-based random numbers of one step of one sequence.

    Args:
        seed: the sequence's seed, of which 128 bits are used.
        position: index, in the whole sequence, of the token after the root.
        draft_stream: the stream for `drafted`; an inner step of a cascade has its own.
    """

    def __init__(self, seed: int, position: int, draft_stream: int = Stream.DRAFT) -> None:
        self.seed, self.position, self.draft_stream = seed, position, draft_stream

    def flip(self, probability: float, node: int) -> bool:
        """Return True with the given probability: a rule's decision about `node`."""
        if not probability < 1.0:
            if math.isnan(probability):
                raise NumericError(f"node {node} would be accepted with probability NaN; check the checkpoint")
            return True
        return self._uniform(self.position, Stream.ACCEPT, node) < probability

    def draw(self, probs: Tensor, depth: int = 0) -> int:
        """Draw a token from `probs` (V,) for the position `depth` tokens after the first.

        Draws are keyed by absolute position, so plain decoding and a walk over a tree draw the same token from the same
        distribution, and almost always from distributions that differ in their last bits: the token with the smallest
        exponential variate is drawn, with probabilities as rates; first among blocks, then within the block. With
        cumulative probabilities the last bit of the first token would shift all others. Raises NumericError if `probs`
        is not a distribution (NaN, infinite, negative where it was drawn, a sum above 1); a sum below 1 is a residual.
        """
        padded = torch.nn.functional.pad(probs, (0, -len(probs) % _BLOCK)).view(-1, _BLOCK)
        masses = padded.sum(1, dtype=widest(probs.device)).cpu().double().numpy()
        if not 0 < masses.sum() < 1 + TOLERANCE:
            raise NumericError(f"what is drawn from adds up to {masses.sum()}; {HINT}")
        variates = self.exponentials(depth, len(probs))
        block = _first(variates[_BLOCK:], masses)
        return block * _BLOCK + _first(variates[:_BLOCK], padded[block].cpu().double().numpy())

    def exponentials_for(self, depth: int, vocabulary: int) -> NDArray[np.float64] | None:
        """Return (T,) the exponential variates that `draw` will use at `depth`, before the distribution is known;
        `first_of` turns them into the token. None if a subclass draws in its own way.
        """
        return self.exponentials(depth, vocabulary) if type(self).draw is Rng.draw else None

    def exponentials(self, depth: int, vocabulary: int) -> NDArray[np.float64]:
        """Return (T,) exponential variates, one per token of a block, then one per block. They are positive, because
        zero divided by a rate of zero would be NaN.
        """
        generator = np.random.Generator(self._bits(self.position + depth, Stream.TARGET, 0))
        variates = generator.standard_exponential(_BLOCK + -(-vocabulary // _BLOCK), method="inv")
        return variates + np.finfo(np.float64).tiny

    def drafted(self, probs: Tensor, node: int, index: int = 0) -> int:
        """Draw a token from `probs` (V,) for a drafter, as child number `index` of `node`."""
        uniform = torch.from_numpy(self._drafts([(node, index)])).to(widest(probs.device)).to(probs.device)
        return int(quantiles(probs, uniform))

    def uniforms(self, children: Sequence[tuple[int, int]]) -> NDArray[np.float64] | None:
        """Return (N,) the numbers in (0, 1) that `drafted` will use for children (node, index), before the
        distributions are known; `quantiles` turns them into tokens. None if a subclass draws in its own way.
        """
        return self._drafts(children) if type(self).drafted is Rng.drafted else None

    def _drafts(self, children: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
        counters = np.array([(node << 16) | index for node, index in children], dtype=np.uint64)
        return _uniforms(self._bits(self.position, self.draft_stream, 0).random_raw(), counters)

    def _uniform(self, position: int, stream: int, index: int) -> float:
        return float(np.random.Generator(self._bits(position, stream, index)).random())

    def _bits(self, position: int, stream: int, index: int) -> np.random.Philox:
        return np.random.Philox(key=self.seed & (2**128 - 1), counter=[index, stream, position, 0])


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index` of a request with this `seed`: unique for each pair of seed and index, and
    the request's own seed for the first completion.
    """
    return (seed & (2**64 - 1)) | index << 64


def request_seed(seed: int, number: int) -> int:
    """Return the seed of request `number` of an engine with this `seed`: reproducible, and different for each
    request.
    """
    return int(np.random.SeedSequence((seed & (2**64 - 1), number)).generate_state(1, np.uint64)[0])


def _first(variates: NDArray[np.float64], rates: NDArray[np.float64]) -> int:
    """Return the index of the smallest variate / rate (N,): entry i with probability ``rates[i] /
    sum``.
    """
    with np.errstate(divide="ignore"):
        first = int((variates / rates).argmin())
    if not rates[first] > 0:
        raise NumericError(f"a token of probability {rates[first]} was drawn; {HINT}")
    return first


def first_of(probs: Tensor, variates: Tensor) -> Tensor:
    """Return (M,) int64, the tokens that `Rng.draw` draws from `probs` (M, V). `variates` (M, T) are its random
    numbers in the device's widest float type. Does not wait for the device; a row of `probs` that is not a distribution
    gives an arbitrary token.
    """
    padded = torch.nn.functional.pad(probs, (0, -probs.shape[-1] % _BLOCK)).view(len(probs), -1, _BLOCK)
    block = (variates[:, _BLOCK:] / padded.sum(-1, dtype=variates.dtype)).argmin(-1)
    inside = padded[torch.arange(len(probs), device=probs.device), block].to(variates.dtype)
    return block * _BLOCK + (variates[:, :_BLOCK] / inside).argmin(-1)


def _uniforms(word: int, counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return (N,) numbers in (0, 1): those at the `counters` (N,) of SplitMix64 seeded with `word`."""
    with np.errstate(over="ignore"):
        bits = np.uint64(word) + (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def quantiles(distributions: Tensor, uniforms: Tensor) -> Tensor:
    """Return (.., C) int64, the tokens at the quantiles `uniforms` (.., C) of the `distributions` (.., V), which need
    not sum to 1. A token of probability zero is returned only if all are zero. `uniforms` have the device's widest
    float type. Does not wait for the device.
    """
    cumulated = distributions.to(widest(distributions.device)).cumsum(-1)
    total = cumulated[..., -1:]
    below = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, below, right=True).clamp_(max=distributions.shape[-1] - 1)
