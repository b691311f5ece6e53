"""A drafter of two layers and data made of numbers: everything the loop needs, nothing more."""

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.losses.objective import FeatureBatch, LossReport, Objective, TokenBatch
from forerun.training.loop.trainer import Training, TrainResult
from forerun.training.recipe import TrainSettings

VOCABULARY, WIDTH, ROWS, LENGTH = 11, 6, 8, 5
FLOAT = {"dtype": "float32", "learning_rate": 1e-2, "muon_learning_rate": 1e-2, "log_every_steps": 1}


class Head(nn.Module):
    """As a real head: a configuration, an embedding, layers, a norm, an output head, a frozen part, a buffer."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("d2t", torch.arange(VOCABULARY))

    def guess(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Not called forward, like the methods of a real head; the layers run twice, as when unrolled."""
        hidden = self.embed_tokens(tokens) + self.frozen(features)
        for _ in range(2):
            hidden = hidden + self.dropout(self.layers[1](functional.silu(self.layers[0](hidden))))
        return self.lm_head(self.norm(hidden))


@dataclass
class Toy(Objective):
    """Cross-entropy of the next token."""

    head: Head = field(default_factory=Head)
    poison: int | None = None
    calls: int = 0

    def parameters_module(self) -> nn.Module:
        return self.head

    def __call__(self, batch: FeatureBatch) -> LossReport:
        logits = self.head.guess(batch.batch.tokens, batch.features[0]).float()
        following = batch.batch.tokens.roll(-1, 1)
        losses = functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
        counted = batch.batch.loss_mask.flatten().float()
        loss = (losses * counted).sum()
        if self.calls == self.poison:
            loss = loss * torch.nan
        self.calls += 1
        right = ((logits.argmax(-1) == following).flatten() * counted).sum()
        return LossReport(loss=loss, weight=counted.sum(), metrics={"accuracy": (right, counted.sum())})


class Pressed(Toy):
    """Somebody presses Ctrl-C during these calls."""

    def __init__(self, presses: dict[int, list[signal.Signals]]) -> None:
        super().__init__()
        self.presses = presses

    def __call__(self, batch: FeatureBatch) -> LossReport:
        for number in self.presses.get(self.calls, []):
            os.kill(os.getpid(), number)
        return super().__call__(batch)


@dataclass
class Numbers:
    """A batch is a function of its position; `parts` batches together are one of the full size."""

    parts: int = 1
    steps_per_epoch: int = 6
    blank: bool = False

    def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
        whole, part = divmod(step, self.parts)
        generator = torch.Generator().manual_seed(whole)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        counts = torch.rand(ROWS, LENGTH, generator=generator) < torch.linspace(0.1, 0.9, ROWS)[:, None]
        features = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
        mine = slice(part + rank * self.parts, None, world * self.parts)
        documents = torch.zeros_like(tokens)
        documents[:, -1] = -1
        positions = torch.arange(LENGTH).expand_as(tokens)
        batch = TokenBatch(
            **{"tokens": tokens[mine], "loss_mask": counts[mine] & (not self.blank), "documents": documents[mine]},
            positions=positions[mine],
        )
        return FeatureBatch(batch=batch, features={0: features[mine]})


def settings(**values: object) -> TrainSettings:
    return TrainSettings(**(FLOAT | values))


def train(*given: object, **more: object) -> TrainResult:
    """Make a `Training` and run it."""
    return Training(*given, **more).run()


def run(output: Path, objective: Toy | None = None, *, allow_changes: bool = False, **values: object) -> TrainResult:
    """Train a toy, by default a new one, for 6 steps; settings by name."""
    return train(objective or Toy(), Numbers(), settings(**values), output, allow_changes=allow_changes)


def weights(head: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}


def logged(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
