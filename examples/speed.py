"""SPEED, a drafter outside the package, for decoders that repeat a block of layers.

Tokens at different depths share each pass of the block. The root goes through the block; what its
first exit expects enters the block in the next pass, beside the root on its way through the second
repetition; and so on. With P repetitions a pass of the block finishes one token once the pipeline
is full, where plain decoding takes P. When a token is finished and the whole model finds another
successor likeliest than the exit did, what came in behind it is flushed. Source: SPEED (arXiv
2310.12072).

What differs from the paper: a step ends in one verification, so the pipeline is drained at the end of each step (P - 1
passes that take in nothing), and in a batch a row that was flushed waits for the others; drafts are greedy, and a
sampled answer keeps them with the target's own probability; states are exact, nothing is approximated or retrained. All
submitted nodes have run through all layers, so scoring is left with the final norm and the head.

No public model of transformers shares its layers, so forerun does not bring this drafter; it shows what one in a file
of your own can do. It asks the target for more than its public methods: such a file breaks where forerun changes them.

Usage: ``LLM(model, speculative_config={"method": "speed:SpeedDrafter"})`` with this folder in ``PYTHONPATH``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from forerun.core.tree import Resume
from forerun.decode.drafter import check_least
from forerun.drafters import Budget, DraftContext, Drafter, DrafterSetup, DraftKind, Sampler, TokenTree
from forerun.drafters.drawing import attempt
from forerun.errors import UnsupportedModelError
from forerun.model.inputs import Nodes
from forerun.model.layers import LayerRange, cache_argument, is_quantised
from forerun.model.partial import compare

if TYPE_CHECKING:
    from forerun.model import TransformersTarget


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedConfig:
    """Options of `speed`."""

    num_speculative_tokens: int = 8  # Most tokens that follow the root into the pipeline in one step

    def __post_init__(self) -> None:
        check_least("speed", self, num_speculative_tokens=1)


class SpeedDrafter(Drafter):
    """Drafts a chain in the pipeline of a decoder whose layers share their weights."""

    name = "speed"
    Config = SpeedConfig

    def __init__(self, config: SpeedConfig, setup: DrafterSetup) -> None:
        """Check the target. Raises UnsupportedModelError if no layers share their weights, or the
        logits do not come out the same.
        """
        self.target = setup.target
        self._pipeline = Pipeline(setup.target)
        self._most = config.num_speculative_tokens
        compare(setup.target, _stream, (0, 1))

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=True)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        most, room = self._most, self.target.max_length
        bounds = zip(budget.nodes, budget.depth, context.tokens, strict=True)
        limits = [min(most, nodes, depth, room - len(tokens)) for nodes, depth, tokens in bounds]
        members = [index for index, limit in enumerate(limits) if limit > 0]
        trees = context.trees()
        if not members:
            return trees
        ids = torch.zeros(len(members), 0, dtype=torch.int64, device=self.target.device)
        limits = [limits[index] for index in members]
        run = _PipelineRun(members=members, limits=limits, ids=ids, confidence=[[] for _ in members])
        self._stream(context, run)
        states = torch.cat(run.finished, dim=1)
        for entry, index in enumerate(members):
            tree, limit, parent = trees[index], run.limits[entry], 0
            for token, confidence in zip(run.ids[entry, :limit].tolist(), run.confidence[entry], strict=False):
                parent = tree.add(token, parent, confidence=confidence)
            if not self.target.buckets.nodes:  # reproducible bits need passes of one shape: everything runs again
                stamp = self.target.writes[context.rows[index]]
                begun = states[entry, : tree.size + 1]
                tree.resume = Resume(boundary=self.target.num_layers, states=begun, stamp=stamp)
        return trees

    def _stream(self, context: DraftContext, run: _PipelineRun) -> None:
        """Run pass after pass of the shared block, until every node that is not flushed has left
        the last one.
        """
        rows, roots = [context.rows[i] for i in run.members], [context.tokens[i][-1] for i in run.members]
        depth, states, step = self._pipeline.depth, None, 0
        while (first := len(run.finished)) <= max(run.limits):
            last = min(step, max(run.limits))
            chain = range(-1, self._most)
            nodes = Nodes.of_levels(roots, run.ids[:, :last], chain, counts=run.limits, start=first)
            blocks = [step - node for node in range(first, last + 1)]
            held = None if states is None else states[:, : last + 1 - first]
            states = self._pipeline.advance(rows, nodes, held, blocks)
            if last == step and last < max(run.limits):
                best = self._likeliest(context, run, self._logits(states[:, -1:]), last)
                run.ids = torch.cat([run.ids, torch.tensor(best, device=run.ids.device).unsqueeze(1)], dim=1)
            if blocks[0] == depth - 1:
                run.finished.append(states[:, :1])
                states = states[:, 1:] if last > first else None
                if first < max(run.limits):
                    self._flush(context, run, first)
            step += 1

    def _logits(self, states: Tensor) -> Tensor:
        return self.target.lm_head(self.target.final_norm(states))[:, 0]

    def _likeliest(self, context: DraftContext, run: _PipelineRun, logits: Tensor, node: int) -> list[int]:
        """Return (A,) the likeliest token after `node` according to its logits (A, V)."""
        best: list[int] = logits.argmax(-1).tolist()
        for entry, index in enumerate(run.members):
            if not context.samplers[index].neutral:
                raw, output = logits[entry], self._output(context, run, entry, node)
                best[entry] = int(attempt(raw, context.samplers[index].process, raw, output).argmax())
        return best

    def _flush(self, context: DraftContext, run: _PipelineRun, node: int) -> None:
        """Finish node `node`: rows whose next node is not what the whole model finds likeliest end
        there.
        """
        logits = self._logits(run.finished[node])
        right = self._likeliest(context, run, logits, node)
        for entry, index in enumerate(run.members):
            drafted, sampler = int(run.ids[entry, node]), context.samplers[index]
            if drafted != right[entry]:
                run.limits[entry] = min(run.limits[entry], node)
            if sampler.greedy:
                run.confidence[entry].append(1.0)
                continue
            output = self._output(context, run, entry, node)
            probs = attempt(torch.zeros_like(logits[entry]), sampler.probs, logits[entry], output)
            run.confidence[entry].append(float(probs[drafted]))

    def _output(self, context: DraftContext, run: _PipelineRun, entry: int, node: int) -> list[int]:
        index = run.members[entry]
        return [*context.tokens[index][context.prompt_lengths[index] :], *run.ids[entry, :node].tolist()]


@dataclass(kw_only=True, slots=True)
class _PipelineRun:
    """One proposal under way, for A rows."""

    members: Sequence[int]  # Indices in the context
    limits: list[int]  # Per row the last node that may still be submitted; a flush lowers it
    ids: Tensor  # (A, K) drafted tokens
    confidence: list[list[float]]
    finished: list[Tensor] = field(default_factory=list)  # (A, 1, H) at the last boundary, node by node


class Pipeline:
    """Runs the tokens of a chain through a shared block, each at its own depth and with its own
    layer in the cache: one pass over token k at block d and token k + 1 at block d - 1 reads the
    weights once. Raises as `shared_block` does.
    """

    def __init__(self, target: TransformersTarget) -> None:
        self.target, self.size = target, shared_block(target)
        self.depth: int = target.num_layers // self.size  # Passes of the block that make the whole model

    @torch.inference_mode()
    def advance(self, rows: Sequence[int], nodes: Nodes, states: Tensor | None, blocks: Sequence[int]) -> Tensor:
        """Run one pass: each of the last F nodes of a chain goes through its block; returns (B, F,
        H) behind their blocks.

        Args:
            nodes: the chains so far, from the first of the F on.
            states: (B, F or F - 1, H) before their blocks; without those of the last node it enters the model now.
            blocks: (F,) which of the model's `depth` blocks each node runs next.
        """
        target, count, batch = self.target, len(blocks), len(rows)
        size = target._nodes(rows, nodes).ids.shape[1]
        if states is None or states.shape[1] < count:
            entering, _ = target.build_inputs(rows, replace(nodes, start=size - 1), padded=False)
            new = target._ranges.run(LayerRange(start=0, stop=0), entering, None)
            states = new if states is None else torch.cat([states, new], dim=1)
        inputs, _ = target.build_inputs(rows, nodes, padded=False)
        masks = inputs["attention_mask"]
        lengths = torch.tensor([target.lengths[row] for row in rows]).unsqueeze(1)
        slots = torch.where(nodes.real, lengths + torch.arange(size), target.cache.dump)[:, -count:]
        width = next(iter(masks.values())).shape[-1] if isinstance(masks, dict) else masks.shape[-1]

        def apart(mask: Tensor) -> Tensor:
            return mask.transpose(1, 2).reshape(batch * count, 1, 1, width)

        inputs |= {
            "input_ids": inputs["input_ids"].reshape(-1, 1),
            "position_ids": inputs["position_ids"].reshape(-1, 1),
            "attention_mask": {k: apart(m) for k, m in masks.items()} if isinstance(masks, dict) else apart(masks),
            cache_argument(target._base): _Cache(self, rows, slots.to(target.device), width, blocks),
        }
        block = LayerRange(start=self.size, stop=2 * self.size)
        return target._ranges.run(block, inputs, states.reshape(batch * count, 1, -1)).view(batch, count, -1)


@dataclass(frozen=True, slots=True)
class _Cache:
    """The target's cache for a batch of B * F tokens: token f of a row is at block ``blocks[f]``."""

    is_compileable: ClassVar[bool] = False
    pipeline: Pipeline
    rows: Sequence[int]
    slots: Tensor
    width: int
    blocks: Sequence[int]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_args: object, **_kwargs: object) -> Any:
        """Update the cache as `SlotCache.update` does, each token at its own layer."""
        seen, cache, size = [], self.pipeline.target.cache, self.pipeline.size
        for token, block in enumerate(self.blocks):
            cache.begin(self.rows, self.slots[:, token : token + 1], self.width)
            mine = [part.reshape(len(self.rows), -1, *part.shape[1:])[:, token] for part in (keys, values)]
            seen.append(cache.update(mine[0], mine[1], block * size + layer % size))
        return tuple(torch.stack(list(parts), dim=1).flatten(0, 1) for parts in zip(*seen, strict=True))


def shared_block(target: TransformersTarget) -> int:
    """Return the number of layers in the block that a target repeats. Raises UnsupportedModelError
    if each layer has weights of its own.
    """
    count = target.num_layers
    types = getattr(target.config, "layer_types", None) or [None] * count
    storages = [
        [weight.data_ptr() for weight in layer.parameters()]
        + [id(getattr(m, "packed_weight", None)) for m in layer.modules()]
        for layer in target._layers
    ]
    for size in range(1, count // 2 + 1):
        same = all(storages[i] == storages[i - size] and types[i] == types[i - size] for i in range(size, count))
        if count % size == 0 and same and not is_quantised(target.model):
            return size
    raise UnsupportedModelError(
        f"{type(target.model).__name__} has weights of its own in each of its {count} layers, as most models have. "
        "Pipelined drafting needs a decoder that runs the same layers several times; use early_exit"
    )


def _stream(target: TransformersTarget, tree: TokenTree) -> Resume:
    """Run a whole chain through the pipeline, one token behind the other."""
    pipeline, states, finished = Pipeline(target), None, list[Tensor]()
    for step in range(pipeline.depth + tree.size):
        first, last = len(finished), min(step, tree.size)
        nodes = Nodes.of_trees([tree.only(range(1, last + 1))], start=first)
        states = pipeline.advance([0], nodes, states, [step - node for node in range(first, last + 1)])
        if step - first == pipeline.depth - 1:
            finished.append(states[:, :1])
            states = states[:, 1:]
    return Resume(boundary=target.num_layers, states=torch.cat(finished, dim=1)[0], stamp=target.writes[0])
