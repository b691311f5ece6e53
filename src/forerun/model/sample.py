"""Tokens on which a model is tried at load: a paragraph through its own tokenizer, else tokens that
it draws itself.

A trained model's logits on text are what it was made for; on made-up ids they are mostly noise, and so would be
whatever is concluded from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.model.layers import device_of
from forerun.model.support import most_positions, refusing, text_config

DRAWN, ROUNDS = 96, 8  # Tokens that a model draws, and passes that it takes for that
_LEAST = 16  # Kinds of tokens in a text
TEXT = """The lighthouse at Carrow Point was built in 1871, after three ships had been lost on the reef in a single \
winter. Its keeper, a former carpenter named Thomas Reed, wrote down the weather four times a day for 31 years. \
"Wind from the south-west, 6; rain since noon; two sails seen," says a typical line. When the station was automated in \
1964, his books were found in a cupboard under the stairs. They are used today by people who study how storms change: \
the mean of the first 10 years, 14.2 gales a year, can be compared with 17.8 for the last 10.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Question: Why were the keeper's books useful to scientists? Answer: Because they recorded the weather at one place, in \
the same way, over a long time. La tour est encore debout; on peut la visiter en \u00e9t\u00e9, de 10 h \u00e0 17 h."""


def sample(model: Any, tokenizer: Callable[[], Any] | None) -> list[int]:
    """Return the ids of a built-in text of some two hundred tokens, behind the token that begins
    texts. Without a tokenizer, or with one of another vocabulary, the model draws `DRAWN` ids.
    `tokenizer` returns the model's, or None.
    """
    loaded = None if tokenizer is None else tokenizer()
    ids = [] if loaded is None else _encode(loaded)
    if len(set(ids)) < _LEAST or max(ids) >= text_config(model).vocab_size:
        return draw_tokens(model, DRAWN)
    return ids


def _encode(tokenizer: Any) -> list[int]:
    begins = getattr(tokenizer, "bos_token_id", None)
    ids = list(tokenizer(TEXT).input_ids)
    return ids if begins is None or ids[:1] == [begins] else [begins, *ids]


@torch.inference_mode()
def draw_tokens(model: Any, count: int) -> list[int]:
    """Return token ids that the model draws from its own distribution, the same at each call,
    without a cache. All positions are drawn at once, again and again, each from what was drawn
    before it in the last round; the first `ROUNDS` are exact draws. There are `count` ids, or as
    many as the context has, and none whose embedding is not finite.
    """
    config, embedding = text_config(model), model.get_input_embeddings()
    device, generator = device_of(embedding), torch.Generator().manual_seed(0)
    count = min(count, most_positions(config))
    begins = getattr(config, "bos_token_id", None)
    ids = torch.randint(config.vocab_size, (1, count), generator=generator)
    ids[0, 0] = begins if isinstance(begins, int) and 0 <= begins < config.vocab_size else 0
    gumbel = (
        -torch.empty(count - 1, config.vocab_size).exponential_(generator=generator).log()
    )  # Gumbel noise: the largest sum wins
    weight = getattr(embedding, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.device.type != "meta":
        full_tensor = getattr(weight, "full_tensor", None)  # Of a DTensor: the model is spread over processes
        weight = weight if full_tensor is None else full_tensor()
        gumbel[:, ~weight[: config.vocab_size].isfinite().all(-1).cpu()] = -torch.inf
    for _ in range(ROUNDS):
        with refusing(model, plainly=True):
            logits = model(input_ids=ids.to(device), use_cache=False).logits[0, :-1, : config.vocab_size]
        ids[0, 1:] = (logits.float().cpu().nan_to_num(nan=0.0) + gumbel).argmax(-1)
    return ids[0].tolist()
