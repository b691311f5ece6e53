"""The demo tokenizer: byte-level BPE with GPT-2's pre-tokenizer, trained on the training files.

Knows the vocabulary, the special tokens and the chat template. Does not know the model.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
MARKS = ["<|user|>", "<|assistant|>", END_OF_TEXT]
"""Where a question, an answer and a text begin."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ '<|assistant|>\\n' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], context: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCABULARY_SIZE` entries whose pre-tokenizer is exactly GPT-2's; `context` in tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL_TOKENS[1:-1],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def plain_words(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Lower-case words, sorted, that are one token behind a space and one token without it.

    A model that copies a word into another place sees it spelled by one token there, too.
    """
    known = tokenizer.get_vocab()
    return sorted(
        word
        for word in known
        if len(word) > 1
        and word.islower()
        and word.isidentifier()
        and not keyword.iskeyword(word)
        and f"Ġ{word}" in known
    )
