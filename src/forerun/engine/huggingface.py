"""A forerun decoding loop inside transformers: ``model.generate(...,
custom_generate=forerun.hf("ngram"))``.

transformers prepares inputs, processors and stopping criteria as always; the decoding loop is forerun's. The processors
are applied at every node of the tree, so all of transformers' options (temperature, n-gram bans, forced tokens) work.

The loop also serves training: the model's weights are used in place, a model keeps its engine between calls, and its
training mode is restored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import MaxTimeCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from forerun.control.config import SpeculativeConfig, arms_of
from forerun.core.rules import rule_named
from forerun.drafters import check_options
from forerun.engine.llm import LLM
from forerun.errors import ArgumentError, RequestError, warn_once
from forerun.model.kernels import attention, forwards, packing
from forerun.model.kernels.accelerate import COMPARED
from forerun.model.kernels.acceptance import GLOBAL_HOOKS
from forerun.model.layers import CACHE_ARGUMENTS, base_of, device_of, evaluating, pass_lock
from forerun.model.load import without_wrapper
from forerun.model.sample import draw_tokens
from forerun.params import NEUTRAL
from forerun.types import LogitsProcessor, OutputToken, SamplingParams, SpeculationStats

_log = logging.getLogger(__name__)

_SLOT_STEP = 512
_REPACKS_FROM = 16
"""New tokens of a row from which on it pays to repack the weights for one call. On SmolLM2-135M (one core of an AMD
EPYC) repacking takes as long as it saves in 5 passes over 1 to 64 rows.
"""
_UNDERSTOOD = ("attention_mask", "position_ids", "cache_position")
"""Tensors that `generate` passes besides the token ids; any other tensor would be part of the prompt and is refused."""
_NATIVE = ("MaxLengthCriteria", "EosTokenCriteria")
"""Stopping criteria that the engine itself implements; all others are called after every token."""
_MODES = {
    "contrastive_search": "penalty_alpha",
    "dola_generation": "dola_layers",
    "constrained_beam_search": "force_words_ids or constraints",
    **dict.fromkeys(("beam_search", "beam_sample", "group_beam_search"), "num_beams"),
}
"""transformers' generation modes that give another text, and the options that choose them."""
_DRAFTERS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")
"""Options that choose one of transformers' own drafters, which change no text."""
_WARPERS = (("TopPLogitsWarper", "top_p"), ("TopKLogitsWarper", "top_k"), ("TemperatureLogitsWarper", "temperature"))
"""Processors that the engine applies as sampling parameters if they come last, listed from the last one backwards."""
_BY_ROW = (
    "PrefixConstrainedLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
)
"""transformers' processors that treat the rows of a batch differently; none of its criteria does."""
_STATEFUL = {
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
}
"""Processors that count their calls, of which a tree makes more than there are tokens, and their options."""
_OF_ROWS = {"adapter_names", "alora_offsets", "task_ids"}  # Arguments that PEFT hands to its layers by hooks
_PREPARES = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods by which transformers' loop prepares its passes; this one has its own way, so that a change would be lost."""


def _made(make: Callable[..., HuggingFaceGenerate]) -> Callable[..., HuggingFaceGenerate]:
    """Let `hf` say so where transformers is given the function itself as a loop and calls it with a model."""

    @wraps(make)
    def checked(*given: Any, **options: Any) -> HuggingFaceGenerate:
        if given and isinstance(given[0], torch.nn.Module):
            raise ArgumentError("forerun.hf makes a decoding loop and is none itself; call it: forerun.hf(...)")
        return make(*given, **options)

    return checked


@_made
def hf(
    drafter: str | None = "ngram",
    *,
    streamer: Any = None,
    logprobs_mode: str = "processed_logprobs",
    allow_biased: bool = False,
    repack: bool = True,
    **options: Any,
) -> HuggingFaceGenerate:
    """Return a decoding loop for transformers: ``model.generate(**inputs,
    custom_generate=forerun.hf("ngram"))``.

    transformers 5 does not pass `generate`'s own ``streamer`` and ``tokenizer`` to a custom loop: give the streamer
    here, and stop strings as ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``.

    Args:
        drafter: a name from ``forerun drafters``; None decodes plainly.
        streamer: a transformers streamer that gets the tokens as they are accepted.
        logprobs_mode: the distribution of the log-probabilities in `GenerateOutput`, as in `SamplingParams`.
        allow_biased: accept a lossy rule (``rule="typical"``), under which `logprobs` are the target's, not those of
            the distribution that was sampled from; without it such a rule is an ArgumentError.
        repack: on a CPU, use copies of the weights in a faster layout, made for each call of at least 16 new tokens and
            freed after it; they take as much memory as the weights.
        options: as in ``speculative_config``: ``num_speculative_tokens``, ``model``, ``rule``, ...
    """
    if drafter is None and options:
        raise ArgumentError(f"{', '.join(options)} are options of a drafter, and drafter=None drafts nothing")
    config = {"method": drafter, **options} if drafter else None
    return HuggingFaceGenerate(config, streamer, logprobs_mode, allow_biased=allow_biased, repack=repack)


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """The output of `generate` with ``return_dict_in_generate=True``. `scores` and `logits` are those of transformers,
    and 0 after a row's end.
    """

    logprobs: Tensor | None = None
    """(B, new) float32 log-probabilities of the new tokens as verification computed them; 0 after a row's end."""


class HuggingFaceGenerate:
    """A callable with the signature of transformers' own decoding loops. It keeps one engine per
    model; threads take turns.
    """

    def __init__(
        self,
        speculative_config: dict[str, Any] | None,
        streamer: Any = None,
        logprobs_mode: str = "processed_logprobs",
        *,
        allow_biased: bool = False,
        repack: bool = True,
    ) -> None:
        self._config, self._streamer, self._turn, self._repack = speculative_config, streamer, Lock(), repack
        self._logprobs_mode = SamplingParams(logprobs_mode=logprobs_mode).logprobs_mode
        self._allow_biased = allow_biased
        parsed = SpeculativeConfig.parse(speculative_config)
        for arm in () if parsed is None else arms_of(parsed):
            check_options(arm.method, arm.drafter_options)
        rule = None if parsed is None else parsed.rule
        if rule is not None and not (allow_biased or rule_named(rule).lossless):
            raise ArgumentError(
                f"rule {rule!r} is lossy: tokens are not sampled from the policy, and a gradient from them is biased; "
                "leave the rule out, or accept that with allow_biased=True"
            )
        self._engines: WeakKeyDictionary[Any, _Served] = WeakKeyDictionary()
        self.speculation = SpeculationStats()
        """Counts of the last call, all rows together, without the rows that a custom stopping criterion ended."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the settings: engines belong to the model objects that they run."""
        make = partial(type(self), allow_biased=self._allow_biased, repack=self._repack)
        return make, (self._config, self._streamer, self._logprobs_mode)

    def __call__(self, model: Any, input_ids: Tensor, *, generation_config: Any, **keywords: Any) -> Any:
        """Return token ids (B, S + new), right-padded; or a `GenerateOutput` if ``return_dict_in_generate`` is set.
        Raises ArgumentError for beams, attentions and hidden states, which a speculative loop does not compute, for
        weights that are sharded over processes, and for prompts with more than token ids and a mask: embeddings,
        images, custom positions, a cache that holds tokens. Raises UnsupportedModelError for virtual tokens (PEFT's
        prompt tuning).
        """
        mask = keywords.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        _refuse(generation_config, keywords, mask)
        _refuse_changed(model)
        _refuse_sharded(model)
        repacks = self._repack and generation_config.max_length - input_ids.shape[1] >= _REPACKS_FROM
        # Autocast gives states another dtype than the weights have, and a hook on all modules is to see those modules.
        repacks = repacks and not torch.is_autocast_enabled("cpu") and not any(GLOBAL_HOOKS)
        with self._turn, pass_lock(base_of(model)), evaluating(model):
            weights = _WeightWatch(model)
            with packing.packed_for_now(model, model.get_output_embeddings()) if repacks else nullcontext():
                return self._generate(model, input_ids, mask, generation_config, keywords, weights=weights)

    def _generate(
        self,
        model: Any,
        input_ids: Tensor,
        mask: Tensor,
        generation_config: Any,
        keywords: Mapping[str, Any],
        *,
        weights: _WeightWatch,
    ) -> Any:
        streamer = self._streamer
        processors = keywords.get("logits_processor") or []
        criteria, length, ends = _take_native(keywords.get("stopping_criteria") or [], generation_config.max_length)
        asked = generation_config
        scores = bool(asked.return_dict_in_generate and (asked.output_scores or asked.output_logits))
        shows_scores = bool(asked.return_dict_in_generate and asked.output_scores)
        processors, warpers = (processors, {}) if scores else _take_warpers(processors)
        rows = list[_BatchRow]()
        for index, (ids, real_mask) in enumerate(zip(input_ids.tolist(), mask.bool().tolist(), strict=True)):
            prompt = [token for token, real in zip(ids, real_mask, strict=True) if real]
            rows.append(_BatchRow(index=index, ids=ids, prompt=prompt, batch=len(input_ids), processors=processors))
        began = time.time()
        served = self._engine(model, len(rows), length)
        criteria = [_delayed(criterion, time.time() - began) for criterion in criteria]
        llm, room = served.llm, length - input_ids.shape[1]
        _warn_of_ends(mask, room, llm.max_model_len)
        params = self._params(generation_config, room, ends, warpers)
        # Rows with the same prompt become one request with several completions, unless a processor treats rows
        # differently.
        alike = not (scores or len(processors) or criteria)
        groups = dict[Any, list[_BatchRow]]()
        for row in rows:
            groups.setdefault(tuple(row.prompt) if alike else row.index, []).append(row)
        running: dict[str, list[_BatchRow]] = {}
        for group in groups.values():
            running[llm.submit(group[0].prompt, group[0].params(params, len(group), scores))] = group

        def stops(row: _BatchRow, token: OutputToken) -> bool:
            """Append a token, and return whether a stopping criterion ends the row with it."""
            row.append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token.id]))
            return any([row.ended_by(criterion, input_ids.device, shows_scores) for criterion in criteria])

        if streamer is not None:
            streamer.put(input_ids.cpu())
        try:
            with _folding(model, served.folds), _in_kernels(model, served):
                self.speculation = _run(llm, running, stops, weights)
        finally:
            for request_id in running:
                llm.abort(request_id)
        if streamer is not None:
            streamer.end()
        return _result(input_ids, rows, generation_config)

    def _params(self, config: Any, room: int, ends: list[int], warpers: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters of all rows. Everything that shapes the distribution comes from
        transformers' processors, of which these `warpers` are the last; the engine adds nothing.
        """
        return SamplingParams(
            **{**NEUTRAL, "temperature": 1.0 if config.do_sample else 0.0, **warpers},
            max_tokens=room,
            stop_token_ids=ends,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if config.return_dict_in_generate else None,
            logprobs_mode=self._logprobs_mode,
            allow_biased=self._allow_biased,
        )

    def _engine(self, model: Any, rows: int, length: int) -> _Served:
        """Return the model's engine, with room for `rows` rows of this length. A new one is made only if the model's
        embeddings, output head, dtype, device, own forward or hooks before it have changed: an engine runs what is
        inside of that, and its self-check refuses a model of which something outside counts.
        """
        context = getattr(model.config.get_text_config(), "max_position_embeddings", length)
        longest = min(context, -(-length // _SLOT_STEP) * _SLOT_STEP)
        around = (*model._forward_pre_hooks, *(ref(value) for name, value in vars(model).items() if name == "forward"))
        ends = model.get_input_embeddings(), model.get_output_embeddings(), model.dtype, model.device, *around
        served = self._engines.get(model)
        if served is None or served.ends != ends:
            folds = attention.suits(model) and attention.refusal(model, _tokens_for(model)) is None
            with _folding(model, folds):
                llm = LLM(
                    model,
                    tokenizer=False,
                    speculative_config=self._config,
                    max_num_seqs=rows,
                    enable_prefix_caching=False,
                    max_model_len=longest,
                )
            served = self._engines[model] = _Served(llm=llm, ends=ends, folds=folds)
        llm = served.llm
        if llm.target.rows < rows or llm.max_model_len < min(length, llm.target.max_length):
            llm.grow(max(rows, llm.target.rows), max(longest, llm.max_model_len))
        return served


def _run(
    llm: LLM,
    running: dict[str, list[_BatchRow]],
    stops: Callable[[_BatchRow, OutputToken], bool],
    weights: _WeightWatch,
) -> SpeculationStats:
    """Step the engine until every row of these requests has ended, and return the counts. Raises ArgumentError if a
    weight changes meanwhile.
    """
    counts, rows = SpeculationStats(), sum(map(len, running.values()))
    while running:
        chunks = llm.engine.step()
        if (changed := weights.changed()) is not None:
            raise ArgumentError(
                f"an optimiser's step, or another write to {changed}, came while generate() ran a rollout of {rows} "
                "rows: their tokens are from two policies, and it ends here; step once generate() has returned"
            )
        for chunk in chunks:
            if chunk.request_id not in running:
                continue
            if chunk.error is not None:
                cause = chunk.error.__cause__ if isinstance(chunk.error, RequestError) else None
                raise cause or chunk.error  # The user's own exception, as transformers raises it
            group = running[chunk.request_id]
            row = group[chunk.index]
            row.ended = any(stops(row, token) for token in chunk.tokens) or chunk.finish_reason is not None
            row.seen.clear()
            if chunk.output is not None:
                for output in chunk.output.outputs:
                    counts.add(output.speculation)
            if all(other.ended for other in group):
                llm.abort(chunk.request_id)
                del running[chunk.request_id]
    return counts


class _WeightWatch:
    """A snapshot of a model's weight versions, which shows whether a weight was written to in place or replaced."""

    def __init__(self, model: Any) -> None:
        self._weights = [(name, one) for name, one in model.named_parameters() if not one.is_inference()]
        self._before = self._states()

    def _states(self) -> list[tuple[int, int]]:
        return [(weight._version, weight.data_ptr()) for _, weight in self._weights]

    def changed(self) -> str | None:
        """Return the name of a weight that has changed since the snapshot, or None."""
        now = self._states()
        if now == self._before:
            return None
        states = zip(self._weights, now, self._before, strict=True)
        return next(name for (name, _), new, old in states if new != old)


@dataclass(kw_only=True, slots=True)
class _Served:
    """A model's engine."""

    llm: LLM
    ends: tuple[Any, ...]  # Embeddings and head, which it refers to, dtype and device, and what is around its forward
    folds: bool  # Whether attention may read the keys of grouped heads without copies of them
    kernels: list[str] | None = None  # Names of modules that forerun's kernels replace; None: not compared yet
    code: list[Any] = field(default_factory=list)  # The forwards of all modules' classes when they were compared


def _tokens_for(model: Any) -> Tensor:
    return torch.tensor([draw_tokens(model, COMPARED)], device=device_of(model.get_input_embeddings()))


@contextmanager
def _folding(model: Any, folds: bool) -> Iterator[None]:
    """Let attention read the keys of grouped heads without copies within the context, if it `folds`."""
    if not folds:
        yield
        return
    attention.install(model)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@contextmanager
def _in_kernels(model: Any, served: _Served) -> Iterator[None]:
    """Run norms, MLPs and layers of packed weights in forerun's kernels within the context. The first time, and where
    modules are of other classes than then, the kernels are compared with the modules that they replace.
    """
    if not packing.packed_bytes(model):
        yield
        return
    code = [type(module).forward for module in model.modules()]
    if code != served.code:
        served.kernels, served.code = None, code
    try:
        forwards.install(model, _tokens_for(model) if served.kernels is None else None, served.kernels)
        served.kernels = forwards.list_installed(model)
        yield
    finally:
        forwards.remove(model)


def _take_warpers(processors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split off the last processors that the engine applies itself, and return the others, and these as parameters."""
    left, taken = list(processors), dict[str, Any]()
    for kind, name in _WARPERS:
        if left and type(left[-1]).__name__ == kind and getattr(left[-1], "min_tokens_to_keep", 1) == 1:
            taken[name] = getattr(left.pop(), name)
    return left, taken


def _take_native(criteria: Sequence[Any], length: int) -> tuple[list[Any], int, list[int]]:
    """Split off the criteria that the engine implements, and return the others, the most tokens of a row (`length` if
    no criterion says it) and the ids that end it.
    """
    lengths = [one.max_length for one in criteria if type(one).__name__ == "MaxLengthCriteria"]
    ends = [one.eos_token_id.tolist() for one in criteria if type(one).__name__ == "EosTokenCriteria"]
    left = [one for one in criteria if type(one).__name__ not in _NATIVE]
    return left, min(lengths, default=length), [token for ids in ends for token in ids]


def _delayed(criterion: Any, seconds: float) -> Any:
    """Return a criterion that counts time so much later, which the engine took to be built; others are left alone."""
    if type(criterion) is not MaxTimeCriteria:
        return criterion
    return MaxTimeCriteria(criterion.max_time, criterion.initial_timestamp + seconds)


def _refuse(config: Any, keywords: Mapping[str, Any], mask: Tensor) -> None:
    tensors = {name for name, value in keywords.items() if isinstance(value, Tensor)} - set(_UNDERSTOOD)
    if tensors:
        raise ArgumentError(
            f"forerun.hf reads token ids; generate() was given {', '.join(sorted(tensors))}, too or instead: pass "
            "input_ids and attention_mask alone, or leave custom_generate out"
        )
    positions = keywords.get("position_ids")
    if positions is not None and bool((positions != mask.cumsum(-1) - 1)[mask.bool()].any()):
        raise ArgumentError(
            "forerun.hf numbers the prompt's tokens from 0, padding left out; generate() was given other position_ids: "
            "leave them out"
        )
    mode = config.get_generation_mode().value
    unsupported = [_MODES[mode]] if mode in _MODES else []
    if config.return_dict_in_generate:
        unsupported += [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]
    names = [type(processor).__name__ for processor in keywords.get("logits_processor") or ()]
    unsupported += [_STATEFUL[name] for name in names if name in _STATEFUL]
    caches = {name: keywords.get(name) for name in CACHE_ARGUMENTS}
    unsupported += [f"a {name} that holds tokens" for name, cache in caches.items() if _holds_tokens(cache)]
    if unsupported:
        raise ArgumentError(f"forerun.hf does not support {', '.join(unsupported)} in generate(); leave it out")
    if drafters := [name for name in _DRAFTERS if getattr(config, name, None)]:
        warn_once(
            _log,
            f"hf drafters {drafters}",
            "%s of generate() is not used: forerun.hf drafts itself, as its first argument says",
            ", ".join(drafters),
        )


def _holds_tokens(cache: Any) -> bool:
    count = getattr(cache, "get_seq_length", None)
    return bool(cache) if count is None else bool(count())


def _refuse_changed(model: Any) -> None:
    """Raise a ForerunError if the passes of transformers' own loop would be changed in a way that this one's are not:
    by a method on the model object, as PEFT's virtual tokens are, or by hooks of PEFT for this call's rows.
    """
    for name in _PREPARES:
        method = vars(model).get(name)
        if method not in (None, getattr(type(model), name).__get__(model)):  # PEFT leaves the model's own there
            without_wrapper(getattr(method, "__self__", None))
            raise ArgumentError(
                f"forerun.hf does not call {name}, which was replaced on this {type(model).__name__}: what it adds "
                "would be lost; delete it from the model object, or leave custom_generate out"
            )
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            code = getattr(hook, "func", hook)
            names = {*getattr(hook, "keywords", ()), *getattr(getattr(code, "__code__", None), "co_freevars", ())}
            if str(code.__module__).startswith("peft.") and (found := sorted(names & _OF_ROWS)):
                raise ArgumentError(
                    f"forerun.hf does not support PEFT's {found[0]}, which changes weights by row or position: choose "
                    "one adapter for the whole batch (set_adapter), or leave custom_generate out"
                )


def _warn_of_ends(mask: Tensor, room: int, context: int) -> None:
    """Warn once of rows that the context will end, and of padding on the right, of which transformers makes a part of
    the text.
    """
    longest = int(mask.sum(1).max())
    if longest + room > context:
        text = (
            "a prompt of %d tokens and max_new_tokens %d are more than the context of %d: rows end there, short of it"
        )
        warn_once(_log, f"hf context {context}", text, longest, room, context)
    if bool((mask[:, -1] == 0).any()):
        warn_once(
            _log,
            "hf right padding",
            "prompts are padded on the right: forerun.hf leaves padding out and continues the prompts, transformers "
            "continues the padding and gives another text; set padding_side='left' in the tokenizer",
        )


def _refuse_sharded(model: Any) -> None:
    """Raise ArgumentError if the weights are sharded over processes, which would all have to run as many passes."""
    for name, weight in model.named_parameters():
        if hasattr(weight, "ds_id") and weight.numel() == 0:
            raise ArgumentError(
                f"DeepSpeed ZeRO-3 holds a part of {name} in each process: gather the weights while generate() runs, "
                "with TRL's unwrap_model_for_generation and ds3_gather_for_generation=True"
            )
    if any(
        any("FullyShard" in kind.__name__ or kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
        for module in model.modules()
    ):
        raise ArgumentError(
            "FSDP gathers weights in every pass, in all processes at once, and with speculation the numbers of passes "
            "differ: generate with a whole copy of the model, or leave custom_generate out"
        )


@dataclass(kw_only=True, eq=False)
class _BatchRow:
    """One row of the batch, with its output so far."""

    index: int
    ids: list[int]  # As given, with padding
    prompt: list[int]  # Without padding
    batch: int  # Rows of the batch
    processors: Any  # transformers'
    output: list[int] = field(default_factory=list)
    ended: bool = False
    logprobs: list[float] = field(default_factory=list)
    scored: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # Raw and processed logits (V,) of each token
    seen: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Raw and processed logits after every output that this step has scored, if they are wanted."""

    def params(self, params: SamplingParams, count: int, scores: bool) -> SamplingParams:
        """Return the parameters of a request for `count` completions of this row's prompt, from those of all rows; with
        `scores` its processor keeps all logits for `append`.
        """
        logits_processors: tuple[LogitsProcessor, ...] = (self._process,) if len(self.processors) else ()
        logits_processors = (self._keep,) if scores else logits_processors
        return replace(params, n=count, seed=int(torch.randint(2**62, (1,))), logits_processors=logits_processors)

    def append(self, token: OutputToken) -> None:
        """Append a token to the output, with its log-probability and logits if these are wanted."""
        if token.logprob is not None:
            self.logprobs.append(token.logprob.logprob)
        if self.seen:
            self.scored.append(self.seen[tuple(self.output)])
        self.output.append(token.id)

    def ended_by(self, criterion: Any, device: torch.device, shows_scores: bool) -> bool:
        """Return whether a stopping criterion ends this row. It gets what transformers would pass, the scores only with
        `shows_scores`.
        """
        ids, scores = torch.tensor([[*self.ids, *self.output]], device=device), None
        if shows_scores:
            scores = tuple([processed.unsqueeze(0) for _, processed in self.scored])
        if not _is_alike(criterion):
            ids = ids.expand(self.batch, -1)
            scores = scores and tuple([each.expand(self.batch, -1) for each in scores])
        return bool(torch.as_tensor(criterion(ids, scores)).expand(len(ids))[self.index % len(ids)])

    def _process(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Apply transformers' processors."""
        padding = self.ids[: len(self.ids) - len(self.prompt)]
        ids, values = torch.tensor([[*padding, *tokens]], device=logits.device), logits.unsqueeze(0).clone()
        for processor in self.processors:
            if _is_alike(processor):
                values = processor(ids, values)
            else:  # A processor may have a state for each row and need the whole batch, so it gets copies of this row
                every = processor(ids.expand(self.batch, -1), values.expand(self.batch, -1).clone())
                values = every[self.index : self.index + 1]
        return values[0]

    def _keep(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Apply transformers' processors, and keep their input and output. Entries from a drafter's calls are
        overwritten by those of the target.
        """
        processed = self._process(tokens, logits) if len(self.processors) else logits
        self.seen[tuple(tokens[len(self.prompt) :])] = logits.clone(), processed.clone()
        return processed


def _is_alike(called: Any) -> bool:
    """Return whether a processor or criterion treats all rows alike, and needs no batch to know which it is given."""
    kind = type(called)
    return kind.__module__.startswith("transformers.") and kind.__name__ not in _BY_ROW


def _result(input_ids: Tensor, rows: Sequence[_BatchRow], config: Any) -> Any:
    pad = config.pad_token_id
    if pad is None:
        ends = config.eos_token_id
        pad = ends[0] if isinstance(ends, list) else ends or 0
    outputs = [torch.tensor(row.output, dtype=input_ids.dtype) for row in rows]
    new = pad_sequence(outputs, batch_first=True, padding_value=pad).to(input_ids.device)
    sequences = torch.cat([input_ids, new], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    logprobs = pad_sequence([torch.tensor(row.logprobs) for row in rows], batch_first=True).to(input_ids.device)
    raw, processed = (_by_token([[pair[part] for pair in row.scored] for row in rows]) for part in (0, 1))
    return GenerateOutput(
        sequences=sequences,
        scores=processed if config.output_scores else None,
        logits=raw if config.output_logits else None,
        logprobs=logprobs,
    )


def _by_token(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...] | None:
    """Return the logits (B, V) at each new token, from those (V,) of each row, 0 where a row has ended."""
    longest = max(map(len, rows))
    if not longest:
        return None
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[place] if place < len(row) else nothing for row in rows]) for place in range(longest))
