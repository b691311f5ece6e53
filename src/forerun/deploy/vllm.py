"""forerun's lookup drafters run inside vLLM with ``--speculative-config '{"method":
"custom_class", "model": "forerun.deploy.vllm.ForerunProposer", "num_speculative_tokens": 8}'``.

``FORERUN_VLLM_CONFIG`` configures the drafter, and how much it drafts at each batch: JSON, or a
file with it. After each step the model runner V1 (``VLLM_USE_V2_MODEL_RUNNER=0``, no
``--async-scheduling``) calls `propose` with the tokens of all running requests and nothing else;
from a tree it gets the best path.

What a request says of its drafts stands in vLLM's ``extra_args`` (``vllm_xargs`` over HTTP): ``prediction``, the answer
that is expected, as text or token ids, and ``group``, the name of the requests that learn from each other.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.core.sampling import check_token_ids
from forerun.deploy.engines.vllm import SCHEDULE, VARIABLE
from forerun.deploy.sequences import NO_HINTS, TOKENS, DraftHints, Sequences, read_options
from forerun.drafters import AUTO
from forerun.errors import ArgumentError
from forerun.params import token_ids

log = logging.getLogger(__name__)


class ForerunProposer:
    """vLLM builds a `ForerunProposer` from its own configuration and asks it for drafts."""

    def __init__(self, vllm_config: Any) -> None:
        """Build the drafter; ArgumentError for an unknown option, or where vLLM would not ask, or
        not wait, for drafts.
        """
        options = read_options(VARIABLE)
        self.schedule = _parse_schedule(options.pop(SCHEDULE, []))
        speculative = vllm_config.speculative_config
        if getattr(vllm_config.scheduler_config, "async_scheduling", False):
            raise ArgumentError("vLLM asks a plug-in for drafts only without --async-scheduling; start it with "
                                "--no-async-scheduling")  # fmt: skip
        room = int(speculative.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self._vocabulary = int(vllm_config.model_config.get_vocab_size())
        self._tokenizer = _tokenizer(vllm_config.model_config)
        self.sequences = Sequences(
            {TOKENS: room, "adaptive": options["method"] == AUTO, **options},
            vocab_size=self._vocabulary,
            rows=int(vllm_config.scheduler_config.max_num_seqs),
            slots=self.max_model_len,
            nodes=room,
            tokenizer=self._tokenizer,
            predictions=True,
        )
        self.most = min(room, int(options.get(TOKENS, room)))
        self._hints: dict[str, DraftHints] = {}  # Of the requests that ran at the last step, by their ids
        self._warned_of_runner = False
        log.info("forerun drafts with %s, %d tokens at most", options["method"], self.most)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing; vLLM's CPU runner calls this although there is nothing to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts for each row, ``token_ids_cpu[i, :num_tokens_no_spec[i]]``.

        A row that sampled nothing, because its prompt is not read yet, gets none. Where it is not known which request
        a row is, none gets any: the texts of one group would teach another's drafts.
        """
        rows = len(sampled_token_ids)
        running = sum(map(bool, sampled_token_ids))
        lengths = num_tokens_no_spec[:rows]
        most = np.minimum(self.tokens_at(running), self.max_model_len - lengths)
        if running < rows:
            most[[not sampled for sampled in sampled_token_ids]] = 0
        try:
            hints = self._hints_of(_find_runner(), rows)
        except (AttributeError, LookupError, TypeError) as error:
            if not self._warned_of_runner:
                log.warning("nothing is drafted, for this vLLM keeps its requests elsewhere: %r", error)
            self._warned_of_runner = True
            return [[] for _ in range(rows)]
        return self.sequences.chains(token_ids_cpu, lengths, most, hints)

    def _hints_of(self, runner: Any, rows: int) -> list[DraftHints] | None:
        """Return the hints of the requests in the first `rows` rows of the runner's batch, None where none has any.

        An AttributeError, LookupError or TypeError says that the runner does not keep them where they are looked for.
        """
        ids = runner.input_batch.req_ids[:rows]
        self._hints = {name: self._hints.get(name) or self._read_hints(runner.requests[name]) for name in ids}
        if all(hint is NO_HINTS for hint in self._hints.values()):
            return None
        return [self._hints[name] for name in ids]

    def _read_hints(self, request: Any) -> DraftHints:
        """Return the hints of a request; what cannot be read is told in the log and left out, for an error would end
        all requests of the engine.
        """
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        group, predicted = extra.get("group"), extra.get("prediction")
        if group is None and predicted is None:
            return NO_HINTS
        try:
            group = None if group is None else str(group)
            return DraftHints(group=group, prediction=self._predicted_tokens(predicted))
        except (TypeError, ValueError) as error:
            log.warning("a prediction in extra_args is left out: %s", error)
            return DraftHints(group=group)

    def _predicted_tokens(self, predicted: Any) -> tuple[int, ...]:
        if isinstance(predicted, str):
            if self._tokenizer is None:
                raise ArgumentError("it is text, and vLLM has no tokenizer; give token ids")
            return tuple(self._tokenizer.encode(predicted, add_special_tokens=False))
        ids = token_ids("prediction", predicted or ())
        check_token_ids("prediction", ids, self._vocabulary)
        return tuple(ids)

    def tokens_at(self, batch: int) -> int:
        """Return how many tokens are drafted for each of this many requests; beyond a range as many
        as in it, as in vLLM.
        """
        tokens = [tokens for first, _, tokens in self.schedule if first <= max(1, batch)]
        return min([self.most, *tokens[-1:]])


def _find_runner() -> Any:
    """Return vLLM's model runner, which hands itself to no plug-in: the nearest caller that has a batch.

    Between it and us may stand a decorator or a tracer. LookupError: nobody there has one.
    """
    frame: FrameType | None = sys._getframe(2)  # The caller of `propose`
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "input_batch"):
            return caller
        frame = frame.f_back
    raise LookupError("no caller has an input_batch")


def _parse_schedule(schedule: Any) -> list[tuple[int, int, int]]:
    """Return `schedule` as triples; ArgumentError if it is malformed."""
    expected = f"{VARIABLE}: {SCHEDULE} must be [[first, last, tokens], ...] in whole numbers, got {schedule!r}"
    if not isinstance(schedule, list):
        raise ArgumentError(expected)
    for entry in schedule:
        if not (
            isinstance(entry, list) and len(entry) == 3 and all(type(number) is int and number >= 0 for number in entry)
        ):
            raise ArgumentError(expected)
    end = 0
    for first, last, _ in schedule:
        if not end < first <= last or (end == 0 and first != 1):
            raise ArgumentError(
                f"{VARIABLE}: the ranges of {SCHEDULE} begin at 1, go up and do not overlap; got {schedule!r}"
            )
        end = last
    return [(first, last, tokens) for first, last, tokens in schedule]


def _tokenizer(model_config: Any) -> Any:
    """Return the target's tokenizer, which a corpus is checked against; None where vLLM has none
    either.
    """
    if getattr(model_config, "skip_tokenizer_init", False):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_config.tokenizer)
