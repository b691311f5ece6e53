"""DFlash's public formats: written and read bit for bit, contradictions refused by name."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from forerun.errors import CheckpointError
from forerun.heads.engines import diagnose, diagnose_files, export_head
from forerun.heads.files import HeadCheckpoint, differences, read_files, read_head, write_head
from heads.samples import FACTS, change, keys_of
from training.ttt import VOCABULARY, dflash

LAYER = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
]
"""Tensors of a layer, by vLLM's and SGLang's loaders."""
SELECTOR = ("hidden_projection.weight", "predecessor_codebook", "successor_codebook")
CONVOLUTION = ("base_kernel", "kernel_projection.weight")
"""Likewise, of DFlash 2's."""


def tensors_of(options: dict[str, Any]) -> set[str]:
    """The names in such a head's file, those of a DSpark head's corrections left out."""
    found = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    found |= {f"layers.{layer}.{tensor}" for layer in range(2) for tensor in LAYER}
    if "gru_hidden_dim" in options:
        found |= {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}
    if "selector_rank" in options:
        kernels = [f"{part}_conv.{name}" for part in ("attention", "mlp") for name in CONVOLUTION]
        found |= {f"layers.{layer}.{kernel}" for layer in range(2) for kernel in kernels}
        found |= {f"candidate_selector.{name}" for name in SELECTOR}
    found |= {"lm_head.weight"} if "own_lm_head" in options else set()
    found |= {"embed_tokens.weight"} if "own_embedding" in options else set()
    return found | ({"d2t", "t2d"} if "draft_vocab_size" in options else set())


HEADS: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {}),
    ("dflash", {"sample_from_anchor": True}),
    ("dflash", {"sliding_window": 8, "full_layers": (1,)}),
    ("dflash", {"own_lm_head": True, "draft_vocab_size": 30}),
    ("dflash", {"own_embedding": True, "own_lm_head": True}),
    ("dflash", {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("dspark", {"markov_rank": 6}),
    ("dspark", {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False, "own_lm_head": True}),
    ("dspark", {"markov_rank": 6, "markov_head_type": "gated", "confidence_head_with_markov": False}),
    ("dspark", {"markov_rank": 6, "enable_confidence_head": False}),
    ("dflash2", {"selector_rank": 6, "conv_kernel_size": 3}),
    ("domino", {"gru_hidden_dim": 6}),
    ("domino", {"gru_hidden_dim": 6, "sample_from_anchor": False, "pure_draft_prefix_len": 2, "is_causal": True}),
]


@pytest.mark.parametrize("name", ["dflash", "speculators"])
@pytest.mark.parametrize(("kind", "options"), HEADS, ids=str)
def test_the_public_formats_are_written_and_read(name: str, kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    before = HeadCheckpoint.of(dflash(**options))
    if name == "speculators" and kind in ("domino", "dflash2"):
        with pytest.raises(CheckpointError, match=r"no (DFlash 2|Domino) heads are .*; use dflash"):
            write_head(before, tmp_path / "head", name, FACTS)
        return
    folder = write_head(before, tmp_path / "head", name, FACTS)
    after = read_head(folder)
    assert differences(before, after) == [] and after.config.kind == kind
    stored = set(load_file(folder / "model.safetensors"))
    markov = {tensor for tensor in stored if tensor.startswith(("markov_head.", "confidence_head.proj."))}
    assert stored - markov == tensors_of(options)
    wanted = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} if kind == "dspark" else set()
    assert markov >= wanted and (markov == wanted) == (options.get("enable_confidence_head", bool(wanted)) is False)


def test_layer_ids_are_counted_as_each_format_does(tmp_path: Path) -> None:
    made = HeadCheckpoint.of(dflash(is_causal=True))
    keys = keys_of(write_head(made, tmp_path / "a", "dflash", FACTS))
    assert keys["architectures"] == ["DFlashDraftModel"] and keys["block_size"] == 5
    nested = {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [0, 1, 2]}
    assert keys["dflash_config"] == {**nested, "causal": True, "causal_head": True}
    assert keys["num_target_layers"] == 4 and keys["layer_types"] == ["full_attention"] * 2
    made = HeadCheckpoint.of(dflash(causal_windows=True, sliding_window=8))
    keys = keys_of(write_head(made, tmp_path / "b", "speculators", FACTS))
    assert keys["aux_hidden_state_layer_ids"] == [1, 2, 3] and keys["sliding_window_non_causal"] is False
    assert keys["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


def test_what_a_block_sees_is_said_as_vllm_reads_it(tmp_path: Path) -> None:
    """Without a key vLLM takes blocks for causal in layers of ``layer_types`` with a window, and there alone."""
    for number, (options, said) in enumerate(
        [
            ({}, None),
            ({"sliding_window": 8}, False),
            ({"sliding_window": 8, "full_layers": (1,), "causal_windows": True}, None),
            ({"sliding_window": 8, "is_causal": True}, True),
        ]
    ):
        for more, name in (({}, "causal"), ({"markov_rank": 6}, "is_causal")):
            made = HeadCheckpoint.of(dflash(**options, **more))
            folder = write_head(made, tmp_path / f"{number}{name}", "dflash", FACTS)
            keys = keys_of(folder)
            assert (keys if more else keys["dflash_config"]).get(name) == said
            assert differences(made, read_head(folder)) == []
    with pytest.raises(CheckpointError, match="where none differs"):
        write_head(HeadCheckpoint.of(dflash(causal_windows=True)), tmp_path / "none", "dflash", FACTS)
    some = HeadCheckpoint.of(dflash(causal_windows=True, sliding_window=8, full_layers=(1,)))
    with pytest.raises(CheckpointError, match="with a window or not; use dflash"):
        write_head(some, tmp_path / "some", "speculators", FACTS)


def test_domino_and_jetspec_are_read_as_their_publishers_write_them(tmp_path: Path) -> None:
    """SpecForge's and ModelOpt's keys of Domino, and what is left out; JetSpec's key of a causal head."""
    folder = write_head(HeadCheckpoint.of(dflash(gru_hidden_dim=6)), tmp_path / "head", "dflash", FACTS)
    keys = keys_of(folder)
    nested = {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [0, 1, 2], "projector_type": "domino"}
    shape = {"emb_dim": 7, "gru_hidden_dim": 6}
    assert keys["dflash_config"] == {**nested, **shape, "pure_draft_prefix_len": 1, "shift_label": True}
    change(folder, dflash_config={**nested, **shape}, emb_dim=7)
    found = read_head(folder)
    assert (found.config.sample_from_anchor, found.config.pure_draft_prefix_len) == (False, 0) and not found.unknown
    for wrong, message in (
        ({**nested, **shape, "emb_dim": 5}, "contradicts itself about emb_dim: 7 at the top, 5 in dflash_config"),
        ({**nested, "emb_dim": 7}, "no gru_hidden_dim"),
        ({**nested, **shape, "projector_type": "causal_v5"}, "'causal_v5'; heads of dflash, dflash2, dspark, domino"),
        ({**nested, "projector_type": "dflash", "shift_label": True}, "tensors|missing|no such"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_head(change(folder, dflash_config=wrong))
    folder = write_head(HeadCheckpoint.of(dflash()), tmp_path / "jetspec", "dflash", FACTS)
    nested = {"mask_token_id": 7, "target_layer_ids": [0, 1, 2], "causal_head": True}
    assert read_head(change(folder, dflash_config=nested)).config.is_causal


def test_dspark_of_modelopt_is_read_under_its_names(tmp_path: Path) -> None:
    before = HeadCheckpoint.of(dflash(markov_rank=6, markov_head_type="gated"))
    folder = write_head(before, tmp_path / "head", "dflash", FACTS)
    file = folder / "model.safetensors"
    theirs = {
        name.removeprefix("markov_head.").replace("confidence_head.proj.", "confidence_proj."): tensor
        for name, tensor in load_file(file).items()
    }
    assert {"markov_w1.weight", "gate_proj.bias", "confidence_proj.weight"} <= theirs.keys()
    save_file(theirs, file, {"format": "pt"})
    own = ("markov_rank", "markov_head_type")
    nested = {name: keys_of(folder)[name] for name in own}
    nested |= {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [0, 1, 2], "projector_type": "dspark"}
    left = dict.fromkeys((*own, "enable_confidence_head", "confidence_head_with_markov"))
    change(folder, dflash_config={**nested, "shift_label": True, "use_confidence_head": True}, **left)
    after = read_head(folder)
    assert differences(before, after) == [] and not after.unknown


def test_what_a_file_leaves_out_is_the_publishers_default(tmp_path: Path) -> None:
    folder = write_head(HeadCheckpoint.of(dflash(boundaries=(2,))), tmp_path / "head", "dflash", FACTS)
    change(folder, dflash_config={"mask_token_id": 7, "block_size": 5}, num_target_layers=4)
    assert read_head(folder).config.boundaries == (2,) and read_head(folder).config.mask_token_id == 7
    change(folder, num_target_layers=None)
    assert read_head(folder, num_layers=4).config.boundaries == (2,)
    with pytest.raises(CheckpointError, match="name the target"):
        read_head(folder)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("dflash", {"mask_token_id": 3}, "contradicts itself about mask_token_id: 3 at the top, 39 in dflash_config"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "no mask_token_id"),
        ("dflash", {"dflash_config": 5}, "dflash_config of config.json must be an object"),
        ("dflash", {"block_size": 1}, "block_size must be at least 2"),
        ("dflash", {"num_hidden_layers": 3, "layer_types": None}, r"missing: layers\.2\."),
        ("dflash", {"selector_rank": 16}, "no conv_kernel_size"),
        ("dflash", {"conv_kernel_size": 2}, "conv_kernel_size 2, which changes what a head computes"),
        ("dflash", {"markov_rank": 16}, r"missing: .*markov_head\.markov_w1"),
        ("speculators", {"aux_hidden_state_layer_ids": None}, "no aux_hidden_state_layer_ids"),
        ("speculators", {"speculators_model_type": "xpress"}, r"'xpress'; .* eagle3, peagle, dflash, dspark are supp"),
    ],
)
def test_what_contradicts_itself_or_is_another_method_is_refused(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_head(HeadCheckpoint.of(dflash()), tmp_path / "head", name, FACTS)
    with pytest.raises(CheckpointError, match=message):
        read_head(change(folder, **keys))


@pytest.mark.parametrize(
    ("options", "keys", "what"),
    [
        ({}, {}, set()),
        ({}, {"sliding_window_non_causal": False}, {"sliding_window_non_causal false beside layers without a window"}),
        ({"sliding_window": 8}, {"sliding_window_non_causal": None}, {"no sliding_window_non_causal"}),
        ({"markov_rank": 6}, {"sample_from_anchor": None}, {"no sample_from_anchor"}),
    ],
    ids=str,
)
def test_doctor_knows_where_vllm_takes_speculators_keys_otherwise(
    options: dict[str, Any], keys: dict[str, Any], what: set[str], tmp_path: Path
) -> None:
    folder = write_head(HeadCheckpoint.of(dflash(**options)), tmp_path / "head", "speculators", FACTS)
    stored = read_files(change(folder, **keys))
    found = diagnose_files(stored, read_head(folder), FACTS)
    assert {finding.what for finding in found} == {f"{words} (as the files are)" for words in what}
    assert all((finding.engine, finding.severity) == ("vllm", "degrades") for finding in found)


@pytest.mark.parametrize("options", [{}, {"markov_rank": 6}], ids=["dflash", "dspark"])
@pytest.mark.parametrize("to", ["vllm", "sglang", "trtllm", "llama.cpp", "speculators", "hf"])
def test_an_export_starts_with_the_tokens_its_engine_counts(to: str, options: dict[str, Any], tmp_path: Path) -> None:
    made = dflash(**options)
    head, kind, depth = HeadCheckpoint.of(made), made.config.kind, made.config.max_depth
    assert depth == (5 if options else 4)
    done = export_head(write_head(head, tmp_path / "head", "dflash", FACTS), FACTS, to, tmp_path / "out")
    assert differences(head, read_head(tmp_path / "out")) == []
    if to == "vllm":
        speculation = {"method": kind, "model": str(tmp_path / "out"), "num_speculative_tokens": depth}
        assert json.loads(shlex.split(done.command)[-1]) == speculation
    if to == "sglang":
        assert f"--speculative-algorithm {kind.upper()} " in done.command
        assert done.command.endswith(f"--speculative-num-draft-tokens {(depth or 0) + 1}")
    if to == "llama.cpp":
        assert done.command.endswith(f"/out.gguf --spec-type draft-{kind} --spec-draft-n-max {depth}")
    if to == "trtllm":
        lines = (tmp_path / "out" / "trtllm.yaml").read_text()
        assert "target_layer_ids: [0, 1, 2]" in lines and f"mask_token_id: {VOCABULARY - 1}" in lines


@pytest.mark.parametrize(
    ("options", "engine", "severity", "what"),
    [
        ({"own_lm_head": True, "draft_vocab_size": 30}, "sglang", "degrades", "a reduced vocabulary"),
        ({"own_embedding": True}, "sglang", "degrades", "an embedding of its own"),
        ({"is_causal": True}, "trtllm", "degrades", "do not see those behind"),
        ({"qk_norm": False}, "sglang", "fails", "no norms of queries and keys"),
        ({"qk_norm": False}, "vllm", "degrades", "no norms of queries and keys"),
        ({"hidden_act": "gelu"}, "vllm", "fails", "the activation gelu"),
        ({"mlp_bias": True}, "vllm", "degrades", "biases of the MLP"),
        ({"boundaries": (3, 1, 2)}, "vllm", "degrades", "reads boundaries [3, 1, 2]"),
        ({"sample_from_anchor": True}, "vllm", "fails", "sample_from_anchor"),
        ({"sliding_window": 8, "full_layers": (1,)}, "vllm", "check", "layers with and without a window"),
        ({"markov_rank": 6, "markov_head_type": "rnn"}, "vllm", "fails", "a table with rnn"),
        ({"markov_rank": 6}, "vllm", "check", "a DSpark head"),
        ({"sliding_window": 8}, "vllm", "check", "a sliding window"),
        ({"markov_rank": 6}, "lmdeploy", "fails", "a DSpark head"),
        ({"selector_rank": 6}, "trtllm", "degrades", "a selector of paths"),
        ({"gru_hidden_dim": 6}, "vllm", "degrades", "a Domino head"),
        ({"gru_hidden_dim": 6}, "sglang", "check", "a Domino head"),
        ({"gru_hidden_dim": 6}, "llama.cpp", "fails", "a Domino head"),
        ({"mlp_bias": True}, "llama.cpp", "fails", "biases of the MLP"),
        ({"attention_bias": True}, "llama.cpp", "fails", "biases of the attention"),
        ({"own_lm_head": True, "draft_vocab_size": 30}, "llama.cpp", "fails", "a reduced vocabulary"),
        ({"own_lm_head": True, "markov_rank": 6}, "llama.cpp", "degrades", "an output head of its own"),
        ({"markov_rank": 6, "markov_head_type": "rnn"}, "llama.cpp", "fails", "another table than vanilla"),
        ({"qk_norm": False}, "llama.cpp", "fails", "no norms of queries and keys"),
        ({"hidden_act": "gelu"}, "llama.cpp", "degrades", "the activation gelu"),
        ({"sample_from_anchor": True}, "llama.cpp", "degrades", "sample_from_anchor"),
        ({"boundaries": (1, 2, FACTS.num_layers)}, "llama.cpp", "check", f"reads boundary {FACTS.num_layers}"),
    ],
    ids=str,
)
def test_doctor_knows_what_engines_do_not_read(options: dict[str, Any], engine: str, severity: str, what: str) -> None:
    plain = {finding.what for finding in diagnose(HeadCheckpoint.of(dflash()), FACTS)}
    found = [f for f in diagnose(HeadCheckpoint.of(dflash(**options)), FACTS) if f.what not in plain]
    [finding] = [finding for finding in found if finding.engine == engine and what in finding.what]
    assert finding.severity == severity and finding.remedy
