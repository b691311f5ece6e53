"""From what a user passes to a queued request: token ids, resolved sampling parameters, stop ids.

Knows a tokenizer and a generation configuration; does not know the engine.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forerun.engine.answer import Answer, Request
from forerun.engine.config import SpeculativeConfig
from forerun.engine.grammar import GrammarCompiler
from forerun.engine.text import AnswerText, Detokenizer
from forerun.errors import ArgumentError
from forerun.sampling import Sampler, check_token_ids
from forerun.step import Row
from forerun.types import SamplingParams
from forerun.verify import rule_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; a dict may also hold a ``"prediction"`` of
the answer, text or token ids, for the drafter of that name."""

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Turns prompts and parameters into requests for one model."""

    tokenizer: PreTrainedTokenizerBase | None
    generation_config: Any
    """transformers' `GenerationConfig` of the checkpoint, or None."""
    vocab_size: int
    context: int
    """Most tokens of prompt and answer together."""
    default_seed: int | None

    def tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, where there is one, and its token ids.

        Raises:
            ArgumentError: empty, too long for the context, or ids outside the vocabulary.
        """
        text, ids = self._read(prompt)
        if not ids:
            raise ArgumentError("the prompt is empty; give at least one token")
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise ArgumentError(f"prompt token id {wrong} is outside the model's vocabulary of {self.vocab_size}")
        if len(ids) >= self.context:
            raise ArgumentError(
                f"the prompt has {len(ids)} tokens, but the context holds {self.context} for prompt and answer; "
                "shorten the prompt, or raise max_model_len if the model allows it"
            )
        return text, ids

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        speculative: SpeculativeConfig | None,
        drafter: str | None,
        trace: bool,
    ) -> Request:
        """A request with its `n` answers, ready to be queued. `drafter` is the key of the drafter that serves it."""
        text, ids = self.tokens(prompt)
        prediction = self.prediction(prompt)
        params = self.resolve(params)
        if params.seed is None and self.default_seed is not None:
            params = replace(params, seed=self.default_seed)
        request = Request(
            id=request_id, prompt=text, prompt_tokens=ids, params=params, speculative=speculative, trace=trace
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request.answers = [self._answer(request, index, seed + index, drafter) for index in range(params.n)]
        for answer in request.answers:
            answer.row.prediction = prediction
        return request

    def prediction(self, prompt: Prompt) -> list[int]:
        """Token ids of the answer that the client predicts; empty where it does not.

        Raises:
            ArgumentError: ids outside the vocabulary, or text without a tokenizer.
        """
        given = prompt.get("prediction") if isinstance(prompt, Mapping) else None
        if given is None:
            return []
        if not isinstance(given, str):
            ids = [int(token) for token in given]
            check_token_ids("prediction", ids, self.vocab_size)
            return ids
        if self.tokenizer is None:
            raise ArgumentError("the prediction is text, but the model has no tokenizer; give a list of token ids")
        return list(self.tokenizer.encode(given, add_special_tokens=False))

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Fill what is None from the generation configuration, else with the neutral value; check token ids."""
        values: dict[str, Any] = {}
        for name, neutral in _NEUTRAL.items():
            if getattr(params, name) is None:
                configured = getattr(self.generation_config, name, None)
                values[name] = neutral if configured is None else configured
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            check_token_ids(name, getattr(params, name) or (), self.vocab_size)
        return replace(params, **values)

    def _structured(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """Structured outputs as one more processor, the last one; one for each answer, whose path it follows."""
        if params.structured_outputs is None:
            return params
        processor = self.grammars.processor(params.structured_outputs, prompt_length)
        return replace(params, logits_processors=(*params.logits_processors, processor))

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """What makes processors of structured outputs, for this tokenizer.

        Raises:
            ArgumentError: no tokenizer, or llguidance is not installed.
        """
        if self.tokenizer is None:
            raise ArgumentError("structured outputs need a tokenizer")
        return GrammarCompiler(self.tokenizer, self.vocab_size, sorted(self.end_ids()))

    def end_ids(self) -> frozenset[int]:
        """The model's own end tokens: the generation configuration's and the tokenizer's."""
        given = getattr(self.generation_config, "eos_token_id", None)
        ids = set(given) if isinstance(given, list | tuple) else {given}
        ids.add(getattr(self.tokenizer, "eos_token_id", None))
        return frozenset(int(token) for token in ids if token is not None)

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), [int(token) for token in prompt["prompt_token_ids"]]
            if "prompt" not in prompt:
                raise ArgumentError(f"a prompt dict needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            return None, [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ArgumentError(
                "the model has no tokenizer: pass token ids ({'prompt_token_ids': [...]}) or a tokenizer"
            )
        return prompt, list(self.tokenizer(prompt)["input_ids"])

    def _answer(self, request: Request, index: int, seed: int, drafter: str | None) -> Answer:
        ids = request.prompt_tokens
        params = self._structured(request.params, len(ids))
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.end_ids())
        left = self.context - len(ids)
        row = Row(
            row=-1,
            tokens=list(ids),
            prompt_length=len(ids),
            sampler=Sampler(
                params, ids, banned_until_min=sorted(stop_ids), bad_words=self._bad_words(params.bad_words or ())
            ),
            seed=seed,
            stop_ids=stop_ids,
            room=left if params.max_tokens is None else min(left, params.max_tokens),
            rule=_checked_rule(request),
            traced=request.trace,
        )
        return Answer(
            request=request,
            index=index,
            row=row,
            detokenizer=Detokenizer(
                self.tokenizer if params.detokenize else None, ids, skip_special=params.skip_special_tokens
            ),
            text=AnswerText(stops=params.stop_strings, include_stop=params.include_stop_str_in_output),
            drafter=drafter,
        )

    def _bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """Each word as token ids, at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in words:
            if self.tokenizer is None:
                raise ArgumentError("bad_words needs a tokenizer; use logit_bias with token ids instead")
            for text in (word, " " + word.lstrip()):
                ids = list(self.tokenizer.encode(text, add_special_tokens=False))
                if ids and ids not in found:
                    found.append(ids)
        return found


def _checked_rule(request: Request) -> str | None:
    """The rule that the request's configuration names, if it may judge at this temperature."""
    name = request.speculative.rule if request.speculative is not None else None
    if name is not None and rule_named(name).name == "argmax_walk" and not request.params.greedy:
        raise ArgumentError("rule 'argmax_walk' is lossless at temperature 0 only; leave the rule out to sample")
    return name
