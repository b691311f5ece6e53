"""Every kind of head is trained, evaluated, written, read and drafted with by the same code: one file and one entry."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.printed import ROOT, markdown
from forerun.cli import main
from forerun.control.config import method_of
from forerun.drafters import DRAFTERS, drafter_class
from forerun.drafters.kinds import KINDS, kind_named, objective_for
from forerun.errors import ArgumentError, VocabularyMismatchError
from forerun.heads.files import FORMATS, HeadCheckpoint, TargetFacts, format_for, write_head
from forerun.training import run
from forerun.training.recipe import make_recipe, read_recipe
from forerun.training.trained import TRAINED, TrainedHead
from heads.samples import PLAIN, TARGET, sample
from llamas import tiny_llama
from mtp_targets import with_fresh_layers
from selection import one_of_each
from training import ttt
from training.conftest import Trainer, drafts, evaluated, words

WAYS: dict[str, list[dict[str, object]]] = {
    "eagle3": [],  # `test_run` trains it at length
    "eagle": [{"method": "eagle"}, {"method": "eagle2", "nodes": 6}],
}
"""Kind -> how its head drafts when it is trained; a new kind trains and drafts without a line here."""
SMALL = {kind: ["objective.anchors=16"] for kind in ("dflash", "dflash2", "domino", "dspark")}
SMALL["domino"] += ["draft.options={gru_hidden_dim: 48, emb_dim: 32}"]
"""Kinds whose own sizes are far above the target's here."""
SIZES = {"domino": {"gru_hidden_dim": 48, "emb_dim": 32}}


def words_for(train: Trainer, kind: str, steps: int, *more: str, into: str = "run") -> list[str]:
    return train.line(kind, steps, *evaluated(train.prepared), *SMALL.get(kind, []), *more, into=into)


FALLS = {
    **{"eagle": 0.99, "peagle": 0.95, "dflash": 0.95, "dflash2": 0.93, "hydra": 0.97, "mlp_speculator": 0.95},
    "kangaroo": 0.98,
}
"""What the loss falls to at least, 0.9 where nothing is said: these begin near the target's entropy."""


CARRIED = {kind for entry in FORMATS.values() for kind in entry.kinds}
"""Kinds of which a checkpoint can be written."""


TRAINABLE = [name for name, kind in KINDS.items() if KINDS[kind.stored_as].objective or kind.objective]
EACH = [name for name in TRAINABLE if name in CARRIED and WAYS.get(name) != []]


@pytest.mark.parametrize("kind", one_of_each(EACH, lambda name: kind_named(name).drafts))
def test_a_trained_head_drafts(kind: str, train: Trainer) -> None:
    if kind_named(kind).in_target is not None:
        train.target = with_fresh_layers(train.target, train.folder / "target")
    late, losses = train(words_for(train, kind, 40, "training.log_every_steps=1")), train.log("loss")
    assert len(losses) == late["steps"] == 40
    # Batches differ in how hard they are: the first and the last two passes over the data.
    assert sum(losses[-12:]) / 12 < FALLS.get(kind, 0.9) * sum(losses[:6]) / 6
    assert late["best"] > 1.3
    shapes = {f"{shape}_t{temperature}" for shape in ("chain", "tree") for temperature in (0, 1)}
    measured = {*shapes, "acceptance_0", "acceptance_1", *(f"acceptance_{one}_0" for one in shapes - {"chain_t0"})}
    assert all(train.log(f"eval/{name}") for name in measured)
    assert method_of(late["head"]) == kind, "named by its folder alone, it drafts as what it is"
    for way in WAYS.get(kind, [{"method": kind}]):
        assert drafts(train.target, **{"model": late["head"], **way}) > 1.2


def test_a_head_of_the_last_state_is_trained_from_stored_ones(train: Trainer) -> None:
    """Online and offline alike; a store with other boundaries is refused."""
    where = ("--target", str(train.target), "--data", str(train.prepared), "--dtype", "float32", "--no-probe", "--yes")
    last, three = (train.folder / name for name in ("last", "three"))
    for output, boundaries in ((last, "none"), (three, "1,2,3")):
        assert main(["features", *where, "--boundaries", boundaries, "--output", str(output)]) == 0
    for name, more in (("online", ()), ("offline", ("mode=offline", f"features={last}"))):
        train(words_for(train, "medusa", 2, "evaluation.prompts=null", "training.log_every_steps=1", *more, into=name))
    losses = train.log("loss", "online")
    assert len(losses) == 2 and train.log("loss", "offline") == pytest.approx(losses, rel=1e-4)
    train.refused(words_for(train, "medusa", 2, "mode=offline", f"features={three}", into="refused"))


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


def test_a_head_of_another_kind_is_no_start(train: Trainer) -> None:
    other = write_head(sample(PLAIN), train.folder / "other", "flat", TARGET)
    said = train.refused(words_for(train, "eagle", 1, f"draft.start={other}"))
    assert "draft.start holds a head of the kind eagle3; go on with it by: forerun train eagle3" in said


def test_a_target_brings_the_shape_of_its_mtp_layers(train: Trainer) -> None:
    """Options are refused, and a target that brings none; trained layers are a start."""
    assert "brings no MTP layers" in train.refused(words_for(train, "mtp", 2, "draft.vocab_size=null"))
    train.target = with_fresh_layers(train.target, train.folder / "target")
    assert "the target brings its own shape" in train.refused(words_for(train, "mtp", 2, "draft.vocab_size=8"))
    made = train(words_for(train, "mtp", 1, "evaluation.prompts=null"))
    train(words_for(train, "mtp", 1, "evaluation.prompts=null", f"draft.start={made['head']}", into="on"))


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
def test_another_targets_head_does_not_go_on(
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


@pytest.mark.parametrize(
    ("kind", "word", "said"),
    [
        ("dflash", "draft.vocab_size=8", "draft.options.own_lm_head=true"),
        ("medusa", "draft.vocab_size=8", "its last hidden state; leave draft.vocab_size away"),
        ("kangaroo", "draft.vocab_size=8", "output head; leave draft.vocab_size away"),
        ("eagle3", "draft.options={heads: 3}", "no option 'heads'"),
        ("distill", "draft.options={layers: 99}", "draft.options.layers must be 1 to 4"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_before_anything_is_loaded(
    kind: str, word: str, said: str, train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's configuration says enough; what it says to do is what was wrong."""
    monkeypatch.setattr(run, "open_frozen_target", None)
    line = [one for one in words_for(train, kind, 2, word) if one == word or not one.startswith("draft.")]
    assert said in train.refused(line)


PAGE = "docs/write-a-head.md"
RUN = """
import json, sys
from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.heads import read_head

line, kind, target, folder = sys.argv[1:]
assert main(json.loads(line)) == 0
assert read_head(folder).config.kind == kind
llm = LLM(target, speculative_config={"method": kind, "model": folder, "adaptive": False})
prompt, params = {"prompt_token_ids": [3]}, SamplingParams(temperature=0, max_tokens=24, detokenize=False)
drafted, plain = (llm.generate(prompt, params, speculative=on)[0].outputs[0] for on in (None, False))
assert drafted.token_ids == plain.token_ids
print("mean", drafted.speculation.mean_acceptance_length)
"""


def test_the_printed_head_is_trained_written_read_and_drafts(target: Path, prepared: Path, tmp_path: Path) -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    for name, block in zip(("linear_head", "linear_kind"), markdown(PAGE, text), strict=False):
        assert block.text.startswith(f"# {name}.py")
        (tmp_path / f"{name}.py").write_text(block.text)
    line = words(target, prepared, tmp_path / "run", 25)
    line = ["train", "linear", *(word for word in line[2:] if not word.startswith(("objective.", "draft.")))]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(line), "linear", str(target), str(tmp_path / "run" / "head")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "FORERUN_PLUGINS": "linear_kind"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split("mean ")[1]) > 1.2


RULE = """
from forerun.core.rules import RULES, ArgmaxWalk, check_named, rule_named
import forerun.drafters
check_named("mine")
assert type(rule_named("mine")) is ArgmaxWalk
"""


@pytest.mark.parametrize(
    ("module", "said"), [("my_rule", ""), ("no_such_rule", "FORERUN_PLUGINS names 'no_such_rule'")]
)
def test_a_rule_of_a_module_of_ones_own(module: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "my_rule.py").write_text("from forerun.core.rules import RULES, ArgmaxWalk\nRULES['mine'] = ArgmaxWalk")
    done = subprocess.run(
        [sys.executable, "-c", RULE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "FORERUN_PLUGINS": module},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (not said) and said in done.stderr, done.stderr[-3000:]
