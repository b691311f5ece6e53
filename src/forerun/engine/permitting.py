"""Before a pass: given nodes that an answer's grammar forbids are left out, since no rule could keep them.

Knows drafts and grammars. Sampled nodes stay: they were drawn under the grammar, and what was drawn decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.engine.controller.admission import prunable, prune
from forerun.engine.grammar import GrammarProcessor
from forerun.judging import Isolation
from forerun.step import Row
from forerun.types import Draft


def permitted(draft: Draft, rows: Sequence[Row]) -> Draft:
    """The draft of a step of `rows` without the given nodes that their grammars forbid, and all below those."""
    keep = dict[int, list[int]]()
    for index, row in enumerate(rows):
        grammar = next((p for p in row.sampler.params.logits_processors if isinstance(p, GrammarProcessor)), None)
        if grammar is None or not prunable(draft, index):
            continue
        nodes = draft.rows[index]
        with Isolation(row):
            kept = _kept(grammar, row.tokens[row.prompt_length :], nodes.tokens, nodes.parents)
            if len(kept) < len(nodes.tokens):
                keep[index] = kept
    return prune(draft, keep) if keep else draft


def _kept(grammar: GrammarProcessor, output: list[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Node ids, parents first."""
    paths = {0: output}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        if parent in paths and grammar.valid(paths[parent], [token]):
            paths[node] = [*paths[parent], token]
    return [node for node in paths if node]
