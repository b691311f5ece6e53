"""A model that stays in the blocks of its GGUF file: the weights of the dequantised checkpoint, to the bit, and its
logits but for rounding.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from forerun.core.tree import TokenTree
from forerun.model import TransformersTarget
from forerun.model.gguf import with_weights
from forerun.model.gguf_files import SOURCE, read_model_header
from forerun.model.gguf_weights import memory_bytes, read_weights
from forerun.model.kernels import blocks, packing, products
from forerun.model.kernels.packing import list_in_blocks, packed_bytes
from forerun.model.names import resolve
from model.ggufs import LAYERS, tiny, write_tiny

pytestmark = pytest.mark.skipif(products.library() is None, reason="no compiler, or no AVX2")
IDS = list(range(3, 40))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(blocks, "fast", lambda: True)


def loaded(source: Any, **more: Any) -> TransformersTarget:
    return TransformersTarget.load(source, **{"dtype": "bfloat16", "device": "cpu", "slots": 128, **more})


def checkpoint(file: Path) -> Path:
    """A checkpoint of transformers with the file's weights, dequantised."""
    copied = Path(shutil.copytree(with_weights(resolve(file)), file.with_name("checkpoint")))
    (copied / SOURCE).unlink()
    return copied


def logits(target: TransformersTarget) -> torch.Tensor:
    """Logits of a prompt, and of a tree behind it."""
    found = target.prefill([0], [IDS[:-1]]).logits
    tree = TokenTree(IDS[-1])
    for token in range(5, 16):
        tree.add(token, (token - 5) // 2)
    return torch.cat((found.reshape(-1, found.shape[-1]), target.score([0], [tree]).logits[0]))


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits differ by the rounding of bf16, 1 % of their spread; two rows that changed places make it 5 %."""
    return bool((found - expected).float().abs().mean() < 0.02 * expected.float().std())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0], ids=lambda kind: kind.name)
def test_logits_are_those_of_the_checkpoint(tmp_path: Path, stored: Type, tied: bool) -> None:
    """Rows of queries and keys are in another order in the file; a tied head reads the embedding's blocks."""
    file = write_tiny(tmp_path / "tiny.gguf", stored, model=tiny(tie_word_embeddings=tied))
    target, plain = loaded(file), loaded(file, repack=False)
    assert len(list_in_blocks(target.model)) == 7 * LAYERS + 1 and target.runs_as == f"{stored.name} on CPU"
    assert near(logits(target), logits(loaded(checkpoint(file))))
    own, theirs = target.model.state_dict(), plain.model.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in own.items())


def test_the_next_start_has_them_in_blocks_again(tmp_path: Path) -> None:
    """And so has the file's folder by its own name."""
    file = write_tiny(tmp_path / "tiny.gguf", Type.Q4_0)
    first, second, folder = loaded(file), loaded(file), loaded(resolve(file))
    assert list_in_blocks(second.model) == list_in_blocks(folder.model) == list_in_blocks(first.model) != []


def test_a_checkpoint_of_the_weights_has_none(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", Type.Q4_0)
    assert not list_in_blocks(loaded(checkpoint(file)).model)


@pytest.mark.parametrize(
    ("stored", "more"),
    [(Type.Q4_0, {"dtype": "float32"}), (Type.Q4_0, {"repack": False}), (Type.F16, {}), (Type.BF16, {})],
    ids=str,
)
def test_weights_that_are_not_packed_in_bf16_or_of_types_without_blocks_have_none(
    tmp_path: Path, stored: Type, more: dict[str, Any]
) -> None:
    assert not list_in_blocks(loaded(write_tiny(tmp_path / "tiny.gguf", stored), **more).model)


def test_where_blocks_are_slower_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "fast", lambda: False)
    assert not list_in_blocks(loaded(write_tiny(tmp_path / "tiny.gguf", Type.Q4_0)).model)


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_knows_what_they_take(tmp_path: Path, tied: bool) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", Type.Q4_0, model=tiny(tie_word_embeddings=tied))
    target, plain = loaded(file), loaded(checkpoint(file))
    header = read_model_header(file)
    saved = memory_bytes(header, 2, in_blocks=False) - memory_bytes(header, 2, in_blocks=True)
    embedding = target.model.get_input_embeddings().weight.nbytes
    counted = packed_bytes(plain.model) - (embedding if tied else 0)  # The file holds a tied one once
    heads = 2 * len(list_in_blocks(target.model)) * 256
    assert 0 <= packed_bytes(target.model) - (counted - saved) < heads


def _shifted(weights: Any, **_: Any) -> Any:
    return weights - 1


def _turned(weights: Any, **_: Any) -> Any:
    return weights.T


def _counted(weights: Any, **_: Any) -> Any:
    assert weights.shape[-1] > 1
    return weights


@pytest.mark.parametrize("change", [_shifted, _turned, _counted])
def test_what_the_converter_changes_is_not_taken_as_it_is(
    tmp_path: Path, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import modeling_gguf_pytorch_utils as theirs

    file = write_tiny(tmp_path / "tiny.gguf", Type.Q4_0)
    assert list_in_blocks(loaded(file).model)

    def process(_: Any, weights: Any, name: str, **__: Any) -> Any:
        return theirs.GGUFTensor(change(weights), name, {})

    monkeypatch.setattr(theirs.LlamaTensorProcessor, "process", process)
    assert not read_weights(read_model_header(file), tiny().config, torch.bfloat16, in_blocks=True).stored


def test_another_value_of_the_kernels_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, right = write_tiny(tmp_path / "tiny.gguf", Type.Q4_0), blocks.dequantise
    expected = logits(loaded(file))
    monkeypatch.setattr(blocks, "dequantise", lambda rows, depth: right(rows, depth).nextafter(torch.ones(())))
    target = loaded(file)
    assert not list_in_blocks(target.model) and near(logits(target), expected)


def test_what_no_packed_layer_takes_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", Type.Q4_0)
    expected = logits(loaded(file))
    monkeypatch.setattr(packing, "_fit_blocks", lambda layers: len(layers) == 1)
    target = loaded(file)
    assert len(list_in_blocks(target.model)) == 2 * LAYERS + 1 and near(logits(target), expected)


def test_parts_of_a_split_file(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", Type.Q8_0, split=5)
    assert len(list_in_blocks(loaded(file).model)) == 7 * LAYERS + 1
