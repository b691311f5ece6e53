"""Training with decoding: the engine regenerates the answers in packed windows during training.

The target generates them, with the trained module drafting: the text is the target's own at the requested temperature,
and the rejected positions are known. Or a draft model generates alone (on-policy, DistillSpec, arXiv 2310.08461).
Several batches are generated together, since many answers cost little more than one. Text is a function of the weights,
the seed and the number of the batch, and batches that were not trained on yet are kept on disk, so that a resumed run
gets the same data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.errors import DataError
from forerun.losses.objective import ObjectiveSettings, TokenBatch, pick_counted
from forerun.model.layers import evaluating
from forerun.model.support import context_length, text_config
from forerun.training.data.store import UNWRITTEN
from forerun.types import SamplingParams, Source
from forerun.writing import replace_file

_WRITTEN = 2  # Stream of the seed; 0 and 1 pack and order the windows


class AnswerWriter:
    """Regenerates the answers in windows, each with a given probability.

    An answer begins at the first counted token and ends where it ended in the data; a document without an answer always
    gets one.

    Args:
        model: the transformers causal LM that generates; its weights may change between calls.
        settings: how much is regenerated, how, and which tokens count.
        length: most tokens of a document.
        rows: rows of a batch, on all processes together.
        drafting: a speculative configuration for `model`; None: plain decoding.
        vocabulary: only token ids below this may be generated; None: all.
        refresh: called before each generation, to update the weights of `model` and of the drafter.
        folder: where batches are kept until they are trained on; None: each is generated on demand.
        needed: returns the first step that a resumed run may need; files of earlier steps are removed.
    """

    def __init__(
        self,
        model: Any,
        settings: ObjectiveSettings,
        *,
        seed: int,
        length: int,
        rows: int,
        drafting: Mapping[str, Any] | None = None,
        vocabulary: int | None = None,
        refresh: Callable[[], None] = lambda: None,
        folder: Path | None = None,
        needed: Callable[[], int] = lambda: 0,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.together = max(1, settings.at_once // rows)  # Batches that are generated together
        self._model, self._seed, self._length, self._refresh, self._needed = model, seed, length, refresh, needed
        # Deterministic drafts, so that the text is that of plain decoding, while they pay; at every step if rejected
        # positions are needed.
        every = settings.accepted < 1
        self._drafting = None if drafting is None else {**drafting, "adaptive": not every, "draw": "deterministic"}
        self._allowed = None if vocabulary is None else range(vocabulary)
        self._llm: Any = None

    def batch(self, windows: Callable[[int], TokenBatch], step: int, first_row: int) -> TokenBatch:
        """Return the batch of step number `step`, for the rows from `first_row` on, counted over all processes.

        `windows` returns the data's batch by number: the next `together` batches are regenerated, then each is trained
        on `reuse` times, in turn.
        """
        turn = self.together * self.settings.reuse  # Steps until the next generation
        round_, place = divmod(step, turn)
        number = round_ * self.together + place % self.together
        if self.folder is None:
            return self([windows(number)], number, first_row)[0]
        if place:
            return self._read(self.folder, number, windows, first_row)
        regenerated = self([windows(number + later) for later in range(self.together)], number, first_row)
        for later, batch in enumerate(regenerated):
            _keep(batch, self.folder / f"{number + later}-{first_row}.npz")
        oldest = self._needed() // turn * self.together
        for path in self.folder.glob(f"*-{first_row}.npz"):
            if int(path.name.partition("-")[0]) < oldest:
                path.unlink()
        return regenerated[0]

    def __call__(self, batches: Sequence[TokenBatch], number: int, first_row: int) -> list[TokenBatch]:
        """Regenerate the answers of these batches, the first of which has this `number`.

        `first_row` is their first row, counted over all processes. A document that is no longer than its prompt is not
        changed. Padding after answers that end early is moved to the row's end.
        """
        names = [f.name for f in dataclasses.fields(TokenBatch)]
        rows = len(batches[0].tokens)
        batch = TokenBatch(**{name: torch.cat([getattr(one, name) for one in batches]) for name in names})
        spans: list[tuple[int, int, int, int]] = []  # Row, begin, first written, end
        seeds, picks = list[int](), list[npt.NDArray[np.float64]]()
        for row, (documents, mask) in enumerate(zip(batch.documents.cpu(), batch.loss_mask.cpu(), strict=True)):
            place = (number + row // rows, first_row + row % rows)
            for document in range(int(documents.max()) + 1):
                where = (documents == document).nonzero().flatten()
                begin, end = int(where[0]), int(where[-1]) + 1
                first = begin + int(mask[begin:end].int().argmax())
                missing = bool(batch.tokens[row, end - 1] == UNWRITTEN)
                if not missing:
                    first = max(first, begin + self.settings.prompt_tokens)
                random = np.random.default_rng([self._seed, _WRITTEN, *place, document])
                chosen = random.random() < self.settings.written or missing
                if mask[begin:end].any() and first < end and chosen:
                    spans.append((row, begin, first, end))
                    seeds.append(int(random.integers(2**31)))
                    picks.append(random.random(end - first))
        prompts = [batch.tokens[row, begin:first].tolist() for row, begin, first, _ in spans]
        answers = self._write(prompts, [end - first for *_, first, end in spans], seeds) if spans else []
        for (row, begin, first, end), (tokens, rejected), chance in zip(spans, answers, picks, strict=True):
            stop = first + len(tokens)
            counts = torch.from_numpy(pick_counted(rejected, chance[: len(tokens)], self.settings.accepted))
            batch.tokens[row, first:stop] = torch.tensor(tokens, device=batch.tokens.device)
            batch.loss_mask[row, begin:first] = False
            batch.loss_mask[row, first:stop] = counts.to(batch.loss_mask.device)
            batch.tokens[row, stop:end], batch.documents[row, stop:end] = 0, -1
            batch.loss_mask[row, stop:end], batch.positions[row, stop:end] = False, 0
        order = (batch.documents < 0).int().argsort(dim=1, stable=True)
        parts = zip(*(getattr(batch, name).gather(1, order).split(rows) for name in names), strict=True)
        return [TokenBatch(**dict(zip(names, part, strict=True))) for part in parts]

    def _write(
        self, prompts: list[list[int]], lengths: list[int], seeds: list[int]
    ) -> list[tuple[list[int], npt.NDArray[np.bool_]]]:
        """Return what follows each prompt, at most so many tokens, the end token included, and
        where a draft was rejected.
        """
        from forerun import LLM

        self._refresh()
        if self._llm is None:
            self._llm = LLM(
                self._model,
                tokenizer=False,
                speculative_config=self._drafting,
                max_num_seqs=self.settings.at_once,
                max_model_len=min(self._length, context_length(text_config(self._model))),
                enable_prefix_caching=False,
                self_check=False,
            )
        self._llm.engine.forget()  # a run that is resumed begins with an engine that has decoded nothing
        drawn: dict[str, Any] = {
            "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0,
            "detokenize": False,
            "temperature": self.settings.temperature,
            "allowed_token_ids": self._allowed,
        }
        params = [SamplingParams(max_tokens=n, seed=seed, **drawn) for n, seed in zip(lengths, seeds, strict=True)]
        with evaluating(self._model), torch.random.fork_rng(devices=[]):
            outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        answers = [output.outputs[0] for output in outputs]
        return [
            (answer.token_ids, np.array([token.source is Source.RECOVERED for token in answer.tokens], dtype=bool))
            for answer in answers
        ]

    def _read(self, folder: Path, number: int, windows: Callable[[int], TokenBatch], first_row: int) -> TokenBatch:
        """Read rows of a batch that was written before, by however many processes."""
        like = windows(number)
        by_row: dict[int, dict[str, Tensor]] = {}
        for path in folder.glob(f"{number}-*.npz"):
            start = int(path.stem.partition("-")[2])
            with np.load(path, allow_pickle=False) as arrays:
                held = {name: torch.from_numpy(arrays[name]).to(like.tokens.device) for name in arrays.files}
            by_row |= {
                start + row: {name: part[row] for name, part in held.items()} for row in range(len(held["tokens"]))
            }
        rows = range(first_row, first_row + len(like.tokens))
        if any(row not in by_row for row in rows):
            raise DataError(
                f"{folder} lacks rows {rows.start} to {rows.stop - 1} of written batch {number}: the run that "
                "is resumed wrote them here, on each machine those of its own processes. Put them back, or begin anew."
            )
        return TokenBatch(**{name: torch.stack([by_row[row][name] for row in rows]) for name in by_row[rows.start]})


def _keep(batch: TokenBatch, path: Path) -> None:
    arrays = {f.name: getattr(batch, f.name).cpu().numpy() for f in dataclasses.fields(batch)}
    with replace_file(path) as fresh, fresh.open("wb") as file:
        np.savez(file, **arrays)
