"""Token-level intersection: whose distribution is drafted from, what is read, what is refused. Losslessness:
tests/contract."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from contract.harness import model, relative
from contract.tongues import OTHERS, WORDS, retold, tongue
from drafters.asking import GREEDY, contexts
from drafters.asking import trees_of as propose
from drafters.tongues import byte_level, unigram
from engine.conftest import byte_llama, tiny_tokenizer
from forerun import LLM, SamplingParams
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DrafterSetup
from forerun.drafters.draft_models import tli
from forerun.drafters.draft_models.draft_model import DraftModelConfig, DraftModelDrafter
from forerun.drafters.draft_models.tli import TliConfig, TliDrafter
from forerun.errors import ArgumentError, VocabularyMismatchError
from forerun.model import TransformersTarget
from forerun.types import Budget
from forerun.types import SamplingParams as Params

SHARED = [token for token, piece in enumerate(WORDS) if piece in OTHERS]
THEIRS = [OTHERS.index(WORDS[token]) for token in SHARED]
TEXT = [0, 3, 11, 10, 1]
"""a, ab, i, cd, b: two of the tokens are unknown to the draft model."""


def setup(words: Any = None, rows: int = 2) -> DrafterSetup:
    target = TransformersTarget.load(model(), rows=rows, slots=96, self_check=False)
    return DrafterSetup(target=target, tokenizer=words, rows=rows, slots=96)


def weights() -> LlamaForCausalLM:
    return retold(relative(), WORDS, OTHERS)


def drafter(draft: Any = None, **options: Any) -> TliDrafter:
    tokenizers = {"tokenizer": tongue(OTHERS), "target_tokenizer": tongue(WORDS)}
    return TliDrafter(TliConfig(model=draft or weights(), **{**tokenizers, **options}), setup())


SAMPLED = Params(temperature=0.7, top_k=0)


def tokens_of(trees: Sequence[TokenTree]) -> list[list[int]]:
    """By row, the root first."""
    return [list(tree.tokens) for tree in trees]


def logits_after(draft: LlamaForCausalLM, text: list[int]) -> torch.Tensor:
    """(V',) of the shared tokens, from a plain forward over the text written in the draft model's tokens."""
    read = [OTHERS.index(letter) for token in text for letter in WORDS[token]]
    with torch.inference_mode():
        return draft(torch.tensor([read])).logits[0, -1, THEIRS]


def test_a_greedy_chain_is_the_likeliest_shared_tokens() -> None:
    made, text = drafter(num_speculative_tokens=4), list(TEXT)
    (tree,) = propose(made, [TEXT])
    assert tree.size == 4
    for token in tree.tokens[1:]:
        assert token == SHARED[int(logits_after(weights(), text).argmax())]
        text.append(token)


def test_the_recorded_distribution_is_the_draft_models_over_the_shared_tokens() -> None:
    (tree,) = propose(drafter(num_speculative_tokens=2), [TEXT], SAMPLED)
    wanted = torch.zeros(12)
    wanted[SHARED] = (logits_after(weights(), TEXT) / 0.7).softmax(-1)
    torch.testing.assert_close(tree.draft_probs[0], wanted, atol=1e-5, rtol=1e-4)


def test_a_pruned_head_drafts_what_the_whole_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = weights()
    before = draft.lm_head.weight.clone()
    pruned = drafter(draft)
    drafts = [propose(pruned, [TEXT, [5]], params) for params in (GREEDY, SAMPLED)]
    assert pruned.model.head(torch.zeros(1, 1, 32)).shape[-1] == len(SHARED)
    assert draft.lm_head.weight.equal(before), "a model that was handed in is left alone"
    monkeypatch.setattr(tli, "prune_head", lambda *_: None)
    whole = drafter(draft)
    for ours, params in zip(drafts, (GREEDY, SAMPLED), strict=True):
        other = propose(whole, [TEXT, [5]], params)
        assert tokens_of(ours) == tokens_of(other)
    assert whole.model.head(torch.zeros(1, 1, 32)).shape[-1] == 12
    assert pruned.memory_bytes() > whole.memory_bytes()


def test_a_head_that_does_more_than_a_linear_layer_is_not_pruned() -> None:
    draft = weights()
    forward = type(draft).forward

    class Ranked(type(draft)):
        def forward(self, *args: Any, **more: Any) -> Any:
            output = forward(self, *args, **more)
            output.logits = output.logits.log_softmax(-1)
            return output

    draft.__class__ = Ranked
    made = drafter(draft, num_speculative_tokens=2)
    assert made.model.head(torch.zeros(1, 1, 32)).shape[-1] == 12
    assert tokens_of(propose(made, [TEXT])) == tokens_of(propose(drafter(num_speculative_tokens=2), [TEXT]))


def test_a_request_that_bans_every_shared_token_gets_no_draft_and_disturbs_nobody() -> None:
    made = drafter(num_speculative_tokens=2)
    banned = Params(temperature=0.7, top_k=0, allowed_token_ids=[WORDS.index("ab"), WORDS.index("cd")])
    both = contexts([TEXT, TEXT], 0, SAMPLED)
    both.samplers[0] = Sampler(banned, TEXT[:1])
    trees = made.propose(both, Budget(nodes=[4, 4], depth=[4, 4]))
    assert [tree.size for tree in trees] == [0, 2]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tokenizer": tongue(tuple("mnopqrstuvwx"))}, VocabularyMismatchError, r"no common tokens.*drafter slem"),
        ({"min_shared": 10}, VocabularyMismatchError, r"9 common tokens, fewer than 10.*min_shared"),
        ({"shape": (10,)}, VocabularyMismatchError, "10 children"),
        ({"tokenizer": None}, ArgumentError, "pass tokenizer="),
        ({"target_tokenizer": None}, ArgumentError, "pass target_tokenizer="),
    ],
)
def test_vocabularies_that_share_too_little_are_refused(options: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        drafter(**options)


def saved(folder: Path, tokenizer: Any, seed: int) -> Path:
    byte_llama(seed, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("words", [lambda: byte_level("code", eos_token="</s>"), unigram], ids=["bytes", "unigram"])
@pytest.mark.parametrize("method", ["tli", "slem"])
def test_text_with_directories(tmp_path: Path, method: str, words: Any) -> None:
    target, draft = saved(tmp_path / "target", tiny_tokenizer(), 0), saved(tmp_path / "draft", words(), 5)
    config = {"method": method, "model": str(draft), "num_speculative_tokens": 4, "adaptive": False}
    engine = LLM(target, speculative_config=config, max_model_len=96)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found, plain = (engine.generate("the dog — né", params, speculative=on)[0].outputs[0] for on in (None, False))
    assert found.token_ids == plain.token_ids and found.speculation.num_draft_tokens > 0


def test_draft_model_names_the_drafters_that_take_another_tokenizer(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level("code"), 5)
    with pytest.raises(VocabularyMismatchError, match="drafters tli and slem"):
        DraftModelDrafter(DraftModelConfig(model=str(folder)), setup(tiny_tokenizer()))
