"""String-level exact match: what is drafted, where it is aligned, what is run. Losslessness: tests/contract."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from contract.tongues import tongue
from drafters.asking import contexts, counted
from drafters.asking import trees_of as propose
from drafters.tongues import byte_level, sentencepiece, unigram
from engine.conftest import byte_llama
from forerun import LLM, SamplingParams
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DrafterSetup
from forerun.drafters.draft_models.slem import SlemConfig, SlemDrafter
from forerun.drafters.draft_models.token_bytes import TokenBytes
from forerun.model import TransformersTarget
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


def drafter(
    target: tuple[LlamaForCausalLM, Any],
    draft: tuple[Any, Any],
    rows: int = 2,
    kind: type[SlemDrafter] = SlemDrafter,
    **options: Any,
) -> Any:
    held = TransformersTarget.load(target[0], rows=rows, slots=96, self_check=False)
    setup = DrafterSetup(target=held, tokenizer=target[1], rows=rows, slots=96)
    return kind(SlemConfig(model=draft[0], tokenizer=draft[1], **options), setup)


def rounds(**options: Any) -> SlemDrafter:
    return drafter((round_of(PAIRS, 2), tongue(PAIRS)), (round_of(TRIPLES, 3), triples()), **options)


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
    made = drafter((target, singles), (draft, whole), num_speculative_tokens=2)
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
    made = drafter((draft, byte_level("code")), (draft, singles), num_speculative_tokens=4)
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
    made = drafter(*pair, rows=1, kind=Watched, num_speculative_tokens=6)
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
    made = drafter(target, (round_of(tuple(ROUND), 1), tongue(tuple(ROUND))), num_speculative_tokens=3)
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
        made = drafter((byte_llama(0, words), words), (draft, theirs))
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
