"""A prompt that is run in several pieces gives the logits of one forward pass, also where no row ends in the first."""

from __future__ import annotations

import pytest
import torch

from contract.harness import model
from forerun.model import Target
from forerun.model import target as target_model


@pytest.mark.parametrize("lengths", [(11,), (11, 9), (3, 11), (4, 8)])
def test_pieces_do_not_show(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_model, "PREFILL_CHUNK", 4)
    target = Target.load(model(), rows=2, slots=32, self_check=False)
    texts = [[(3 * row + 5 * place) % 12 for place in range(length)] for row, length in enumerate(lengths)]
    logits = target.prefill(list(range(len(texts))), texts).logits
    for found, text in zip(logits, texts, strict=True):
        with torch.inference_mode():
            wanted = model()(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(found[0], wanted, atol=1e-4, rtol=1e-4)
