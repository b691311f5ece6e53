"""Token-level intersection: a causal LM with another tokenizer drafts the tokens that both vocabularies share.

arXiv 2502.05202. The draft model's logits are restricted to the shared tokens and renormalised, and this distribution
is recorded, so the usual rules apply and the output is lossless. The draft model reads the committed text token by
token: a token that it lacks is encoded in its own tokens, so its text and the target's differ in length. Acceptance is
at most the probability that the target gives to the shared tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.decode.drafter import DrafterSetup
from forerun.drafters.draft_models.draft_model import DraftModelConfig, DraftModelDrafter
from forerun.drafters.draft_models.token_bytes import SpanEncoder, TokenBytes, opening_of
from forerun.drafters.drawing import DraftVocabulary
from forerun.drafters.vocabulary import tokenizers
from forerun.errors import ArgumentError, VocabularyMismatchError
from forerun.model import TransformersTarget
from forerun.model.kernels.packing import PackedLinear, PackedWeight, packable
from forerun.model.layers import OutputHead
from forerun.model.transformers_target import require_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class TliConfig(DraftModelConfig):
    """Options of `tli`: those of `draft_model`, and those about the two tokenizers."""

    tokenizer: Any = None  # The draft model's: directory, hub id or object; None takes the one beside the model
    target_tokenizer: Any = None  # The target's; None takes the engine's
    min_shared: float = 0.05  # Least number of shared tokens; below 1 a share of the smaller vocabulary

    def __post_init__(self) -> None:
        self.check("tli")
        if self.min_shared < 0:
            raise ArgumentError(f"tli: min_shared must be 0 or more, got {self.min_shared}")


class TliDrafter(DraftModelDrafter):
    """Drafts shared tokens with a smaller causal LM, with one forward pass per depth for all rows."""

    name = "tli"
    Config = TliConfig
    config: TliConfig
    _slot_ratio: ClassVar[int] = 2  # A row whose text needs more of the draft model's tokens drafts nothing

    def memory_bytes(self) -> int:
        return super().memory_bytes() + (self._pruned or 0)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().truncate(rows, lengths)  # It also shrinks the alignments, through `_draft_length`
        for row_id, length in zip(rows, lengths, strict=True):
            if length == 0:
                del self._alignments[row_id]

    def _check_vocabulary(self, setup: DrafterSetup) -> None:
        """Find the shared tokens, and check that there are enough."""
        target, draft = map(TokenBytes, tokenizers(self.name, self.config, setup))
        shared = intersection(target, draft, setup.target.vocab_size, self.model.vocab_size)
        require(shared, self.config.min_shared, target, draft)
        widest = max(self._tree.shape.widths)
        if len(shared) < widest:
            raise VocabularyMismatchError(
                f"tli: {widest} children per node need as many shared tokens; {target!r}, {draft!r} have {len(shared)}"
            )
        dictionary = Dictionary(target, SpanEncoder(draft), self.model.vocab_size)
        device = self.model.device
        self._alignments = defaultdict[int, TokenAlignment](lambda: TokenAlignment(dictionary))
        target_ids, self._draft_ids = shared.T.contiguous().to(device)
        self._shared = DraftVocabulary(token_ids=target_ids, size=setup.target.vocab_size)
        self._translated = torch.zeros(setup.target.vocab_size, dtype=torch.int64, device=device)
        self._translated[target_ids] = self._draft_ids
        self._pruned = prune_head(require_layers(self.model, "tli"), self._draft_ids)

    def _draft_tokens(self, row_id: int, tokens: Sequence[int]) -> Sequence[int]:
        return self._alignments[row_id].follow(tokens)

    def _draft_length(self, row_id: int, length: int) -> int:
        self._alignments[row_id].shrink(length)
        return self._alignments[row_id].span(length)

    def _translate(self, ids: Tensor) -> Tensor:
        return self._translated[ids]

    def _target_logits(self, logits: Tensor) -> Tensor:
        """Select the logits (B, F, V') of the shared tokens, ascending in the target's ids."""
        return logits if self._pruned is not None else logits[..., self._draft_ids]


def intersection(target: TokenBytes, draft: TokenBytes, target_size: int, draft_size: int) -> Tensor:
    """Return (V', 2) int64: pairs of target and draft token ids that stand for the same bytes, or are special tokens
    with the same meaning. Each id occurs once; target ids ascend. Ids are below the sizes of the embeddings.
    """
    pairs = {ours: draft.ordinary[piece] for piece, ours in target.ordinary.items() if piece in draft.ordinary}
    taken = set[int]()
    for ours, theirs in target.counterparts(draft).items():
        if theirs not in taken:
            pairs[ours] = theirs
            taken.add(theirs)
    shared = sorted((ours, theirs) for ours, theirs in pairs.items() if ours < target_size and theirs < draft_size)
    return torch.tensor(shared, dtype=torch.int64).view(-1, 2)


def require(shared: Tensor, least: float, target: TokenBytes, draft: TokenBytes) -> None:
    """Raise VocabularyMismatchError if too few tokens are shared. A `least` below 1 is a share of
    the smaller vocabulary, else a number of tokens.
    """
    needed = max(1, round(least * min(len(target), len(draft)) if least < 1 else least))
    if len(shared) >= needed:
        return
    common = f"{len(shared)} common tokens, fewer than {needed}" if len(shared) else "no common tokens"
    remedy = "take the drafter slem, which compares text" + (", or lower min_shared" if len(shared) else "")
    raise VocabularyMismatchError(f"the tokenizers of target {target!r} and draft {draft!r} have {common}; {remedy}")


class Dictionary:
    """Maps a target token to draft tokens: to the shared one, or else to the draft tokenizer's encoding of its
    bytes.
    """

    def __init__(self, target: TokenBytes, encoder: SpanEncoder, draft_size: int) -> None:
        """Prepare the map; `draft_size` is the number of token ids that the draft model can embed."""
        self._target, self._encoder, self._size = target, encoder, draft_size
        self.opening = opening_of(encoder.token_bytes)
        self.silent = {target.tokenizer.bos_token_id} if self.opening else set()  # The opening stands for them
        shared = target.counterparts(encoder.token_bytes)
        self._known = {token: [shared[token]] if token in shared else [] for token in target.specials}

    def __getitem__(self, token: int) -> list[int]:
        """Return the draft tokens of a target token; none for a special token without a counterpart, or for bytes that
        the draft tokenizer cannot encode.
        """
        if token not in self._known:
            piece = self._target.of(token)
            same = self._encoder.token_bytes.ordinary.get(piece)
            draft_ids = [span.id for span in self._encoder.encode(piece, opening=False)] if same is None else [same]
            self._known[token] = [known for known in draft_ids if known < self._size]
        return self._known[token]


class TokenAlignment:
    """One row's text in draft tokens, translated token by token."""

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary
        self.ids: list[int] = list(dictionary.opening)  # Draft tokens
        self._ends: list[int] = []

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft tokens of a text, which must begin with the text of the last call."""
        for index in range(len(self._ends), len(tokens)):
            if index or tokens[index] not in self._dictionary.silent:
                self.ids.extend(self._dictionary[tokens[index]])
            self._ends.append(len(self.ids))
        return self.ids

    def span(self, length: int) -> int:
        """Return the number of draft tokens of the first `length` target tokens."""
        return self._ends[min(length, len(self._ends)) - 1] if length > 0 and self._ends else 0

    def shrink(self, length: int) -> None:
        """Forget all but the first `length` target tokens."""
        if length < len(self._ends):
            del self._ends[length:]
            del self.ids[self._ends[-1] if self._ends else len(self._dictionary.opening) :]


_TOLERANCE = 0.02  # Relative to the largest logit: differences in bfloat16 from another order of summation


class PrunedHead(OutputHead):
    """Maps hidden states after the final norm (.., H) to the model's raw logits (.., V') of `ids` (V',)."""

    def __init__(self, model: nn.Module, name: str, ids: Tensor) -> None:
        super().__init__(model)
        output = self._model._modules[name]
        assert isinstance(output, nn.Linear | PackedLinear)
        weight, bias = output.weight.detach(), output.bias
        rows = ids.to(weight.device)
        linear = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach()[rows], requires_grad=False)
        packed = isinstance(output, PackedLinear) and packable(linear)
        self._model._modules[name] = PackedLinear(linear, PackedWeight.of([linear])) if packed else linear
        self.nbytes = sum(parameter.nbytes for parameter in linear.parameters())  # Bytes of the rows that were copied


@torch.inference_mode()
def prune_head(target: TransformersTarget, ids: Tensor) -> int | None:
    """Let `target` compute only the logits of these token ids, in their order, without changing the model. Return the
    bytes of the copied rows, or None if nothing was changed, because the output head is not a linear layer or the model
    processes its logits jointly.
    """
    output = target.model.get_output_embeddings()
    name = next((name for name, child in target.model._modules.items() if child is output), None)
    if name is None or not (type(output) is nn.Linear or isinstance(output, PackedLinear)):
        return None
    pruned = PrunedHead(target.model, name, ids)
    states = torch.randn(1, 4, target.hidden_size, generator=torch.Generator().manual_seed(0)).to(
        target.device, target.dtype
    )
    whole, part = target.head(states).float(), pruned(states).float()
    if part.shape[-1] != len(ids) or not bool(whole.isfinite().all()):
        return None
    expected = whole[..., ids.to(whole.device)]
    if not torch.allclose(part, expected, rtol=0, atol=_TOLERANCE * float(whole.abs().max())):
        return None
    target.head = pruned
    return pruned.nbytes
