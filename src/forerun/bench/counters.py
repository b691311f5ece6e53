"""This module reads the engines' speculation counters into one schema with vLLM's names, and says
what was converted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.types import mean_acceptance_length, tokens_per_pass

Samples = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]
"""The samples of a metrics page: name -> labels -> value."""
COUNTERS = {"vllm:spec_decode_num_": "vllm:generation_tokens", "llamacpp:spec_decode_num_": "llamacpp:tokens_predicted"}
"""Prefixes of vLLM's and llama.cpp's counter names, which count the same, and the counter of the
answers' tokens.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationCounts:
    """`SpeculationCounts` hold what an engine counted over some time; None where it does not tell."""

    drafts: int | None = None
    """Passes of the target that verified a draft."""
    tokens: int | None = None
    """Tokens of the answers, each one's first included."""
    passes: int | None = None
    """Passes of the target that gave these tokens, with a draft or without; None where it is to be inferred."""
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_per_position: tuple[int, ...] = ()
    source: str = ""
    """The source of the counts, and what was converted."""

    @property
    def tokens_per_pass(self) -> float | None:
        """Return all tokens over all passes.

        For an engine that does not count passes, each pass gives one token of the target's own and
        what it accepts.
        """
        if not self.tokens or self.accepted_tokens is None:
            return None
        return tokens_per_pass(self.tokens, self.passes or self.tokens - self.accepted_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Return vLLM's mean acceptance length."""
        if not self.drafts or self.accepted_tokens is None:
            return None
        return mean_acceptance_length(self.accepted_tokens, self.drafts)

    @property
    def acceptance_rate(self) -> float | None:
        """Return the accepted share of the drafted tokens."""
        if not self.draft_tokens or self.accepted_tokens is None:
            return None
        return self.accepted_tokens / self.draft_tokens

    def record(self) -> dict[str, Any]:
        """Return the counts under the keys of ``vllm bench serve``, and tokens per pass; rates are
        in percent there, so here too.
        """
        rate, drafts = self.acceptance_rate, self.drafts or 0
        positions = [round(count / drafts, 4) for count in self.accepted_per_position] if drafts else []
        found = {
            "tokens_per_pass": self.tokens_per_pass,
            "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": positions or None,
            "spec_decode_source": self.source,
        }
        return {name: value for name, value in found.items() if value is not None}


def parse(text: str) -> Samples:
    """Return the samples of a Prometheus page; ValueError if it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in (one for one in family.samples if math.isfinite(one.value)):
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def diff_counts(before: Samples, after: Samples) -> SpeculationCounts | None:
    """Return what was counted between two pages of an engine's metrics; None where they have no
    speculation counters.
    """

    def grown(name: str) -> int | None:
        if name not in after:
            return None
        return round(sum(after[name].values()) - sum(before.get(name, {}).values()))

    for names, tokens in COUNTERS.items():
        if (drafts := grown(f"{names}drafts_total")) is None:
            continue
        return SpeculationCounts(
            drafts=drafts,
            tokens=grown(f"{tokens}_total"),
            passes=grown("forerun:passes_total"),
            draft_tokens=grown(f"{names}draft_tokens_total"),
            accepted_tokens=grown(f"{names}accepted_tokens_total"),
            accepted_per_position=_positions(before, after, f"{names}accepted_tokens_per_pos_total"),
            source=f"the server's {names.removesuffix('_num_')} counters",
        )
    if (calls := grown("sglang:spec_verify_calls_total")) is not None:
        written, asked = grown("sglang:generation_tokens_total"), grown("sglang:num_requests_total")
        if written is None or asked is None:
            return None
        return SpeculationCounts(
            drafts=calls,
            tokens=written,
            accepted_tokens=written - asked - calls,
            source="sglang:spec_verify_calls and generation_tokens; the first token of each request is no pass's, "
            "while SGLang's own accept length counts it",
        )
    return None


def _positions(before: Samples, after: Samples, name: str) -> tuple[int, ...]:
    """Return the tokens accepted at the first, second, ... drafted position."""
    totals: dict[int, float] = {}
    for page, sign in ((after, 1), (before, -1)):
        for labels, value in page.get(name, {}).items():
            name_of = dict(labels).get("position", "")
            if not name_of.isdecimal():
                continue
            place = int(name_of)
            totals[place] = totals.get(place, 0.0) + sign * value
    return tuple(round(totals[place]) for place in sorted(totals))


def read_counts(answer: Mapping[str, Any], tokens: int) -> SpeculationCounts | None:
    """Return the counts that a response, or the last chunk of a stream, gives for its own request.

    These are vLLM's (and forerun's) ``metrics`` or llama.cpp's ``timings``; `tokens` is the number
    of tokens of the answer.
    """
    counts = (answer.get("metrics") or {}).get("speculative_decoding")
    if isinstance(counts, Mapping) and counts.get("num_spec_steps") is not None:
        reached = list(counts.get("acceptance_histogram") or ())
        return SpeculationCounts(
            drafts=int(counts["num_spec_steps"]),
            tokens=tokens,
            passes=counts.get("num_passes"),
            draft_tokens=int(counts["num_draft_tokens"]),
            accepted_tokens=int(counts["num_accepted_draft_tokens"]),
            accepted_per_position=tuple(sum(reached[place:]) for place in range(1, len(reached))),
            source="the answers' metrics.speculative_decoding",
        )
    timings = answer.get("timings")
    if isinstance(timings, Mapping) and timings.get("draft_n") is not None:
        accepted = int(timings.get("draft_n_accepted") or 0)
        return SpeculationCounts(
            drafts=max(0, int(timings.get("predicted_n", tokens)) - 1 - accepted),
            tokens=int(timings.get("predicted_n", tokens)),
            draft_tokens=int(timings["draft_n"]),
            accepted_tokens=accepted,
            source="the answers' timings; llama.cpp does not tell passes without a draft from others: all are counted",
        )
    return None


def sum_counts(parts: Iterable[SpeculationCounts | None]) -> SpeculationCounts | None:
    """Return the sum of several requests' counts; None where no request has any."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    longest = max(len(part.accepted_per_position) for part in found)
    padded = [[*part.accepted_per_position, *[0] * (longest - len(part.accepted_per_position))] for part in found]
    counted = all(part.passes is not None for part in found)
    return SpeculationCounts(
        drafts=sum(part.drafts or 0 for part in found),
        tokens=sum(part.tokens or 0 for part in found),
        passes=sum(part.passes or 0 for part in found) if counted else None,
        draft_tokens=sum(part.draft_tokens or 0 for part in found),
        accepted_tokens=sum(part.accepted_tokens or 0 for part in found),
        accepted_per_position=tuple(map(sum, zip(*padded, strict=True))),
        source=found[0].source,
    )
