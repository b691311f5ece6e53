"""``forerun features`` on a tiny target: says how much beforehand, goes on where it stopped, refuses clearly."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from cli.conftest import Forerun, Ran
from forerun.cli.features import _read_by
from forerun.drafters.kinds import KINDS, kind_named
from forerun.heads.dflash import spread_boundaries
from forerun.training.data.store import write_prepared
from forerun.training.features.online import OnlineFeatures, reference_states
from forerun.training.features.store import FeatureStore
from forerun.types import LAST_HIDDEN
from forerun.writing import TokenizerIdentity
from mtp_targets import Checkpoint

TEXTS = ["the cat sat on the mat", "the dog", "the dog sat on the log and the cat sat on the dog", "a mat"]


@pytest.fixture(scope="module")
def prepared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    documents = [(ids, [True] * len(ids)) for ids in tokenizer(TEXTS)["input_ids"]]
    write_prepared(folder, documents, TokenizerIdentity.of(tokenizer))
    return folder


@pytest.fixture
def store(forerun: Forerun, checkpoint: Path, prepared: Path, tmp_path: Path) -> Callable[..., Ran]:
    def run(*more: object, target: Path = checkpoint, output: str = "features") -> Ran:
        common: list[object] = ["--target", target, "--data", prepared, "--output", tmp_path / output, "--yes"]
        return forerun("features", *common, *more)

    return run


def test_features_are_the_targets_own_and_their_size_is_said_beforehand(
    store: Callable[..., Ran], checkpoint: Path, tmp_path: Path
) -> None:
    ran = store("--boundaries", "0,1", "--dtype", "float32", "--batch-tokens", 40, "--json")
    assert ran.code == 0, ran.err
    facts = json.loads(ran.out)
    assert facts["documents"] == 4 and facts["bytes"] == facts["tokens"] * 3 * 32 * 4
    assert f"4 documents, {facts['tokens']} tokens x 384 bytes (boundaries 0, 1 and the last state" in ran.err
    assert [check["boundary"] for check in facts["probe"]] == [0, 1, -1]
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    features = FeatureStore(tmp_path / "features")
    for document, text in enumerate(TEXTS):
        own = reference_states(model, tokenizer(text)["input_ids"])
        for signal, states in features.read(document).items():
            torch.testing.assert_close(states, own[signal], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "eagle2", "medusa", "dflash", "dspark"])
def test_a_kind_is_stored_where_its_untrained_head_reads(
    kind: str, store: Callable[..., Ran], checkpoint: Path, tmp_path: Path
) -> None:
    ran = store("--kind", kind, "--json", "--no-probe")
    assert ran.code == 0, ran.err
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    wanted = kind_named(kind).head.Config.for_target(kind, model).boundaries
    assert json.loads(ran.out)["boundaries"] == [boundary for boundary in wanted if boundary != LAST_HIDDEN]
    assert bool(json.loads(ran.out)["boundaries"]) == (kind in ("dflash", "dspark"))
    own = json.loads(store("--kind", kind, "--boundaries", "1", "--json", "--no-probe", output="own").out)
    assert own["boundaries"] == [1], "`--boundaries` says otherwise"


def test_every_trainable_kind_can_be_asked_for() -> None:
    config = LlamaConfig(num_hidden_layers=32)
    found = {kind.name: _read_by(kind, config, "") for kind in KINDS.values() if kind.in_target is None}
    assert found["eagle3"] == found["peagle"] == (2, 16, 29)
    assert found["medusa"] == found["distill"] == found["layerskip"] == (LAST_HIDDEN,)
    assert found["kangaroo"] == (2,) and found["medusa2"] == (LAST_HIDDEN,)
    assert found["dflash"] == found["dspark"] == spread_boundaries(32, 5) == (2, 9, 16, 23, 30)


def test_mtp_layers_are_read_where_their_checkpoint_says(tmp_path: Path) -> None:
    for family, expected in {"glm": (LAST_HIDDEN,), "mimo": (2,)}.items():
        folder = tmp_path / family
        Checkpoint(family, folder)
        assert _read_by(kind_named("mtp"), None, str(folder)) == expected


def test_ctrl_c_keeps_what_was_done_and_the_same_command_goes_on(
    store: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--boundaries", "1", "--batch-tokens", 1, "--no-probe"]
    run, ran_documents = OnlineFeatures.documents, []

    def interrupted(self: OnlineFeatures, documents: Any) -> Any:
        ran_documents.append(documents)
        if len(ran_documents) == 3:
            raise KeyboardInterrupt
        return run(self, documents)

    monkeypatch.setattr(OnlineFeatures, "documents", interrupted)
    stopped = store(*arguments)
    assert stopped.code == 130 and "stopped after 2 documents" in stopped.err
    done = store(*arguments)
    assert done.code == 0 and len(ran_documents) == 3 + 2 and "are there" in done.err
    assert len(FeatureStore(tmp_path / "features")) == 4
    again = store(*arguments)
    assert again.code == 0 and len(ran_documents) == 5
    other = store("--boundaries", "2")
    assert other.code == 2 and "boundaries: stored 1, wanted 2" in other.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--boundaries", "1,3"], "no layer boundary 3: expected 0..2"),
        (["--boundaries", "two"], "--boundaries takes numbers"),
        ([], "a target of 2 layers has too few"),
        (["--kind", "dflsh"], "unknown kind of head 'dflsh'"),
        (["--kind", "mtp"], "brings no MTP layers"),
        (["--boundaries", "1", "--dtype", "int4"], "bfloat16, float8, float16 or float32, not 'int4'"),
        (["--boundaries", "1", "--batch-tokens", "0"], "must be above 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    store: Callable[..., Ran], tmp_path: Path, arguments: list[str], message: str
) -> None:
    ran = store(*arguments)
    assert ran.code == 2 and message in ran.err and not (tmp_path / "features").exists()


def test_data_that_is_not_there_or_of_another_tokenizer_is_refused(
    forerun: Forerun, store: Callable[..., Ran], checkpoint: Path, prepared: Path, tmp_path: Path
) -> None:
    ran = forerun("features", "--target", checkpoint, "--data", "nowhere", "--output", tmp_path / "features")
    assert ran.code == 2 and "there is no directory nowhere" in ran.err
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["<unheard>"])
    tokenizer.save_pretrained(other)
    ran = store("--boundaries", "1", target=other)
    assert ran.code == 2 and "was prepared with the tokenizer" in ran.err and not (tmp_path / "features").exists()


def test_without_vllm_its_source_is_refused(store: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    ran = store("--boundaries", "1", "--source", "vllm")
    assert ran.code == 2 and "needs the package vllm" in ran.err


def test_a_full_disk_is_seen_beforehand(
    store: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    ran = store("--boundaries", "1")
    assert ran.code == 2 and "has 100 bytes free" in ran.err and not (tmp_path / "features").exists()
