"""The training loop of the demo models: packed documents, Muon for the matrices, AdamW for the rest.

Knows how a Llama of a given size is trained and resumed. Does not know where the documents come from.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from forerun.devices import multiplies
from forerun.losses.chunked_loss import Teacher, hard_loss, soft_loss
from forerun.training.loop.update import Muon

NOTED_EVERY = 20
"""Steps between two lines of the log."""


class Stream(Protocol):
    """Endless batches; see `documents.TokenStream`."""

    def batches(self, tokens: int, portion: int, first: int) -> Iterator[tuple[Tensor, tuple[int, int]]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How long and how fast to train."""

    tokens: int
    """Training tokens in all."""
    batch_tokens: int = 65_536
    """Tokens per optimizer step."""
    muon_rate: float = 6.0e-3
    """Peak learning rate of the matrices."""
    adam_rate: float = 3.0e-3
    """Peak learning rate of embeddings and norms."""
    warmup_steps: int = 60
    decay_share: float = 0.5
    """Share of the steps, at the end, in which the rate falls."""
    weight_decay: float = 0.1
    distill_weight: float = 0.0
    """Share of the loss that follows the teacher's law instead of the text."""
    question_weight: float = 0.2
    """What a token of a question weighs beside one of an answer or of a file."""
    save_every_s: float = 300.0

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens

    def rate(self, step: int) -> float:
        """Learning-rate factor in [0, 1]: linear warm-up, constant, then linear to 2 % over the last part."""
        falling = (1 - step / self.steps) / self.decay_share if self.decay_share else 1.0
        return min((step + 1) / self.warmup_steps, max(0.02, falling), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The tokens at which a question, an answer and a text begin."""

    question: int
    answer: int
    text: int

    def weights(self, ids: Tensor, question_weight: float) -> Tensor:
        """(B, S - 1): what the tokens behind the first of `ids` (B, S) weigh; they sum to 1. What answers a question
        that lies before the row, so that nobody could know it, weighs as the question does."""
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        question, answer, text = (
            torch.where(ids == mark, place, -1).cummax(1).values for mark in (self.question, self.answer, self.text)
        )
        asked = (question > text) & (question > answer)
        unasked = (answer > text) & (question <= text)
        weights = torch.where(asked | unasked, question_weight, 1.0)
        weights = weights.masked_fill(functional.pad(ids[:, 1:] == self.text, (0, 1)) & (ids == self.text), 0.0)
        return weights[:, :-1] / weights[:, :-1].sum()


def optimizers_for(model: LlamaForCausalLM, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        Muon(matrices, lr=schedule.muon_rate, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=schedule.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def mean_loss(
    model: LlamaForCausalLM, ids: Tensor, weights: Tensor, share: float, teacher: LlamaForCausalLM | None
) -> Tensor:
    """The loss in nats per token behind the first, weighted by `weights` (B, S - 1), of which a `share` follows the
    teacher, where there is one."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    matrix, flat = model.lm_head.weight, weights.flatten()
    if teacher is None:
        return hard_loss(hidden, matrix, flat, ids[:, 1:].flatten()).loss
    with torch.no_grad():
        known = teacher.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    followed = Teacher(hidden=known, weight=teacher.lm_head.weight.to(known.dtype))
    loss = soft_loss(hidden, matrix, flat * share, followed).loss
    return loss + hard_loss(hidden, matrix, flat * (1 - share), ids[:, 1:].flatten()).loss if share < 1 else loss


def train(
    model: LlamaForCausalLM,
    stream: Stream,
    marks: Marks,
    schedule: Schedule,
    folder: Path,
    *,
    teacher: LlamaForCausalLM | None = None,
) -> None:
    """Train in place, on the model's device; resumes from ``folder/state.pt`` where one exists. Writes
    ``folder/log.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    optimizers = optimizers_for(model, schedule)
    device = model.device
    if device.type == "cuda":
        for layer in [*model.model.layers, *(teacher.model.layers if teacher is not None else ())]:
            layer.compile(dynamic=False)
    step, first = _resume(folder, model, optimizers)
    saved = noted = time.monotonic()
    bars = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*bars) as progress, (folder / "log.jsonl").open("a") as log:
        losses: list[Tensor] = []
        bar = progress.add_task("training", total=schedule.steps, completed=step)
        batches = stream.batches(schedule.batch_tokens, *first)
        while step < schedule.steps:
            ids, position = next(batches)
            for optimizer, peak in zip(optimizers, (schedule.muon_rate, schedule.adam_rate), strict=True):
                optimizer.param_groups[0]["lr"] = peak * schedule.rate(step)
            losses.append(_step(model, ids.to(device), marks, schedule, optimizers, teacher=teacher))
            step += 1
            over = step == schedule.steps
            if step % NOTED_EVERY == 0 or over:
                loss = float(torch.stack(losses).mean())
                speed = len(losses) * schedule.batch_tokens / (time.monotonic() - noted)
                losses, noted = [], time.monotonic()
                figures = {"loss": round(loss, 4), "tokens_per_second": round(speed)}
                log.write(json.dumps({"step": step, "tokens": step * schedule.batch_tokens, **figures}) + "\n")
                log.flush()
                progress.update(bar, completed=step, description=f"loss {loss:.3f}")
            if time.monotonic() - saved > schedule.save_every_s or over:
                _save(folder, model, optimizers, (step, position))
                saved = time.monotonic()


def _step(
    model: LlamaForCausalLM,
    ids: Tensor,
    marks: Marks,
    schedule: Schedule,
    optimizers: list[torch.optim.Optimizer],
    *,
    teacher: LlamaForCausalLM | None,
) -> Tensor:
    """One update; the loss, on the device."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=multiplies(ids.device, torch.bfloat16)):
        weights = marks.weights(ids, schedule.question_weight)
        loss = mean_loss(model, ids, weights, schedule.distill_weight, teacher)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def _save(
    folder: Path,
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    done: tuple[int, tuple[int, int]],
) -> None:
    state = {"done": done, "model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
    torch.save(state, folder / "state.tmp")
    os.replace(folder / "state.tmp", folder / "state.pt")


def _resume(
    folder: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, tuple[int, int]]:
    """The steps that are behind it, and the place in the stream: portion and row."""
    path = folder / "state.pt"
    if not path.exists():
        return 0, (0, 0)
    state = torch.load(path, weights_only=True, map_location=model.device)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    step, position = state["done"]
    return step, tuple(position)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, documents: list[list[int]], separator: int, context: int) -> float:
    """Nats per token over whole documents, in windows of `context` tokens that overlap by half."""
    total, count = 0.0, 0
    model.eval()
    for document in documents:
        ids = torch.tensor([separator, *document], device=model.device)
        for start in range(0, max(1, len(ids) - 1), context // 2):
            window = ids[start : start + context]
            logits = model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
            fresh = 0 if start == 0 else context // 2 - 1
            losses = functional.cross_entropy(logits[fresh:], window[1 + fresh :], reduction="sum")
            total, count = total + float(losses), count + max(0, len(window) - 1 - fresh)
    model.train()
    return total / count
