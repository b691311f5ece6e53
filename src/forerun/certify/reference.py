"""The reference for certify: a model's logits from transformers or llama.cpp without forerun, and from them the exact
distributions of completions.

In a low-precision format the shape of a batch changes the last bits of a logit, so two tokens that are almost equally
likely may change places, which counts as a tie. Larger differences are bugs.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.certify import CertifyPlan
from forerun.errors import ArgumentError, ForerunError, OutOfMemoryError
from forerun.model.llama_context import load_api
from forerun.model.llama_cpp import LlamaCppTarget
from forerun.model.load import LoadOptions
from forerun.model.prepare import open_named
from forerun.model.target import PREFILL_CHUNK
from forerun.model.transformers_target import require_layers
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun import LLM


class Reference:
    """The target without forerun's code, with which completions are compared."""

    whose = ""  # Logits, in a report: "transformers'"

    @staticmethod
    def of(llm: LLM) -> Reference:
        """Load the target a second time, on its original implementation. Raises ArgumentError if the engine was built
        from a model in memory, which has no checkpoint.
        """
        if isinstance(llm.target, LlamaCppTarget):
            return LlamaCppReference.of(llm)
        return TransformersReference.of(llm)

    def logits(self, tokens: Sequence[int], last: int) -> Tensor:
        """(last, V) float32: raw logits after each of the `last` tokens of a text."""
        raise NotImplementedError

    def places(
        self, prompt: Sequence[int], answer: Sequence[int], temperature: float, uniform: torch.Generator
    ) -> list[float]:
        """Return the quantile of each token of a completion in its distribution, with the likelier tokens first, at a
        random point of the token's probability. These are uniform and independent if each token was drawn from the
        target's distribution at that temperature (Rosenblatt's transform, 1952)."""
        logits = self.logits([*prompt, *answer[:-1]], len(answer)).cpu().double()
        probs = (logits / temperature).softmax(-1)
        chance = probs.gather(1, torch.tensor(answer)[:, None])
        likelier, equal = (probs.where(chosen, 0).sum(-1) for chosen in (probs > chance, probs == chance))
        points = torch.rand(len(answer), generator=uniform, dtype=torch.float64)
        quantiles: list[float] = (likelier + points * equal).tolist()
        return quantiles

    @torch.inference_mode()
    def probs(
        self, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, allowed: Tensor | None = None
    ) -> Tensor:
        """Return (V,) float64, the distribution of the token after a partial completion `answer`, by transformers'
        processors for the repetition penalty, temperature, top-k, top-p and min-p; other parameters are applied here.
        `allowed`, (V,): the tokens that a grammar allows there."""
        from transformers import (
            MinPLogitsWarper,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        text = [*prompt, *answer]
        scores = self.logits(text, 1).cpu()
        ids = torch.tensor([text])
        if allowed is not None:
            scores[0, ~allowed] = -torch.inf
        for token, bias in (params.logit_bias or {}).items():
            scores[0, token] += bias
        if params.repetition_penalty not in (None, 1.0):
            scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
        for token in answer:
            scores[0, token] -= params.frequency_penalty
        for token in set(answer):
            scores[0, token] -= params.presence_penalty
        scores = TemperatureLogitsWarper(float(params.temperature or 1.0))(ids, scores)
        if params.top_k:
            scores = TopKLogitsWarper(params.top_k)(ids, scores)
        if params.top_p is not None and params.top_p < 1:
            scores = TopPLogitsWarper(params.top_p)(ids, scores)
        if params.min_p:
            scores = MinPLogitsWarper(params.min_p)(ids, scores)
        distribution: Tensor = scores[0].double().softmax(-1)
        return distribution


class TransformersReference(Reference):
    """The checkpoint as transformers loads and runs it: an unmodified `PreTrainedModel`."""

    whose = "transformers'"

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @staticmethod
    def of(llm: LLM) -> TransformersReference:
        """Load it in the engine's dtype and on its device."""
        if not llm.target.name_or_path:
            raise ArgumentError(
                "certify compares with the checkpoint as transformers loads it; this engine was built from a model in "
                "memory: pass certify(..., reference=TransformersReference(MODEL)) with a copy made before"
            )
        target = require_layers(llm.target, "certify")
        options = LoadOptions(dtype=target.dtype, device=target.device)
        return TransformersReference(open_named(target.name_or_path, options))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], last: int) -> Tensor:
        """Run one pass over the text."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        found: Tensor = self.model(input_ids=ids, use_cache=False).logits[0, -last:].float()
        return found


class LlamaCppReference(Reference):
    """A GGUF file in its own context of llama.cpp, with one sequence: the prompt in one pass, then one token per pass,
    as llama.cpp decodes. There are no trees and no other rows, and no code of `LlamaCppTarget`.
    """

    whose = "llama.cpp's"

    def __init__(self, file: str, *, tokens: int, layers: int = 0) -> None:
        """Open a file for texts of up to `tokens` tokens, with `layers` layers on an accelerator."""
        api = self._api = load_api()
        model, context = api.llama_model_default_params(), api.llama_context_default_params()
        model.n_gpu_layers = layers
        context.n_ctx, context.n_seq_max, context.swa_full, context.no_perf = tokens, 1, True, True
        context.n_threads = context.n_threads_batch = torch.get_num_threads()
        self._model = api.llama_model_load_from_file(file.encode(), model)
        weakref.finalize(self, api.llama_model_free, self._model)
        self._context = self._model and api.llama_init_from_model(self._model, context)
        if not self._context:
            raise OutOfMemoryError(f"llama.cpp cannot open {file} a second time, to compare with: lower --max-tokens")
        # Finalizers run in reverse order: this one before the model's
        weakref.finalize(self, api.llama_free, self._context)
        self._memory = api.llama_get_memory(self._context)
        self._vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self._prompt = list[int]()  # The context begins with it
        self._behind = torch.empty(0)  # Logits (V,) behind the prompt

    @staticmethod
    def of(llm: LLM) -> LlamaCppReference:
        """Open the engine's file for the longest text that it takes, on its device."""
        layers = int(llm.target.identity()["layers_offloaded"])
        return LlamaCppReference(llm.target.name_or_path, tokens=llm.max_model_len, layers=layers)

    def logits(self, tokens: Sequence[int], last: int) -> Tensor:
        """Run the prompt in one pass, unless it is already in the context, and the other tokens one by one."""
        prompt, answer = list(tokens[: len(tokens) - last + 1]), tokens[len(tokens) - last + 1 :]
        if prompt != self._prompt or not self._api.llama_memory_seq_rm(self._memory, 0, len(prompt), -1):
            self._api.llama_memory_clear(self._memory, True)  # Recurrent states cannot be rolled back
            self._prompt = prompt
            for start in range(0, len(prompt), PREFILL_CHUNK):
                self._behind = self._run(prompt[start : start + PREFILL_CHUNK])
        return torch.stack([self._behind, *(self._run([token]) for token in answer)])

    def _run(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens, and return the logits (V,) after the last one."""
        ids = (self._api.llama_token * len(tokens))(*tokens)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(ids, len(tokens))):
            raise ForerunError(f"llama.cpp cannot run a pass over {len(tokens)} tokens of a text to compare with")
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(logits, (self._vocab_size,))).clone()


IMPOSSIBLE = 1e-12  # Probability below which an outcome counts as impossible: a single one is a failure
Outcome = tuple[int, ...]
Cells = dict[Outcome, float]
REST: Outcome = ()  # The cell of everything that has no cell of its own


def exact_cells(
    reference: Reference,
    prompt: Sequence[int],
    params: SamplingParams,
    plan: CertifyPlan,
    allowed: Tensor | None = None,
) -> Cells:
    """Return the cells of completions of `prompt`, and their probabilities in the target's distribution."""

    def likely(beginning: Outcome) -> dict[int, float]:
        probs = reference.probs(prompt, beginning, params, allowed)
        return {token: float(probs[token]) for token in torch.nonzero(probs >= plan.least).flatten().tolist()}

    return cells_of(likely, plan)


def cells_of(likely: Callable[[Outcome], Mapping[int, float]], plan: CertifyPlan) -> Cells:
    """Return the probability of every cell: the likeliest prefixes of completions that no other cell extends, and
    `REST`. `likely` returns the tokens after a prefix with their probabilities; missing tokens stay in the prefix's
    cell. The likeliest prefix is extended until there are `plan.cells`; extensions less likely than `plan.least` join
    the cell of their prefix. The probabilities sum to 1.
    """
    cells: Cells = {REST: 1.0}
    going = [REST]
    while going and len(cells) < plan.cells:
        beginning = max(going, key=cells.__getitem__)
        going.remove(beginning)
        whole = cells[beginning]
        for token, prob in sorted(likely(beginning).items()):
            if whole * prob < plan.least:
                continue
            longer = (*beginning, token)
            cells[longer] = whole * prob
            cells[beginning] -= cells[longer]
            if len(longer) < plan.sample_tokens:
                going.append(longer)
    return _merge(cells, plan)


def _merge(cells: Cells, plan: CertifyPlan) -> Cells:
    """Merge the remainder of a prefix with the cell of a shorter prefix if its probability is small."""
    for outcome in sorted(cells, key=len, reverse=True):
        if outcome and cells[outcome] < IMPOSSIBLE:
            cells[outcome] = 0.0
        elif outcome and cells[outcome] < plan.least:
            cells[_home(outcome[:-1], cells)] += cells.pop(outcome)
    while IMPOSSIBLE < cells[REST] < plan.least:
        # Only one that no shorter cell begins: the answers of another would be counted there
        outer = [outcome for outcome in cells if outcome and _home(outcome[:-1], cells) == REST]
        cells[REST] += cells.pop(min(outer, key=lambda outcome: (cells[outcome] == 0, cells[outcome])))
    cells[REST] = cells[REST] if cells[REST] > IMPOSSIBLE else 0.0
    return cells


def _home(beginning: Outcome, cells: Cells) -> Outcome:
    """Return the cell of completions with this prefix: its longest prefix that is a cell."""
    lengths = range(len(beginning), 0, -1)
    return next((beginning[:length] for length in lengths if beginning[:length] in cells), REST)


def count(cells: Cells, answers: Iterable[Outcome]) -> Counter[Outcome]:
    return Counter(_home(answer, cells) for answer in answers)


TIE_EPSILON = {"float32": 0.0, "float64": 0.0, "bfloat16": 0.25, "float16": 0.03125}
"""Largest gap of the two best log-probabilities, in nats, that counts as a tie: two units in the last place of a logit
between 16 and 32. In float32 no difference is excused."""
LOGPROB_TOLERANCE = {"float32": 5e-4, "float64": 5e-4, "bfloat16": 0.25, "float16": 0.03125}
"""Largest difference, in nats, of the same token's log-probability in two batches of different shape."""
QUANTISED = 0.5
"""Both for a GGUF file on llama.cpp, which rounds activations to 8 bits: where the last bit of a sum differs, such as
that of attention in a batch of 64 tokens, some are rounded otherwise. SmolLM2-135M in Q4_1: of one row 256 positions
with chains and trees are equal; of four rows, 576 positions, at most 0.24 nats part the same token (0.025 in the mean),
and 0.40 two that changed places.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first difference between two completions of one prompt."""

    prompt: int  # Index of the prompt
    position: int  # Index of the first token that differs
    plain: int | None  # Plain decoding's token; None if its completion had ended
    speculative: int | None
    gap: float  # From the best log-probability there to the worse of the two, nats; infinite for an unlikely token
    epsilon: float

    @property
    def tie(self) -> bool:
        """True if rounding explains it."""
        return self.gap < self.epsilon


def epsilon_of(llm: LLM) -> float:
    """Return the largest gap that counts as a tie in the target's number format, nats."""
    return TIE_EPSILON.get(llm.target.dtype_name, QUANTISED)


def first_worse(logits: Tensor, answer: Sequence[int], index: int, epsilon: float) -> Difference | None:
    """Return the first token of a greedy completion that is not the argmax of `logits` (T, V), or None."""
    best = logits.argmax(-1).tolist()
    position = first_difference(best, answer)
    if position is None:
        return None
    logprobs, plain, other = logits[position].log_softmax(-1), best[position], answer[position]
    gap = float(logprobs[plain] - logprobs[other])
    return Difference(prompt=index, position=position, plain=plain, speculative=other, gap=gap, epsilon=epsilon)


def first_difference(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Return the index of the first token that differs or is missing; None for equal completions."""
    pairs = enumerate(itertools.zip_longest(plain, speculative))
    return next((position for position, (one, other) in pairs if one != other), None)


def difference(
    llm: LLM, prompt: Sequence[int], plain_ids: Sequence[int], other_ids: Sequence[int]
) -> Difference | None:
    """Find the first difference between the plain and the speculative completion of `prompt`, and the gap there."""
    position = first_difference(plain_ids, other_ids)
    if position is None:
        return None
    plain, other = list(itertools.zip_longest(plain_ids, other_ids))[position]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=8, detokenize=False, ignore_eos=True)
    prefix = {"prompt_token_ids": [*prompt, *plain_ids[:position]]}
    token = llm.generate(prefix, params, speculative=False)[0].outputs[0].tokens[0]
    likeliest: dict[int | None, float] = {name: entry.logprob for name, entry in (token.top_logprobs or {}).items()}
    worse = min(likeliest.get(name, -math.inf) for name in (plain, other))
    gap = max(likeliest.values()) - worse
    epsilon = epsilon_of(llm)
    return Difference(prompt=0, position=position, plain=plain, speculative=other, gap=gap, epsilon=epsilon)
