"""Two tokenizers for the tiny models: of twelve tokens each, nine of which spell the same in both."""

import copy
import functools
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = tuple("abcdefghijkl")
WORDS = ("a", "b", "c", "ab", "d", "e", "f", "bc", "g", "h", "cd", "i")
"""A target's tokens, by id: three of them are two letters long."""
OTHERS = ("x", "i", "g", "y", "a", "c", "e", "h", "z", "f", "d", "b")
"""A draft model's tokens, by id."""


@functools.cache
def tongue(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose token ids spell `pieces`; pieces of two letters are merged from them."""
    merges = [(piece[0], piece[1]) for piece in pieces if len(piece) == 2]
    made = Tokenizer(models.BPE(vocab={piece: token for token, piece in enumerate(pieces)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def retold(model: LlamaForCausalLM, source: Sequence[str], wanted: Sequence[str]) -> LlamaForCausalLM:
    """A copy that knows the tokens of `source` under the ids they have in `wanted`; those left over fill the gaps."""
    spare = [token for token, piece in enumerate(source) if piece not in wanted]
    order = [source.index(piece) if piece in source else spare.pop() for piece in wanted]
    made = copy.deepcopy(model)
    for module in (made.get_input_embeddings(), made.get_output_embeddings()):
        module.weight.data = module.weight.data[order]
    return made
