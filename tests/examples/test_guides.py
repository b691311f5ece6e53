"""Recipes are complete, every key that the guides name is true, and the tutorial notebook runs from top to bottom."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from forerun.drafters.kinds import KINDS, kind_named
from forerun.heads.eagle import EagleConfig, default_boundaries
from forerun.training.recipe import make_recipe, read_recipe, to_plain

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "eagle3").glob("*.yaml"))
TRAINING, KEYS, SELF_SPECULATION, PARD = (
    (ROOT / "docs" / page).read_text(encoding="utf-8")
    for page in ("training.md", "recipes.md", "self-speculation.md", "pard.md")
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_complete_and_its_head_can_be_built(path: Path) -> None:
    recipe = read_recipe("eagle3", path)
    assert set(recipe.draft.options) <= set(EagleConfig.option_names())
    layers = {"demo": 8, "meta-llama/Llama-3.1-8B-Instruct": 32, "Qwen/Qwen3-8B": 36}[recipe.target]
    boundaries = tuple(recipe.draft.options.get("boundaries", default_boundaries(layers)))
    assert boundaries == default_boundaries(layers)
    made = EagleConfig(
        **{"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128256},
        draft_vocab_size=recipe.draft.vocab_size or 128256,
        **{**recipe.draft.options, "boundaries": boundaries},
    )
    assert not made.qk_norm and not made.norm_before_residual, "a recipe's head is read by every large engine"
    assert recipe.evaluation.prompts not in (None, recipe.data)


def table(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose header begins with `first`."""
    rows = text.split(f"| {first} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_keys_and_defaults_of_the_recipes_guide_are_the_recipes() -> None:
    defaults = to_plain(make_recipe("eagle3", {"target": "a", "data": "b", "output": "c"}))
    rows = table(KEYS, "key")
    assert len(rows) > 25
    for key, default, _ in rows:
        value: Any = defaults
        for part in key.strip("`").split("."):
            value = value[part]
        assert str(value) == default.strip("`"), key


def test_the_settings_of_the_other_kinds_are_their_recipes() -> None:
    rows = table(KEYS, "kind")
    objectives = {name for name, kind in KINDS.items() if kind.objective}
    assert {row[0].strip("`") for row in rows} == objectives - {"eagle3", "distill", "pard", "layerskip"}
    for kind, key, default, _ in ([cell.strip("`") for cell in row] for row in rows):
        value: Any = to_plain(make_recipe(kind, {"target": "a", "data": "b", "output": "c"}))
        fields = {field.name: field.default for field in dataclasses.fields(kind_named(kind).head.Config)}
        for part in key.split("."):
            value = fields if part == "options" else value[part]
        assert str(value) == default, key


@pytest.mark.parametrize(
    ("kind", "page", "more"),
    [
        ("distill", TRAINING, {"draft.start", "draft.options"}),
        ("pard", PARD, {"draft.start", "draft.options"}),
        ("layerskip", SELF_SPECULATION, set()),
    ],
    ids=["distill", "pard", "layerskip"],
)
def test_the_settings_of_what_trains_whole_models_are_their_recipes(kind: str, page: str, more: set[str]) -> None:
    plain = to_plain(make_recipe(kind, {"target": "a", "data": "b", "output": "c"}))
    rows = table(page, f"key of `{kind}`")
    own = {f"objective.{name}" for name in plain["objective"]} - {
        *("objective.gradient_checkpointing", "objective.lk_decay", "objective.mix")
    }
    shared = {row[0].strip("`") for row in table(KEYS, "key of every kind")}
    assert {row[0].strip("`") for row in rows} - shared == own - shared | more
    for key, default, _ in ([cell.strip("`") for cell in row] for row in rows):
        section, name = key.split(".")
        assert str(plain[section][name]) == default, key


def test_the_variants_of_the_recipes_guide_are_options_of_a_head() -> None:
    names = [name for row in table(KEYS, "option") for name in re.findall(r"`(\w+)`", row[0])]
    assert len(names) > 8 and set(names) <= set(EagleConfig.option_names())
    fields = EagleConfig.__dataclass_fields__
    for cells in table(KEYS, "option"):
        for name, shown in zip(re.findall(r"`(\w+)`", cells[0]), cells[1].split(", "), strict=False):
            assert name == "boundaries" or str(fields[name].default).lower() == shown, name


def test_the_default_boundaries_of_the_formats_guide_are_ours() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    ours, theirs = (tuple(map(int, row[3].split(","))) for row in table(text, "place")[:2])
    assert ours == default_boundaries(32) and theirs == tuple(boundary - 1 for boundary in ours)
    assert ", ".join(map(str, default_boundaries(8))) in text


NOTEBOOK = Path(__file__).parents[2] / "examples" / "eagle3.ipynb"
STEPS = 4
SECONDS = 600
"""Longest a cell may take, on a busy machine; the whole takes well under a minute on two quiet cores."""


@pytest.fixture(scope="module")
def stored() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_stored_without_outputs(stored: Any) -> None:
    nbformat.validate(stored)
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert len(code) > 8
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.slow
# Third parties' warnings, of sockets and paths, are not ours to fix.
@pytest.mark.filterwarnings("ignore")
def test_it_trains_a_head_that_changes_no_answer_and_exports_it(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_EXAMPLE_STEPS", str(STEPS))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    client = NotebookClient(stored, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()

    shown = {cell.source: "".join(map(_shown, cell.outputs)) for cell in stored.cells if cell.cell_type == "code"}
    assert "'identical': True" in _under(shown, '"identical"')
    assert f"'steps': {STEPS}" in _under(shown, "outcome = run.train")
    assert "image/png" in _under(shown, "plt.subplots")
    assert _under(shown, "exported.command").startswith("'vllm serve ")
    assert "'vllm', 'ok'" in _under(shown, "diagnose(")
    assert "'the same text': True" in _under(shown, '"the same text"')


def _under(shown: dict[str, str], words: str) -> str:
    """What the cell that holds these words displayed; the last one, if several do."""
    return [output for source, output in shown.items() if words in source][-1]


def _shown(output: Any) -> str:
    data = output.get("data", {})
    return "image/png" if "image/png" in data else data.get("text/plain", "")
