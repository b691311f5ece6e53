"""Draft models, one token or one pass at a time: vocabulary, budget, cache, context. Losslessness: tests/contract."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from drafters.asking import DRAWN, GREEDY, contexts, counted, setup_for
from drafters.asking import trees_of as propose
from forerun.drafters.draft_models.draft_model import DraftModelConfig, DraftModelDrafter
from forerun.drafters.draft_models.pard import PardConfig, PardDrafter
from forerun.errors import VocabularyMismatchError
from forerun.types import Drawn, SamplingParams
from llamas import tiny_llama

WORDS = 12
PROMPT = [1, 2, 3, 4]


def model(vocabulary: int = WORDS, *, seed: int = 0, positions: int = 96) -> LlamaForCausalLM:
    sizes = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 2}
    return tiny_llama(vocabulary, seed, max_position_embeddings=positions, initializer_range=0.2, **sizes)


def tokenizer(words: int = WORDS, **special: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(WordLevel({f"w{index}": index for index in range(words)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def saved(folder: Path, weights: LlamaForCausalLM, words: PreTrainedTokenizerFast | None) -> str:
    weights.save_pretrained(folder)
    if words is not None:
        words.save_pretrained(folder)
    return str(folder)


def drafter(
    draft: Any, *, target: LlamaForCausalLM | None = None, words: Any = None, rows: int = 1, **options: Any
) -> DraftModelDrafter:
    return DraftModelDrafter(DraftModelConfig(model=draft, **options), setup_for(target or model(), words, rows=rows))


def greedy(weights: LlamaForCausalLM, text: list[int], length: int, vocabulary: int = WORDS) -> list[int]:
    text = list(text)
    for _ in range(length):
        with torch.inference_mode():
            text.append(int(weights(torch.tensor([text])).logits[0, -1, :vocabulary].argmax()))
    return text[-length:]


def test_greedy_chains_are_the_draft_models_own_text_up_to_the_end_of_its_context() -> None:
    weights = model(seed=3)
    texts = [PROMPT, [5, 6], list(range(WORDS)) * 3]
    trees = propose(drafter(weights, rows=3), texts)
    assert [tree.tokens for tree in trees] == [[text[-1], *greedy(weights, text, 5)] for text in texts]
    assert not any(tree.draft_probs or tree.sampled for tree in trees)
    made = drafter(model(positions=16))
    assert propose(made, [[1] * 14])[0].size == 2
    assert propose(made, [[1] * 16])[0].size == 0


@pytest.mark.parametrize("kept", range(5))
def test_no_token_is_run_twice(kept: int) -> None:
    weights = model(seed=3)
    made, text = drafter(weights, num_speculative_tokens=4), list(PROMPT)
    made.extend(contexts([text], len(text)))
    tokens = propose(made, [text])[0].tokens[1:]
    other = next(token for token in range(WORDS) if token not in tokens)
    text += [*tokens[:kept], other]
    made.extend(contexts([text], kept + 1))
    with counted(made) as passes:
        again = propose(made, [text])[0].tokens[1:]
    assert again == greedy(weights, text, 4)
    assert passes == [2 if kept == 4 else 1, 1, 1, 1]


def test_a_sampled_chain_records_the_distribution_at_the_drafters_own_temperature() -> None:
    weights = model(seed=3)
    (tree,) = propose(drafter(weights, temperature=2.0), [PROMPT], params=DRAWN)
    with torch.inference_mode():
        logits = weights(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(tree.draft_probs[0], (logits / 2).softmax(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"shape": (2, 1), "draw": "iid"}, {"draw": "deterministic"}])
def test_confidence_follows_what_was_kept(options: dict[str, Any]) -> None:
    made, text = drafter(model(seed=3), **options), list(PROMPT)
    made.extend(contexts([text], len(text)))
    firsts = []
    for _ in range(25):
        (tree,) = propose(made, [text], replace(DRAWN, temperature=3.0), depth=1)
        firsts.append(tree.confidence[1])
        text += [tree.tokens[1], 0]
        made.extend(contexts([text], 2))
    assert firsts[-1] > 0.75 > firsts[0]


def test_a_padded_embedding_is_no_other_vocabulary(tmp_path: Path) -> None:
    large = saved(tmp_path / "large", model(16, seed=5), tokenizer())
    for params in (GREEDY, replace(DRAWN, temperature=5.0)):
        assert max(propose(drafter(large, words=tokenizer()), [PROMPT], params)[0].tokens) < WORDS
    small = saved(tmp_path / "small", model(WORDS, seed=5), tokenizer())
    made = drafter(small, target=model(16), words=tokenizer())
    (tree,) = propose(made, [PROMPT], params=DRAWN)
    assert tree.draft_probs and all(len(probs) == 16 for probs in tree.draft_probs.values())
    assert all(float(probs[WORDS:].sum()) == 0 for probs in tree.draft_probs.values())
    made.truncate([0], [0])
    assert propose(made, [[1, 15, 2]])[0].size == 5, "a token that only the target has"


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (tokenizer(11), "12 tokens.*11 tokens.*'w11'"),
        (tokenizer(WORDS, eos_token="w3"), "special tokens"),
        (None, "12 token ids and the draft model 16"),
    ],
)
def test_another_vocabulary_is_refused(tmp_path: Path, theirs: Any, says: str) -> None:
    folder = saved(tmp_path, model(16), theirs)
    with pytest.raises(VocabularyMismatchError, match=says):
        drafter(folder, words=tokenizer())


MASK = WORDS - 1


def pard_drafter(rows: int = 1, slots: int = 96, **options: Any) -> PardDrafter:
    draft = model(seed=3)
    draft.config.pard_token = MASK
    return PardDrafter(PardConfig(model=draft, **options), setup_for(model(), rows=rows, slots=slots))


@torch.no_grad()
def levels(text: list[int], depths: int) -> torch.Tensor:
    """(depths, V) log-probabilities, by transformers' own forward."""
    draft = model(seed=3)
    return draft(torch.tensor([[*text, *[MASK] * (depths - 1)]])).logits[0, len(text) - 1 :].log_softmax(-1)


@pytest.mark.parametrize("text", [PROMPT, list(range(WORDS)) * 3])
def test_a_chain_is_the_likeliest_token_of_each_level(text: list[int]) -> None:
    (tree,) = propose(pard_drafter(shape=(1,) * 5), [text])
    assert tree.tokens == [text[-1], *levels(text, 5).argmax(-1).tolist()] and not tree.sampled


def test_the_default_is_the_tree_of_the_likeliest_paths() -> None:
    """No path that was left out is likelier than one that was taken."""
    (tree,) = propose(pard_drafter(num_speculative_tokens=4, nodes=9), [PROMPT])
    logs = levels(PROMPT, 4)
    scores = dict[tuple[int, ...], float]({(): 0.0})
    for depth in range(4):
        paths = [path for path in scores if len(path) == depth]
        scores |= {(*path, token): scores[path] + float(logs[depth, token]) for path in paths for token in range(WORDS)}
    taken = {tuple(tree.tokens[node] for node in tree.path(node)) for node in range(1, tree.size + 1)}
    best = sorted((path for path in scores if path), key=lambda path: -scores[path])[:9]
    assert tree.size == 9 and taken == set(best)
    assert all(kind is Drawn.DETERMINISTIC for kind in tree.drawn[1:])


def test_a_sampled_tree_records_the_marginals_that_it_was_drawn_from() -> None:
    made = pard_drafter(num_speculative_tokens=3, nodes=14)
    (tree,) = propose(made, [PROMPT], DRAWN)
    logs, depths = levels(PROMPT, 3), tree.depths
    assert tree.size == 14 and set(tree.draft_probs) == {node for node in range(7)}
    for node, probs in tree.draft_probs.items():
        torch.testing.assert_close(probs.float(), logs[depths[node]].exp(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_step_is_one_pass_over_what_is_new_and_the_masks(params: SamplingParams) -> None:
    made, text = pard_drafter(rows=2, num_speculative_tokens=4), list(PROMPT)
    first = propose(made, [text, [5, 6]], params)
    grown = [[*text, first[0].tokens[1], 7], [5, 6, 8, 9, 1]]
    made.extend(contexts(grown, [2, 3], params))
    with counted(made) as passes:
        propose(made, grown, params)
    assert passes == [2 * (3 + 3)], "two and three new tokens, padded to three, and three masks each"
    fresh = propose(pard_drafter(rows=2, num_speculative_tokens=4), grown, params)
    again = propose(made, grown, params)
    assert [tree.tokens for tree in fresh] == [tree.tokens for tree in again]


@pytest.mark.parametrize(
    "options", [{"nodes": 300, "num_speculative_tokens": 4}, {"shape": (1,) * 4}], ids=["best-first", "chain"]
)
def test_rows_near_the_end_of_the_context_draft_less(options: dict[str, Any]) -> None:
    texts = [[1] * (96 - left) for left in (0, 1, 3, 40)]
    trees = propose(pard_drafter(rows=4, **options), texts, nodes=300)
    assert [max(tree.depths) for tree in trees] == [0, 1, 3, 4]
