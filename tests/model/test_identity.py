"""A fingerprint knows a checkpoint's weights, whatever their dtype and shards."""

from pathlib import Path

import torch

from forerun.model.identity import fingerprint
from llamas import tiny_llama


def test_weights_count_and_not_how_they_are_stored(tmp_path: Path) -> None:
    model = tiny_llama(40)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    first = fingerprint(tmp_path / "whole")
    assert first is not None and fingerprint(tmp_path / "shards") == first
    model.to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    assert fingerprint(tmp_path / "rounded") == first
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.1)
    model.save_pretrained(tmp_path / "tuned")
    assert fingerprint(tmp_path / "tuned") != first
    assert fingerprint(tmp_path) is None and fingerprint("nobody/here") is None
