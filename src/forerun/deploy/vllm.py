"""forerun's copying drafters run inside vLLM with ``--speculative-config '{"method":
"custom_class", "model": "forerun.deploy.vllm.ForerunProposer", "num_speculative_tokens": 8}'``.

``FORERUN_VLLM_CONFIG`` configures the drafter, and how much it drafts at each batch: JSON, or a
file with it. After each step the model runner V1 (``VLLM_USE_V2_MODEL_RUNNER=0``, no
``--async-scheduling``) calls `propose` with the tokens of all running requests and nothing else;
from a tree it gets the best path.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.deploy.engines.vllm import SCHEDULE, VARIABLE
from forerun.deploy.sequences import TOKENS, Sequences, read_options
from forerun.drafters import AUTO
from forerun.errors import ArgumentError

log = logging.getLogger(__name__)


class ForerunProposer:
    """vLLM builds a `ForerunProposer` from its own configuration and asks it for drafts."""

    def __init__(self, vllm_config: Any) -> None:
        """Build the drafter; ArgumentError for an unknown option, or where vLLM would not ask, or
        not wait, for drafts.
        """
        given = read_options(VARIABLE)
        self.schedule = _parse_schedule(given.pop(SCHEDULE, []))
        speculative = vllm_config.speculative_config
        if getattr(vllm_config.scheduler_config, "async_scheduling", False):
            raise ArgumentError("vLLM asks a plug-in for drafts only without --async-scheduling; start it with "
                                "--no-async-scheduling")  # fmt: skip
        room = int(speculative.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self.sequences = Sequences(
            {TOKENS: room, "adaptive": given["method"] == AUTO, **given},
            vocab_size=int(vllm_config.model_config.get_vocab_size()),
            rows=int(vllm_config.scheduler_config.max_num_seqs),
            slots=self.max_model_len,
            nodes=room,
            tokenizer=_tokenizer(vllm_config.model_config),
        )
        self.most = min(room, int(given.get(TOKENS, room)))
        log.info("forerun drafts with %s, %d tokens at most", given["method"], self.most)

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

        A row that sampled nothing, because its prompt is not read yet, gets none.
        """
        rows, running = len(sampled_token_ids), sum(map(bool, sampled_token_ids))
        lengths = num_tokens_no_spec[:rows]
        most = np.minimum(self.tokens_at(running), self.max_model_len - lengths)
        if running < rows:
            most[[not sampled for sampled in sampled_token_ids]] = 0
        return self.sequences.chains(token_ids_cpu, lengths, most)

    def tokens_at(self, batch: int) -> int:
        """Return how many tokens are drafted for each of so many requests; beyond a range as many
        as in it, as in vLLM.
        """
        tokens = [tokens for first, _, tokens in self.schedule if first <= max(1, batch)]
        return min([self.most, *tokens[-1:]])


def _parse_schedule(schedule: Any) -> list[tuple[int, int, int]]:
    """Return `schedule` as triples; ArgumentError if it is malformed."""
    expected = f"{VARIABLE}: {SCHEDULE} must be [[first, last, tokens], ...] in whole numbers, got {schedule!r}"
    if not isinstance(schedule, list):
        raise ArgumentError(expected)
    for entry in schedule:
        if not (isinstance(entry, list) and len(entry) == 3 and all(type(one) is int and one >= 0 for one in entry)):
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
