"""Where the tokens of an answer are copied from, and attention that is shown the place.

A model learns to copy once a head of its attention finds the token that comes next in the text that is copied. The
makers of edits and drills know this token, so some layers are told: one where the copy stands in the question's code,
two where the very token stands, which for a new name is in the request; one of them is the last layer, which no other
overrules. This costs nothing when the model is used: only the loss of the training has terms more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import chain, takewhile

import torch
from edits import Edit
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NOWHERE = -1
"""The place of a token that is copied from nowhere."""
PLACE_LAYER, TOKEN_LAYERS = 3, (5, 7)
"""Of the eight layers, the one that is shown the place in the code, and those that are shown the token itself."""
QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and for each token where in the document it is copied from: by place in the code, and by token."""

    ids: list[int]
    places: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for found in (self.places, self.sources):
            found.extend([NOWHERE] * (len(self.ids) - len(found)))


def copied(tokenizer: PreTrainedTokenizerFast, dialogues: Iterable[list[Edit]]) -> Iterator[Document]:
    """Dialogues about edits, each of the answer before, and where the answers are copied from."""
    names = [text.lstrip("Ġ") for text in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    for edits in dialogues:
        further = (({"role": "user", "content": edit.request}, edit.conversation[1]) for edit in edits[1:])
        chat = [*edits[0].conversation, *chain.from_iterable(further)]
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]]

        def span(found: str, at: int, starts: list[int] = starts, text: str = text) -> tuple[slice, int]:
            begun = text.index(found, at)
            ended = begun + len(found)
            return slice(bisect_left(starts, begun), bisect_left(starts, ended)), ended

        ids = list(encoded["input_ids"])
        document, end, code = Document(ids), 0, slice(0)
        for edit in edits:
            request, end = span(edit.request, end)
            if edit is edits[0]:
                code, end = span(edit.before, end)
            answer, end = span(edit.after, end)
            _note_copies(document, names, code=code, answer=answer, request=request)
            code = answer
        yield document


def _note_copies(document: Document, names: list[str], *, code: slice, answer: slice, request: slice) -> None:
    """Note where the tokens of an answer are copied from; `names`: all tokens' texts as a request may spell them."""
    before, after = document.ids[code], document.ids[answer]
    for kind, first, last, start, stop in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        for number in range(start, stop):
            place = min(first + number - start, max(first, last - 1), len(before) - 1)
            document.places[answer.start + number] = code.start + place
        if kind == "equal":
            document.sources[answer.start + start : answer.start + stop] = range(code.start + first, code.start + last)
            continue
        done = start
        while done < stop:  # What is new is copied in pieces, each as long as may be
            found = [_longest(document.ids[text], text.start, after[done:stop], names) for text in (request, code)]
            size, _, at = max(found, key=lambda one: one[:2])
            document.sources[answer.start + done : answer.start + done + size] = range(at, at + size)
            done += max(1, size)


def _longest(text: list[int], offset: int, wanted: list[int], names: list[str]) -> tuple[int, bool, int]:
    """How many of the first of `wanted` stand together in `text`, whether the first is the very token, and where,
    counted from `offset`."""
    best = (0, False, offset)
    for at in range(len(text)):
        pairs = zip(wanted, text[at:], strict=False)
        size = sum(1 for _ in takewhile(lambda pair: names[pair[0]] == names[pair[1]], pairs))
        if size and (size, text[at] == wanted[0]) > best[:2]:
            best = (size, text[at] == wanted[0], offset + at)
    return best


class GuidedAttention:
    """Causal attention for `AttentionInterface`, in blocks of queries, the heads of a group folded into rows.

    A block reads only the keys before its end and stays in the cache: on a CPU twice as fast as the flash kernel.
    """

    def __init__(self) -> None:
        self.wanted: dict[int, Tensor] = {}
        """Layer -> (B, S) the place that the query there shall find, `NOWHERE` for any."""
        self.told: dict[int, Tensor] = {}
        """Token layer -> (B, S, H) what its attention added to the hidden states in the last pass."""
        self._losses: list[Tensor] = []

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object
    ) -> tuple[Tensor, None]:
        """Attention of query (B, heads, S, D) to key and value (B, groups, S, D)."""
        batch, heads, length, width = query.shape
        wanted = self.wanted.get(int(module.layer_idx))  # type: ignore[arg-type]
        outputs = []
        for first in range(0, length, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, length)
            folded = (query[:, :, first:last] * width**-0.5).reshape(batch, key.shape[1], -1, width)
            scores = folded @ key[:, :, :last].transpose(-1, -2)
            blocked = torch.ones(last - first, last, dtype=torch.bool).triu(first + 1)
            scores.view(batch, heads, last - first, last).masked_fill_(blocked, -torch.inf)
            probs = scores.softmax(-1)
            outputs.append((probs @ value[:, :, :last]).view(batch, heads, last - first, width))
            if wanted is not None:
                found = probs.view(batch, key.shape[1], -1, last - first, last)
                self._note(found, wanted[:, first:last], 1 if module.layer_idx == PLACE_LAYER else key.shape[1])
        return torch.cat(outputs, 2).transpose(1, 2), None

    def _note(self, probs: Tensor, wanted: Tensor, groups: int) -> None:
        """Keep what the best heads of the best `groups` of probs (B, groups, heads, rows, keys) miss of `wanted`: a
        place is known by one group of heads, a token is told by the values of all."""
        places, known = wanted.clamp(min=0)[:, None, None, :, None], wanted != NOWHERE
        found = probs.gather(-1, places.expand(*probs.shape[:-1], 1))[..., 0].float().amax(2)
        best = found.topk(groups, dim=1).values.transpose(1, 2)[known]
        self._losses.append(-(best + 1e-4).log().mean(1))

    def listen(self, model: LlamaForCausalLM) -> None:
        """Keep what the attention of the token layers tells, from now on."""
        for layer in TOKEN_LAYERS:
            model.model.layers[layer].self_attn.register_forward_hook(
                lambda _, arguments, output, layer=layer: self.told.update({layer: output[0]})
            )

    def show(self, places: Tensor, sources: Tensor) -> None:
        """What the queries of the next pass shall find: (B, S) by place in the code, and by token."""
        self.wanted = {PLACE_LAYER: places, **dict.fromkeys(TOKEN_LAYERS, sources)}

    def loss(self) -> Tensor:
        """Nats by which the heads of the guided layers missed its places since the last call, a mean."""
        losses, self._losses = torch.cat(self._losses), []
        return losses.mean() if len(losses) else losses.sum()
