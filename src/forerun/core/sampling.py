"""Sampling parameters are applied to logits here.

`Sampler` turns raw logits at a node into the distribution of the request's parameters; penalties read the node's path.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.rng import HINT, TOLERANCE
from forerun.devices import send, widest
from forerun.errors import ArgumentError, NoTokenLeftError, NumericError, of_the_process
from forerun.types import SamplingParams

_EVERYTHING = 2.0  # A mass that no set of tokens reaches: stands for no top-p
_NEUTRAL = SamplingParams()


class Sampler:
    """Turns one sequence's logits into the distribution of its request's parameters. It is read-only, because drafters
    get it, too.

    Args:
        params: resolved (`resolve`): neutral values instead of None.
        prompt: the prompt's token ids, for the repetition penalty.
        banned_until_min: token ids that may not come before `min_tokens`: every stop id.
        bad_words: token sequences that may not be produced.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        banned_until_min: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self.params = params.sealed()
        self.prompt = tuple(prompt)
        self.banned_until_min = tuple(banned_until_min)
        self.bad_words = tuple([tuple(word) for word in bad_words])
        self.neutral = not (
            params.allowed_token_ids
            or self.bad_words
            or params.min_tokens
            or params.logit_bias
            or params.logits_processors
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty not in (None, 1.0)
        )
        """True if the processed logits equal the raw ones, so that one argmax over the batch includes this row."""
        self.prompt_set = frozenset(prompt)  # Its tokens
        self._allowed = torch.as_tensor(params.allowed_token_ids or (), dtype=torch.int64)
        self._biased = torch.as_tensor(list(params.logit_bias or ()), dtype=torch.int64)
        self._bias = torch.as_tensor(list((params.logit_bias or {}).values()), dtype=torch.float64)
        self.bad_tokens = tuple([word[0] for word in self.bad_words if len(word) == 1])
        self._longer_words = defaultdict[int, list[tuple[int, ...]]](list)  # By their last token but one
        for word in self.bad_words:
            if len(word) > 1:
                self._longer_words[word[-2]].append(word)
        self._fitting = set[int]()  # Sizes of vocabularies that hold all token ids among the parameters

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise AttributeError(f"a Sampler is read-only; make another one with another {name}")
        super().__setattr__(name, value)

    @property
    def greedy(self) -> bool:
        return self.params.greedy

    def fits(self, vocabulary: int) -> bool:
        """Return whether `Processing` can apply these parameters on the device alone: the effect at a node must depend
        on how often tokens occurred, not on their order (no custom processor, no bad word of several tokens), and all
        token ids must be within the vocabulary.
        """
        if self.params.logits_processors or any(len(word) > 1 for word in self.bad_words):
            return False
        try:
            self._check_ids(vocabulary)
        except ArgumentError:
            return False
        return max((*self.bad_tokens, *self.banned_until_min), default=0) < vocabulary

    def edits(self, vocabulary: int, output: Sequence[int], paths: Sequence[Sequence[int]]) -> Edits | None:
        """Return the changes that `process` makes at the ends of `paths`, or None if there are none. Raises
        ArgumentError as `process` does.
        """
        if self.neutral:
            return None
        self._check_ids(vocabulary)
        return Edits(
            sampler=self,
            output=output,
            paths=paths,
            banned=[(node, token) for node, path in enumerate(paths) for token in self._word_ends([*output, *path])],
        )

    def process(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        """Apply all processing before the temperature to raw logits (V,), and return (V,) float32 (float64 stays).

        Args:
            logits: raw logits of one node.
            output: the output tokens up to and including the node.

        Raises:
            NumericError: the raw logits hold NaN, or the processors left NaN or infinity.
            NoTokenLeftError: the processors left no token.
            ArgumentError: a token id among the parameters is outside the vocabulary.
        """
        return self._process(logits, output)[0]

    def _process(self, logits: Tensor, output: Sequence[int]) -> tuple[Tensor, float]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        highest = float(logits.max())
        check_raw(highest)
        if self.neutral:
            return logits, check_highest(highest)
        p = self.params
        self._check_ids(len(logits))
        if p.allowed_token_ids:
            allowed = torch.full_like(logits, -torch.inf)
            ids = self._allowed.to(logits.device)
            logits = allowed.index_copy_(0, ids, logits[ids])
        banned = self._word_ends(output)
        if len(output) < p.min_tokens:
            banned += self.banned_until_min
        if banned:
            logits[torch.as_tensor(banned, device=logits.device)] = -torch.inf
        if p.logit_bias:
            logits.index_add_(0, self._biased.to(logits.device), self._bias.to(logits.dtype).to(logits.device))
        self._penalise(logits, output)
        logits = self.custom(logits, output)
        return logits, check_highest(float(logits.max()))

    def custom(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        """Apply the custom logits processors to the logits (V,) after an output."""
        for processor in self.params.logits_processors:
            result: object = processor([*self.prompt, *output], logits)
            if not (isinstance(result, Tensor) and result.shape == logits.shape and result.is_floating_point()):
                named = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
                raise ArgumentError(
                    f"the logits processor {getattr(processor, '__name__', processor)} returned {named}; expected a "
                    f"tensor of floating-point numbers of shape {tuple(logits.shape)}, one for each token"
                )
            logits = result
        return logits

    def _check_ids(self, vocabulary: int) -> None:
        if vocabulary in self._fitting:
            return
        named = {"allowed_token_ids": self.params.allowed_token_ids or (), "logit_bias": self.params.logit_bias or ()}
        for name, ids in named.items():
            check_token_ids(name, ids, vocabulary)
        self._fitting.add(vocabulary)

    def probs(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        """Return the distribution of the next token, (V,) float32; at temperature 0 a point mass on the largest
        processed logit. Raises as `process` does, and NumericError if the result is not a distribution.
        """
        processed, highest = self._process(logits, output)
        probs = distribution_of(processed, self.params, highest)
        _check_distribution(probs, None if self.neutral else processed)
        return probs

    def _penalise(self, logits: Tensor, output: Sequence[int]) -> None:
        p = self.params
        if p.repetition_penalty not in (None, 1.0):
            seen = torch.as_tensor(sorted(self.prompt_set.union(output)), device=logits.device)
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if (p.presence_penalty or p.frequency_penalty) and output:
            counts = Counter(output)
            ids = torch.as_tensor(list(counts), device=logits.device)
            times = torch.as_tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
            logits[ids] -= p.presence_penalty + p.frequency_penalty * times

    def _word_ends(self, output: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a bad word after the prompt and an output."""
        prompt = self.prompt
        ends = list(self.bad_tokens)
        for word in self._longer_words.get((output or prompt or (-1,))[-1], ()):
            missing = max(len(word) - 1 - len(output), 0)
            tail = (*prompt[max(len(prompt) - missing, 0) :], *output[len(output) - len(word) + 1 + missing :])
            if tail == word[:-1]:
                ends.append(word[-1])
        return ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """A request's changes to the raw logits at N nodes, as token ids: collected on the host,
    applied by `process_rows` to all rows at once.
    """

    sampler: Sampler
    output: Sequence[int] = ()  # Committed output tokens
    paths: Sequence[Sequence[int]] = ()  # (N,) tokens from the root's child to the node, itself included
    banned: Sequence[tuple[int, int]] = ()  # (node, token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Processing:
    """The logits processing of B requests as tensors on their device; parts that no request uses are None."""

    outside: Tensor | None = None  # (B, V) bool, tokens that are never allowed
    bias: Tensor | None = None  # (B, V)
    early: Tensor | None = None  # (B, V) bool, tokens that may not come before `min_tokens`
    missing: Tensor | None = None  # (B,) number of tokens until then
    penalties: Tensor | None = None  # (B, 3) repetition, presence and frequency
    prompt: Tensor | None = None  # (B, V) bool, tokens of the prompt, for the repetition penalty
    output: Tensor | None = None  # (B, V) how often each token occurs in the output

    @classmethod
    def of(
        cls, edits: Sequence[Edits | None], vocabulary: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Processing | None:
        """Collect the requests' parameters and send them to the device in one asynchronous copy; None if no request
        needs processing. Parts that depend on a node's path are not included.
        """
        if not any(edits):
            return None
        rows = [(row, edit) for row, edit in enumerate(edits) if edit is not None]
        params = [_NEUTRAL if edit is None else edit.sampler.params for edit in edits]
        banned = [(row, token) for row, edit in rows for token in edit.sampler.bad_tokens]
        allowed = [(row, token) for row, _ in rows for token in params[row].allowed_token_ids or ()]
        limited = sorted({row for row, _ in allowed})
        biased = [(row, token, bias) for row, _ in rows for token, bias in (params[row].logit_bias or {}).items()]
        missing = [0 if edit is None else params[row].min_tokens - len(edit.output) for row, edit in enumerate(edits)]
        early = [(row, token) for row, edit in rows if missing[row] > 0 for token in edit.sampler.banned_until_min]
        penalties = [
            (params_of_row.repetition_penalty or 1.0, params_of_row.presence_penalty, params_of_row.frequency_penalty)
            for params_of_row in params
        ]
        counted = [(row, token, n) for row, edit in rows for token, n in Counter(edit.output).items()]
        prompts = [(row, token) for row, edit in rows if penalties[row][0] != 1.0 for token in edit.sampler.prompt_set]

        def flat(pairs: Iterable[Sequence[Any]]) -> Tensor:
            return torch.tensor([pair[0] * vocabulary + pair[1] for pair in pairs], dtype=torch.int64)

        host = {
            "banned": flat(banned),
            "allowed": flat(allowed),
            "biased": flat(biased),
            "early": flat(early),
            "counted": flat(counted),
            "prompts": flat(prompts),
            "limited": torch.tensor(limited, dtype=torch.int64),
            "missing": torch.tensor(missing, dtype=torch.int64),
            "biases": torch.tensor([bias for *_, bias in biased], dtype=dtype),
            "counts": torch.tensor([n for *_, n in counted], dtype=dtype),
            "penalties": torch.tensor(penalties, dtype=dtype),
        }
        sent = dict(zip(host, send(list(host.values()), device), strict=True))

        def marked(at: Tensor, first: Tensor | None = None) -> Tensor:
            marks = torch.zeros(len(edits), vocabulary, dtype=torch.bool, device=device)
            if first is not None:
                marks.index_fill_(0, sent["limited"], True).view(-1).index_fill_(0, first, False)
            marks.view(-1).index_fill_(0, at, True)
            return marks

        def added(at: Tensor, values: Tensor) -> Tensor:
            sums = torch.zeros(len(edits), vocabulary, dtype=dtype, device=device)
            sums.view(-1).index_add_(0, at, values)
            return sums

        penalised = any(row != (1.0, 0.0, 0.0) for row in penalties)
        return cls(
            outside=marked(sent["banned"], sent["allowed"]) if allowed or banned else None,
            bias=added(sent["biased"], sent["biases"]) if biased else None,
            early=marked(sent["early"]) if early else None,
            missing=sent["missing"] if early else None,
            penalties=sent["penalties"] if penalised else None,
            prompt=marked(sent["prompts"]) if penalised else None,
            output=added(sent["counted"], sent["counts"]) if penalised else None,
        )

    def apply(self, values: Tensor, drafted: Tensor, depths: Tensor, banned: Tensor | None = None) -> Tensor:
        """Return the processed logits of F nodes per row, without custom processors. Does not wait for the device.

        Args:
            values: (B, F, V) raw, float32 or float64.
            drafted: flat indices into (B, F, V) of the tokens on each node's path.
            depths: (B or 1, F) of the nodes.
            banned: flat indices of tokens that end a bad word there.
        """
        if self.outside is not None:
            values = values.masked_fill(self.outside.unsqueeze(1), -torch.inf)
        if self.early is not None and self.missing is not None:
            early = self.early.unsqueeze(1) & (depths < self.missing.unsqueeze(1)).unsqueeze(-1)
            values = values.masked_fill(early, -torch.inf)
        if banned is not None:
            values = values.flatten().index_fill(0, banned, -torch.inf).view_as(values)
        if self.bias is not None:
            values = values + self.bias.unsqueeze(1)
        if self.penalties is not None and self.prompt is not None and self.output is not None:
            repetition, presence, frequency = self.penalties.unsqueeze(-1).unsqueeze(-1).unbind(1)
            times = self.output.unsqueeze(1).expand_as(values).flatten()
            times = times.index_add(0, drafted, torch.ones_like(drafted, dtype=times.dtype)).view_as(values)
            seen = self.prompt.unsqueeze(1) | (times > 0)
            values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
            values = values - (presence * (times > 0) + frequency * times)
        return values

    @property
    def key(self) -> tuple[str, ...]:
        """The names of the parts in use."""
        return tuple([name for name in self.__slots__ if getattr(self, name) is not None])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the parts in use, in the order of `key`."""
        return tuple([getattr(self, name) for name in self.key])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Processing:
        """Return a copy with other tensors of the same parts."""
        return Processing(**dict(zip(self.key, tensors, strict=True)))


def widen(logits: Tensor) -> Tensor:
    """Return the logits in float32; float64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def process_rows(logits: Tensor, edits: Sequence[Edits | None]) -> tuple[Tensor, dict[tuple[int, int], BaseException]]:
    """Run `Sampler.process` for all nodes of all rows without waiting for the device. Return (B, N, V) float32 (float64
    stays) from raw `logits` (B, N, V), and the errors of custom processors, which run node by node, as (row, node) ->
    error. `edits` (B,) are those of `Sampler.edits`; None for a row whose logits are not changed.
    """
    values = widen(logits)
    rows = [(row, edit) for row, edit in enumerate(edits) if edit is not None]
    if not rows:
        return values, {}
    size, nodes, device = logits.shape[-1], logits.shape[1], logits.device
    drafted = [((row * nodes + n) * size + t) for row, edit in rows for n, path in enumerate(edit.paths) for t in path]
    banned = [((row * nodes + node) * size + token) for row, edit in rows for node, token in edit.banned]
    depths = [[*map(len, () if edit is None else edit.paths)] for edit in edits]
    depths = [row + [0] * (nodes - len(row)) for row in depths]
    host = [torch.tensor(part, dtype=torch.int64) for part in (drafted, banned, depths)]
    drafted_at, banned_at, depth_at = send(host, device)
    processing = Processing.of(edits, size, device, values.dtype)
    assert processing is not None, "a row has edits"
    values = processing.apply(values, drafted_at, depth_at, banned_at if banned else None)
    failed = dict[tuple[int, int], BaseException]()
    if any(edit.sampler.params.logits_processors for _, edit in rows):
        values = values.clone()  # The processors' results are written into it
    for row, edit in rows:
        for node, path in enumerate(edit.paths if edit.sampler.params.logits_processors else ()):
            try:
                values[row, node] = edit.sampler.custom(values[row, node], [*edit.output, *path])
            except BaseException as error:
                if of_the_process(error):
                    raise
                failed[row, node] = error
    return values, failed


def settings_of(params: SamplingParams) -> tuple[float, ...]:
    """Return a request's (5,) settings for `probs_of`: whether it is sampled, temperature, top-k,
    top-p, min-p.
    """
    temperature = 1.0 if params.greedy or params.temperature is None else params.temperature
    top_k = params.top_k if params.top_k is not None and params.top_k > 0 else 1 << 31
    top_p = params.top_p if params.top_p is not None and params.top_p < 1 else _EVERYTHING
    return (0.0 if params.greedy else 1.0, temperature, top_k, top_p, params.min_p or 0.0)


def has_filters(params: SamplingParams) -> bool:
    """Return whether the parameters have a top-k, top-p or min-p."""
    return bool(params.min_p or (params.top_k or 0) > 0 or (params.top_p is not None and params.top_p < 1))


def probs_of(logits: Tensor, settings: Tensor, *, filters: bool) -> Tensor:
    """Return (B, F, V) float32 (float64 stays): `distribution_of` with each row's `settings` (B, 5), NaN where that
    raises. Rows at temperature 0 are filtered as at temperature 1, since only their argmax is used. Does not wait for
    the device.
    """
    values = widen(logits)
    temperature, top_k, top_p, min_p = settings[:, 1:, None, None].unbind(1)
    scaled = (values - values.amax(-1, keepdim=True)) / temperature.to(values.dtype)
    if not filters:
        return scaled.softmax(-1)
    scaled = scaled.masked_fill(scaled < min_p.log().to(values.dtype), -torch.inf)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    last = (top_k.long() - 1).clamp(0, logits.shape[-1] - 1).expand(-1, logits.shape[1], -1)
    scaled = scaled.masked_fill(scaled < ordered.gather(-1, last), -torch.inf)
    probs = scaled.softmax(-1)
    falling = probs.gather(-1, order)
    inside = falling.cumsum(-1, dtype=widest(probs.device)) - falling < top_p
    probs = probs * torch.zeros_like(inside).scatter(-1, order, inside)
    return probs / probs.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)


def check_token_ids(name: str, ids: Iterable[int], vocabulary: int) -> None:
    """Raise ArgumentError for ids outside ``0 .. vocabulary - 1``, naming the parameter and the
    first wrong id.
    """
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ArgumentError(f"{name} holds token id {wrong}; the vocabulary has ids 0 to {vocabulary - 1}")


def distribution_of(logits: Tensor, params: SamplingParams, highest: float | None = None) -> Tensor:
    """Apply temperature, min-p, top-k and top-p: (V,) distribution from processed logits (V,), in
    the logits' precision. `highest` is the largest logit, if known; raises as `check_highest` does.
    """
    highest = check_highest(float(logits.max())) if highest is None else highest
    if params.greedy:
        probs = torch.zeros_like(logits)
        probs[int(logits.argmax())] = 1.0
        return probs
    scaled = logits - highest
    if params.temperature is not None:
        scaled /= params.temperature
    if params.min_p:
        scaled = scaled.masked_fill(scaled < math.log(params.min_p), -torch.inf)
    if params.top_k is not None and 0 < params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -torch.inf)
    probs = scaled.softmax(-1)
    if params.top_p is not None and params.top_p < 1:
        nucleus = _classed_nucleus if probs.device.type == "cpu" else _sorted_nucleus
        probs = probs * nucleus(probs, params.top_p)
        probs /= probs.sum()
    return probs


def _check_distribution(probs: Tensor, processed: Tensor | None) -> None:
    """Raise NumericError unless `probs` is a distribution over the tokens that the `processed`
    logits allow (None: all).
    """
    if probs.device.type == "cpu":  # On a CPU numpy finds banned tokens in a fifth of torch's time
        outside = 0.0 if processed is None else float(probs.numpy()[processed.numpy() == -np.inf].sum())
        check_sums(float(probs.sum()), float(probs.min()), outside)
        return
    banned = probs.new_zeros(()) if processed is None else probs @ (processed == -torch.inf).to(probs.dtype)
    check_sums(*torch.stack((probs.sum(), probs.min(), banned)).tolist())


def check_sums(total: float, least: float, outside: float) -> None:
    """Raise NumericError unless these are a distribution's total, least probability and mass on
    banned tokens (1, >= 0, 0).
    """
    if not (abs(total - 1) < TOLERANCE and least >= 0 and outside == 0):
        raise NumericError(
            f"the probabilities are no distribution: they add up to {total}, the least is {least}, banned tokens "
            f"have {outside}; {HINT}"
        )


def check_raw(highest: float) -> None:
    """Raise NumericError if the largest raw logit is NaN, which it is if any is."""
    if math.isnan(highest):
        raise NumericError("the model produced NaN logits; check the checkpoint, or load it with dtype float32")


def check_highest(highest: float) -> float:
    """Return the largest processed logit. Raises NumericError if it is NaN or infinite,
    NoTokenLeftError if every token is banned.
    """
    if highest == -math.inf:
        raise NoTokenLeftError(
            "every token is banned here; relax allowed_token_ids, bad_words, logit_bias, min_tokens (a complete "
            "structured output can only end) or the processors"
        )
    if not math.isfinite(highest):
        raise NumericError(f"the largest processed logit is {highest}; {HINT}")
    return highest


_COARSE = 20  # Bits of a float32 that are ignored when tokens are classed by probability: eight classes per octave


def _sorted_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return (V,) bool: the smallest set of likeliest tokens whose mass reaches `top_p`; of equally likely tokens the
    lower id comes first.
    """
    ordered, order = probs.sort(descending=True, stable=True)
    before = ordered.cumsum(0, dtype=widest(probs.device)) - ordered
    return torch.zeros_like(probs, dtype=torch.bool).index_copy_(0, order, before < top_p)


def _classed_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Compute `_sorted_nucleus` on a CPU, where sorting 151,936 tokens takes 20 ms. Tokens that can be in the nucleus
    are put into classes of about equal probability, and only the class at the border is sorted: 0.1 to 1.5 ms, the more
    the larger the nucleus. The likeliest 1,024 by ``topk`` would take 0.9 ms, and a sort where they do not suffice.
    """
    values = probs.numpy()
    # All others together have less than half of the rest
    able = np.flatnonzero(values >= (1 - top_p) / (2 * len(values)))
    chances = values[able].astype(np.float64)
    if chances.sum() <= top_p:
        able, chances = np.arange(len(values)), values.astype(np.float64)
    classes = chances.astype(np.float32).view(np.int32) >> _COARSE  # The bits of positive floats rise with their values
    mass = np.bincount(classes, weights=chances)
    above = np.append(mass[:0:-1].cumsum()[::-1], 0.0)
    border = int((above < top_p).argmax())
    inside = np.flatnonzero(classes == border)
    order = inside[(-chances[inside]).argsort(kind="stable")]
    ordered = chances[order]
    nucleus = classes > border
    nucleus[order] = above[border] + ordered.cumsum() - ordered < top_p
    inside_nucleus = np.zeros(len(values), dtype=np.bool_)
    inside_nucleus[able[nucleus]] = True
    return torch.from_numpy(inside_nucleus)
