"""Targets with recurrent states: what the engine answers is what transformers answers, and planted faults are seen."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.model import TransformersTarget, compression, states
from forerun.model.cache import SlotCache
from forerun.model.inputs import Nodes
from forerun.model.masks import Block
from forerun.model.states.rows import MOST, SPACING, RowStates, StatePass, Tree
from model.families import random_tokens
from model.test_families import compare, greedy
from model.test_resume import ROWS, TREES, begun, worst
from model.tiny import build
from selection import slow

KINDS = (
    *("lfm2", "qwen3_next", "jamba", "bamba", "kimi_linear", "zamba", "lara_mini", "deepseek_v32"),
    *("recurrent_gemma", "minimax", "zaya", "rwkv", "xlstm", "inkling2_loop_text", "qwen4_exp_text"),
    "deepseek_v4",
)
"""Short convolutions, gated delta rule, Mamba, Mamba-2, KDA, several scans in a layer, windows, an index, RG-LRU,
lightning attention, compressed convolutional attention, weighted keys, mLSTM, layers that run again, n-grams,
compressed windows.
"""
NEW = 16


@cache
def model_of(kind: str) -> Any:
    """A small random model; made once."""
    return build(kind)


@cache
def answer_to(kind: str, prompt: tuple[int, ...], new: int = NEW) -> list[int]:
    """What transformers' own generate adds."""
    return greedy(model_of(kind), list(prompt), new)


@cache
def prompts_of(kind: str) -> list[tuple[int, ...]]:
    """Prompts of unequal lengths, some of which begin alike, and one that goes on behind another's answer."""
    text = [3 + token % 90 for token in random_tokens(150, 7)]
    found = [(*text[:length], *(3 + token % 90 for token in random_tokens(9, length))) for length in (140, 150, 20)]
    return [*found, (*found[0], *answer_to(kind, found[0]), 5, 6, 7)]


SERVED = ("qwen3_next", "jamba", "lfm2", "recurrent_gemma", "zaya", "rwkv", "bloom", "mpt", "deepseek_v4")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "recycling") for kind in SERVED),
        ("qwen3_next", "ngram"),
        *slow(("jamba", "ngram"), ("deepseek_v4", "ngram")),
    ],
)
def test_answers_are_those_of_transformers(kind: str, method: str) -> None:
    """Chains and trees, rows of unequal length, prompts that begin in the cache, more requests than rows."""
    model = model_of(kind)
    prompts = prompts_of(kind)
    llm = LLM(model, speculative_config={"method": method}, max_num_seqs=2, max_model_len=320)
    asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for again in (False, True):
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], asked)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == answer_to(kind, prompt), (again, len(prompt))
    assert sum(output.num_cached_tokens or 0 for output in outputs) >= SPACING


@pytest.mark.parametrize("kind", ["xlstm", "minimax"])
def test_answers_where_a_chunk_of_the_prompt_ends_within_it(kind: str) -> None:
    model = model_of(kind)
    compare(TransformersTarget.load(model, rows=2, slots=200), model, lengths=(90, 150))


def test_a_preempted_answer_goes_on_as_before() -> None:
    model = model_of("qwen3_next")
    prompts = [prompts_of("qwen3_next")[0][start : start + 40] for start in (0, 20, 40, 60)]
    config = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(model, speculative_config=config, max_num_seqs=4, max_model_len=128, kv_cache_tokens=130)
    asked = SamplingParams(temperature=0, max_tokens=2 * NEW, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], asked)
    assert [one.outputs[0].token_ids for one in outputs] == [answer_to("qwen3_next", each, 2 * NEW) for each in prompts]
    assert llm.engine.preemptions


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_that_grows_by_levels(kind: str) -> None:
    """Passes that run some nodes of a tree after others give the logits of one pass over all, and commit the same."""
    target = TransformersTarget.load(model_of(kind), rows=2, slots=96, self_check=False)
    tree = TokenTree(5)
    for token, parent in ((7, 0), (8, 0), (9, 1), (10, 2), (11, 3), (12, 4)):
        tree.add(token, parent)
    prompt = [3 + token % 90 for token in random_tokens(30, 3)]
    found = []
    for steps in ((7,), (3, 5, 7)):
        target.truncate([0], [0])
        target.prefill([0], [prompt])
        logits = torch.cat([scored(target, tree, start, stop) for start, stop in pairwise((0, *steps))], 1)
        target.commit([0], [(2, 4)])
        found.append(torch.cat([logits, target.score([0], [TokenTree(13)]).logits], dim=1))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def scored(target: TransformersTarget, tree: TokenTree, start: int, stop: int) -> Tensor:
    """The logits of the nodes from `start` to before `stop`, whose ancestors were run."""
    part = TokenTree(tree.tokens[0])
    for token, parent in zip(tree.tokens[1:stop], tree.parents[1:stop], strict=True):
        part.add(token, parent)
    return target.score([0], Nodes.of_trees([part], start=start)).logits


@pytest.mark.parametrize("counts", [(99, 99, 99), (1, 3, 2), (0, 2, 4)])
@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear", "lfm2"])
def test_a_pass_that_the_first_layers_have_begun(kind: str, counts: tuple[int, int, int]) -> None:
    """Nodes of rows that were begun to unequal depths: the logits of whole passes, and the same states behind them."""
    target = TransformersTarget.load(model_of(kind), rows=3, slots=96, self_check=False)
    found = []
    for resumes in (False, True):
        target.truncate(ROWS, [0, 0, 0])
        target.prefill(ROWS, [random_tokens(count, count) for count in (3, 9, 17)])
        now = target.score(ROWS, begun(target, 2, 4, counts) if resumes else TREES).logits
        target.commit(ROWS, [path_to(tree, tree.size) for tree in TREES])
        found.append((now, target.score(ROWS, [TokenTree(7)] * 3).logits))
    assert worst(found[0][0], found[1][0]) < 1e-4
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)


def path_to(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The nodes from below the root down to this one."""
    return () if node == 0 else (*path_to(tree, tree.parents[node]), node)


def test_states_are_kept_where_a_prefix_may_end() -> None:
    target = TransformersTarget.load(
        build("qwen3_next", max_position_embeddings=1024), rows=2, slots=1024, self_check=False
    )
    text = [3 + token % 90 for token in random_tokens(980, 3)]
    target.prefill([0], [text[:200]])
    for token in text[200:260]:
        target.score([0], [TokenTree(token)])
        target.commit([0], [()])
    assert [target.reusable(0, length) for length in (260, 259, 200, 191, 63)] == [260, 256, 192, 128, 0]
    target.copy_row(0, 1, 192)
    found = target.prefill([1], [text[192:230]]).logits
    target.truncate([0], [0])
    torch.testing.assert_close(found, target.prefill([0], [text[:230]]).logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(ArgumentError, match="states behind 64, 128, 192, 230 tokens, none behind 100"):
        target.copy_row(0, 1, 100)
    for start in range(230, 980, 30):
        target.prefill([0], [text[start : start + 30]])
    assert target.states is not None
    kept = sorted(target.states._kept[0])
    assert len(kept) == MOST and kept[0] == SPACING and kept[-1] == 15 * SPACING
    assert max(later - length for length, later in pairwise(kept)) <= 4 * SPACING


def test_states_of_a_model_in_bfloat16_are_kept_in_float32() -> None:
    """As transformers keeps them; a convolution's last inputs stay what they were."""
    target = TransformersTarget.load(build("qwen3_next").bfloat16(), rows=1, slots=96)
    target.prefill([0], [[5, 6, 7]])
    assert target.states is not None
    found = {(key[0].__name__, state.dtype) for key, state in target.states._states.items()}
    assert found == {("LinearAttention", torch.float32), ("Convolution", torch.bfloat16)}


# --- planted faults ---------------------------------------------------------------------------------------------------


def change_trees(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """What changes who follows whom in a tree that branches."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        tree = StatePass.tree

        def changed(self: StatePass, device: torch.device) -> Tree:
            found = tree(self, device)
            return found if found.paths is None else replace(found, sees=change(found.sees))

        patch.setattr(StatePass, "tree", changed)

    return plant


def follow_the_slot_before(sees: Tensor) -> Tensor:
    """A node goes on from the state of the node in the slot before it, often a sibling's."""
    found = sees.clone()
    for node in range(2, sees.shape[1]):
        found[:, node] |= found[:, node - 1]
    return found


def skip_the_parent(sees: Tensor) -> Tensor:
    found = sees.clone()
    for node in range(2, sees.shape[1]):
        for line in range(len(sees)):
            above = [each for each in range(node) if sees[line, node, each]]
            if len(above) > 1:
                found[line, node, above[-1]] = False
    return found


def keep_rejected_in_the_window(patch: pytest.MonkeyPatch) -> None:
    behind = Tree.behind
    patch.setattr(Tree, "behind", lambda self, size: behind(replace(self, paths=None), size))


def commit_one_too_far(patch: pytest.MonkeyPatch) -> None:
    commit = RowStates.commit

    def further(self: RowStates, rows: Any, lengths: Any, paths: Sequence[tuple[int, ...]]) -> None:
        commit(self, rows, lengths, [(*path[:-1], path[-1] - 1) if path and path[-1] > 1 else path for path in paths])

    patch.setattr(RowStates, "commit", further)


def forget_to_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowStates, "commit", lambda *_: None)


def leave_the_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotCache, "_tensors", lambda self: [store for pair in self._stores.values() for store in pair])


def count_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Block, "key_positions", lambda self, width: torch.arange(width).expand(len(self.lengths), -1))


def pool_the_slots(patch: pytest.MonkeyPatch) -> None:
    def by_slots(self: Block, places: Tensor) -> Tensor:
        last = self.lengths.unsqueeze(1) + self.sees.shape[2] - 1
        return places.clamp(min=0).minimum(last).unsqueeze(1).repeat(1, self.sees.shape[1], 1)

    patch.setattr(Block, "slots_of", by_slots)


def show_every_window(patch: pytest.MonkeyPatch) -> None:
    mask = compression._mask
    patch.setattr(compression, "_mask", lambda visible, like: mask(visible | visible.any(1, keepdim=True), like))


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "state of a sibling": ("qwen3_next", change_trees(follow_the_slot_before)),
    "state of the parent's parent": ("bamba", change_trees(skip_the_parent)),
    "state of a sibling, selective scan": ("mamba", change_trees(follow_the_slot_before)),
    "rejected token in the convolution's window": ("lfm2", keep_rejected_in_the_window),
    "state of another node committed": ("kimi_linear", commit_one_too_far),
    "states that are never committed": ("jamba", forget_to_commit),
    "rejected key in the index": ("deepseek_v32", leave_the_index),
    "state of a sibling, weighted keys": ("rwkv", change_trees(follow_the_slot_before)),
    "state of the parent's parent, mLSTM": ("xlstm", change_trees(skip_the_parent)),
    "state of the parent's parent, RG-LRU": ("recurrent_gemma", change_trees(skip_the_parent)),
    "state of another node, lightning attention": ("minimax", commit_one_too_far),
    "rejected token before the one that is mixed": ("zaya", keep_rejected_in_the_window),
    "rejected token in an n-gram": ("qwen4_exp_text", keep_rejected_in_the_window),
    "distances by slots": ("inkling_text", count_slots),
    "a sibling in a compressed window": ("deepseek_v4", pool_the_slots),
    "another node's compressed window": ("deepseek_v4", show_every_window),
    "biases by slots": ("bloom", count_slots),
    "biases by slots, for all rows": ("mpt", count_slots),
}
UNCHANGED = (
    *("rejected key in the index", "state of a sibling, weighted keys", "biases by slots"),
    "rejected token before the one that is mixed",
)
"""Faults that change logits, and in these small models no likeliest token."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the self-check at load and, where it changes the likeliest token, by the comparison with `generate`."""
    kind, plant = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="failed the self-check"):
        TransformersTarget.load(model_of(kind), rows=2, slots=96)
    if name not in UNCHANGED:
        with pytest.raises(AssertionError):
            compare(TransformersTarget.load(model_of(kind), rows=2, slots=96, self_check=False), model_of(kind))


def pretend_that_any_prefix_has_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowStates, "reusable", lambda _self, _row, _held, length: length)
    copy_row = RowStates.copy_row

    def stale(self: RowStates, source: int, target: int, held: int, length: int) -> None:
        if length in (0, held, *self._kept[source]):
            copy_row(self, source, target, held, length)

    patch.setattr(RowStates, "copy_row", stale)


def copy_no_states(patch: pytest.MonkeyPatch) -> None:
    copy_row = RowStates.copy_row

    def left(self: RowStates, source: int, target: int, held: int, length: int) -> None:
        if source == target:
            copy_row(self, source, target, held, length)

    patch.setattr(RowStates, "copy_row", left)


@pytest.mark.parametrize("plant", [pretend_that_any_prefix_has_states, copy_no_states])
def test_a_stale_state_behind_a_prefix_is_seen(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mamba")
    prompt = prompts_of("mamba")[0]
    plant(monkeypatch)
    llm = LLM(model, max_num_seqs=2, max_model_len=320)
    asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, n=2)
    wanted = answer_to("mamba", prompt)
    answers = [
        answer.token_ids
        for _ in range(2)
        for answer in llm.generate({"prompt_token_ids": list(prompt)}, asked)[0].outputs
    ]
    assert any(answer != wanted for answer in answers)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_states_rule_out() -> None:
    with pytest.raises(ArgumentError, match="reproducible=True cannot hold"):
        LLM(model_of("lfm2"), tokenizer=False, reproducible=True)


def test_a_layer_whose_state_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "KINDS", ())
    with pytest.raises(UnsupportedModelError, match=r"Lfm2ShortConv \(update_conv_state\) keep a state"):
        TransformersTarget.load(model_of("lfm2"))
