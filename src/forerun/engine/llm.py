"""`LLM`: the engine's public interface, with vLLM's names."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import torch
from tqdm import tqdm

from forerun import shipped
from forerun.control.config import (
    MAX_SPECULATIVE_TOKENS,
    SpeculativeConfig,
    check_models_named,
    check_sizes,
    drafter_bytes,
    from_old_keywords,
    reads_layers,
)
from forerun.control.measuring import known_or_nominal
from forerun.decode.drafter import DrafterSetup
from forerun.engine.arguments import EngineArguments, LoadingArguments
from forerun.engine.completion import Request
from forerun.engine.core import Engine
from forerun.engine.drafting import DrafterPool
from forerun.engine.prompts import Prompt, PromptReader, Speculative, conversation, pair_prompts
from forerun.engine.scheduling import Scheduling
from forerun.errors import (
    CLOSED,
    ArgumentError,
    EngineError,
    about,
    check_arguments,
    name_unknown_arguments,
    refuse_unknown,
)
from forerun.model import Buckets
from forerun.model.back_ends import context_of, load_target
from forerun.model.load import find_device
from forerun.model.names import load_tokenizer, warn_of_more_tokens
from forerun.model.target import PREFILL_CHUNK, Target
from forerun.model.templates import read_template
from forerun.other_engines import ARGUMENTS, REQUEST_ARGUMENTS
from forerun.types import RequestOutput, SamplingParams, StreamChunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Conversation = Sequence[Mapping[str, Any]]  # Messages: ``{"role": ..., "content": ...}``

REPRODUCIBLE_NODES = 16  # Nodes of every pass in reproducible mode, root included: 16 cost about as much as one

_HEADROOM = MAX_SPECULATIVE_TOKENS + 1  # Slots after the longest text, for drafted tokens
OF_TEMPLATES = ("tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
SLEEPING_PARTS = ("weights", "kv_cache")  # vLLM's tags for `LLM.wake_up`


class LLM:
    """A language model with speculative decoding. Threads may share it: their requests run in one batch.

    Use it as ``with LLM(...) as llm`` or call `close` to free its memory at a known time.

    Args:
        model: a checkpoint directory, a hub id, ``"demo"``, or a loaded transformers model (left as it is).
        tokenizer: directory, hub id or object; None takes the model's own. ``False`` works on token ids alone.
        chat_template: a Jinja file, a template's text or ``"hermes"`` (ChatML with tools); None is the tokenizer's own.
        speculative_config: a method's name (``"auto"``), or vLLM's dict, e.g. ``{"method": "ngram",
            "num_speculative_tokens": 8}``; None is plain decoding.
        dtype: ``"auto"`` (the checkpoint's; float32 on a CPU that only emulates that), ``"float32"``, ``"bfloat16"``,
            ``"float16"``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``...; None takes an accelerator if there is one.
        max_model_len: most tokens of prompt and output together; None takes the model's context, at most 8192.
        max_num_seqs: most completions that run at once (rows of the cache).
        max_num_batched_tokens: most prompt tokens of a pass. None: 512 on an accelerator; on a CPU, as many as delay
            running requests by at most three decoding steps (measured). `LLM` takes 512, `AsyncLLM` None.
        enable_prefix_caching: reuse the cached prefix of an earlier request.
        kv_cache_tokens: most tokens in all rows together, see `Scheduling`; it also bounds `max_model_len`. None: as
            many as the rows can hold. Requests that do not fit are preempted and continue later, with the same output.
        seed: for requests without a seed: each gets one derived from it and from the number of requests before, so that
            a run repeats and its outputs differ. None: each gets a random one.
        reproducible: run every pass with the same number of nodes, so that plain and speculative decoding of a chain
            compute the same bits in bfloat16, too. Drafts are limited to 15 nodes, and no prefix is reused.
        check: verify the step's invariants while running (slow).
        loading: how the model is loaded, `LoadingArguments`: backend, device_map, tp_plan, adapter, revision,
            trust_remote_code, token, self_check, repack. The older keywords ``speculative_model``,
            ``num_speculative_tokens``, ``ngram_prompt_lookup_max`` and ``ngram_prompt_lookup_min`` work, too.

    Raises:
        TypeError: an unknown keyword; the message names the nearest one, or what takes the place of vLLM's.
        ForerunError: the model or the drafter cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: str | Path | PreTrainedTokenizerBase | bool | None = None,
        chat_template: str | Path | None = None,
        speculative_config: Mapping[str, Any] | str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int | None = PREFILL_CHUNK,
        enable_prefix_caching: bool = True,
        kv_cache_tokens: int | None = None,
        seed: int | None = None,
        reproducible: bool = False,
        check: bool = False,
        **loading: Unpack[LoadingArguments],
    ) -> None:
        check_arguments("LLM", loading, EngineArguments.__annotations__, ARGUMENTS)
        opening: dict[str, Any] = {**loading}
        self.speculative = _configured(speculative_config, opening)
        check_sizes(max_model_len, max_num_seqs, kv_cache_tokens)
        most_batched = PREFILL_CHUNK if reproducible and max_num_batched_tokens is None else max_num_batched_tokens
        check_models_named(self.speculative, str(getattr(model, "name_or_path", model)))
        own_tokenizer = cache(partial(load_tokenizer, model, tokenizer, read_template(chat_template)))  # On demand
        weights, cached = drafter_bytes(self.speculative)
        opening |= {"backend": _back_end(opening, self.speculative), "dtype": dtype, "device": device}
        _check_context(max_model_len, model, opening)
        target = load_target(
            model,
            rows=max_num_seqs,
            slots=None if max_model_len is None else max_model_len + _HEADROOM,
            reserve_bytes=weights,
            reserve_bytes_per_slot=cached,
            tokens=None if kv_cache_tokens is None else kv_cache_tokens + max_num_seqs * _HEADROOM,
            tokenizer=own_tokenizer,
            **opening,
        )
        most, limit = target.max_length, target.cached_tokens_limit
        kv_cache_tokens = kv_cache_tokens if limit is None else min(limit, kv_cache_tokens or limit)
        self.max_model_len = min(most, target.slots - _HEADROOM, kv_cache_tokens or most)
        _refuse_longer(max_model_len, most)
        self.tokenizer = own_tokenizer()
        warn_of_more_tokens(self.tokenizer, target.vocab_size)
        self.reader = PromptReader(
            tokenizer=self.tokenizer,
            generation_config=target.generation_config,
            vocab_size=target.vocab_size,
            context=self.max_model_len,
            longest=most,
            default_seed=seed,
            speculative=self.speculative,
        )
        cost = cache(partial(known_or_nominal, target))  # Read on demand
        setup = DrafterSetup(
            target=target,
            tokenizer=self.tokenizer,
            rows=max_num_seqs,
            slots=target.slots,
            pass_ms=lambda drafted: cost().pass_ms(drafted + 1),
        )
        if reproducible:
            target.check_reproducible()
            target.buckets = Buckets(nodes=(REPRODUCIBLE_NODES,))
        scheduling = Scheduling(
            max_num_batched_tokens=most_batched,
            whole_chunks=reproducible,
            enable_prefix_caching=enable_prefix_caching and not reproducible,
            kv_cache_tokens=kv_cache_tokens,
        )
        pool = DrafterPool(setup, nodes=REPRODUCIBLE_NODES - 1 if reproducible else MAX_SPECULATIVE_TOKENS)
        self.name = str(getattr(model, "name_or_path", model))  # As the caller gave it
        self._engine: Engine | None = Engine(target, pool, scheduling, check=check)  # None once it is closed
        self._drafter = self.engine.drafting.ensure(self.speculative)
        self._asleep = set[str]()  # Of `SLEEPING_PARTS`
        self._keep_costs = weakref.finalize(self, pool.keep_costs)
        self._inbox: dict[str, deque[StreamChunk]] = {}
        self._line, self._turn = Lock(), Lock()  # Held by the next thread in line, and by the one that uses the engine
        self._ending = deque[str]()  # Requests to abort: done by the thread that uses the engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._engine is None:
            return f"LLM({self.name!r}, closed)"
        drafter = None if self.speculative is None else self.speculative.method
        return f"LLM({self.name!r}, drafter={drafter!r}: {self.target.runs_as})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled or copied: it holds a model, its caches and running requests; make one in each "
            "process, of the same arguments; threads may share one"
        )

    @property
    def engine(self) -> Engine:
        """The engine that batches the requests. Raises EngineError once the `LLM` is closed."""
        if self._engine is None:
            raise EngineError(CLOSED)
        return self._engine

    @property
    def target(self) -> Target:
        """The model on its back end. Raises EngineError once the `LLM` is closed."""
        return self.engine.target

    def close(self) -> None:
        """Free the memory of the model, the drafters and their caches. A running step ends first; unfinished and later
        requests end with an EngineError. A second call does nothing.
        """
        with self._alone():
            if self._engine is None:
                return
            self._keep_costs()  # Before the drafters are freed
            self._engine = None
            self._inbox.clear()
        gc.collect()  # Modules and hooks refer to each other
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises ArgumentError if there is none (``tokenizer=False``)."""
        if self.tokenizer is None:
            raise ArgumentError("there is no tokenizer: the LLM was made with tokenizer=False")
        return self.tokenizer

    @name_unknown_arguments(REQUEST_ARGUMENTS)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: Speculative = None,
        trace: bool = False,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate completions for all prompts, and return the outputs in the prompts' order.

        Args:
            prompts: one or many: text, token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``.
            sampling_params: one for all or one for each; None takes the model's defaults.
            speculative: the drafter of these requests: None is the engine's own, False is plain decoding; else a
                method's name or a configuration.
            trace: keep a `StepTrace` of every step in the outputs.
            timeout_s: longest time from queueing to the end, seconds; a request that takes longer ends with the tokens
                that it has and the finish reason ``"abort"``.
            cache_salt: isolation domain: cached prefixes, and what drafters have learned, are used within a domain
                only. All requests without a salt share one domain.
            priority: one for all prompts or one for each; of all requests with a priority, that with the lowest number
                goes first.
            use_tqdm: show the number of finished requests on stderr.
        """
        client = None if priority is None else "priority"  # Among the requests of one client priorities count
        submit = partial(
            self.submit, speculative=speculative, trace=trace, timeout_s=timeout_s, cache_salt=cache_salt, client=client
        )
        ids: list[str] = []
        pairs = pair_prompts(prompts, sampling_params)
        priorities = list(priority) if isinstance(priority, Sequence) else [priority or 0] * len(pairs)
        if len(priorities) != len(pairs):
            raise ArgumentError(f"{len(priorities)} priorities for {len(pairs)} prompts; give one, or one for each")
        try:
            for (prompt, params), number in zip(pairs, priorities, strict=True):
                ids.append(submit(prompt, params, priority=number))
            return [self._wait(request_id) for request_id in tqdm(ids, "Completions", disable=not use_tqdm)]
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise

    @name_unknown_arguments(REQUEST_ARGUMENTS)
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculative: Speculative = None,
        trace: bool = False,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield one prompt's completion, a chunk per step; the last chunk has the whole output. Closing the iterator
        aborts the request.
        """
        submit = partial(self.submit, speculative=speculative, trace=trace, timeout_s=timeout_s, cache_salt=cache_salt)
        return self._chunks(submit(prompt, sampling_params or SamplingParams()))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one or many conversations (``[{"role": ..., "content": ...}]``), with the
        model's chat template.

        Args:
            keywords: those of `generate`, and those of vLLM's `chat` for the template: `tools`, see `chat_prompt`,
                `chat_template_kwargs` (its variables), `continue_final_message`, `add_generation_prompt`.
        """
        prompts = self.chat_prompts(messages, **take_template_arguments(keywords))
        return self.generate(prompts, sampling_params, **keywords)

    def stream_chat(
        self, messages: Conversation, sampling_params: SamplingParams | None = None, **keywords: Any
    ) -> Iterator[StreamChunk]:
        """Yield a conversation's next message as `chat` returns it, a chunk per step."""
        [prompt] = self.chat_prompts([list(messages)], **take_template_arguments(keywords))
        return self.stream(prompt, sampling_params, **keywords)

    def chat_prompts(
        self,
        messages: Conversation | Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template: Any,
    ) -> list[dict[str, Any]]:
        """Apply `chat_prompt` to one or many conversations, with `chat_template_kwargs` among the template's
        variables.
        """
        template |= chat_template_kwargs or {}
        several = isinstance(messages, Sequence) and all(isinstance(one, list | tuple) for one in messages)
        conversations: Sequence[Any] = messages if several else [messages]
        return [self.chat_prompt(one, tools, **template) for one in conversations]

    def chat_prompt(
        self, messages: Conversation, tools: Sequence[Mapping[str, Any]] | None = None, **template: Any
    ) -> dict[str, Any]:
        """Apply the chat template, and return text and token ids, including the generation prompt.

        Messages and tools are read as plain text: only the template writes control tokens, such as the marks of roles.
        Raises ArgumentError if there is no template, if it takes no tools or refuses the conversation, or if the text
        of a control token in a message cannot be tokenized as text.

        Args:
            tools: functions that the model may call: ``[{"type": "function", "function": {"name": ..., ...}}]``.
            template: further variables, e.g. ``enable_thinking=False``; ``continue_final_message``, as in transformers.
        """
        if self.tokenizer is None or not self.has_chat_template:
            raise ArgumentError("the tokenizer has no chat template; use generate() with a prompt of your own")
        encode = partial(self.reader.encode, "prompt", add_special_tokens=False)
        with about("prompt"):
            return conversation(self.tokenizer, messages, tools, template, encode)

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's default sampling parameters, from its ``generation_config.json``. A request has these
        where it sets no others.
        """
        return self.reader.resolve(SamplingParams())

    def read_prompt(self, prompt: Prompt, sampling_params: SamplingParams) -> dict[str, Any]:
        """Tokenize a prompt, and return its text (None if it was truncated) and token ids. Raises ArgumentError if it
        is empty or does not fit.
        """
        text, ids = self.reader.tokens(prompt, sampling_params)
        return {"prompt": text, "prompt_token_ids": ids}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises ArgumentError if it is longer than the context."""
        with about("prompt"):
            return self.reader.encode("prompt", text, add_special_tokens=add_special_tokens)

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        speculative: Speculative = None,
        trace: bool = False,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        client: str | None = None,
        user: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id; the engine's `step` advances it. Raises ArgumentError
        if the prompt does not fit, or an option is out of range.

        Args:
            cache_salt: isolation domain, see `generate`.
            client: rows are shared evenly among clients. None: a client of its own.
            user: a client's rows are shared evenly among its users, of whom None is one.
            priority: of a client's requests the one with the lowest number goes first.
        """
        request = self.reader.request(
            next(self.reader.numbers),
            prompt,
            sampling_params,
            speculative=speculative,
            trace=trace,
            timeout_s=timeout_s,
        )
        request.set_owner(cache_salt=cache_salt, client=client, user=user, priority=priority)
        with self._alone():
            return self.queue(request)

    def queue(self, request: Request) -> str:
        """Queue a request of `reader` and return its id; raises as `submit` does. Only for the thread that steps
        the engine.
        """
        if self.is_sleeping:
            raise ArgumentError("the engine sleeps and takes no requests: call wake_up first")
        drafter = self.engine.drafting.ensure(request.speculative)
        for completion in request.completions:
            completion.drafter = drafter
        self.engine.add(request)
        return request.id

    def grow(self, max_num_seqs: int, max_model_len: int) -> None:
        """Make room for more or longer requests, while none runs. Nothing is loaded or checked again, and drafters keep
        what they have learned.

        Args:
            max_num_seqs: as for `LLM`; at least the present value.
            max_model_len: as for `LLM`; the model's context and `kv_cache_tokens` bound it.

        Raises:
            ArgumentError: requests are waiting or running, or llama.cpp runs the model.
            OutOfMemoryError: such a cache does not fit.
        """
        with self._alone():
            if self.engine.busy:
                raise ArgumentError("the engine grows between requests only: wait for the running ones, or abort them")
            most = self.engine.scheduling.kv_cache_tokens or max_model_len
            length = min(max_model_len, self.target.max_length, most)
            self.engine.grow(max_num_seqs, length + _HEADROOM)
            self.max_model_len = length
            self.reader = replace(self.reader, context=length)

    def load_drafter(self, model: str | Path) -> None:
        """Replace the configured method's head or draft model by the one in the directory `model`, or by a shipped one
        of that name (``demo-eagle3``), for new requests.
        Submitted requests finish with the old one, whose memory is freed after the last of them. Outputs have the
        target's distribution with either.

        Raises:
            ForerunError: no drafter with a single model is configured, there is no such directory, or its model does
                not fit the target. The old drafter stays.
        """
        if self._drafter is None:
            raise ArgumentError("no drafter is configured (speculative_config), so there is none to replace")
        folder = Path(shipped.resolve(model)).expanduser()
        if not folder.is_dir():
            raise ArgumentError(f"there is no directory {folder}; name the one that holds the new head or draft model")
        began = time.perf_counter()
        with self._alone():
            self.engine.load_drafter(self._drafter, str(folder))
        log.info("drafter loaded from %s in %.2f s; it drafts for new requests", folder, time.perf_counter() - began)

    def update_weights_from_disk(self, model_path: str | Path) -> None:
        """Replace the target's weights by those of another checkpoint of the same model, in the directory `model_path`,
        as a trainer saves it. Cached prefixes are dropped; drafters keep what they have learned from texts. Heads and
        draft models keep their own weights, see `load_drafter`.

        Raises:
            ForerunError: requests are waiting or running, there is no such directory, or it holds a model of another
                shape, another tokenizer, or weights that are not finite. The old weights stay.
        """
        folder = Path(model_path).expanduser()
        weights = self.target.open_weights(folder, self.tokenizer)
        with self._alone():
            if self.engine.busy:
                raise ArgumentError(
                    f"the weights cannot change to those in {model_path} while {self.engine.running} completions run "
                    f"and {self.engine.waiting} wait, which would be from two policies: wait for them, or abort them"
                )
            self.engine.write_weights(weights, folder)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. While requests wait or run nothing is dropped, and the answer is False."""
        with self._alone():
            if self.engine.busy:
                return False
            self.engine.forget()
        return True

    def sleep(self, level: int = 1) -> None:
        """Free the KV caches of the target and the drafters, and take no requests until `wake_up`. Weights stay where
        they are.

        Args:
            level: 1. vLLM's level 2, which drops the weights, is not supported.

        Raises:
            ArgumentError: there is no such level, requests are running, or llama.cpp runs the model.
        """
        self.check_sleep(level)
        with self._alone():
            if self.engine.busy:
                raise ArgumentError("the engine sleeps between requests only: wait for the running ones, or abort them")
            self.engine.grow(self.target.rows, self.target.slots)
            self._asleep = set(SLEEPING_PARTS)

    def check_sleep(self, level: int) -> None:
        """Raise ArgumentError if `sleep` has no such level, or llama.cpp runs the model."""
        if level != 1:
            raise ArgumentError(
                f"sleep level {level}: only level 1 is supported, which frees the cache and keeps the weights; "
                "update_weights_from_disk replaces them, awake or asleep"
            )
        self.target.check_growth()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take requests again; the first of them allocates the caches.

        Args:
            tags: vLLM's, of ``"weights"`` and ``"kv_cache"``; requests are taken once both are awake. None: both.
        """
        parts = SLEEPING_PARTS if tags is None else tags
        for tag in parts:
            refuse_unknown("there is nothing to wake up named", tag, SLEEPING_PARTS)
        self._asleep -= set(parts)

    @property
    def is_sleeping(self) -> bool:
        """True from `sleep` to `wake_up`."""
        return bool(self._asleep)

    def abort(self, request_id: str) -> None:
        """Abort a request and free its rows; unknown ids are ignored. Does not block: if a step runs, the request is
        aborted after it.
        """
        self._ending.append(request_id)
        self._end()

    def _end(self) -> None:
        """Abort the requests for which `abort` was called; every thread calls this when it has used the engine."""
        while self._ending and self._turn.acquire(blocking=False):
            try:
                while self._ending:
                    request_id = self._ending.popleft()
                    if self._engine is not None:
                        self._engine.abort(request_id)
                    self._inbox.pop(request_id, None)
            finally:
                self._turn.release()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the block with exclusive use of the engine. Threads take turns: one that has just used it goes to the end
        of the line.
        """
        with self._line:
            self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()
            self._end()

    def _chunks(self, request_id: str) -> Iterator[StreamChunk]:
        """Return a generator of a queued request's chunks, already started: closing a generator that was not started
        would not abort the request.
        """
        chunks = self._received(request_id)
        next(chunks)
        return chunks

    def _received(self, request_id: str) -> Iterator[Any]:
        """Yield None once, so that the generator can be started before there is a chunk, then the request's chunks. The
        request is aborted where the generator is closed early.
        """
        inbox = self._inbox.setdefault(request_id, deque())
        try:
            yield None
            while True:
                while not inbox:
                    self._step(inbox)
                chunk = inbox.popleft()
                if chunk.error is not None:
                    raise chunk.error
                yield chunk
                if chunk.output is not None:
                    return
        finally:
            self.abort(request_id)

    def _step(self, inbox: deque[StreamChunk]) -> None:
        """Run a step, unless another thread's step has put chunks into `inbox`."""
        with self._alone():
            for chunk in () if inbox else self.engine.step():
                self._inbox.setdefault(chunk.request_id, deque()).append(chunk)

    def _wait(self, request_id: str) -> RequestOutput:
        for chunk in self._chunks(request_id):
            if chunk.output is not None:
                return chunk.output
        raise AssertionError("a stream ends with its output")


def take_template_arguments(keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of `LLM.chat_prompts` from those of `LLM.chat`, and return them."""
    return {name: keywords.pop(name) for name in OF_TEMPLATES if name in keywords}


def _configured(given: Mapping[str, Any] | str | None, opening: dict[str, Any]) -> SpeculativeConfig | None:
    """Return the drafter's configuration, from ``speculative_config`` or from the older keywords, which are removed
    from `opening`. Raises ArgumentError if both are given.
    """
    old = from_old_keywords(opening)
    if old is not None and given is not None:
        raise ArgumentError("give either speculative_config or the older speculative_model keywords, not both")
    return SpeculativeConfig.parse(given if old is None else old)


def _check_context(max_model_len: int | None, model: Any, opening: Mapping[str, Any]) -> None:
    """Raise ArgumentError, before anything is loaded, if there is no such device, or the model's context is shorter."""
    if opening["device"] is not None:
        find_device(opening["device"])
    if max_model_len is not None:
        hub = {name: opening[name] for name in ("revision", "token", "trust_remote_code") if name in opening}
        _refuse_longer(max_model_len, context_of(model, **hub))


def _refuse_longer(max_model_len: int | None, context: int) -> None:
    if max_model_len is not None and max_model_len > context:
        raise ArgumentError(f"max_model_len {max_model_len} exceeds the model's context of {context}: lower it to that")


def _back_end(opening: Mapping[str, Any], config: SpeculativeConfig | None) -> str:
    """Return the requested back end, or the one that the drafter needs."""
    requested: str = opening.get("backend", "auto")
    return "transformers" if requested == "auto" and reads_layers(config) else requested
