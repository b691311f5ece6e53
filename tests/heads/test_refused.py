"""What makes no sense is refused by name: shapes, settings of objectives, every key of another type in every format."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import main
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads import eagle_engines, files
from forerun.heads.base import HeadConfig
from forerun.heads.domino import DominoSettings
from forerun.heads.eagle import EagleSettings
from forerun.heads.engines import diagnose, diagnose_files
from forerun.heads.files import (
    FORMATS,
    HeadCheckpoint,
    StoredFiles,
    TargetFacts,
    expected_shapes,
    format_named,
    parse,
    read_files,
)
from forerun.heads.kangaroo import KangarooConfig
from forerun.heads.medusa import MedusaConfig
from forerun.heads.mtp import MtpSettings
from forerun.heads.mtp_files import read_target
from forerun.heads.pard_files import PardModel
from forerun.heads.peagle import PEagleConfig, PEagleSettings
from forerun.types import LAST_HIDDEN
from heads import samples
from heads.samples import PLAIN, TARGET, VARIANTS, sample
from llamas import tiny_llama
from mtp_targets import Checkpoint
from selection import in_turn
from training import ttt
from training.ttt import VOCABULARY, dflash, head, hydra, medusa, mlp_speculator, model, peagle

adapter = partial(KangarooConfig.for_target, "kangaroo", model())
SHAPES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (head, {"sliding_window": 0}, "at least 1 position"),
    (head, {"full_layers": (0,)}, "a head with a sliding_window"),
    (head, {"sliding_window": 4, "full_layers": (0,)}, "some, not all"),
    (head, {"sliding_window": 4, "num_hidden_layers": 2, "full_layers": (2,)}, "counted from 0"),
    (head, {"sliding_window": 4, "num_hidden_layers": 3, "full_layers": (1, 0)}, "in order"),
    (dflash, {"block_size": 1}, "block_size must be at least 2"),
    (dflash, {"mask_token_id": VOCABULARY}, "mask_token_id must be one of the target's"),
    (dflash, {"boundaries": (LAST_HIDDEN,)}, "boundaries count layers"),
    (dflash, {"draft_vocab_size": 30}, "needs its own lm_head"),
    (dflash, {"markov_rank": 0}, "markov_rank must be at least 1"),
    (dflash, {"markov_rank": 6, "markov_head_type": "lstm"}, "vanilla, gated, rnn"),
    (dflash, {"gru_hidden_dim": 0}, "gru_hidden_dim must be at least 1"),
    (dflash, {"gru_hidden_dim": 6, "pure_draft_prefix_len": 5}, r"pure_draft_prefix_len must be in 0\.\.4, got 5"),
    (dflash, {"selector_rank": 6, "conv_kernel_size": 6}, r"conv_kernel_size must be in 1\.\.5"),
    (dflash, {"selector_rank": 6, "conv_group_size": 5}, "conv_group_size must divide the hidden size 32"),
    (dflash, {"selector_rank": 0}, "selector_rank must be at least 1"),
    (dflash, {"selector_rank": 6, "selector_top_k": 41}, r"selector_top_k must be in 1\.\.40"),
    (peagle, {"mask_token_id": VOCABULARY}, "mask_token_id must be one of the target's"),
    (peagle, {"generation": 1}, "its layers are EAGLE-3's; got generation 1"),
    (peagle, {"own_lm_head": False}, "needs its own lm_head"),
    (partial(PEagleConfig.for_target, "peagle", model()), {"norm_output": True}, "has no option 'norm_output'"),
    (medusa, {"num_heads": 0}, "num_heads must be at least 1"),
    (medusa, {"boundaries": [1]}, "no option 'boundaries'"),
    (hydra, {"num_heads": 0}, "num_heads and num_layers must be at least 1"),
    (hydra, {"num_hidden_layers": 2}, r"num_hidden_layers is 1 \(Hydra\+\+\) or 0"),
    (hydra, {"boundaries": [1]}, "no option 'boundaries'"),
    (hydra, {"hidden_size": 8}, "no option 'hidden_size'"),
    (mlp_speculator, {"n_predict": 0}, "n_predict must be at least 1"),
    (mlp_speculator, {"n_predict": 1, "tie_weights": True}, "n_predict must be at least 2"),
    (mlp_speculator, {"boundaries": [1]}, "no option 'boundaries'"),
    (adapter, {"boundaries": [1, 2]}, "boundaries is the one after the layers that draft"),
    (adapter, {"boundaries": [LAST_HIDDEN]}, "boundaries is the one"),
    (adapter, {"boundaries": [9]}, "boundary 9 does not exist: the target has 4 layers"),
    (adapter, {"num_hidden_layers": 2}, "has no option 'num_hidden_layers'"),
]
SETTINGS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (EagleSettings, {"noise": -0.1}, "objective: "),
    (EagleSettings, {"regression_weight": 0.0, "token_weight": 0.0}, "objective: "),
    (EagleSettings, {"steps": 0}, "objective: "),
    (DominoSettings, {"base_start": 1.5}, "base_start must be less than or equal to 1"),
    (DominoSettings, {"base_until": 0.0}, "base_until must be greater than 0"),
    (PEagleSettings, {"depths": 0}, "depths"),
    (PEagleSettings, {"keep": 0.0}, "keep"),
    (PEagleSettings, {"floor": 1.5}, "floor"),
    (MtpSettings, {"steps": 0}, "steps must be greater than or equal to 1"),
    (MtpSettings, {"decay": 0}, "decay must be greater than 0"),
]


@pytest.mark.parametrize(("make", "options", "named"), [*SHAPES, *SETTINGS])
def test_what_makes_no_sense_is_refused(make: Callable[..., Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        make(**({"options": options} if isinstance(make, partial) else options))


@pytest.mark.parametrize("config", [MedusaConfig, type(hydra().config), type(mlp_speculator().config), KangarooConfig])
def test_a_head_without_a_vocabulary_of_its_own_is_asked_for_none(config: Any) -> None:
    with pytest.raises(ArgumentError, match=r"leave draft\.vocab_size"):
        config.for_target("any", model(), 20)


WRONG: tuple[Any, ...] = ("100", [1])
NOBODYS = ("layer_types", "rope_parameters", "quantization_config", "num_aux_hidden_states", "use_swa", "bias")
"""Keys that are not in every file and that readers look for."""
FACTS = dataclasses.replace(samples.FACTS, num_layers=6)
HEADS: dict[str, tuple[str, Callable[[], HeadCheckpoint], TargetFacts]] = {
    "flat": ("flat", lambda: sample(PLAIN), TARGET),
    "flat, EAGLE-1": ("flat", lambda: sample(VARIANTS["first"]), TARGET),
    "modelopt": ("modelopt", lambda: sample(PLAIN), TARGET),
    "speculators": ("speculators", lambda: sample(VARIANTS["window_mixed"]), TARGET),
    "speculators, DSpark": ("speculators", lambda: HeadCheckpoint.of(ttt.dflash(markov_rank=6)), FACTS),
    "peagle": ("peagle", lambda: HeadCheckpoint.of(ttt.peagle(num_hidden_layers=2)), FACTS),
    "dflash": ("dflash", lambda: HeadCheckpoint.of(ttt.dflash(sliding_window=8, full_layers=(1,))), FACTS),
    "dflash, Domino": ("dflash", lambda: HeadCheckpoint.of(ttt.dflash(gru_hidden_dim=6)), FACTS),
    "medusa": ("medusa", lambda: HeadCheckpoint.of(ttt.medusa()), FACTS),
    "hydra": ("hydra", lambda: HeadCheckpoint.of(ttt.hydra()), FACTS),
    "mlp_speculator": ("mlp_speculator", lambda: HeadCheckpoint.of(ttt.mlp_speculator()), FACTS),
    "kangaroo": ("kangaroo", lambda: HeadCheckpoint.of(ttt.kangaroo()), FACTS),
}


def changed(keys: Mapping[str, Any], wrong: object) -> Iterator[dict[str, Any]]:
    """The configuration twice as often as it has keys, those in objects too: one of them wrong, or null."""
    for name, value in keys.items():
        yield from ({**keys, name: bad} for bad in (wrong, None))
        if isinstance(value, dict):
            yield from ({**keys, name: inner} for inner in changed(value, wrong))


def examine(stored: StoredFiles, target: TargetFacts) -> None:
    """As the doctor does. CheckpointError: it says what is wrong with the configuration, and where."""
    head = parse(stored, num_layers=target.num_layers)
    assert [*diagnose(head, target), *diagnose_files(stored, head, target)]


def refused(keys: Mapping[str, Any], tensors: Mapping[str, Any], target: TargetFacts) -> str:
    """What the error says; empty: it is a head."""
    try:
        examine(StoredFiles(directory=Path("the/head"), config=keys, tensors=tensors), target)
    except CheckpointError as error:
        assert str(error).startswith("the/head: ") and len(str(error)) > 40
        return str(error)
    return ""


@pytest.fixture(autouse=True, scope="module")
def shapes_are_remembered() -> Iterator[None]:
    """A thousand configurations announce few different heads, and each head is asked for its shapes by every engine."""
    known: dict[str, dict[str, Any]] = {}

    def remembered(config: HeadConfig) -> dict[str, Any]:
        if (key := repr(config)) not in known:
            known[key] = expected_shapes(config)
        return dict(known[key])

    with pytest.MonkeyPatch.context() as patch:
        for module in (files, eagle_engines):
            patch.setattr(module, "expected_shapes", remembered)
        yield


def test_every_format_is_tried() -> None:
    with_a_targets_keys = {"mtp", "gemma4_assistant"}
    assert {name for name, *_ in HEADS.values()} | with_a_targets_keys == set(FORMATS)


@pytest.mark.parametrize(("name", "wrong"), in_turn(HEADS, WRONG), ids=str)
def test_a_value_of_another_type_is_named_or_means_nothing(name: str, wrong: object) -> None:
    written_in, made, target = HEADS[name]
    written, tensors = format_named(written_in).write(made(), target)
    keys = json.loads(json.dumps(written))
    assert not refused(keys, tensors, target)
    absent = {key: None for key in NOBODYS if key not in keys}
    said = [refused(one, tensors, target) for one in changed({**keys, **absent}, wrong)]
    assert sum(map(bool, said)) > len(keys) / 3


@pytest.mark.parametrize("family", ["glm", "mimo", "deepseek"])
def test_a_targets_keys_of_another_type(family: str, tmp_path: Path) -> None:
    folder = Checkpoint(family, tmp_path / "target").folder
    head, target = read_target(folder), TargetFacts.read(folder)
    written, tensors = format_named("mtp").write(head, target)
    keys = json.loads(json.dumps(written))
    assert not refused(keys, tensors, target)
    assert any([refused(one, tensors, target) for one in changed(keys, WRONG[0])])


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "num_attention_heads"])
def test_sizes_below_0(key: str) -> None:
    keys, tensors = format_named("flat").write(sample(PLAIN), TARGET)
    assert refused({**keys, key: -1}, tensors, TARGET)


@pytest.mark.parametrize("value", [["a"], "100", [1], {}, True, 1.5, None], ids=repr)
@pytest.mark.parametrize("key", ["vocab_size", "pard_token", "architectures", "pard2"])
def test_pard_keys_of_another_type(key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama(40).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": 39, key: value}))
    try:
        model = PardModel.at(tmp_path)
        if model is not None:
            found = [one.severity for one in model.findings(TARGET) if one.engine == "vllm"]
            assert "fails" in found or key in ("vocab_size", "pard2")
    except CheckpointError as error:
        assert f"{key} of config.json must be" in str(error)
    assert main(["doctor", str(tmp_path), "--target", "demo", "--json"]) in (0, 1, 2)
    capsys.readouterr()


def test_files_are_read_no_further_than_a_wrong_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "architectures": 5}))
    with pytest.raises(CheckpointError, match=r"architectures of config.json must be a list of names, got 5"):
        read_files(tmp_path)
