"""SPEED: for decoders that repeat a block of layers, tokens at different depths share each pass of the block.

The root goes through the block; what its first exit expects enters the block in the next pass, beside the root on its
way through the second repetition; and so on. With P repetitions a pass of the block finishes one token once the
pipeline is full, where plain decoding takes P. When a token is finished and the whole model finds another successor
likeliest than the exit did, what came in behind it is flushed. Source: SPEED (arXiv 2310.12072).

What differs from the paper: a step ends in one verification, so the pipeline is drained at the end of each step (P - 1
passes that take in nothing), and in a batch a row that was flushed waits for the others; drafts are greedy, and a
sampled answer keeps them with the target's own probability; states are exact, nothing is approximated or retrained.
All submitted nodes have run through all layers, so scoring is left with the final norm and the head. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.drafters.growth import Shape, attempt
from forerun.drafters.self_drafting import partial_draft
from forerun.errors import ArgumentError
from forerun.sampling import Sampler
from forerun.target.nouns import Resume
from forerun.target.pipeline import Pipeline
from forerun.tree import TreeBuilder, stack
from forerun.types import Budget, Draft, DraftKind, empty_draft


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedConfig:
    """Options of `speed`."""

    num_speculative_tokens: int = 8
    """Most tokens that follow the root into the pipeline in one step."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ArgumentError(f"speed: num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}")


@dataclass(kw_only=True, slots=True)
class _Run:
    """One proposal under way, for A rows."""

    members: Sequence[int]
    """Places in the context."""
    limits: list[int]
    """Per row the last node that may still be submitted; a flush lowers it."""
    ids: Tensor
    """(A, K) drafted tokens."""
    confidence: list[list[float]]
    finished: list[Tensor]
    """(A, 1, H) at the last boundary, node by node."""


class SpeedDrafter(Drafter):
    """Drafts a chain in the pipeline of a decoder whose layers share their weights."""

    name = "speed"
    Config = SpeedConfig

    def __init__(self, config: SpeedConfig, setup: DrafterSetup) -> None:
        """Find the shared block; raises UnsupportedModelError where each layer has weights of its own."""
        self.target = setup.target
        self._pipeline = Pipeline.proved(setup.target)
        self._shape = Shape.regular((1,) * config.num_speculative_tokens)

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=True)

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        limits = [
            self._shape.within(nodes, min(depth, self.target.max_length - len(tokens)))
            for nodes, depth, tokens in zip(budget.nodes, budget.depth, context.tokens, strict=True)
        ]
        members = [index for index, limit in enumerate(limits) if limit > 0]
        if not members:
            return empty_draft(len(limits))
        run = _Run(
            members=members,
            limits=[limits[index] for index in members],
            ids=torch.zeros(len(members), 0, dtype=torch.int64, device=self.target.device),
            confidence=[[] for _ in members],
            finished=[],
        )
        self._stream(context, run)
        return self._draft(context, run)

    def _stream(self, context: DraftContext, run: _Run) -> None:
        """Pass after pass of the shared block, until every node that is not flushed has left the last one."""
        rows, roots = [context.rows[i] for i in run.members], [context.tokens[i][-1] for i in run.members]
        depth, states, step = self._pipeline.depth, None, 0
        while (first := len(run.finished)) <= max(run.limits):
            last = min(step, max(run.limits))
            draft = partial_draft(self._shape, run.ids[:, :last], run.limits)
            blocks = [step - node for node in range(first, last + 1)]
            held = None if states is None else states[:, : last + 1 - first]
            states = self._pipeline.advance(rows, roots, draft, held, blocks)
            if last == step and last < max(run.limits):
                best = self._likeliest(context, run, states[:, -1:], last)
                run.ids = torch.cat([run.ids, torch.tensor(best, device=run.ids.device).unsqueeze(1)], dim=1)
            if blocks[0] == depth - 1:
                run.finished.append(states[:, :1])
                states = states[:, 1:] if last > first else None
                self._flush(context, run, first)
            step += 1

    def _likeliest(self, context: DraftContext, run: _Run, states: Tensor, node: int) -> list[int]:
        """(A,) what follows `node` according to its states (A, 1, H)."""
        logits = self._logits(states)
        best: list[int] = logits.argmax(-1).tolist()
        for place, index in enumerate(run.members):
            if not context.samplers[index].neutral:
                raw, output = logits[place], self._output(context, run, place, node)
                best[place] = int(attempt(raw, context.samplers[index].process, raw, output).argmax())
        return best

    def _flush(self, context: DraftContext, run: _Run, node: int) -> None:
        """Node `node` is finished: rows whose next node is not what the whole model finds likeliest end there."""
        if node >= max(run.limits):
            return
        logits = self._logits(run.finished[node])
        right = self._likeliest(context, run, run.finished[node], node)
        for place, index in enumerate(run.members):
            drafted, sampler = int(run.ids[place, node]), context.samplers[index]
            if drafted != right[place]:
                run.limits[place] = min(run.limits[place], node)
            if sampler.greedy:
                run.confidence[place].append(1.0)
                continue
            output = self._output(context, run, place, node)
            law = attempt(torch.zeros_like(logits[place]), sampler.law, logits[place], output)
            run.confidence[place].append(float(law[drafted]))

    def _logits(self, states: Tensor) -> Tensor:
        return self.target.lm_head(self.target.final_norm(states))[:, 0]

    def _output(self, context: DraftContext, run: _Run, place: int, node: int) -> list[int]:
        index = run.members[place]
        return [*context.tokens[index][context.prompt_lengths[index] :], *run.ids[place, :node].tolist()]

    def _draft(self, context: DraftContext, run: _Run) -> Draft:
        builders = [TreeBuilder() for _ in context.rows]
        for place, index in enumerate(run.members):
            parent = 0
            for token, confidence in zip(
                run.ids[place, : run.limits[place]].tolist(), run.confidence[place], strict=False
            ):
                parent = builders[index].add(token, parent, confidence=confidence)
        draft = stack(builders, device=run.ids.device)
        if self.target.buckets.nodes:
            return draft  # Reproducible bits need passes of one shape: everything runs again.
        states = torch.cat(run.finished, dim=1)[:, : draft.size + 1]
        spread = states.new_zeros(len(builders), *states.shape[1:])
        spread[list(run.members)] = states
        counts = [0] * len(builders)
        for place, index in enumerate(run.members):
            counts[index] = run.limits[place] + 1
        stamps = [self.target.writes[row] for row in context.rows]
        return replace(
            draft, resume=Resume(boundary=self.target.num_layers, states=spread, counts=counts, stamps=stamps)
        )
