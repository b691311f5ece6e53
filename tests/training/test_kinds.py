"""Every kind of head is trained, evaluated, written, read and drafted with by the same code."""

import dataclasses
import json
from pathlib import Path

import pytest

from forerun.cli import main
from forerun.control.config import method_of
from forerun.drafters import DRAFTERS, drafter_class
from forerun.drafters.kinds import KINDS, kind_named, objective_for
from forerun.errors import ArgumentError, VocabularyMismatchError
from forerun.heads.files import FORMATS, HeadCheckpoint, TargetFacts, format_for, write_head
from forerun.training.recipe import make_recipe, read_recipe
from forerun.training.trained import TRAINED, TrainedHead
from llamas import tiny_llama
from mtp_targets import with_fresh_layers
from selection import one_of_each
from training import ttt
from training.conftest import drafts, evaluated, line_of, logged

WAYS: dict[str, list[dict[str, object]]] = {
    "eagle3": [],  # `test_run` trains it at length
    "eagle": [{"method": "eagle"}, {"method": "eagle2", "nodes": 6}],
}
"""Kind -> how its head drafts when it is trained; a new kind trains and drafts without a line here."""
SMALL = {kind: ["objective.anchors=16"] for kind in ("dflash", "dflash2", "domino", "dspark")}
SMALL["domino"] += ["draft.options={gru_hidden_dim: 48, emb_dim: 32}"]
"""Kinds whose own sizes are far above the target's here."""
SIZES = {"domino": {"gru_hidden_dim": 48, "emb_dim": 32}}


def words(kind: str, target: Path, prepared: Path, output: Path, steps: int) -> list[str]:
    return line_of(kind, target, prepared, output, steps, *evaluated(prepared), *SMALL.get(kind, []))


FALLS = {
    "eagle": 0.99,
    "peagle": 0.95,
    "dflash": 0.95,
    "dflash2": 0.93,
    "hydra": 0.97,
    "mlp_speculator": 0.95,
    "kangaroo": 0.98,
}
"""What the loss falls to at least, 0.9 where nothing is said: these begin near the target's entropy."""


CARRIED = {kind for entry in FORMATS.values() for kind in entry.kinds}
"""Kinds of which a checkpoint can be written."""


TRAINABLE = [name for name, kind in KINDS.items() if KINDS[kind.stored_as].objective or kind.objective]
EACH = [name for name in TRAINABLE if name in CARRIED and WAYS.get(name) != []]


@pytest.mark.parametrize("kind", one_of_each(EACH, lambda name: kind_named(name).drafts))
def test_a_trained_head_drafts(
    kind: str, target: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind_named(kind).in_target is not None:
        target = with_fresh_layers(target, tmp_path / "target")
    made = words(kind, target, prepared, tmp_path / "run", 40)
    assert main([*made, "training.log_every_steps=1"]) == 0
    late = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = logged(tmp_path / "run", "loss")
    assert len(losses) == late["steps"] == 40
    # Batches differ in how hard they are: the first and the last two passes over the data.
    assert sum(losses[-12:]) / 12 < FALLS.get(kind, 0.9) * sum(losses[:6]) / 6
    assert late["best"] > 1.3
    measured = {name for line in lines for name in line if name.startswith("eval/")}
    shapes = {f"{shape}_t{temperature}" for shape in ("chain", "tree") for temperature in (0, 1)}
    assert {f"eval/{shape}" for shape in shapes} | {"eval/acceptance_0", "eval/acceptance_1"} <= measured
    assert {f"eval/acceptance_{shape}_0" for shape in shapes - {"chain_t0"}} <= measured
    assert method_of(late["head"]) == kind, "named by its folder alone, it drafts as what it is"
    for way in WAYS.get(kind, [{"method": kind}]):
        assert drafts(target, **{"model": late["head"], **way}) > 1.2


def test_a_head_of_the_last_state_is_trained_from_stored_ones(target: Path, prepared: Path, tmp_path: Path) -> None:
    """Online and offline alike; a store with other boundaries is refused."""
    where = ("--target", str(target), "--data", str(prepared), "--dtype", "float32", "--no-probe", "--yes")
    assert main(["features", *where, "--boundaries", "none", "--output", str(tmp_path / "last")]) == 0
    assert main(["features", *where, "--boundaries", "1,2,3", "--output", str(tmp_path / "three")]) == 0
    losses = []
    for name, more in (("online", ()), ("offline", ("mode=offline", f"features={tmp_path / 'last'}"))):
        made = words("medusa", target, prepared, tmp_path / name, 2)
        assert main([*made, "evaluation.prompts=null", "training.log_every_steps=1", *more]) == 0
        losses.append(logged(tmp_path / name, "loss"))
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)
    made = words("medusa", target, prepared, tmp_path / "refused", 2)
    assert main([*made, "mode=offline", f"features={tmp_path / 'three'}"]) == 2


def test_kinds_are_drafters_and_can_be_trained() -> None:
    assert KINDS.keys() - TRAINABLE == {"gemma4_assistant"}, "which is taken as it is published"
    assert {kind.trains for kind in KINDS.values()} == set(TRAINED)
    for name, kind in KINDS.items():
        assert kind.name == name and (name in DRAFTERS or kind.trains != "head")
        if name in DRAFTERS:
            assert DRAFTERS[name].path == kind.drafter and drafter_class(name).name == name
            assert DRAFTERS[name].needs_training == (kind.in_target is None)
        if name not in TRAINABLE:
            continue
        settings = objective_for(kind).Settings()
        assert dataclasses.is_dataclass(settings) and not settings.gradient_checkpointing
        recipe = make_recipe(name, {"target": "a", "data": "b", "output": "c"})
        assert recipe.kind == name and recipe.objective == settings


def test_what_is_no_kind_or_another_ones_is_refused_by_name() -> None:
    given = {"target": "a", "data": "b", "output": "c"}
    with pytest.raises(ArgumentError, match=r"unknown kind of head 'eagel3'.* 'eagle3'"):
        make_recipe("eagel3", given)
    with pytest.raises(ArgumentError, match="forerun train eagle3"):
        make_recipe("eagle", {**given, "kind": "eagle3"})
    with pytest.raises(ArgumentError, match=r"unknown key 'objective\.anchors"):
        make_recipe("eagle3", {**given, "objective": {"anchors": 64}})
    drafting = dataclasses.replace(kind_named("eagle3"), name="later", objective=None)
    with pytest.raises(ArgumentError, match="later cannot be trained here"):
        objective_for(drafting)


def test_a_head_of_another_kind_is_no_start(
    target: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forerun.heads.files import write_head
    from heads.samples import PLAIN, TARGET, sample

    write_head(sample(PLAIN), tmp_path / "other", "flat", TARGET)
    made = words("eagle", target, prepared, tmp_path / "run", 1)
    assert main([*made, f"draft.start={tmp_path / 'other'}"]) == 2
    assert (
        "draft.start holds a head of the kind eagle3; go on with it by: forerun train eagle3" in capsys.readouterr().err
    )


def test_a_target_brings_the_shape_of_its_mtp_layers(
    target: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options are refused, and a target that brings none; trained layers are a start."""
    whole = with_fresh_layers(target, tmp_path / "target")
    for place, word, message in (
        (whole, "draft.vocab_size=8", "the target brings its own shape"),
        (target, "draft.vocab_size=null", "brings no MTP layers"),
    ):
        assert main([*words("mtp", place, prepared, tmp_path / "refused", 2), word]) == 2
        assert message in capsys.readouterr().err
    made = [*words("mtp", whole, prepared, tmp_path / "run", 1), "evaluation.prompts=null"]
    assert main(made) == 0
    again = [*words("mtp", whole, prepared, tmp_path / "on", 1), "evaluation.prompts=null"]
    assert main([*again, f"draft.start={json.loads(capsys.readouterr().out)['head']}"]) == 0


WRONG = {
    "num_hidden_layers": ("two", -1, 1.5),
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), (0, -4, "4")),
    "head_dim": (7, 0),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), (-1, "small")),
    "rope_theta": (-1, 0),
    "rope_scaling": ({"a": 1}, {"rope_type": "yarn", "factor": "much"}, 3),
    "max_position_embeddings": (0,),
    "hidden_act": ("nonsense", 3),
    "boundaries": (2, [], ["2"]),
    "sliding_window": (0, "wide"),
    "attention_bias": ("no",),
    **dict.fromkeys(("num_heads", "num_layers", "n_predict", "inner_dim"), (-1, "one")),
    **dict.fromkeys(("block_size", "markov_rank", "selector_rank", "emb_dim", "gru_hidden_dim"), (-1, "one")),
}
"""Option of heads -> values that no kind takes."""
FRESH = [one.name for one in KINDS.values() if one.trains == "head" and one.in_target is None and one.objective]


@pytest.mark.parametrize("kind", FRESH)
def test_an_option_that_no_head_can_have_is_refused_by_name(kind: str) -> None:
    made = kind_named(kind).head.Config
    wrong = [(name, value) for name in sorted(WRONG.keys() & set(made.option_names())) for value in WRONG[name]]
    for name, value in wrong:
        with pytest.raises(ArgumentError, match=rf"{name}.*"):
            made.for_target(kind, ttt.model(), None, {name: value})
    with pytest.raises(ArgumentError):
        made.for_target(kind, ttt.model(), 0)


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize(
    ("vocabulary", "hidden", "named"),
    [(ttt.VOCABULARY, 64, "hidden states of size 64, the target's have 32"), (30, 32, "30 tokens, the target has 40")],
)
def test_a_head_of_another_target_is_not_gone_on_with(
    kind: str, vocabulary: int, hidden: int, named: str, tmp_path: Path
) -> None:
    other = tiny_llama(vocabulary, num_hidden_layers=4, hidden_size=hidden)
    made = kind_named(kind).head
    head = made.initial(other, made.Config.for_target(kind, other, None, SIZES.get(kind)))
    facts = TargetFacts.of(other.config, "other")
    write_head(HeadCheckpoint.of(head), tmp_path / "head", format_for(kind_named(kind).stored_as), facts)
    places = {"target": "here", "data": "nowhere", "output": "nowhere", "draft.start": str(tmp_path / "head")}
    recipe = read_recipe(kind, None, [], places)
    with pytest.raises((ArgumentError, VocabularyMismatchError), match=f"draft.start: .*{named}"):
        TrainedHead(recipe).start(ttt.model(), None, None)
