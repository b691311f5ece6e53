"""On-policy data: answers in packed windows, written anew by the model that learns from them, or by the target.

What is written is a function of the writer's weights, the seed and the number of the batch, so that a run that is
resumed sees what it would have seen. Source: DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.model.layers import cache_argument
from forerun.training.batch import TokenBatch
from forerun.training.features.online import evaluating

_STREAM = 2  # Of the seed; 0 and 1 pack and order the windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """Writes the answers of windows: each of them, or with a chance, from its first counted token to where it ended."""

    model: Any  # A transformers causal LM; its weights may change between calls
    seed: int
    vocabulary: int  # Tokens that it may write, the first ones
    share: float = 1.0  # Of the documents
    temperature: float = 1.0  # 0: the likeliest tokens
    prompt_tokens: int = 16  # Left of each document at least
    half: bool = False  # Whether to run in bfloat16, by autocast

    def __call__(self, batch: TokenBatch, number: int, first_row: int) -> TokenBatch:
        """Batch `number` of the run, whose first row is `first_row` of all processes'; as before where a document is no
        longer than its prompt. An answer that ends early leaves padding behind."""
        batch = TokenBatch(**{f.name: getattr(batch, f.name).clone() for f in dataclasses.fields(batch)})
        spans: list[tuple[int, int, int, int]] = []  # Row, begin, first written, end
        draws: list[np.ndarray[Any, np.dtype[np.float64]]] = []
        for row, (documents, mask) in enumerate(zip(batch.documents.cpu(), batch.loss_mask.cpu(), strict=True)):
            for document in range(int(documents.max()) + 1):
                where = (documents == document).nonzero().flatten()
                begin, end = int(where[0]), int(where[-1]) + 1
                first = max(begin + int(mask[begin:end].int().argmax()), begin + self.prompt_tokens)
                random = np.random.default_rng([self.seed, _STREAM, number, first_row + row, document])
                if mask[begin:end].any() and first < end and random.random() < self.share:
                    spans.append((row, begin, first, end))
                    draws.append(random.random(end - first))
        if spans:
            prompts = [batch.tokens[row, begin:first] for row, begin, first, _ in spans]
            written = self._write(prompts, draws)
            for (row, begin, first, end), tokens in zip(spans, written, strict=True):
                stop = first + len(tokens)
                batch.tokens[row, first:stop] = tokens
                batch.loss_mask[row, begin:first], batch.loss_mask[row, first:stop] = False, True
                batch.tokens[row, stop:end], batch.documents[row, stop:end] = 0, -1
                batch.loss_mask[row, stop:end], batch.positions[row, stop:end] = False, 0
        return batch

    @torch.no_grad()
    def _write(self, prompts: list[Tensor], draws: list[np.ndarray[Any, np.dtype[np.float64]]]) -> list[Tensor]:
        """What follows each prompt (p,): a token for each of its numbers in [0, 1), fewer where the answer ends."""
        device, longest = prompts[0].device, max(map(len, prompts))
        ids = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
        real = torch.stack([torch.arange(longest, device=device) >= longest - len(prompt) for prompt in prompts]).long()
        wanted = torch.tensor([len(numbers) for numbers in draws], device=device)
        chance = torch.zeros(len(draws), int(wanted.max()), dtype=torch.float64)
        for row, numbers in enumerate(draws):
            chance[row, : len(numbers)] = torch.from_numpy(numbers)
        chance, ends = chance.to(device), self._ends(device)
        written, alive, cache = list[Tensor](), torch.ones_like(wanted, dtype=torch.bool), None
        argument = cache_argument(self.model)
        length = torch.zeros_like(wanted)
        positions = (real.cumsum(1) - 1).clamp_min(0)
        with evaluating(self.model), torch.autocast(device.type, torch.bfloat16, enabled=self.half):
            for step in range(chance.shape[1]):
                found = self.model(
                    input_ids=ids, attention_mask=real, position_ids=positions, use_cache=True, **{argument: cache}
                )
                cache = found[argument]
                token = self._drawn(found.logits[:, -1, : self.vocabulary], chance[:, step])
                written.append(token)
                length += alive
                alive = alive & ~torch.isin(token, ends) & (length < wanted)
                if not alive.any():
                    break
                ids, positions = token.unsqueeze(1), positions[:, -1:] + 1
                real = torch.cat([real, torch.ones_like(ids)], 1)
        tokens = torch.stack(written, 1)
        return [row[:size] for row, size in zip(tokens, length.tolist(), strict=True)]

    def _drawn(self, logits: Tensor, chance: Tensor) -> Tensor:
        """(n,) tokens of logits (n, V) at the numbers `chance` (n,) of their cumulative distributions."""
        if not self.temperature:
            return logits.argmax(-1)
        total = torch.softmax(logits.double() / self.temperature, -1).cumsum(-1)
        return (total <= chance.unsqueeze(1) * total[:, -1:]).sum(-1).clamp_max(logits.shape[-1] - 1)

    def _ends(self, device: torch.device) -> Tensor:
        """The tokens that end an answer."""
        found = self.model.generation_config.eos_token_id
        return torch.tensor([] if found is None else found, dtype=torch.int64, device=device).view(-1)
