"""A copying drafter for an engine that tells no request ids: whose a row is, is seen from what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from forerun.core.sampling import Rng, Sampler
from forerun.core.tree import TokenTree
from forerun.deploy import COPYING, methods
from forerun.drafters import drafter_class
from forerun.drafters.base import DraftContext, DrafterSetup
from forerun.drafters.guarded import Guarded
from forerun.engine.config import SpeculativeConfig
from forerun.errors import ArgumentError
from forerun.types import Budget, SamplingParams

if TYPE_CHECKING:
    from forerun.model import Target

TOKENS = "num_speculative_tokens"
_GREEDY = Sampler(SamplingParams(temperature=0.0), ())  # Copied tokens are deterministic, whatever the request samples


@dataclass(frozen=True, slots=True)
class Stranger:
    """What is known of a target that another engine runs."""

    vocab_size: int
    num_layers: int = 0


@dataclass(slots=True)
class _Sequence:
    row: int  # Of the drafter
    prompt_length: int
    text: list[int]
    held: NDArray[np.int32]  # The same as `text`, with room to grow

    def grow(self, tokens: NDArray[np.int32]) -> int:
        """Take over what `tokens` have behind the text; how many."""
        known = len(self.text)
        if len(tokens) > len(self.held):
            self.held = np.resize(self.held, 2 * len(tokens))
        self.held[known : len(tokens)] = tokens[known:]
        self.text += tokens[known:].tolist()
        return len(tokens) - known

    def begins(self, tokens: NDArray[np.int32]) -> bool:
        """Whether `tokens` go on with this text."""
        known = len(self.text)
        return known <= len(tokens) and bool((tokens[:known] == self.held[:known]).all())


class Sequences:
    """Rows of tokens that another engine keeps, and a drafter's drafts for them.

    A row that goes on with a known text is that sequence, wherever it stands now: two that hold the same are the same
    to a drafter, too. What is in no row any more is forgotten; a request that was preempted is read again.
    """

    def __init__(
        self, config: Mapping[str, Any], *, vocab_size: int, rows: int, slots: int, tokenizer: Any = None
    ) -> None:
        """`config`: as `LLM` takes it; `rows`, `slots`: most sequences at a time and tokens of one. ArgumentError: the
        drafter, or one that it is made of, is none of `COPYING`."""
        parsed = SpeculativeConfig.parse(config)
        if parsed is None:
            raise ArgumentError("no drafter is named; expected for example {'method': 'suffix'}")
        for method in methods(config):
            if method not in COPYING:
                raise ArgumentError(
                    f"{method} needs the target's states or distributions, which a plug-in is not given; there are "
                    f"{', '.join(COPYING)}"
                )
        chosen = drafter_class(parsed.method).Config
        options = dict(parsed.options)
        if parsed.num_speculative_tokens and any(one.name == TOKENS for one in fields(chosen)):
            options[TOKENS] = parsed.num_speculative_tokens
        setup = DrafterSetup(target=cast("Target", Stranger(vocab_size)), tokenizer=tokenizer, rows=rows, slots=slots)
        self.drafter = Guarded.built(parsed.method, options, setup)
        self._rows = list(range(rows))[::-1]
        self._sequences: list[_Sequence] = []

    def draft(self, texts: Sequence[NDArray[np.int32]], most: Sequence[int]) -> list[TokenTree]:
        """A tree of at most ``most[i]`` nodes for each row's text, prompt and answer so far; 0 for none."""
        found, fresh = self._found(texts)
        if any(fresh):
            grown = [index for index, count in enumerate(fresh) if count]
            self.drafter.extend(_context([found[index] for index in grown], [fresh[index] for index in grown]))
        trees = dict[int, TokenTree]()
        asked = [index for index, nodes in enumerate(most) if nodes > 0]
        if asked:
            limits = tuple(most[index] for index in asked)
            context = _context([found[index] for index in asked], [0] * len(asked))
            drafted = self.drafter.propose(context, Budget(nodes=limits, depth=limits))
            for index, tree in zip(asked, drafted, strict=True):
                trees[index] = tree
        return [trees.get(index) or TokenTree(one.text[-1]) for index, one in enumerate(found)]

    def _found(self, texts: Sequence[NDArray[np.int32]]) -> tuple[list[_Sequence], list[int]]:
        """Each row's sequence and how many of its tokens are new. They are kept in the order of the rows, so that a row
        which stays where it was is found at once."""
        left = dict(enumerate(self._sequences))
        known: list[_Sequence | None] = []
        for index, tokens in enumerate(texts):
            one = left.get(index)
            known.append(left.pop(index) if one is not None and one.begins(tokens) else None)
        for index, tokens in enumerate(texts):
            if known[index] is None:
                at = max(
                    (at for at, one in left.items() if one.begins(tokens)),
                    key=lambda at: len(left[at].text),
                    default=None,
                )
                known[index] = None if at is None else left.pop(at)
        if left:
            gone = [one.row for one in left.values()]
            self.drafter.truncate(gone, [0] * len(gone))
            self._rows += gone
        self._sequences = [self._new(tokens) if one is None else one for one, tokens in zip(known, texts, strict=True)]
        return self._sequences, [one.grow(tokens) for one, tokens in zip(self._sequences, texts, strict=True)]

    def _new(self, tokens: NDArray[np.int32]) -> _Sequence:
        assert self._rows, "more rows than the engine said"
        return _Sequence(self._rows.pop(), max(1, len(tokens) - 1), [], np.empty(0, np.int32))


def best_path(tree: TokenTree) -> list[int]:
    """The path from below the root that is expected to be accepted furthest: the largest sum of its nodes' survival."""
    survival, gains = tree.survival(), [0.0] * len(tree.tokens)
    for node in range(1, len(tree.tokens)):
        gains[node] = gains[tree.parents[node]] + survival[node]
    best = max(range(len(tree.tokens)), key=gains.__getitem__)
    return [tree.tokens[node] for node in tree.path(best) if node]


def _context(sequences: Sequence[_Sequence], fresh: Sequence[int]) -> DraftContext:
    return DraftContext(
        rows=tuple(one.row for one in sequences),
        tokens=tuple(one.text for one in sequences),
        prompt_lengths=tuple(one.prompt_length for one in sequences),
        fresh=tuple(fresh),
        samplers=(_GREEDY,) * len(sequences),
        rng=tuple(Rng(0, len(one.text)) for one in sequences),
        hidden_states={},
    )
