"""GGUF files as models: the weights, tokenizer and chat template that transformers reads there; what is kept; and what
is refused."""

import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.errors import ArgumentError, CheckpointError, UnsupportedModelError
from forerun.model import TransformersTarget
from forerun.model.gguf import CACHE, with_weights
from forerun.model.gguf_files import file_of
from forerun.model.gguf_weights import _Names
from forerun.model.load import LoadOptions
from forerun.model.names import load_tokenizer, resolve
from forerun.model.prepare import open_named
from model.ggufs import CHAT, SPECIAL, TOKENS, tiny, write_tiny
from model.tiny import build
from selection import in_turn

REAL = Path(os.environ.get("FORERUN_REAL_GGUF", ""))
TEXT = "hello, world: héllo\n\n  42 <|im_end|> hell"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where converted checkpoints are kept, new for each test."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / CACHE


def opened(directory: str | Path, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, **more).eval()


def ours(file: Path, dtype: str = "auto") -> Any:
    """The model that is opened from the file."""
    return open_named(file, LoadOptions(dtype=dtype, device="cpu", repack=False))


def theirs(file: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights as transformers itself reads the file."""
    return opened(file.parent, gguf_file=file.name, dtype=dtype).state_dict()


def same(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


STORED = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_1)


@pytest.mark.parametrize(("stored", "dtype"), in_turn(STORED, ["bfloat16", "float16", "float32"]), ids=str)
def test_the_weights_are_those_that_transformers_reads(tmp_path: Path, stored: Type, dtype: str) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", stored)
    same(ours(file, dtype).state_dict(), theirs(file, getattr(torch, dtype)))


def test_unquantised_weights_keep_every_bit(tmp_path: Path) -> None:
    model = tiny()
    file = write_tiny(tmp_path / "tiny.gguf", model=model)
    same(ours(file).state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(Type.F32, "float32"), (Type.F16, "float16"), (Type.BF16, "bfloat16"), (Type.Q8_0, "bfloat16")],
)
def test_auto_is_the_files_own_dtype(tmp_path: Path, stored: Type, dtype: str) -> None:
    directory = resolve(write_tiny(tmp_path / "tiny.gguf", stored))
    assert str(AutoConfig.from_pretrained(directory).dtype) == f"torch.{dtype}"


def test_it_is_a_target_with_the_logits_of_transformers(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", Type.Q4_0)
    target = TransformersTarget.load(file, dtype="float32", device="cpu")
    ids = list(range(3, 40))
    with torch.inference_mode():
        expected = opened(tmp_path, gguf_file=file.name, dtype=torch.float32)(torch.tensor([ids])).logits[0, -1]
    assert torch.allclose(target.prefill([0], [ids]).logits[0, 0], expected, atol=1e-5)


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 30000.0}
SHORT = {"sliding_window": 16}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, **SHORT}
CAPS = {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 20.0}
BOTH = {"full_attention": {**ROPE, "rope_theta": 1e6}, "sliding_attention": {**ROPE, "rope_theta": 1e4}}


def window(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(16)


def caps(writer: gguf.GGUFWriter) -> None:
    window(writer)
    writer.add_attn_logit_softcapping(30.0)
    writer.add_final_logit_softcapping(20.0)


OTHERS: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "mistral": ("mistral", "llama", {"rope_parameters": ROPE, "head_dim": 32, "sliding_window": None}, None),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": ROPE, "tie_word_embeddings": True}, None),
    "qwen3": ("qwen3", "qwen3", {"rope_parameters": ROPE, "head_dim": 32}, None),
    "gemma2": ("gemma2", "gemma2", {**GEMMA, **CAPS}, caps),
    "gemma2, 46 layers": ("gemma2", "gemma2", {**GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 46}, window),
    "gemma3": ("gemma3_text", "gemma3", {**GEMMA, "rope_parameters": BOTH, "num_hidden_layers": 7}, window),
    "phi3": ("phi3", "phi3", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, **SHORT}, window),
    "starcoder2": ("starcoder2", "starcoder2", {"rope_parameters": ROPE}, None),
    "stablelm": ("stablelm", "stablelm", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, None),
}
"""What it is -> model type, architecture in the file, configuration, what else the file says."""


@pytest.mark.parametrize("name", OTHERS)
def test_another_architecture_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    """transformers leaves out what some files say of heads, windows, caps and ropes, so the model is the reference."""
    kind, architecture, changes, more = OTHERS[name]
    model = tiny(kind, **changes)
    file = write_tiny(tmp_path / "tiny.gguf", model=model, architecture=architecture, more=more or (lambda _: None))
    own, ids = ours(file, "float32"), torch.arange(3, 120).unsqueeze(0)
    with torch.inference_mode():
        assert torch.allclose(own(ids).logits, model(ids).logits, atol=1e-5)


def test_an_older_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf", None)  # which came with 5.24
    with pytest.raises(UnsupportedModelError, match=r"GGUF files need transformers 5.24 or later, and this is 5"):
        resolve(write_tiny(tmp_path / "tiny.gguf"))


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    def biases(writer: gguf.GGUFWriter) -> None:
        for layer in range(2):
            writer.add_tensor(f"blk.{layer}.attn_q.bias", np.ones(64, dtype=np.float32))

    with pytest.raises(UnsupportedModelError, match=r"has no place: blk.0.attn_q.bias, blk.1.attn_q.bias. Without"):
        ours(write_tiny(tmp_path / "tiny.gguf", more=biases))


def linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(4096)


def llama3(writer: gguf.GGUFWriter) -> None:
    """As llama.cpp's converter writes the factors, frequency by frequency."""
    factors = []
    for index in range(8):
        wavelength = 2 * math.pi * 20000.0 ** (index / 8)
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        factors.append(1 if wavelength < 8192 / 4 else 8 if wavelength > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("scaling", "writes"),
    [
        ({"rope_type": "linear", "factor": 4.0}, linear),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, yarn),
        ({"rope_type": "llama3", **LLAMA3}, llama3),
    ],
)
def test_a_scaled_rope_is_the_models_own(tmp_path: Path, scaling: dict[str, Any], writes: Any) -> None:
    """transformers leaves it out, so the model itself is the reference."""
    rope = {"rope_theta": 20000.0, **scaling}
    model = tiny(rope_parameters=rope, max_position_embeddings=16384)
    own = ours(write_tiny(tmp_path / "tiny.gguf", model=model, more=writes), "float32")
    ids = torch.arange(3, 250).unsqueeze(0)
    with torch.inference_mode():
        assert own.config.rope_parameters == model.config.rope_parameters
        assert torch.equal(own(ids).logits, model(ids).logits)


def test_another_scaled_rope_is_refused(tmp_path: Path) -> None:
    def other(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32))

    with pytest.raises(UnsupportedModelError, match="scales its rope in a way that is not read"):
        resolve(write_tiny(tmp_path / "tiny.gguf", more=other))


def test_tokenizer_and_chat_template_are_the_files(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    own, other = load_tokenizer(file, None), AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert own is not None and own.encode(TEXT) == other.encode(TEXT)
    assert own.decode(own.encode(TEXT)) == TEXT
    assert own.eos_token == SPECIAL[2] and own.chat_template == CHAT
    assert own.get_vocab() == other.get_vocab()


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "qwen3_moe", "starcoder2"])
def test_names_of_tensors_are_those_that_transformers_finds_in_every_module(kind: str) -> None:
    model = build(kind)
    processor = modeling_gguf_pytorch_utils.TensorProcessor(config=model.config.to_dict())
    asked = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map
    assert asked(_Names.of(model), processor) == asked(model, processor)


def test_every_end_that_the_file_names_ends_an_answer(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", more=lambda writer: writer.add_eot_token_id(0))
    assert ours(file).generation_config.eos_token_id == [0, 2]


def test_what_is_kept_is_small_and_has_no_weights(tmp_path: Path, kept: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", Type.Q8_0)
    directory = Path(resolve(file))
    assert resolve(str(file)) == resolve(file) == directory
    assert [folder.name for folder in kept.iterdir()] == [directory.name]
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    ours(file)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert not [name for name in before if name.endswith(".safetensors")]


@pytest.mark.parametrize(("stored", "dtype"), [(Type.F16, "float16"), (Type.Q4_1, "bfloat16")])
def test_weights_are_written_for_those_who_need_a_checkpoint(tmp_path: Path, stored: Type, dtype: str) -> None:
    """And the folder is still the file's."""
    file = write_tiny(tmp_path / "tiny.gguf", stored)
    directory = with_weights(resolve(file))
    same(opened(directory).state_dict(), ours(file, dtype).state_dict())
    assert resolve(file) == directory == with_weights(directory)
    assert load_tokenizer(directory, None) is not None and file_of(directory) is not None
    assert with_weights("owner/name") == "owner/name"


def test_another_file_of_the_name_is_another_model(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    first, before = resolve(write_tiny(file, model=tiny(seed=1))), ours(file)
    second, after = resolve(write_tiny(file, model=tiny(seed=2))), ours(file)
    assert first != second
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_what_is_being_written_is_seen_by_nobody(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fails)
    with pytest.raises(CheckpointError, match="No space left on device; FORERUN_CACHE names another"):
        resolve(write_tiny(tmp_path / "tiny.gguf"))
    assert list(kept.iterdir()) == []


def test_test_a_folder_with_one_is_that_model_unless_a_checkpoint_is_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = write_tiny(folder / "tiny.gguf")
    shutil.copy(file, folder / "mmproj-tiny.gguf")
    assert resolve(folder) == resolve(file)
    write_tiny(tmp_path / "tiny.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path


def test_every_cut_is_refused_and_leaves_nothing(tmp_path: Path, kept: Path) -> None:
    whole = write_tiny(tmp_path / "tiny.gguf", Type.Q8_0).read_bytes()
    least = len(whole) - 32  # the last 31 bytes may be padding
    for size in [*range(0, 400, 7), *range(400, least, least // 40), least]:
        file = tmp_path / f"{size}.gguf"
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut short|no GGUF file") as caught:
            resolve(file)
        assert "\n" not in str(caught.value)
    assert not kept.exists()


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """The parts of a model, in a folder of their own."""
    (folder := tmp_path / "split").mkdir()
    write_tiny(folder / "tiny.gguf", Type.Q8_0, split=6)
    return sorted(folder.iterdir())


def test_a_split_model_is_the_whole_one_whichever_part_is_named(tmp_path: Path, split: list[Path]) -> None:
    assert len(split) > 2
    whole = ours(write_tiny(tmp_path / "tiny.gguf", Type.Q8_0), "float32").state_dict()
    same(ours(split[0], "float32").state_dict(), whole)
    directory = resolve(split[0])
    assert resolve(split[0].parent) == resolve(split[2]) == directory
    assert re.fullmatch("tiny-[0-9a-f]{12}", Path(directory).name)
    own = load_tokenizer(split[1], None)
    assert own is not None and own.decode(own.encode(TEXT)) == TEXT


def test_a_part_that_is_absent_cut_or_anothers_is_named(split: list[Path], kept: Path) -> None:
    last, content = split[-1], split[-1].read_bytes()
    last.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"{last.name} is cut short"):
        resolve(split[0])
    last.write_bytes(split[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"tensors, \d+ are announced: they are not the parts of one model"):
        resolve(split[0])
    last.unlink()
    with pytest.raises(CheckpointError, match=rf"and {last.name} is not beside it"):
        resolve(split[1])
    renamed = split[0].rename(split[0].with_name("first.gguf"))
    with pytest.raises(CheckpointError, match=r"looked for beside it by their names: call the first NAME-00001-of"):
        resolve(renamed)
    assert not kept.exists()


def of_kind(kind: str) -> Any:
    return lambda writer: writer.add_type(kind)


def refusals(folder: Path) -> dict[str, Path]:
    """What is wrong in words that the message must hold, and the path that is named."""
    two = folder / "two"
    two.mkdir()
    for name in ("a.gguf", "b.gguf"):
        write_tiny(two / name)
    (folder / "directory.gguf").mkdir()
    (folder / "empty.gguf").touch()
    (folder / "notes.gguf").write_text("This is no model.")
    (folder / "notes.txt").write_text("This is no model.")
    shapes = tiny()
    shapes.config.intermediate_size //= 2

    def part(writer: gguf.GGUFWriter) -> None:
        writer.add_uint16("split.count", 3)

    return {
        "holds 2 GGUF models (a.gguf, b.gguf): name one of them": two,
        "holds no config.json": folder / "directory.gguf",
        "empty.gguf is a file and no GGUF file": folder / "empty.gguf",
        "notes.gguf is a file and no GGUF file": folder / "notes.gguf",
        "notes.txt is a file and no GGUF file": folder / "notes.txt",
        "there is no file": folder / "absent.gguf",
        "projector of a multimodal model": write_tiny(folder / "mmproj-x.gguf", more=of_kind("mmproj")),
        "no language model but 'adapter'": write_tiny(folder / "adapter.gguf", more=of_kind("adapter")),
        "is one of 3 parts of a model, and x-00002-of-00003.gguf, x-00003-of-00003.gguf are not beside it": write_tiny(
            folder / "x-00001-of-00003.gguf", more=part
        ),
        "of the architecture rwkv7, which": write_tiny(folder / "rwkv.gguf", architecture="rwkv7"),
        "holds no tokenizer": write_tiny(folder / "silent.gguf", tokens=None),
        "less.gguf are not those of its metadata. missing: model.norm.weight. The": write_tiny(
            folder / "less.gguf", without="output_norm.weight"
        ),
        "shapes.gguf are not those of its metadata. of the wrong shape: model.layers.0.mlp": write_tiny(
            folder / "shapes.gguf", model=shapes
        ),
    }


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, kept: Path) -> None:
    for words, path in refusals(tmp_path).items():
        with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
            TransformersTarget.load(str(path), dtype="float32", device="cpu")
        assert words in str(caught.value) and "\n" not in str(caught.value), (words, str(caught.value))
    assert {folder.name.rpartition("-")[0] for folder in kept.iterdir()} <= {"rwkv", "less", "shapes"}


def test_the_command_line_generates_from_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_tiny(tmp_path / "tiny.gguf")
    drafted = ["--drafter", "draft_model", "--drafter-model", str(write_tiny(tmp_path / "draft.gguf", Type.Q8_0))]
    texts = []
    for more in ([], drafted):
        assert main(["generate", str(file), "--prompt", "hello", "-n", "4", "--temperature", "0", *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].strip()


@pytest.mark.parametrize("rows", [len(TOKENS) - 40, len(TOKENS) + 40])
def test_a_head_has_fewer_or_more_rows_than_tokens(tmp_path: Path, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", model=tiny(vocab_size=rows))
    llm = LLM(file, dtype="float32", device="cpu", max_num_seqs=1)
    short = rows < len(TOKENS)
    assert short == (f"the tokenizer has {len(TOKENS)} tokens and the model only {rows}" in caplog.text)
    assert len(llm.generate("!!", SamplingParams(max_tokens=20, ignore_eos=True))[0].outputs[0].token_ids) == 20
    if short:
        with pytest.raises(ArgumentError, match=f"token id {len(TOKENS) - 1}; the vocabulary has ids 0 to {rows - 1}"):
            llm.generate("hello")


@pytest.mark.skipif(not REAL.is_file(), reason="FORERUN_REAL_GGUF names no file of SmolLM2-135M-Instruct")
def test_the_real_ones_tokenizer_stops_and_chats() -> None:
    directory = Path(resolve(REAL))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in text
    assert ours(REAL).generation_config.eos_token_id == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


assert len(TOKENS) == len(set(TOKENS))
