"""A forerun decoding loop inside transformers: ``model.generate(...,
custom_generate=forerun.hf("ngram"))``.

transformers prepares inputs, processors and stopping criteria as always; the decoding loop is ours. Its processors are
applied at every node of the tree, so whatever it knows (temperature, n-gram bans, forced tokens) holds here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from forerun.engine.llm import LLM
from forerun.errors import ArgumentError
from forerun.params import NEUTRAL
from forerun.types import LogitsProcessor, SamplingParams

_SLOT_STEP = 512
_UNDERSTOOD = ("attention_mask", "position_ids", "cache_position")
"""Tensors that `generate` hands on besides the token ids; any other one would be part of the
prompt.
"""
_NATIVE = ("MaxLengthCriteria", "EosTokenCriteria")
"""Stopping criteria that the engine itself obeys; all others are asked after every token."""


def hf(drafter: str = "ngram", *, streamer: Any = None, **options: Any) -> HuggingFaceGenerate:
    """Return a decoding loop for transformers: ``model.generate(**inputs,
    custom_generate=forerun.hf("ngram"))``.

    transformers 5 does not hand `generate`'s own ``streamer`` and ``tokenizer`` to a custom loop: give the streamer
    here, and stop strings as ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``.

    Args:
        drafter: a name from ``forerun drafters``.
        streamer: a transformers streamer that gets the tokens as they are accepted.
        options: as in ``speculative_config``: ``num_speculative_tokens``, ``model``, ``rule``, ...
    """
    return HuggingFaceGenerate({"method": drafter, **options}, streamer)


class HuggingFaceGenerate:
    """A callable with the signature of transformers' own decoding loops. It keeps one engine per
    model; threads take turns.
    """

    def __init__(self, speculative_config: dict[str, Any], streamer: Any = None) -> None:
        self._config, self._streamer, self._turn = speculative_config, streamer, Lock()
        self._engines: WeakKeyDictionary[Any, LLM] = WeakKeyDictionary()

    def __call__(self, model: Any, input_ids: Tensor, *, generation_config: Any, **keywords: Any) -> Any:
        """Return token ids (B, S + new), right-padded; or transformers' output object if it was
        asked for. Raises ArgumentError for beams, scores and states that a speculative loop does
        not compute, or a prompt that is more than token ids and a mask: embeddings, images,
        positions of one's own.
        """
        mask = keywords.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        _refuse(generation_config, keywords, mask)
        with self._turn:
            return self._generate(model, input_ids, mask, generation_config, keywords)

    def _generate(
        self, model: Any, input_ids: Tensor, mask: Tensor, generation_config: Any, keywords: Mapping[str, Any]
    ) -> Any:
        prompts = [row[kept.bool()].tolist() for row, kept in zip(input_ids, mask, strict=True)]
        llm = self._engine(model, len(prompts), generation_config.max_length)
        streamer, processors = self._streamer, keywords.get("logits_processor") or []
        criteria = [c for c in keywords.get("stopping_criteria") or [] if type(c).__name__ not in _NATIVE]
        answers: list[list[int]] = [[] for _ in prompts]
        running: dict[str, int] = {}
        for index, prompt in enumerate(prompts):
            padding = input_ids[index, : input_ids.shape[1] - len(prompt)].tolist()
            own = (_wrap(processors, padding, index, len(prompts)),) if len(processors) else ()
            params = _params(generation_config, generation_config.max_length - input_ids.shape[1], own)
            running[llm.submit(prompt, params)] = index

        def stops(index: int, token: int) -> bool:
            """Append a token, and return whether a criterion ends the answer with it."""
            answers[index].append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            ids = torch.tensor([[*prompts[index], *answers[index]]])
            return any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in criteria)

        if streamer is not None:
            streamer.put(input_ids.cpu())
        try:
            while running:
                for chunk in llm.engine.step():
                    if chunk.request_id not in running:
                        continue
                    if chunk.error is not None:
                        raise chunk.error
                    index = running[chunk.request_id]
                    if any(stops(index, token.id) for token in chunk.tokens) or chunk.finish_reason is not None:
                        llm.abort(chunk.request_id)
                        del running[chunk.request_id]
        finally:
            for request_id in running:
                llm.abort(request_id)
        if streamer is not None:
            streamer.end()
        return _result(input_ids, answers, generation_config)

    def _engine(self, model: Any, rows: int, length: int) -> LLM:
        llm = self._engines.get(model)
        if llm is None or llm.target.rows < rows or llm.max_model_len < length:
            context = getattr(model.config.get_text_config(), "max_position_embeddings", length)
            slots = min(context, -(-length // _SLOT_STEP) * _SLOT_STEP)
            llm = LLM(
                model,
                tokenizer=False,
                speculative_config=self._config,
                max_num_seqs=rows,
                enable_prefix_caching=False,
                max_model_len=max(slots, min(length, context)),
            )
            self._engines[model] = llm
        return llm


def _refuse(config: Any, keywords: Mapping[str, Any], mask: Tensor) -> None:
    given = {name for name, value in keywords.items() if isinstance(value, Tensor)} - set(_UNDERSTOOD)
    if given:
        raise ArgumentError(
            f"forerun.hf reads token ids; generate() was given {', '.join(sorted(given))}, too or instead: pass "
            "input_ids and attention_mask alone, or leave custom_generate out"
        )
    positions = keywords.get("position_ids")
    if positions is not None and bool((positions != mask.cumsum(-1) - 1)[mask.bool()].any()):
        raise ArgumentError(
            "forerun.hf numbers the prompt's tokens from 0, padding left out; generate() was given other position_ids: "
            "leave them out"
        )
    found = ["num_beams"] if (config.num_beams or 1) > 1 else []
    if config.return_dict_in_generate:
        outputs = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        found += [name for name in outputs if getattr(config, name)]
    if found:
        raise ArgumentError(f"forerun.hf does not support {', '.join(found)} in generate(); leave it out")


def _params(config: Any, room: int, processors: tuple[LogitsProcessor, ...]) -> SamplingParams:
    """Return the sampling parameters. Everything that shapes the distribution comes from
    transformers' processors; the engine adds nothing.
    """
    ends = config.eos_token_id
    return SamplingParams(
        **{**NEUTRAL, "temperature": 1.0 if config.do_sample else 0.0},
        max_tokens=room,
        ignore_eos=True,
        stop_token_ids=[ends] if isinstance(ends, int) else list(ends or ()),
        seed=int(torch.randint(2**62, (1,))),
        detokenize=False,
        logits_processors=processors,
    )


def _wrap(processors: Any, padding: list[int], index: int, batch: int) -> LogitsProcessor:
    """Wrap transformers' processors for row `index` of the batch."""

    def process(tokens: Sequence[int], logits: Tensor) -> Tensor:
        # Some processors hold a state per row and insist on the whole batch: give them this row that many times.
        ids = torch.tensor([[*padding, *tokens]], device=logits.device).expand(batch, -1)
        result: Tensor = processors(ids, logits.expand(batch, -1).clone())[index]
        return result

    return process


def _result(input_ids: Tensor, answers: list[list[int]], config: Any) -> Any:
    width = max(len(answer) for answer in answers)
    pad = config.pad_token_id
    if pad is None:
        ends = config.eos_token_id
        pad = ends[0] if isinstance(ends, list) else ends or 0
    new = torch.tensor([answer + [pad] * (width - len(answer)) for answer in answers], device=input_ids.device)
    sequences = torch.cat([input_ids, new.to(input_ids.dtype)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)
