"""Early exit: the target's first layers draft, its other layers verify.

Drafted nodes run through the first E layers in the slots in which they are scored, so their keys there are the target's
own. Their states at boundary E are passed along with the draft: scoring runs the remaining layers, and the first E only
for the leaves, which drafting did not run. There is no second cache and no second set of weights. Source: LayerSkip
(arXiv 2404.16710), which also trains the target so that its early layers predict well; an untrained target drafts
poorly.

`SelfDrafter` is the base of all drafters that run a part of the target itself, in the cache slots of the coming step.
The prefix's keys and values are the target's own. Root and drafted nodes are run depth by depth in the slots after the
committed tokens, which scoring overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import linear

from forerun.core.acceptance import Proposal
from forerun.core.sampling import Sampler
from forerun.core.tree import Resume, TokenTree
from forerun.decode.drafter import DraftContext, DrafterSetup, LearningDrafter
from forerun.devices import send
from forerun.drafters.drawing import Children
from forerun.drafters.trees import FixedTree, NodeLimits, Submitted, TreeOptions
from forerun.errors import ArgumentError, CheckpointError
from forerun.model import Target, TransformersTarget
from forerun.model.inputs import Nodes
from forerun.model.layers import LayerRange, base_of, norm_after_layers
from forerun.model.load import read_header
from forerun.model.partial import prove, renumber
from forerun.model.transformers_target import require_layers
from forerun.types import Budget, DraftKind


class SelfDrafter(LearningDrafter[Submitted]):
    """The base of drafters that run a part of the target; a method provides `logits`."""

    reads_layers = True

    def __init__(self, tree: FixedTree, target: Target) -> None:
        super().__init__()
        self.target = require_layers(target, self.name)
        self._tree = tree

    def kind(self, sampler: Sampler) -> DraftKind:
        return self._tree.kind(sampler)

    def logits(self, rows: Sequence[int], nodes: Nodes) -> Tensor:
        """Return the method's raw logits (B, N - start, V) after `nodes`; those before `start` have already been
        run.
        """
        raise NotImplementedError

    def stop_below(self, row: int, *, greedy: bool) -> float | None:
        """Return the threshold of a row: it drafts no deeper if all its last nodes are less likely. None: no threshold.
        A sampled node counts with the confidence of its distribution (`Children.confidence`).
        """
        return None

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        within = self._tree.within(context, budget, self.target.max_length)
        active = [index for index, count in enumerate(within) if count > 0]
        trees = context.trees()
        if not active:
            return trees
        thresholds = [self.stop_below(context.rows[index], greedy=context.samplers[index].greedy) for index in active]

        def stopped(children: Children) -> list[bool]:
            if all(threshold is None for threshold in thresholds):
                return []
            surest = children.confidence.flatten(1).amax(1).tolist()
            return [below is not None and sure < below for sure, below in zip(surest, thresholds, strict=True)]

        shape = self._tree.shape
        limits = NodeLimits(shape.levels, [within[index] for index in active], stopped)
        rows, roots = [context.rows[index] for index in active], [context.tokens[index][-1] for index in active]

        def descend(ids: Tensor, level: range) -> Tensor:
            return self.logits(rows, Nodes.of_levels(roots, ids, shape.parents, counts=limits.nodes, start=level.start))

        first = self.logits(rows, Nodes.of_trees([TokenTree(root) for root in roots]))
        draws = self._tree.draws(context, active, first.device, first.shape[-1])
        grown = self._tree.grow(draws, max(limits.nodes), first, descend, enough=limits.enough)
        for index, tree, submitted in self._tree.cuts(context, active, grown, limits.nodes):
            trees[index], self._drafted[context.rows[index]] = tree, submitted
        return trees


_HEAD, _NORM = "lm_head.weight", "norm.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyExitConfig(TreeOptions):
    """Options of `early_exit`."""

    exit_layer: int  # E, number of the target's layers that draft: 1 .. L - 1
    head: str | Path | None = None
    """Safetensors file of an output head for this exit: ``lm_head.weight`` (V, H), and ``norm.weight`` (H,) if it has a
    final norm of its own, in the target's convention. None: the target's final norm and output head.
    """

    def __post_init__(self) -> None:
        self.check_tree("early_exit")


class EarlyExitDrafter(SelfDrafter):
    """Drafts with the first layers of the target, and passes their states on to the scoring pass."""

    name = "early_exit"
    Config = EarlyExitConfig

    def __init__(self, config: EarlyExitConfig, setup: DrafterSetup) -> None:
        """Check the exit. Raises ArgumentError if there is no such layer, UnsupportedModelError if the target's layers
        cannot be run in part, CheckpointError if the head's file is missing, damaged, or has other tensors.
        """
        super().__init__(config.fixed_tree(), setup.target)
        layers = setup.target.num_layers
        if not 1 <= config.exit_layer < layers:
            raise ArgumentError(
                f"early_exit: exit_layer must be in 1..{layers - 1} for a target of {layers} layers, got "
                f"{config.exit_layer}"
            )
        prove(self.target, config.exit_layer)
        self.config = config
        self._head = None if config.head is None else ExitHead(Path(config.head), self.target)
        self._rows: Sequence[int] = ()
        self._states: list[Tensor] = []  # Of this proposal: (A, F, H) at the exit by depth, for the rows `_rows`

    def memory_bytes(self) -> int:
        return 0 if self._head is None else self._head.nbytes()

    def logits(self, rows: Sequence[int], nodes: Nodes) -> Tensor:
        """Return the exit's logits after the nodes: (A, N - start, V)."""
        states, logits = self.target.draft(rows, nodes, LayerRange(stop=self.config.exit_layer), self._head)
        self._rows = rows
        self._states.append(states)
        return logits

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        self._states = []
        trees = super().propose(context, budget)
        if not self._states:
            return trees
        by_row = dict(zip(context.rows, trees, strict=True))
        states = torch.cat(self._states, dim=1)
        self._states = []
        drafts = [(row, by_row[row], self._drafted[row]) for row in self._rows]
        leave(self.target, self.config.exit_layer, drafts, states)
        return trees


def leave(
    target: TransformersTarget, boundary: int, drafts: Sequence[tuple[int, TokenTree, Proposal]], states: Tensor
) -> None:
    """Attach to each row's tree the states of its nodes that were run, so that scoring runs only the remaining layers.

    Args:
        drafts: (B,) row, its tree, and the submitted nodes in the numbering in which they were run.
        states: (B, F, H) at the `boundary`, of the nodes that were run, root first.
    """
    rows = [row for row, _, _ in drafts]
    kept = [[node for node in submitted.evidence if node < states.shape[1]] for _, _, submitted in drafts]
    # If a distribution had too few tokens for all children, the nodes behind the gap have moved up.
    renumber(target, rows, kept)
    size = max(map(len, kept)) + 1
    [index] = send([torch.tensor([[0, *nodes, *[0] * (size - 1 - len(nodes))] for nodes in kept])], states.device)
    moved = states.gather(1, index.unsqueeze(2).expand(-1, -1, states.shape[2]))
    for (row, tree, _), nodes, run in zip(drafts, kept, moved, strict=True):
        tree.resume = Resume(boundary=boundary, states=run[: len(nodes) + 1], stamp=target.writes[row])


class ExitHead:
    """An output head that was trained for the exit: a norm like the target's final one, and a linear layer."""

    def __init__(self, path: Path, target: TransformersTarget) -> None:
        """Load the file. Raises CheckpointError if it is missing, damaged, or has other tensors."""
        if not path.is_file():
            raise CheckpointError(f"early_exit: there is no file {path}; head is a safetensors file")
        shapes = {name: tuple(entry["shape"]) for name, entry in read_header(path).items()}
        expected = {_HEAD: (target.vocab_size, target.hidden_size), _NORM: (target.hidden_size,)}
        if _HEAD not in shapes or not shapes.items() <= expected.items():
            raise CheckpointError(
                f"early_exit: {path} must hold {_HEAD} {expected[_HEAD]}, may hold {_NORM} {expected[_NORM]}, "
                f"nothing else; it holds {shapes}"
            )
        tensors = load_file(path)
        self._weight = tensors[_HEAD].to(target.device, target.dtype)
        _, self._norm = norm_after_layers(base_of(target.model), target.num_layers)
        self._own = {"weight": tensors[_NORM].to(target.device, target.dtype)} if _NORM in tensors else {}

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """Map states at the exit (.., H) -> raw logits (.., V)."""
        normed: Tensor = functional_call(self._norm, self._own, (states,))
        return linear(normed, self._weight)

    def nbytes(self) -> int:
        """Return the bytes of the weights that the target does not have."""
        return self._weight.nbytes + sum(weight.nbytes for weight in self._own.values())
