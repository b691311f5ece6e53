"""SGLang's worker for ``NGRAM`` drafts here with one of forerun's drafters as its corpus; see
`forerun.deploy.sglang`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.speculative import ngram_worker
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from forerun.core.tree import TokenTree
from forerun.deploy.engines.sglang import ALGORITHM, VARIABLE
from forerun.deploy.sequences import Sequences, read_fixed_config
from forerun.errors import ArgumentError


class ForerunWorker(NGRAMWorker):  # type: ignore[misc]
    """SGLang's NGRAM worker with forerun's drafts."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        own, ngram_worker.NgramCorpus = ngram_worker.NgramCorpus, NoCorpus
        try:  # which would compile SGLang's trie and make room for a million nodes
            super().__init__(*arguments, **keywords)
        finally:
            ngram_worker.NgramCorpus = own

    def alloc_memory_pool(self, **keywords: Any) -> None:
        """Build the drafter; SGLang calls this once it is known how many requests fit."""
        super().alloc_memory_pool(**keywords)
        model = self.model_runner.model_config
        self.sequences = Sequences(
            read_fixed_config(VARIABLE, self.draft_token_num - 1),
            vocab_size=int(model.vocab_size),
            rows=int(self.max_batch_size),
            slots=int(model.context_len),
            nodes=self.draft_token_num - 1,
            tokenizer=getattr(self._target_worker, "tokenizer", None),
            chains=self.topk == 1,
        )

    def clear_cache_pool(self) -> None:
        """Forget what drafts are copied from, because the cache was flushed."""
        super().clear_cache_pool()
        self.sequences.clear()

    def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return each request's tree: (B * N,) tokens, and (B * N * N,) True where one node is an
        ancestor of the other or itself.
        """
        texts = [
            np.concatenate([np.asarray(part, dtype=np.int32) for part in (prompt, answer, accepted)])
            for prompt, answer, accepted in zip(*self._parts(batch), strict=True)
        ]
        lengths = np.array([len(text) for text in texts], np.int32)
        table = np.zeros((len(texts), max(lengths, default=1)), np.int32)
        for row, text in zip(table, texts, strict=True):
            row[: len(text)] = text
        trees = self.sequences.trees(table, lengths, np.full(len(texts), self.draft_token_num - 1))
        filled = [pad_tree(tree, self.draft_token_num) for tree in trees]
        tokens, masks = zip(*filled, strict=True)
        return np.concatenate(tokens), np.concatenate(masks)

    def _parts(self, batch: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return for each request its prompt, the known part of its completion, and newly accepted
        tokens.

        The latter are those of the step before that the answer does not hold yet, because results
        are processed a step late.
        """
        prompts = [request.origin_input_ids_unpadded for request in batch.reqs]
        answers = [request.output_ids for request in batch.reqs]
        if not self.enable_overlap or batch.grammar_needs_sync():
            return prompts, answers, [()] * len(prompts)
        accepted = batch.spec_info.accept_tokens.cpu().numpy().reshape(len(prompts), self.draft_token_num)
        counts = batch.spec_info.accept_lens.cpu().tolist()
        return prompts, answers, [row[:count] for row, count in zip(accepted, counts, strict=True)]

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Do nothing: there is no corpus, a drafter reads new tokens when it drafts next."""


def pad_tree(tree: TokenTree, nodes: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Pad a tree to `nodes` nodes: (nodes,) tokens, root first, and the (nodes * nodes,) mask of
    ancestors and the node itself.

    SGLang scores as many for every request: missing nodes repeat the root's token below the root,
    and may be accepted as any draft may.
    """
    parents = [*tree.parents, *[0] * (nodes - len(tree.parents))]
    tokens = np.full(nodes, tree.tokens[0], dtype=np.int64)
    tokens[: len(tree.tokens)] = tree.tokens
    mask = np.zeros((nodes, nodes), dtype=np.bool_)
    mask[0, 0] = True
    for node in range(1, nodes):
        mask[node] = mask[parents[node]]
        mask[node, node] = True
    return tokens, mask.reshape(-1)


class NoCorpus:
    """Stands where `NGRAMWorker` keeps its own n-grams. ArgumentError: a text is to be loaded into it."""

    def __init__(self, **_: Any) -> None:
        pass

    def reset(self) -> None:
        """Do nothing: there are no n-grams."""

    def erase_match_state(self, requests: Sequence[str]) -> None:
        """Do nothing: there are no matches to erase."""

    def list_external_corpora(self) -> dict[str, int]:
        """Return no corpora."""
        return {}

    def load_external_corpus_named(self, name: str, chunks: Any) -> int:
        """Raise ArgumentError: a corpus is built beforehand."""
        raise ArgumentError(
            f"{ALGORITHM} takes no corpora while it runs; `forerun datastore build` makes one of {name!r}, and "
            f'{VARIABLE}=\'{{"method": "rest", "datastore": DIR}}\' drafts from it'
        )
