"""Train with decode: answers in packed windows, written anew while training goes on, by the engine.

The target writes with what is trained drafting for it: the text is the target's own at the temperature that is asked
for, and it is known where drafts were rejected. Or a draft model writes alone (on-policy, DistillSpec, arXiv
2310.08461). Text is a function of the weights, the seed and the number of the batch, and what shall be seen again is on
disk: a run that is resumed sees what it would have seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.errors import DataError
from forerun.model.support import context_length, text_config
from forerun.training.batch import TokenBatch
from forerun.training.features.online import evaluating
from forerun.training.objectives.base import ObjectiveSettings, picked
from forerun.types import SamplingParams, Source
from forerun.writing import written

_WRITTEN, _REPEATED = 2, 3  # Streams of the seed; 0 and 1 pack and order the windows
ROWS = 16  # Answers that are written at once
REMEMBERED = 64  # Written batches that may be seen again, the last ones


class Writer:
    """Writes the answers of windows: of each document, or with a chance, from its first counted token to where it
    ended.

    Args:
        model: a transformers causal LM, what writes; its weights may change between calls.
        settings: how much is written anew, how, and what of it counts.
        length: most tokens of a document.
        drafting: a speculative configuration for `model`; None: it decodes plainly.
        vocabulary: only so many tokens may be written, the first ones; None: all.
        refresh: called before a batch is written, to bring what writes and what drafts up to date.
        folder: where batches are kept that are seen again; None: none are.
    """

    def __init__(
        self,
        model: Any,
        settings: ObjectiveSettings,
        *,
        seed: int,
        length: int,
        drafting: Mapping[str, Any] | None = None,
        vocabulary: int | None = None,
        refresh: Callable[[], None] = lambda: None,
        folder: Path | None = None,
    ) -> None:
        self.settings, self.folder = settings, folder
        self._model, self._seed, self._length, self._refresh = model, seed, length, refresh
        # Drafts that are not drawn: what is written is then plain decoding's text, whatever drafts.
        self._drafting = None if drafting is None else {**drafting, "adaptive": False, "draw": "deterministic"}
        self._allowed = None if vocabulary is None else range(vocabulary)
        self._llm: Any = None

    def batch(self, windows: Callable[[int], TokenBatch], step: int, first_row: int) -> TokenBatch:
        """What step number `step` is trained on, of the rows from `first_row` on of all processes'. `windows` gives the
        data's by number: one in `every` steps writes the next ones anew, the others see again what was written."""
        number, again = divmod(step, self.settings.every)
        if again:
            random = np.random.default_rng([self._seed, _REPEATED, step])
            return self._read(int(random.integers(max(0, number - REMEMBERED + 1), number + 1)), windows, first_row)
        made = self(windows(number), number, first_row)
        if self.settings.every > 1:
            self._keep(made, number, first_row)
        return made

    def __call__(self, batch: TokenBatch, number: int, first_row: int) -> TokenBatch:
        """Batch `number` of those that are written, whose first row is `first_row` of all processes'; as before where a
        document is no longer than its prompt. Padding, which answers leave that end early, goes to the row's end."""
        batch = TokenBatch(**{f.name: getattr(batch, f.name).clone() for f in dataclasses.fields(batch)})
        spans: list[tuple[int, int, int, int]] = []  # Row, begin, first written, end
        seeds, picks = list[int](), list[npt.NDArray[np.float64]]()
        for row, (documents, mask) in enumerate(zip(batch.documents.cpu(), batch.loss_mask.cpu(), strict=True)):
            for document in range(int(documents.max()) + 1):
                where = (documents == document).nonzero().flatten()
                begin, end = int(where[0]), int(where[-1]) + 1
                first = max(begin + int(mask[begin:end].int().argmax()), begin + self.settings.prompt_tokens)
                random = np.random.default_rng([self._seed, _WRITTEN, number, first_row + row, document])
                if mask[begin:end].any() and first < end and random.random() < self.settings.written:
                    spans.append((row, begin, first, end))
                    seeds.append(int(random.integers(2**31)))
                    picks.append(random.random(end - first))
        prompts = [batch.tokens[row, begin:first].tolist() for row, begin, first, _ in spans]
        answers = self._write(prompts, [end - first for *_, first, end in spans], seeds) if spans else []
        for (row, begin, first, end), (tokens, rejected), chance in zip(spans, answers, picks, strict=True):
            stop = first + len(tokens)
            counts = torch.from_numpy(picked(rejected, chance[: len(tokens)], self.settings.accepted))
            batch.tokens[row, first:stop] = torch.tensor(tokens, device=batch.tokens.device)
            batch.loss_mask[row, begin:first] = False
            batch.loss_mask[row, first:stop] = counts.to(batch.loss_mask.device)
            batch.tokens[row, stop:end], batch.documents[row, stop:end] = 0, -1
            batch.loss_mask[row, stop:end], batch.positions[row, stop:end] = False, 0
        order = (batch.documents < 0).int().argsort(dim=1, stable=True)
        return TokenBatch(**{f.name: getattr(batch, f.name).gather(1, order) for f in dataclasses.fields(batch)})

    def _write(
        self, prompts: list[list[int]], lengths: list[int], seeds: list[int]
    ) -> list[tuple[list[int], npt.NDArray[np.bool_]]]:
        """What follows each prompt, at most so many tokens, the one that ends an answer included; and where a draft was
        rejected."""
        from forerun import LLM

        self._refresh()
        if self._llm is None:
            self._llm = LLM(
                self._model,
                tokenizer=False,
                speculative_config=self._drafting,
                max_num_seqs=ROWS,
                max_model_len=min(self._length, context_length(text_config(self._model))),
                enable_prefix_caching=False,
                self_check=False,
            )
        self._llm.engine.forget()  # a run that is resumed begins with an engine that has decoded nothing
        drawn: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "detokenize": False}
        drawn |= {"temperature": self.settings.temperature, "allowed_token_ids": self._allowed}
        params = [SamplingParams(max_tokens=n, seed=seed, **drawn) for n, seed in zip(lengths, seeds, strict=True)]
        with evaluating(self._model), torch.random.fork_rng(devices=[]):
            outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        answers = [output.outputs[0] for output in outputs]
        return [
            (answer.token_ids, np.array([token.source is Source.RECOVERED for token in answer.tokens], dtype=bool))
            for answer in answers
        ]

    def _keep(self, batch: TokenBatch, number: int, first_row: int) -> None:
        if self.folder is None:
            return
        arrays = {f.name: getattr(batch, f.name).cpu().numpy() for f in dataclasses.fields(batch)}
        with written(self.folder / f"{number}-{first_row}.npz") as fresh, fresh.open("wb") as file:
            np.savez(file, **arrays)
        (self.folder / f"{number - REMEMBERED}-{first_row}.npz").unlink(missing_ok=True)

    def _read(self, number: int, windows: Callable[[int], TokenBatch], first_row: int) -> TokenBatch:
        """Rows of a batch that was written before, by however many processes."""
        like = windows(number)
        if self.folder is None:
            return like
        found: dict[int, dict[str, Tensor]] = {}
        for path in self.folder.glob(f"{number}-*.npz"):
            start = int(path.stem.partition("-")[2])
            with np.load(path, allow_pickle=False) as arrays:
                held = {name: torch.from_numpy(arrays[name]).to(like.tokens.device) for name in arrays.files}
            found |= {
                start + row: {name: part[row] for name, part in held.items()} for row in range(len(held["tokens"]))
            }
        wanted = range(first_row, first_row + len(like.tokens))
        if any(row not in found for row in wanted):
            raise DataError(
                f"{self.folder} lacks rows {wanted.start} to {wanted.stop - 1} of written batch {number}: the run that "
                "is resumed wrote them here, on each machine those of its own processes. Put them back, or begin anew."
            )
        return TokenBatch(**{name: torch.stack([found[row][name] for row in wanted]) for name in found[wanted.start]})
