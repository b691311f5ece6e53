"""Where the tokens of an answer are copied from, and attention that is shown the place.

A model learns to copy once a head of its attention finds the token that comes next in the text that is copied. The
makers of edits and drills know this token, so some layers are told. In the question, what is behind the text that shall
be replaced looks at its name in the request, and what is behind other words looks away: only there is it known that a
word ends. In the answer, a layer looks at the next token's place in the code, another behind the word there, where it
is known whether it is replaced, and two at where the very token stands, which for a new name is in the request; one of
them is the last layer, which no other overrules. This costs nothing when the model is used: only the loss of the
training has terms more.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from difflib import SequenceMatcher
from itertools import chain, takewhile

import torch
from edits import Edit, standing
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NOWHERE = -1
"""The place of a token that is copied from nowhere."""
MARK_LAYER, PLACE_LAYER, END_LAYER, TOKEN_LAYERS = 2, 3, 4, (5, 7)
"""Of the eight layers, those that are shown what is replaced, the place in the code, what is behind the word there, and
the token itself."""
GROUPS = {MARK_LAYER: [1], PLACE_LAYER: [2], END_LAYER: [0], **{layer: [0, 1, 2] for layer in TOKEN_LAYERS}}
"""The groups of heads in these layers that are shown it, of three."""
OTHER_WORDS = 2
"""Shown as not replaced, besides those that begin alike, for each one that is."""
QUERY_BLOCK = 128
QUOTES = "'\""


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and for each token where the one before it looks: at the name of what is replaced, at the place in the
    code that it is copied from, behind the word there, and at the very token."""

    ids: list[int]
    marks: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for found in self.guides:
            found.extend([NOWHERE] * (len(self.ids) - len(found)))

    @property
    def guides(self) -> tuple[list[int], ...]:
        return self.marks, self.places, self.ends, self.sources


COLUMNS = len(fields(Document))
"""Of a document's table: token ids and its guides."""


def copied(tokenizer: PreTrainedTokenizerFast, dialogues: Iterable[list[Edit]], *, seed: int = 0) -> Iterator[Document]:
    """Dialogues about edits, each of the answer before, and where the answers are copied from; `seed`: of the choice of
    words that are shown as not replaced."""
    names = [text.lstrip("Ġ") for text in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    chance = random.Random(seed)
    for edits in dialogues:
        further = (({"role": "user", "content": edit.request}, edit.conversation[1]) for edit in edits[1:])
        chat = [*edits[0].conversation, *chain.from_iterable(further)]
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        document = Document(list(encoded["input_ids"]))
        located = _Located(text, [start for start, _ in encoded["offset_mapping"]])
        end, code = 0, slice(0)
        for edit in edits:
            request = located.find(edit.request, end)
            first = edit is edits[0]
            if first:
                code = located.find(edit.before, request.stop)
            answer = located.find(edit.after, max(request.stop, code.stop))
            tokens = (located.tokens(part) for part in (code, answer, request))
            _note_copies(document, names, *tokens)
            words, replaced = located.matches(r"\w+", code), []
            if edit.replaced:
                pattern = standing(edit.replaced[0])
                replaced = located.matches(pattern, code)
                if first:
                    named = located.matches(pattern, request)
                    _note_marks(document, located, named, replaced, words, chance)
            _note_ends(document, located, [*words, *replaced], located.tokens(answer))
            code, end = answer, answer.stop
        yield document


@dataclass(frozen=True, slots=True)
class _Located:
    """A text and where its tokens begin; parts of it are slices of characters."""

    text: str
    starts: list[int]

    def find(self, part: str, at: int) -> slice:
        begun = self.text.index(part, at)
        return slice(begun, begun + len(part))

    def tokens(self, part: slice) -> slice:
        """Those that begin in a part."""
        return slice(bisect_left(self.starts, part.start), bisect_left(self.starts, part.stop))

    def token(self, character: int) -> int:
        """The one that holds a character."""
        return bisect_right(self.starts, character) - 1

    def behind(self, part: slice) -> int:
        """The token after the last one of a part: the first that knows that the part ends."""
        return self.token(part.stop - 1) + 1

    def matches(self, pattern: str, part: slice) -> list[slice]:
        """Where a pattern stands in a part, without the quotes that it may stand in."""
        found = re.compile(pattern).finditer(self.text, part.start, part.stop)
        return [slice(one.start() + size, one.end() - size) for one in found for size in [one[0][0] in QUOTES]]


def _note_marks(
    document: Document,
    located: _Located,
    named: list[slice],
    replaced: list[slice],
    words: list[slice],
    chance: random.Random,
) -> None:
    """Note that the token behind what is replaced looks at its name in the request, and those behind some other words
    at the document's first token."""
    looked = [located.token(found.stop - 1) for found in named]
    ends = {located.behind(found) for found in replaced}
    begun = {located.text[found][:3] for found in named}
    others = {located.behind(found): located.text[found][:3] for found in words if located.behind(found) not in ends}
    alike = [end for end, text in others.items() if text in begun]
    names = {end: next((at for at in looked if document.ids[at] == document.ids[end - 1]), looked[0]) for end in ends}
    mark(document, names, list(others), alike, chance)


def mark(document: Document, names: dict[int, int], others: list[int], alike: list[int], chance: random.Random) -> None:
    """Note that the tokens of `names` look where these say, and `alike` and some of the `others` at the first token."""
    for at in {*alike, *chance.sample(others, k=min(len(others), OTHER_WORDS * len(names)))}:
        document.marks[at + 1] = 0
    for at, name in names.items():
        document.marks[at + 1] = name


def _note_ends(document: Document, located: _Located, words: list[slice], answer: slice) -> None:
    """Note what is behind the words that an answer's tokens are copied from."""
    ends = {at: located.behind(word) for word in words for at in range(located.token(word.start), located.behind(word))}
    for number in range(answer.start, answer.stop):
        document.ends[number] = ends.get(document.places[number], NOWHERE)


def _note_copies(document: Document, names: list[str], code: slice, answer: slice, request: slice) -> None:
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
        self._losses = defaultdict[int, list[Tensor]](list)

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
                self._note(int(module.layer_idx), found, wanted[:, first:last])  # type: ignore[arg-type]
        return torch.cat(outputs, 2).transpose(1, 2), None

    def _note(self, layer: int, probs: Tensor, wanted: Tensor) -> None:
        """Keep what the guided heads miss of `wanted` in probs (B, groups, heads, rows, keys). Every one of them must
        look: where the best one counts, one looks always here, another always there, and none decides."""
        places, known = wanted.clamp(min=0)[:, None, None, :, None], wanted != NOWHERE
        guided = probs[:, GROUPS[layer]]
        found = guided.gather(-1, places.expand(*guided.shape[:-1], 1))[..., 0].float().flatten(1, 2)
        self._losses[layer].append(-(found.transpose(1, 2)[known] + 1e-8).log().mean(1))

    def listen(self, model: LlamaForCausalLM) -> None:
        """Keep what the attention of the token layers tells, from now on."""
        for layer in TOKEN_LAYERS:
            model.model.layers[layer].self_attn.register_forward_hook(
                lambda _, arguments, output, layer=layer: self.told.update({layer: output[0]})
            )

    def show(self, marks: Tensor, places: Tensor, ends: Tensor, sources: Tensor) -> None:
        """What the queries of the next pass shall find, (B, S) each: a document's guides for the tokens that follow."""
        self.wanted = {MARK_LAYER: marks, PLACE_LAYER: places, END_LAYER: ends, **dict.fromkeys(TOKEN_LAYERS, sources)}

    def loss(self) -> Tensor:
        """Nats by which the heads of the guided layers missed their places since the last call: the mean of the layers'
        means."""
        losses, self._losses = [torch.cat(found) for found in self._losses.values()], defaultdict(list)
        means = [found.mean() for found in losses if len(found)]
        return torch.stack(means).mean() if means else torch.zeros(())
