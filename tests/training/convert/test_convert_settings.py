"""ModelOpt's keys: what they mean here, and what is refused with its reason."""

from typing import Any

import pytest

from forerun.errors import ArgumentError
from forerun.heads.eagle import EagleConfig, default_boundaries
from forerun.training.convert.modes import EagleMode, read_mode
from forerun.training.convert.settings import EAGLE1_DEFAULT_CFG, EAGLE3_DEFAULT_CFG
from forerun.types import LAST_HIDDEN
from training.convert.converted import config
from training.ttt import model


def shape_of(architecture: dict[str, Any]) -> EagleConfig:
    return shape_meant([("eagle", config(architecture))])


def shape_meant(mode: Any) -> Any:
    found = read_mode(mode)
    assert isinstance(found, EagleMode)
    return found.shape(model())


def test_the_presets_have_modelopts_values() -> None:
    assert EAGLE3_DEFAULT_CFG["algorithm"] == "eagle"
    given = EAGLE3_DEFAULT_CFG["config"]
    shape = given["eagle_architecture_config"]
    assert (given["eagle_ttt_steps"], given["eagle_loss_decay_factor"], given["eagle_report_acc"]) == (3, 0.9, True)
    assert (shape["intermediate_size"], shape["num_attention_heads"], shape["head_dim"]) == (14336, 32, 128)
    assert shape["use_aux_hidden_state"] and shape["use_last_layernorm"]
    assert not {"hidden_size", "draft_vocab_size", "fc_norm"} & set(shape)
    first = EAGLE1_DEFAULT_CFG["config"]["eagle_architecture_config"]
    assert {name for name in shape if shape[name] != first[name]} == {
        "use_aux_hidden_state",
        "use_last_layernorm",
        "use_input_layernorm_in_first_layer",
    }


def test_the_preset_is_a_head_for_a_model() -> None:
    made = shape_meant([("eagle", EAGLE3_DEFAULT_CFG["config"])])
    assert (made.hidden_size, made.vocab_size, made.draft_vocab_size) == (32, 40, 40)
    assert made.intermediate_size == 14336
    assert made.boundaries == default_boundaries(4)
    assert not made.own_lm_head
    assert made.max_position_embeddings == model().config.max_position_embeddings
    assert shape_meant([EAGLE3_DEFAULT_CFG]) == made
    first = shape_meant(EAGLE1_DEFAULT_CFG)
    assert (first.generation, first.boundaries) == (1, (LAST_HIDDEN,))


def test_what_is_missing_takes_the_preset() -> None:
    filled, empty = EagleMode(EAGLE3_DEFAULT_CFG["config"]), EagleMode({})
    assert empty.values == EagleMode({"eagle_architecture_config": {}}).values
    steps = "eagle_ttt_steps"
    assert (empty.values[steps], empty.architecture) == (filled.values[steps], filled.architecture)
    assert empty.settings() == filled.settings()


def test_layer_ids_are_outputs_of_layers_counted_from_0() -> None:
    assert shape_of({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}).boundaries == (1, 2, 4)
    assert shape_of({"eagle_aux_hidden_state_layer_ids": []}).boundaries == default_boundaries(4)
    for wrong in ([4], [-2]):
        with pytest.raises(ArgumentError, match="4 layers from 0"):
            shape_of({"eagle_aux_hidden_state_layer_ids": wrong})


def test_the_output_head_is_the_bases_unless_asked_or_reduced() -> None:
    assert not shape_of({}).own_lm_head
    assert shape_of({"has_lm_head": True}).own_lm_head
    assert shape_of({"draft_vocab_size": 20}).own_lm_head


def test_the_ropes_base_may_stand_in_either_place() -> None:
    assert shape_of({}).rope_theta == 10_000.0
    assert shape_of({"rope_theta": 5e5}).rope_theta == 5e5
    assert shape_of({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5
    assert shape_of({"rope_scaling": None, "rope_theta": 7}).rope_theta == 7.0
    with pytest.raises(ArgumentError, match="give one"):
        shape_of({"rope_theta": 6, "rope_scaling": {"rope_type": "default", "rope_theta": 7}})
    scaled = shape_of({"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert scaled.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_variants_that_modelopt_lacks() -> None:
    made = shape_of({"fc_norm": True, "norm_output": True, "qk_norm": True})
    assert made.fc_norm and made.norm_output and made.qk_norm


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eagle_tt_steps": 3}, "unknown key eagle_tt_steps. Did you mean 'eagle_ttt_steps'"),
        ({"eagle_ttt_steps": "3"}, "eagle_ttt_steps must be of the type int"),
        ({"eagle_ttt_steps": True}, "eagle_ttt_steps must be of the type int"),
        ({"eagle_report_acc": 1}, "eagle_report_acc must be of the type bool"),
        ({"eagle_hidden_state_distillation": True}, "eagle_hidden_state_distillation must be False"),
        ({"eagle_architecture_config": 3}, "eagle_architecture_config must be of the type dict"),
        ({"eagle_architecture_config": {"num_heads": 3}}, "eagle_architecture_config.num_heads"),
        ({"eagle_architecture_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm must be False"),
        ({"eagle_architecture_config": {"use_last_layernorm": False}}, "has .*use_last_layernorm True"),
        ({"eagle_architecture_config": {"use_aux_hidden_state": False}}, "EAGLE-1 head"),
        ({"eagle_architecture_config": {"torch_dtype": "int8"}}, "torch_dtype must be one of"),
        ({"eagle_architecture_config": {"draft_vocab_size": "20"}}, "draft_vocab_size must be of the type int"),
        ([], "the configuration must be a dict"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        EagleMode(given)


@pytest.mark.parametrize(
    "given", [{"hidden_size": 64}, {"vocab_size": 41}, {"draft_vocab_size": 41}, {"num_key_value_heads": 3}]
)
def test_sizes_that_are_not_the_models_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        shape_of(given)


@pytest.mark.parametrize(
    "mode", ["eagel", [], [("hydra", {})], [("eagle",)], [("eagle", {}), ("eagle", {})], {"algorithm": "eagel"}, None]
)
def test_other_modes_are_refused(mode: Any) -> None:
    with pytest.raises(ArgumentError, match="convert: "):
        read_mode(mode)
