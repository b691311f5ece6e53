"""Keys that no reader asks for, at every place of every format: kept, refused or reported, and never passed over."""

import copy
import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.errors import CheckpointError
from forerun.heads.engines import ENGINES, diagnose, worst
from forerun.heads.files import differences, format_named, format_of, parse, read_files, read_head, write_head
from forerun.heads.keys import MEANINGLESS, NEUTRAL
from forerun.training.convert.settings import ARCHITECTURE_KEYS
from heads.samples import FIRST, FORMATS, LLAMA3, PLAIN, TARGET, VARIANTS, sample, written

PLACES = {
    "flat": ("", "eagle_config"),
    "modelopt": ("", "eagle_config"),
    "speculators": ("", "transformer_layer_config"),
}
EVERYWHERE = [(name, place) for name, places in PLACES.items() for place in places]
UNKNOWN: dict[str, Any] = {"norm_after_attention": True, "depth_gain": [1, 2], "mixing": {"use_cache": 0.5}}
"""Of each sort that JSON has; the last looks as if its inside were known."""


def at(keys: dict[str, Any], place: str) -> dict[str, Any]:
    return keys[place] if place else keys


def on_disk(directory: Path, name: str, place: str = "", **added: Any) -> Path:
    head = write_head(sample(PLAIN), directory / f"from-{name}", name, TARGET)
    keys = json.loads((head / "config.json").read_text())
    at(keys, place).update(added)
    (head / "config.json").write_text(json.dumps(keys))
    return head


def test_every_format_is_tried() -> None:
    assert PLACES.keys() == set(FORMATS)


@pytest.mark.parametrize(("name", "place"), EVERYWHERE)
def test_what_means_nothing_is_kept_without_a_word(name: str, place: str, tmp_path: Path) -> None:
    added = {key: f"said {key}" for key in sorted(MEANINGLESS)}
    head = parse(read_files(on_disk(tmp_path, name, place, **added)))
    assert head.unknown == [] and head.notes == ()
    inside = head.config.extra["eagle_config"] if place == "eagle_config" else head.config.extra
    assert inside == added
    assert {worst(diagnose(head, TARGET), engine) for engine in ENGINES} == {"ok"}


@pytest.mark.parametrize(("name", "place"), EVERYWHERE)
def test_what_changes_the_computation_is_refused_by_name(name: str, place: str) -> None:
    stored, tensors = written(name=name)
    for key, meaningless in NEUTRAL.items():
        keys = copy.deepcopy(stored)
        for value in (None, *meaningless):
            at(keys, place)[key] = value
            assert format_of(keys).read(keys, tensors, num_layers=10).unknown == []
        for value in (0.37, 7, "yes"):
            at(keys, place)[key] = value
            with pytest.raises(CheckpointError, match=rf"{key} {value!r}, which changes what a head computes"):
                format_of(keys).read(keys, tensors, num_layers=10)


def test_a_token_id_of_0_is_a_token_id() -> None:
    keys, tensors = written()
    with pytest.raises(CheckpointError, match="ptd_token_id 0"):
        format_of(keys).read(keys | {"ptd_token_id": 0}, tensors)


@pytest.mark.parametrize("key", UNKNOWN)
@pytest.mark.parametrize(("name", "place"), EVERYWHERE)
def test_what_is_unknown_is_reported_by_name_and_no_engine_is_ok(
    name: str, place: str, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = on_disk(tmp_path, name, place, **{key: UNKNOWN[key]})
    full = f"eagle_config.{key}" if place == "eagle_config" else key
    head = parse(read_files(directory))
    assert head.unknown == [full] and [note for note in head.notes if f"there: {full}." in note]
    found = diagnose(head, TARGET)
    for engine in ENGINES:
        assert worst(found, engine) == "check"
        assert [f for f in found if f.engine == engine and f.what == f"the key {full}" and f.remedy]
    with caplog.at_level(logging.WARNING):
        read_head(directory)  # as drafting and training do
    assert full in caplog.text


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FORMATS, 2)))
def test_what_is_kept_survives_each_change_of_format_and_back(first: str, second: str, tmp_path: Path) -> None:
    """Also the versions by which one format's files are known, which made flat files unreadable."""
    places = PLACES[first]
    directory = on_disk(tmp_path, first, places[0], speculators_version="0.9.0", bos_token_id=7, **UNKNOWN)
    keys = json.loads((directory / "config.json").read_text())
    at(keys, places[1]).update({"gain": 3, "pad_token_id": 0})
    if first == "speculators":
        whole = keys["speculators_config"]
        whole["revision"] = 2
        whole["proposal_methods"][0]["speculative_tokens"] = 3
    (directory / "config.json").write_text(json.dumps(keys))
    before = parse(read_files(directory))
    assert len(before.unknown) == len(UNKNOWN) + 1 + (first == "speculators")
    other = write_head(before, tmp_path / "other", second, TARGET)
    assert differences(before, parse(read_files(other))) == []
    again = write_head(parse(read_files(other)), tmp_path / "again", first, TARGET)
    assert differences(before, parse(read_files(again))) == []
    assert format_of(json.loads((other / "config.json").read_text())).name == second
    assert ("speculators_config" in json.loads((other / "config.json").read_text())) == (second == "speculators"), (
        "vLLM takes every file with that key for one of speculators'"
    )


def test_a_meaning_inside_an_object_that_this_format_does_not_have_is_reported() -> None:
    keys, tensors = written(name="speculators")
    keys["transformer_layer_config"]["eagle_config"] = {"eh_proj_bias": True, "norm_before_fc": True, "bos_token_id": 1}
    head = format_of(keys).read(keys, tensors)
    assert head.unknown == ["eagle_config.eh_proj_bias", "eagle_config.norm_before_fc"]


def test_a_key_in_two_places_with_two_values_is_refused() -> None:
    keys, tensors = written(name="speculators")
    keys["gain"] = keys["transformer_layer_config"]["gain"] = 3
    assert format_of(keys).read(keys, tensors).unknown == ["gain"]
    keys["gain"] = 4
    with pytest.raises(CheckpointError, match="gain is 4 at the top and 3 in transformer_layer_config"):
        format_of(keys).read(keys, tensors)


@pytest.mark.parametrize("proposals", [{"proposal_type": "greedy"}, [{"tokens": 3}], ["greedy", 3]])
def test_proposals_that_are_none_are_refused(proposals: Any) -> None:
    keys, tensors = written(name="speculators")
    keys["speculators_config"]["proposal_methods"] = proposals
    with pytest.raises(CheckpointError, match="proposal_methods of speculators_config"):
        format_of(keys).read(keys, tensors)


@pytest.mark.parametrize("name", FORMATS)
def test_a_key_that_is_null_is_absent(name: str) -> None:
    """ModelOpt's template writes its deprecated ones so."""
    keys, tensors = written(name=name)
    before = format_of(keys).read(keys, tensors)
    for place in PLACES[name]:
        at(keys, place).update(dict.fromkeys([*MEANINGLESS, *NEUTRAL, *UNKNOWN]))
    if name == "modelopt":
        for key in ("use_mtp_layernorm", "parallel_draft_step", "next_layer_regular", "use_aux_hidden_state"):
            keys["eagle_config"][key] = None
    after = format_of(keys).read(keys, tensors)
    assert differences(before, after) == [] and after.unknown == []


# The rotary embedding


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type is 'spiral'; expected default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "much"}}, "no head that can be built"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "differs by kind of layer"),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "flu"}, "hidden_act of config.json is 'flu'; expected .*silu"),
    ],
)
def test_what_nothing_can_compute_is_refused_when_it_is_read(changes: dict[str, Any], words: str) -> None:
    keys, tensors = written()
    with pytest.raises(CheckpointError, match=words):
        format_of(keys).read(keys | changes, tensors)


@pytest.mark.parametrize("kind", [{"rope_type": "default", "sections": [1, 2]}, {**LLAMA3, "sections": [1]}])
def test_an_unknown_key_of_the_rotary_embedding_is_kept_and_reported(kind: dict[str, Any]) -> None:
    keys, tensors = written()
    head = format_of(keys).read(keys | {"rope_scaling": kind}, tensors)
    assert head.unknown == ["rope_scaling.sections"]
    assert format_named("flat").write(head, TARGET)[0]["rope_scaling"] == kind
    assert VARIANTS["scaled_rope"].rope_scaling == LLAMA3 and sample(VARIANTS["scaled_rope"]).unknown == []


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "mrope", "mrope_section": [2, 3, 3]},
        {"rope_type": "mrope", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        {"rope_type": "default", "mrope_section": [2, 3, 3]},
    ],
)
def test_a_head_of_a_multimodal_target_reads_text_as_any_other(kind: dict[str, Any]) -> None:
    keys, tensors = written()
    head = format_of(keys).read(keys | {"rope_scaling": kind}, tensors)
    assert head.unknown == [] and head.config.rope_scaling is not None
    assert head.config.rope_scaling["rope_type"] == "default", "the three positions of a text token are the same"
    assert head.build() is not None


# What trainer and reader say of ModelOpt's keys


def test_the_trainers_defaults_change_nothing_for_a_reader() -> None:
    """ModelOpt 0.38 to 0.42 writes the defaults of its parallel heads into a head that has none."""
    keys, tensors = written(name="modelopt")
    keys["eagle_config"] |= {"parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}
    assert format_of(keys).read(keys, tensors).unknown == []
    for name, key in ARCHITECTURE_KEYS.items():
        if name in NEUTRAL:
            assert key.default in NEUTRAL[name], name
    shared = {name for name in ARCHITECTURE_KEYS if name in NEUTRAL}
    assert {"parallel_draft_step", "parallel_draft_heads_num_layers", "use_mtp_layernorm"} <= shared


# Whose head it is where no format reads it

FLAT: dict[str, Any] = {"hidden_size": 32, "vocab_size": 96}


@pytest.mark.parametrize(
    ("config", "whose"),
    [
        ({**FLAT, "model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 5}, "vLLM's own layout of"),
        ({"model_type": "eagle", "architectures": ["EAGLEModel"], "model": FLAT}, "vLLM's own layout of an EAGLE head"),
        ({**FLAT, "architecture": "EagleForCausalLM", "mapping": {"tp_size": 1}}, "TensorRT-LLM's converted"),
        ({**FLAT, "architecture": "MedusaForCausalLM", "mapping": {}, "num_medusa_heads": 4}, "TensorRT-LLM's conv"),
        ({**FLAT, "architectures": ["Gemma4Eagle3Model"]}, "Gemma4Eagle3Model is no EAGLE head"),
        ({**FLAT, "architectures": ["XMedusaModel"]}, "XMedusaModel is no EAGLE head"),
    ],
)
def test_another_layout_is_refused_by_its_projects_name(config: dict[str, Any], whose: str, tmp_path: Path) -> None:
    """And not for a key of EAGLE's that it lacks."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"blocks.0.layers.0.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(whose)):
        read_head(tmp_path, num_layers=4)


# What the next step reads


def test_trtllms_name_of_the_normed_feedback_is_read_and_written() -> None:
    keys, tensors = written(VARIANTS["eagle-3.1"])
    assert keys["norm_output"] is True and keys["eagle_config"]["return_hidden_post_norm"] is True
    assert "return_hidden_post_norm" not in written()[0]["eagle_config"]
    before = format_of(keys).read(keys, tensors)
    del keys["norm_output"]
    assert differences(before, format_of(keys).read(keys, tensors)) == [], "as TensorRT-LLM alone would read it"
    for contradiction in ({"norm_output": False}, {"return_hidden_post_norm": False}):
        with pytest.raises(CheckpointError, match="contradicts itself about what the next step reads"):
            format_of(keys).read(keys | contradiction, tensors)
    keys["eagle_config"]["return_hidden_post_norm"] = False
    assert not format_of(keys).read(keys, tensors).config.norm_output


def test_a_bias_is_announced_by_its_tensor() -> None:
    """``bias`` means the attention's biases to vLLM and SGLang; EAGLE-1's own code takes its absence for true."""
    assert "bias" not in written(VARIANTS["biases"])[0] and "bias" not in written()[0]
    assert written(FIRST)[0]["bias"] is False and "bias" not in written(VARIANTS["first_bias"])[0]
    for variant in ("biases", "first_bias"):
        keys, tensors = written(VARIANTS[variant])
        before = format_of(keys).read(keys, tensors)
        assert before.config.fc_bias
        assert differences(before, format_of(keys).read(keys | {"bias": True}, tensors)) == [], "as it was written once"
