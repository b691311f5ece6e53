"""Recurrences that go node by node down the paths of a tree, where no form over all nodes at once is known or pays."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.model.states.rows import Fed, Recurrence, Tree


@dataclass
class NodeByNode(Recurrence):
    """A state that each token moves one step on. `read_only` inputs, the last ones, do not move it."""

    inputs: Fed
    read_only = 0

    @staticmethod
    @abstractmethod
    def step(state: Tensor, *fed: Tensor) -> Tensor:
        """Return the states (B, ..) behind one token of each row, which feeds (B, ..) each."""

    @abstractmethod
    def read(self, before: Tensor, behind: Tensor, inputs: Fed) -> Tensor:
        """Return what comes out (B, N, ..) between the states (B, N, ..) before and behind each token."""

    def run(self, state: Tensor, inputs: Fed, earlier: Fed | None, tree: Tree) -> tuple[Tensor, Fed]:
        fed = inputs[: len(inputs) - self.read_only]
        if earlier is not None:
            fed = tuple(torch.cat(both, dim=1) for both in zip(earlier, fed, strict=True))
        rows, count = torch.arange(len(state), device=state.device).unsqueeze(1), fed[0].shape[1]
        order = torch.arange(1, count + 1, device=state.device)
        before = (tree.sees & ~torch.eye(count, dtype=torch.bool, device=state.device)) * order
        parents = before.amax(2)  # (B, M) the node before each, counted from 1; 0: the committed state
        states = state.new_empty(len(state), count + 1, *state.shape[1:])
        states[:, 0] = state
        for node in range(count):
            states[:, node + 1] = self.step(states[rows[:, 0], parents[:, node]], *(one[:, node] for one in fed))
        start = tree.start
        return self.read(states[rows, parents[:, start:]], states[:, start + 1 :], inputs), fed

    @classmethod
    def advance(cls, state: Tensor, fed: Fed, tree: Tree) -> Tensor:
        for node, reached in enumerate(tree.reached.unbind(1)):
            moved = cls.step(state, *(one[:, node] for one in fed))
            state = torch.where(reached.view(-1, *[1] * (state.dim() - 1)), moved, state)
        return state
