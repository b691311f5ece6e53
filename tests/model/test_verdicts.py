"""The self-check's result is kept: a second start compares nothing, and anything that could change it asks again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import NumericError, UnsupportedModelError
from forerun.model import Target, proof, self_check
from forerun.model.cache import SlotCache
from model.families import make


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and a cache of its own."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    make("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every check."""
    made, expect = list[Any](), self_check.expect

    def counted(model: Any, *args: Any, **keywords: Any) -> Any:
        made.append(model)
        return expect(model, *args, **keywords)

    monkeypatch.setattr(self_check, "expect", counted)
    return made


def load(path: Path, **options: Any) -> Target:
    return Target.load(path, rows=1, slots=32, device="cpu", **options)


def test_a_second_start_compares_nothing(saved: Path, checks: list[Any]) -> None:
    first = load(saved)
    assert len(checks) == 1
    second = load(saved)
    assert len(checks) == 1
    assert second.cache.nbytes() == first.cache.nbytes(), "reserved at load"
    scored = [target.prefill([0], [[5, 6, 7]]).logits for target in (first, second)]
    assert torch.equal(*scored)


def test_what_could_change_it_asks_again(saved: Path, checks: list[Any]) -> None:
    load(saved)
    load(saved, dtype="bfloat16")
    load(saved, repack=False)
    counted = len(checks)
    load(saved, dtype="bfloat16")
    assert len(checks) == counted
    for file in saved.glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    load(saved)
    assert len(checks) > counted


def test_a_broken_file_is_ignored(saved: Path, checks: list[Any], tmp_path: Path) -> None:
    load(saved)
    [kept] = (tmp_path / "cache" / "checked").iterdir()
    for text in ("", "{", "[]", '{"accepted": 3}', '{"accepted": [3]}'):
        kept.write_text(text)
        counted = len(checks)
        load(saved)
        assert len(checks) == counted + 1


def test_what_fails_is_not_kept(saved: Path, checks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SlotCache, "move", lambda *_: None)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="failed the self-check"):
                load(saved)
    load(saved)
    assert len(checks) == 3


def test_what_helps_is_tried_before_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose 16 bits alone are wrong: float32 is offered, because it passed."""
    model = make("llama", dtype=torch.bfloat16)
    forward = SlotCache.write

    def rough(self: SlotCache, keys: Any, values: Any, layer: int) -> None:
        forward(self, keys if keys.dtype == torch.float32 else 2 * keys, values, layer)

    monkeypatch.setattr(SlotCache, "write", rough)
    with pytest.raises(UnsupportedModelError, match=r"times its own noise.*In float32 it passes: load it with dtype="):
        Target.load(model)
    monkeypatch.setattr(proof, "_copy", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="No option of forerun changes that"):
        Target.load(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_nan_in_one_weight(name: str, dtype: torch.dtype) -> None:
    model = make("llama", dtype=dtype)
    model.get_parameter(name).data[77, 5] = torch.nan
    with pytest.raises(
        NumericError, match=r"(model\.layers\.2|token 77|lm_head).* is not finite. The checkpoint is bro"
    ):
        Target.load(model)
