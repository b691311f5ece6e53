"""The training loop of the demo models: packed documents, Muon for the matrices, AdamW for the rest.

Knows how a Llama of a given size is trained and resumed. Does not know where the documents come from.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from guide import COLUMNS, NOWHERE, TOKEN_LAYERS, Document, GuidedAttention
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, LlamaForCausalLM

from forerun.devices import multiplies
from forerun.training.chunked_loss import Teacher, hard_loss, soft_loss
from forerun.training.loop.update import Muon

PHASES = ((0.80, 512), (0.16, 1024), (0.04, 2048))
"""Share of the steps, and their context in tokens: attention is dear on a CPU, so the long contexts come last."""
LONG_PHASES = ((0.85, 1024), (0.15, 2048))
"""Where a text must be seen whole, question and answer."""
OPEN_ROWS = 32
"""Rows that a document may join while they are packed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How long and how fast to train."""

    tokens: int
    """Training tokens in all."""
    batch_tokens: int = 4096
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
    teach_answers: bool = True
    """Whether the teacher is followed in answers, too; else in texts alone."""
    phases: tuple[tuple[float, int], ...] = PHASES
    question_weight: float = 1.0
    """What a token of a question weighs beside one of an answer."""
    echo: bool = False
    """Whether a question's states say the token that is read instead of the next: what is copied must be kept until the
    last layer, where a state has mostly forgotten which token it is of."""
    text_weight: float = 1.0
    """What a token of a file weighs beside one of an answer."""
    guide_weight: float = 0.0
    """What a nat of the guided layers weighs beside one of the text."""
    save_every_s: float = 300.0

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens

    def rate(self, step: int) -> float:
        """Learning-rate factor in [0, 1]: linear warm-up, constant, then linear to 2 % over the last part."""
        left = (self.steps - step) / (self.decay_share * self.steps)
        return min((step + 1) / self.warmup_steps, max(0.02, left), 1.0)

    def context(self, step: int) -> int:
        done = step / self.steps
        for share, context in self.phases:
            if done < share:
                return context
            done -= share
        return self.phases[-1][1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The tokens at which a question, an answer and a text begin."""

    question: int
    answer: int
    text: int

    def asked(self, ids: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S - 1) three times, for token ids (B, S): the tokens to say, what each weighs, and how much of this
        follows the teacher; the weights sum to 1."""
        place = torch.arange(ids.shape[1]).expand_as(ids)
        question, answer, text = (
            torch.where(ids == mark, place, -1).cummax(1).values for mark in (self.question, self.answer, self.text)
        )
        asked = (question > text) & (question > answer)
        unasked = (answer > text) & (question <= text)  # The question lies before the piece: nobody could answer
        answered = (answer > question) & (question > text)
        weights = torch.where(answered, 1.0, schedule.text_weight)
        weights[asked | unasked] = schedule.question_weight
        weights = weights[:, :-1] / weights[:, :-1].sum()
        taught = schedule.distill_weight * weights
        if not schedule.teach_answers:
            taught = taught.masked_fill((answered | asked)[:, :-1], 0.0)
        said = torch.where(asked[:, :-1] & schedule.echo, ids[:, :-1], ids[:, 1:])
        return said, weights, taught


class TokenStream:
    """An endless stream of shuffled documents, packed into rows; only a document longer than a row is cut.

    `batch` depends on its arguments alone, so a resumed run sees the same data.
    """

    def __init__(self, documents: list[Document], marks: Marks, seed: int) -> None:
        self.documents, self.marks, self.seed = documents, marks, seed
        self._rows: dict[int, Tensor] = {}

    def batch(self, step: int, batch_tokens: int, context: int) -> Tensor:
        """(batch_tokens // context, context, COLUMNS): token ids, and where in the row the tokens before them
        look; each row is from another place of the epoch."""
        if context not in self._rows:
            self._rows = {context: self._packed(context)}
        rows, size = self._rows[context], batch_tokens // context
        epoch, first = divmod(step * size, len(rows) - size)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed + epoch))
        return rows[order[first : first + size]]

    def _packed(self, context: int) -> Tensor:
        """All documents in rows of `context` tokens, each opened by a text mark: best fit out of those at hand."""
        order = torch.randperm(len(self.documents), generator=torch.Generator().manual_seed(self.seed)).tolist()
        pieces = (
            _piece(self.documents[index], start, context - 1, self.marks.text)
            for index in order
            for start in range(0, len(self.documents[index].ids), context - 1)
        )
        rows: list[list[Tensor]] = []
        room: list[tuple[int, list[Tensor]]] = []  # Tokens in a row that may still be joined, and its pieces
        for piece in pieces:
            fitting = [number for number, (used, _) in enumerate(room) if used + len(piece) <= context]
            if fitting:
                used, row = room.pop(max(fitting, key=lambda number: room[number][0]))
            else:
                used, row = 0, []
                rows.append(row)
            row.append(_moved(piece, used))
            room.append((used + len(piece), row))
            if len(room) > OPEN_ROWS:
                room.remove(max(room, key=lambda one: one[0]))
        padding = torch.full((context, COLUMNS), NOWHERE, dtype=torch.int32)
        padding[:, 0] = self.marks.text
        return torch.stack([torch.cat([*row, padding])[:context] for row in rows])


def _piece(document: Document, start: int, length: int, mark: int) -> Tensor:
    """(tokens + 1, COLUMNS): a mark, and so many tokens of the document with their places counted from the mark."""
    columns = [one[start : start + length] for one in (document.ids, *document.guides)]
    found = torch.tensor([(mark, *[NOWHERE] * (COLUMNS - 1)), *zip(*columns, strict=True)], dtype=torch.int32)
    found[:, 1:] = torch.where(found[:, 1:] >= start, found[:, 1:] - start + 1, NOWHERE)
    return found


def _moved(piece: Tensor, offset: int) -> Tensor:
    """The piece `offset` tokens further on in a row."""
    piece[:, 1:] += offset * (piece[:, 1:] != NOWHERE)
    return piece


def optimizers_for(model: LlamaForCausalLM, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        Muon(matrices, lr=schedule.muon_rate, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=schedule.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def mean_loss(
    model: LlamaForCausalLM,
    ids: Tensor,
    said: Tensor,
    weights: Tensor,
    taught: Tensor,
    teacher: LlamaForCausalLM | None,
) -> Tensor:
    """The loss in nats per token `said`, weighted by `weights` (B, S - 1), of which `taught` follow the teacher, where
    there is one."""
    if teacher is None:
        taught = torch.zeros_like(taught)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    matrix, rows = model.lm_head.weight, taught.sum(1) > 0
    loss = hard_loss(hidden.flatten(0, 1), matrix, (weights - taught).flatten(), said.flatten()).loss
    if teacher is None or not rows.any():
        return loss
    with torch.no_grad():
        known = teacher.model(input_ids=ids[rows], use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    followed = Teacher(hidden=known, weight=teacher.lm_head.weight.to(known.dtype))
    return loss + soft_loss(hidden[rows].flatten(0, 1), matrix, taught[rows].flatten(), followed).loss


def train(
    model: LlamaForCausalLM,
    stream: TokenStream,
    schedule: Schedule,
    folder: Path,
    teacher: LlamaForCausalLM | None = None,
) -> None:
    """Train in place; resumes from ``folder/state.pt`` where one exists. Writes ``folder/log.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    attention = GuidedAttention()
    AttentionInterface.register("guided", attention)
    model.set_attn_implementation("guided")
    if schedule.guide_weight:
        attention.listen(model)
    optimizers = optimizers_for(model, schedule)
    first = _resume(folder, model, optimizers)
    saved = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress, (folder / "log.jsonl").open("a") as log:
        bar = progress.add_task("training", total=schedule.steps, completed=first)
        for step in range(first, schedule.steps):
            began = time.monotonic()
            loss, missed = _step(model, stream, schedule, optimizers, step, attention=attention, teacher=teacher)
            speed = schedule.batch_tokens / (time.monotonic() - began)
            figures = {"loss": round(loss, 4), "guide": round(missed, 4), "tokens_per_second": round(speed)}
            log.write(json.dumps({"step": step, **figures}) + "\n")
            log.flush()
            progress.update(bar, completed=step + 1, description=f"loss {loss:.3f}")
            if time.monotonic() - saved > schedule.save_every_s or step + 1 == schedule.steps:
                _save(folder, model, optimizers, step + 1)
                saved = time.monotonic()


def _step(
    model: LlamaForCausalLM,
    stream: TokenStream,
    schedule: Schedule,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    *,
    attention: GuidedAttention,
    teacher: LlamaForCausalLM | None,
) -> tuple[float, float]:
    """The loss and what the guided layers missed, in nats per token."""
    ids, *guides = stream.batch(step, schedule.batch_tokens, schedule.context(step)).long().unbind(-1)
    following = (functional.pad(guide[:, 1:], (0, 1), value=NOWHERE) for guide in guides)
    if schedule.guide_weight:
        attention.show(*following)
    for optimizer, peak in zip(optimizers, (schedule.muon_rate, schedule.adam_rate), strict=True):
        optimizer.param_groups[0]["lr"] = peak * schedule.rate(step)
        optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=multiplies(ids.device, torch.bfloat16)):
        loss = mean_loss(model, ids, *stream.marks.asked(ids, schedule), teacher)
        missed = torch.zeros(())
        if schedule.guide_weight:
            untold = [_untold(model, attention, layer, ids) for layer in TOKEN_LAYERS]
            missed = attention.loss() + torch.stack(untold).mean()
    (loss + schedule.guide_weight * missed).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.detach()), float(missed.detach())


def _untold(model: LlamaForCausalLM, attention: GuidedAttention, layer: int, ids: Tensor) -> Tensor:
    """Nats by which a token layer's attention, read as the model's last state is, misses the copied token."""
    places = attention.wanted[layer]
    following = ids.roll(-1, 1)
    known = (places != NOWHERE) & (ids.gather(1, places.clamp(min=0)) == following)
    states = model.model.norm(attention.told[layer][known])
    weights = torch.full((len(states),), 1 / max(1, len(states)))
    return hard_loss(states, model.lm_head.weight, weights, following[known]).loss


def _save(folder: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    torch.save(state, folder / "state.tmp")
    os.replace(folder / "state.tmp", folder / "state.pt")


def _resume(folder: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    path = folder / "state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, documents: list[list[int]], separator: int, context: int) -> float:
    """Nats per token over whole documents, in windows of `context` tokens that overlap by half."""
    total, count = 0.0, 0
    model.eval()
    for document in documents:
        ids = torch.tensor([separator, *document])
        for start in range(0, max(1, len(ids) - 1), context // 2):
            window = ids[start : start + context]
            logits = model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
            fresh = 0 if start == 0 else context // 2 - 1
            losses = functional.cross_entropy(logits[fresh:], window[1 + fresh :], reduction="sum")
            total, count = total + float(losses), count + max(0, len(window) - 1 - fresh)
    model.train()
    return total / count
