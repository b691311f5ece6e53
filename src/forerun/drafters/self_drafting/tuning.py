"""Finds the set of skipped sub-layers with the least time per token on given prompts: Draft & Verify's search.

It is Bayesian optimisation of 2L binary choices (arXiv 2309.08168) by the logarithm of the ms per token. Acceptance is
measured by decoding the same prompts with each set. Costs are measured once, for one sequence, and those of skipped
sub-layers are subtracted, so that sets are comparable even if the machine does other work meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from statistics import median

from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DrafterSetup
from forerun.decode.row import Row
from forerun.decode.step import Group, first_tokens, step
from forerun.devices import time_in_turns
from forerun.drafters.self_drafting.skip_layers import (
    PARTS,
    Search,
    SkipLayersConfig,
    SkipLayersDrafter,
    SkipSet,
    Space,
    Sublayer,
    every,
    names,
)
from forerun.errors import ForerunError
from forerun.model import TransformersTarget
from forerun.model.inputs import Nodes
from forerun.types import SamplingParams, mean_acceptance_length

REPEATS = 15  # Measurements of every pass; the median counts
ITERATIONS = 60  # Sets that are tried if neither a number nor a time is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The result of a search."""

    best: Worth
    costs: Costs
    trials: list[Worth]  # Every set that was tried, in order
    seconds: float
    interrupted: bool  # Ctrl-C ended it; the best so far is kept

    @property
    def plain_ms(self) -> float:
        """Milliseconds of a token decoded plainly."""
        return self.costs.verify_ms[0]

    @property
    def speedup(self) -> float:
        """Speed-up of the best set over plain decoding, from measured acceptance and measured passes."""
        return self.plain_ms / self.best.ms_per_token


def tune(
    probe: Probe,
    layers: int,
    *,
    iterations: int | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    progress: Callable[[Worth, Worth], None] = lambda _tried, _best: None,
) -> Tuned:
    """Try sets of the model's `layers` until their number or the time is used up, all are tried, or Ctrl-C ends the
    search; KeyboardInterrupt is raised only before the first set is measured.

    Args:
        iterations: number of sets to try; None: `ITERATIONS`, or as many as fit `budget_s`.
        budget_s: seconds, after which no further set is tried.
        progress: called after each trial with the set just tried and the best one.
    """
    start, cheapest = time.perf_counter(), attrgetter("ms_per_token")
    most = math.inf if iterations is None and budget_s is not None else iterations or ITERATIONS
    search, trials, interrupted = Search(Space(allowed=every(layers)), seed=seed), list[Worth](), False
    costs = probe.costs()
    try:
        while len(trials) < most and (budget_s is None or not trials or time.perf_counter() - start < budget_s):
            skip = search.ask()
            if skip is None:
                break
            found = worth(skip, probe.accepted(skip), costs, layers)
            search.tell(skip, -math.log(found.ms_per_token))
            trials.append(found)
            progress(found, min(trials, key=cheapest))
    except KeyboardInterrupt:
        if not trials:
            raise
        interrupted = True
    best, seconds = min(trials, key=cheapest), time.perf_counter() - start
    return Tuned(best=best, costs=costs, trials=trials, seconds=seconds, interrupted=interrupted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The costs of passes over one sequence, in ms."""

    rest_ms: float  # A draft pass without any sub-layer: embedding, final norm, output head
    sublayer_ms: dict[str, float]  # ``"attn"`` and ``"mlp"``: one sub-layer of one layer, over one token
    verify_ms: tuple[float, ...]  # Scoring pass over k + 1 nodes, k = 0, 1, ...; the first is plain decoding

    def draft_ms(self, skip: SkipSet, layers: int) -> float:
        """Return the ms of drafting one token of a chain without the sub-layers in `skip`."""
        return self.rest_ms + sum(self.sublayer_ms[part] for layer, part in every(layers) if (layer, part) not in skip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """The value of a set of skipped sub-layers at its best draft length."""

    skip: SkipSet
    num_speculative_tokens: int
    ms_per_token: float
    mean_acceptance_length: float  # At that length; every pass verifies a draft
    draft_ms: float  # One drafted token

    def record(self) -> dict[str, object]:
        """Return the entry for the file."""
        rounded = {name: round(value, 4) for name, value in asdict(self).items() if name != "skip"}
        return {"skip": names(self.skip), **rounded}


def worth(skip: SkipSet, accepted: Sequence[int], costs: Costs, layers: int) -> Worth:
    """Return the set's value at the draft length with the least time per token. `accepted` are the numbers of accepted
    tokens in each step, of chains with the longest length for which `costs` has a scoring pass.
    """
    draft_ms = costs.draft_ms(skip, layers)

    def at(length: int) -> Worth:
        tokens = mean_acceptance_length(sum(min(count, length) for count in accepted), len(accepted))
        cost = (length * draft_ms + costs.verify_ms[length]) / tokens
        figures = {"ms_per_token": cost, "mean_acceptance_length": tokens, "draft_ms": draft_ms}
        return Worth(skip=skip, num_speculative_tokens=length, **figures)

    return min(map(at, range(1, len(costs.verify_ms))), key=attrgetter("ms_per_token"))


class Probe:
    """Prompts (token ids) that are decoded again with every set, each in an empty row of the target's cache: `tokens`
    tokens in chains of `length`, with resolved sampling parameters.
    """

    def __init__(
        self,
        target: TransformersTarget,
        prompts: Sequence[Sequence[int]],
        *,
        length: int,
        tokens: int,
        params: SamplingParams,
    ) -> None:
        self._target, self._length, self._tokens, self._params = target, length, tokens, params
        self._ids = list(range(len(prompts)))
        logits = target.prefill(self._ids, prompts).logits
        rows = [self._row(row, list(prompt), len(prompt)) for row, prompt in enumerate(prompts)]
        first_tokens(rows, logits)
        self._beginnings = [(row.tokens, row.prompt_length) for row in rows]
        config = SkipLayersConfig(skip=[names(every(target.num_layers))[0]], num_speculative_tokens=length)
        setup = DrafterSetup(target=target, tokenizer=None, rows=target.rows, slots=target.slots)
        self._drafter = SkipLayersDrafter(config, setup)

    def accepted(self, skip: SkipSet) -> list[int]:
        """Return the number of accepted tokens in each step when `skip` drafts. Raises ForerunError if a draft was too
        short.
        """
        self._drafter.skip = skip
        rows = [self._row(row, list(tokens), prompt) for row, (tokens, prompt) in enumerate(self._beginnings)]
        ends = [len(row.tokens) + self._tokens for row in rows]
        found = list[int]()
        try:
            while running := [row for row, end in zip(rows, ends, strict=True) if len(row.tokens) < end]:
                members = range(len(running))
                depths = [self._length] * len(running)
                drafter = self._drafter
                group = Group(name=drafter.name, drafter=drafter, members=members, depths=depths, nodes=self._length)
                emitted = step(self._target, running, [group])
                if any(one.drafted < self._length for one in emitted):
                    raise ForerunError("skip_layers drafted fewer tokens than requested; the log says why")
                found += [len(one.tokens) - 1 for one in emitted]
        finally:
            self._target.truncate(self._ids, [len(tokens) - 1 for tokens, _ in self._beginnings])
            self._drafter.truncate(self._ids, [0] * len(rows))
        return found

    def costs(self) -> Costs:
        """Time the passes of the first prompt's row, all kinds in turn."""
        layers, root = self._target.num_layers, self._beginnings[0][0][-1]

        def draft(skip: SkipSet) -> None:
            self._drafter.skip = skip
            self._drafter.logits([0], Nodes.of_trees([TokenTree(root)]))[0].argmax(-1).tolist()

        def verify(chain: TokenTree) -> None:
            self._target.score([0], [chain]).logits[0].argmax(-1).tolist()

        skips = [frozenset[Sublayer](), *(frozenset((layer, part) for layer in range(layers)) for part in PARTS)]
        chains = [TokenTree(root) for _ in range(self._length + 1)]
        for length, chain in enumerate(chains):
            chain.add_path([root] * length)
        passes = [*(partial(draft, skip) for skip in skips), *(partial(verify, chain) for chain in chains)]
        # In ms; the first of each only warms up.
        whole, *times = (1e3 * median(taken[1:]) for taken in time_in_turns(passes, REPEATS + 1))
        self._target.truncate([0], [self._target.lengths[0]])
        sublayer = {part: max(0.0, (whole - less) / layers) for part, less in zip(PARTS, times, strict=False)}
        rest = max(0.0, whole - layers * sum(sublayer.values()))
        return Costs(rest_ms=rest, sublayer_ms=sublayer, verify_ms=tuple(times[len(PARTS) :]))

    def _row(self, row: int, tokens: list[int], length: int) -> Row:
        sampler = Sampler(self._params, tokens[:length])
        room = self._tokens + self._length + 1
        return Row(
            cache_row=row,
            tokens=tokens,
            prompt_length=length,
            sampler=sampler,
            seed=row,
            stop_ids=frozenset(),
            tokens_left=room,
        )
