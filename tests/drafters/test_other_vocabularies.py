"""Drafters of another vocabulary, by strings and by the tokens that both have. Losslessness: tests/contract."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from contract.harness import model, relative
from contract.tongues import OTHERS, WORDS, retold, tongue
from drafters.asking import GREEDY, contexts, counted, setup_for
from drafters.asking import trees_of as propose
from drafters.tongues import byte_level, sentencepiece, unigram
from engine.conftest import byte_llama, tiny_tokenizer
from forerun import LLM, SamplingParams
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.drafters.draft_models import tli
from forerun.drafters.draft_models.draft_model import DraftModelConfig, DraftModelDrafter
from forerun.drafters.draft_models.slem import SlemConfig, SlemDrafter
from forerun.drafters.draft_models.tli import TliConfig, TliDrafter
from forerun.drafters.draft_models.token_bytes import TokenBytes
from forerun.errors import ArgumentError, VocabularyMismatchError
from forerun.types import Budget
from forerun.types import SamplingParams as Params
from llamas import tiny_llama

ROUND = "abcdefghijklmnopqrstuvwx"
"""A text that goes round and round."""
PAIRS = (*ROUND, *(ROUND[place : place + 2] for place in range(0, 24, 2)))
TRIPLES = (*ROUND, *(ROUND[place : place + length] for length in (2, 3) for place in range(0, 24, 3)))
HAN = "aé漢b"
"""The same with characters of one, two, three bytes and one."""


def successions(size: int, following: Callable[[int], int], sharpness: float = 8.0) -> LlamaForCausalLM:
    """A model whose likeliest next token depends on the last one alone."""
    hidden = -(-size // 8) * 8
    sizes = {"hidden_size": hidden, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = tiny_llama(size, max_position_embeddings=128, **sizes)
    with torch.no_grad():
        made.model.layers[0].self_attn.o_proj.weight.zero_()
        made.model.layers[0].mlp.down_proj.weight.zero_()
        made.model.embed_tokens.weight.copy_(torch.eye(size, hidden))
        made.lm_head.weight.zero_()
        for token in range(size):
            made.lm_head.weight[following(token), token] = sharpness / hidden**0.5
    return made


def round_of(pieces: Sequence[str], length: int) -> LlamaForCausalLM:
    """Continues `ROUND`, in pieces of `length` letters where one begins, else letter by letter."""

    def following(token: int) -> int:
        place = (ROUND.index(pieces[token][-1]) + 1) % len(ROUND)
        return list(pieces).index(ROUND[place : place + length] if place % length == 0 else ROUND[place])

    return successions(len(pieces), following)


def letters_of(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """BPE that knows nothing of bytes: a character is a token."""
    made = Tokenizer(models.BPE(vocab={piece: token for token, piece in enumerate(pieces)}, merges=[]))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def triples() -> PreTrainedTokenizerFast:
    made = tongue(TRIPLES)
    merges = [(piece[:-1], piece[-1]) for piece in TRIPLES if len(piece) > 1]
    made.backend_tokenizer.model = models.BPE(vocab={piece: t for t, piece in enumerate(TRIPLES)}, merges=merges)
    return made


def slem_drafter(
    target: tuple[LlamaForCausalLM, Any],
    draft: tuple[Any, Any],
    rows: int = 2,
    kind: type[SlemDrafter] = SlemDrafter,
    **options: Any,
) -> Any:
    return kind(SlemConfig(model=draft[0], tokenizer=draft[1], **options), setup_for(*target, rows=rows))


def rounds(**options: Any) -> SlemDrafter:
    return slem_drafter((round_of(PAIRS, 2), tongue(PAIRS)), (round_of(TRIPLES, 3), triples()), **options)


def pairs(*pieces: str) -> list[int]:
    return [PAIRS.index(piece) for piece in pieces]


def drafted(trees: Sequence[TokenTree], row: int = 0) -> list[int]:
    tree = trees[row]
    assert list(tree.parents) == list(range(-1, tree.size)) and not any(one.sampled for one in trees)
    return list(tree.tokens[1:])


def test_the_drafted_text_comes_in_the_targets_tokens() -> None:
    trees = propose(rounds(num_speculative_tokens=3), [pairs("ab", "cd"), pairs("x")])
    assert drafted(trees) == pairs("ef", "gh", "i"), "the draft model wrote e, f, ghi"
    assert drafted(trees, 1) == pairs("ab", "cd", "ef"), "three tokens, nine letters: ab, cd, ef, gh, i"


def test_a_border_inside_a_token_drafts_nothing() -> None:
    assert drafted(propose(rounds(), [pairs("ab", "c")])) == []
    assert drafted(propose(rounds(num_speculative_tokens=1), [pairs("ab", "c"), pairs("ab")]), 1) == pairs("c")


def test_confidence_is_the_probability_of_what_a_token_is_made_of() -> None:
    model = round_of(TRIPLES, 3)
    with torch.inference_mode():
        sure = float(model(torch.tensor([[0]])).logits.softmax(-1).max())
    assert 0.2 < sure < 0.99
    (tree,) = propose(rounds(num_speculative_tokens=3), [pairs("ab", "cd")])
    assert tree.confidence[1:] == pytest.approx([sure**2, sure, 1.0], abs=1e-3), "e and f; ghi; its rest"


def test_confidence_follows_what_was_kept() -> None:
    made, text, seen = rounds(num_speculative_tokens=4), pairs("ab"), list[float]()
    for _ in range(20):
        (tree,) = propose(made, [text])
        seen.append(tree.confidence[1])
        text = text[:1]
        made.extend(contexts([[*text, *pairs("x", "x")]], 2))
        made.truncate([0], [1])
    assert seen[-1] < 0.5 * seen[0]


@pytest.mark.parametrize("length", range(1, 8))
def test_characters_of_several_bytes_at_the_border(length: int) -> None:
    data = HAN.encode()
    singles = tongue(tuple(byte_level().backend_tokenizer.pre_tokenizer.pre_tokenize_str(HAN)[0][0]))
    whole = letters_of(HAN)
    target = successions(len(data), lambda token: (token + 1) % len(data))
    draft = successions(len(HAN), lambda token: (token + 1) % len(HAN))
    made = slem_drafter((target, singles), (draft, whole), num_speculative_tokens=2)
    token_bytes = TokenBytes(singles)
    tokens = [token_bytes.ordinary[data[place : place + 1]] for place in range(len(data))]
    found = drafted(propose(made, [tokens[:length]]))
    wanted = (data * 3)[length:]
    assert found and wanted.startswith(token_bytes.join(found))


def test_an_incomplete_character_is_not_drafted() -> None:
    singles = byte_level()
    data = HAN.encode()
    token_bytes = TokenBytes(singles)
    ids = [token_bytes.ordinary[data[place : place + 1]] for place in range(len(data))]
    order = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    draft = successions(len(singles), lambda token: order.get(token, 0))
    made = slem_drafter((draft, byte_level("code")), (draft, singles), num_speculative_tokens=4)
    target = TokenBytes(byte_level("code"))
    found = drafted(propose(made, [[target.ordinary[b"a"]]]))
    assert target.join(found).decode() == "é", "two of the three bytes of the next character were written"


KINDS = {"bytes": lambda: byte_level("code"), "sentencepiece": sentencepiece, "unigram": unigram}


class Watched(SlemDrafter):
    """Remembers what the draft model read and wrote for the last row."""

    wrote = b""

    def _chain(self, tree: Any, text: Any, most: int) -> None:
        alignment = text.row.alignment
        self.read, self.tail = alignment.ids, bytes(alignment.data[alignment.covered :])
        self.wrote = b"".join(text.pieces)
        super()._chain(tree, text, most)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_nothing_is_lost_or_reordered(make: Any) -> None:
    words, theirs = byte_level(), make()
    pair = (byte_llama(0, words), words), (byte_llama(5, theirs), theirs)
    made = slem_drafter(*pair, rows=1, kind=Watched, num_speculative_tokens=6)
    target, draft = TokenBytes(words), TokenBytes(theirs)
    text = words("the cat sat on the mat — naïve")["input_ids"]
    drafts = 0
    for step in range(30):
        found = drafted(propose(made, [text]))
        assert made.wrote.startswith(made.tail + target.join(found)) or not found
        if make is not unigram:  # which cannot write every byte
            assert draft.join(made.read).removeprefix(b" ") == target.join(text).removeprefix(b" ")
        drafts += len(found) > 0
        fresh = [*found[: step % 3], (7 * step) % len(words)]
        text = [*text, *fresh]
        made.extend(contexts([text], len(fresh)))
    assert drafts > 4, "too few drafts to show anything"


def run_in(made: SlemDrafter, text: list[int]) -> list[int]:
    """Tokens in each of the draft model's passes."""
    with counted(made) as passes:
        propose(made, [text])
    return passes


def test_only_what_is_new_is_run() -> None:
    target = (round_of(PAIRS, 2), tongue(PAIRS))
    made = slem_drafter(target, (round_of(tuple(ROUND), 1), tongue(tuple(ROUND))), num_speculative_tokens=3)
    text = pairs("ab", "cd")
    assert run_in(made, text) == [4, 1, 1]
    text += pairs("ef", "gh")
    made.extend(contexts([text], 2))
    assert run_in(made, text) == [2, 1, 1], "g was drafted and never run, h is new"


def test_what_reads_otherwise_with_the_text_behind_it_is_run_again() -> None:
    made, text = rounds(num_speculative_tokens=3), pairs("ab", "cd")
    assert run_in(made, text) == [2, 1, 1]
    text += pairs("ef", "gh", "ij")
    made.extend(contexts([text], 3))
    assert run_in(made, text) == [3, 1, 1], "d, e, f became def; ghi and j are new"
    assert drafted(propose(made, [text])) == drafted(propose(rounds(num_speculative_tokens=3), [text]))


def test_special_tokens_end_a_draft_and_are_drafted_by_their_own_name() -> None:
    words, theirs = byte_level(eos_token="<end>"), byte_level("code", eos_token="</s>", pad_token="<nothing>")
    letter = theirs.convert_tokens_to_ids("a")
    for last, wanted in (("</s>", [words.eos_token_id]), ("<nothing>", [])):
        end = theirs.convert_tokens_to_ids(last)
        draft = successions(len(theirs), lambda token, end=end: end)
        made = slem_drafter((byte_llama(0, words), words), (draft, theirs))
        assert drafted(propose(made, [[words.convert_tokens_to_ids("a")]])) == wanted
    assert letter != end


def test_a_draft_that_knows_the_text_is_accepted() -> None:
    draft = {"model": round_of(TRIPLES, 3), "tokenizer": triples(), "num_speculative_tokens": 4}
    config = {"method": "slem", "adaptive": False, **draft}
    engine = LLM(round_of(PAIRS, 2), tokenizer=tongue(PAIRS), speculative_config=config, max_model_len=100)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    found = engine.generate([{"prompt_token_ids": pairs("ab")}], params)[0].outputs[0]
    assert found.text == (ROUND * 5)[2:98]
    assert found.speculation.mean_acceptance_length > 4


SHARED = [token for token, piece in enumerate(WORDS) if piece in OTHERS]
THEIRS = [OTHERS.index(WORDS[token]) for token in SHARED]
TEXT = [0, 3, 11, 10, 1]
"""a, ab, i, cd, b: two of the tokens are unknown to the draft model."""


def weights() -> LlamaForCausalLM:
    return retold(relative(), WORDS, OTHERS)


def tli_drafter(draft: Any = None, **options: Any) -> TliDrafter:
    tokenizers = {"tokenizer": tongue(OTHERS), "target_tokenizer": tongue(WORDS)}
    return TliDrafter(TliConfig(model=draft or weights(), **{**tokenizers, **options}), setup_for(model(), rows=2))


SAMPLED = Params(temperature=0.7, top_k=0)


def tokens_of(trees: Sequence[TokenTree]) -> list[list[int]]:
    """By row, the root first."""
    return [list(tree.tokens) for tree in trees]


def logits_after(draft: LlamaForCausalLM, text: list[int]) -> torch.Tensor:
    """(V',) of the shared tokens, from a plain forward over the text written in the draft model's tokens."""
    read = [OTHERS.index(letter) for token in text for letter in WORDS[token]]
    with torch.inference_mode():
        return draft(torch.tensor([read])).logits[0, -1, THEIRS]


def test_a_greedy_chain_is_the_likeliest_shared_tokens_and_a_sampled_one_records_their_distribution() -> None:
    made, text = tli_drafter(num_speculative_tokens=4), list(TEXT)
    (tree,) = propose(made, [TEXT])
    assert tree.size == 4
    for token in tree.tokens[1:]:
        assert token == SHARED[int(logits_after(weights(), text).argmax())]
        text.append(token)
    (tree,) = propose(tli_drafter(num_speculative_tokens=2), [TEXT], SAMPLED)
    wanted = torch.zeros(12)
    wanted[SHARED] = (logits_after(weights(), TEXT) / 0.7).softmax(-1)
    torch.testing.assert_close(tree.draft_probs[0], wanted, atol=1e-5, rtol=1e-4)


def test_a_pruned_head_drafts_what_the_whole_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = weights()
    before = draft.lm_head.weight.clone()
    pruned = tli_drafter(draft)
    drafts = [propose(pruned, [TEXT, [5]], params) for params in (GREEDY, SAMPLED)]
    assert pruned.model.head(torch.zeros(1, 1, 32)).shape[-1] == len(SHARED)
    assert draft.lm_head.weight.equal(before), "a model that was handed in is left alone"
    monkeypatch.setattr(tli, "prune_head", lambda *_: None)
    whole = tli_drafter(draft)
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
    made = tli_drafter(draft, num_speculative_tokens=2)
    assert made.model.head(torch.zeros(1, 1, 32)).shape[-1] == 12
    assert tokens_of(propose(made, [TEXT])) == tokens_of(propose(tli_drafter(num_speculative_tokens=2), [TEXT]))


def test_a_request_that_bans_every_shared_token_gets_no_draft_and_disturbs_nobody() -> None:
    made = tli_drafter(num_speculative_tokens=2)
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
        tli_drafter(**options)


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
        DraftModelDrafter(DraftModelConfig(model=str(folder)), setup_for(model(), tiny_tokenizer()))
