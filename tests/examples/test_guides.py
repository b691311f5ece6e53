"""Every command that the guides and recipes show is understood, every key and default of the training guide is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import build_app
from forerun.drafters.heads.config import EagleConfig, default_boundaries
from forerun.training.fresh import FREE
from forerun.training.recipe import TrainRecipe, read_recipe, to_plain

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "recipes" / "eagle3").glob("*.yaml"))
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def commands(path: Path) -> list[str]:
    """Lines of code blocks, or of a recipe's comments, that run the command."""
    text = path.read_text(encoding="utf-8")
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    if path.suffix == ".md":
        lines = [line for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    return [line for line in lines if re.search(r"^(\S*/)?forerun [a-z]|\| forerun [a-z]|-m forerun\.cli ", line)]


def words_of(command: str) -> list[str]:
    """What the command line is given."""
    words = shlex.split(command, comments=True)
    start = next(index for index, word in enumerate(words) if re.fullmatch(r"(\S*/)?forerun|forerun\.cli", word))
    return words[start + 1 :]


SHOWN = [(path.name, command) for path in (*PAGES, *RECIPES) for command in commands(path)]


def test_there_are_commands_and_recipes() -> None:
    assert len(SHOWN) > 40
    assert {path.stem for path in RECIPES} >= {"demo", "llama-3.1-8b", "qwen3-8b"}


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[f"{page}: {command}"[:90] for page, command in SHOWN])
def test_a_command_that_is_shown_is_understood(page: str, command: str) -> None:
    words = words_of(command)
    build_app().parse_args(words, exit_on_error=False, print_error=False)
    if words[:2] == ["train", "eagle3"]:
        changes = [word for word in words[2:] if re.fullmatch(r"[a-z_.]+=.*", word)]
        given = {"target": "a", "data": "b", "output": "c"}
        read_recipe(None, changes, given)


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match="--sources"):
        build_app().parse_args(
            ["features", "--target", "a", "--data", "b", "--output", "c", "--sources", "vllm"],
            exit_on_error=False,
            print_error=False,
        )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_complete_and_its_head_can_be_built(path: Path) -> None:
    recipe = read_recipe(path)
    assert set(recipe.draft.options) <= set(FREE)
    layers = {"demo": 8, "meta-llama/Llama-3.1-8B-Instruct": 32, "Qwen/Qwen3-8B": 36}[recipe.target]
    boundaries = tuple(recipe.draft.options.get("boundaries", default_boundaries(layers)))
    assert boundaries == default_boundaries(layers)
    made = EagleConfig(
        hidden_size=64,
        target_hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=128256,
        draft_vocab_size=recipe.draft.vocab_size or 128256,
        **{**recipe.draft.options, "boundaries": boundaries},
    )
    assert not made.qk_norm and not made.norm_before_residual, "a recipe's head is read by every large engine"
    assert recipe.evaluation.prompts not in (None, recipe.data)


def table(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose header begins with `first`."""
    rows = text.split(f"| {first} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_keys_and_defaults_of_the_training_guide_are_the_recipes() -> None:
    defaults = to_plain(TrainRecipe(target="a", data="b", output="c"))
    rows = table(TRAINING, "key")
    assert len(rows) > 25
    for key, default, _ in rows:
        value: Any = defaults
        for part in key.strip("`").split("."):
            value = value[part]
        assert str(value) == default.strip("`"), key


def test_the_variants_of_the_training_guide_are_options_of_a_head() -> None:
    names = [name for row in table(TRAINING, "option") for name in re.findall(r"`(\w+)`", row[0])]
    assert len(names) > 8 and set(names) <= set(FREE)
    fields = EagleConfig.__dataclass_fields__
    for cells in table(TRAINING, "option"):
        for name, shown in zip(re.findall(r"`(\w+)`", cells[0]), cells[1].split(", "), strict=False):
            assert name == "boundaries" or str(fields[name].default).lower() == shown, name


def test_the_default_boundaries_of_the_heads_guide_are_ours() -> None:
    text = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
    ours, theirs = (tuple(map(int, row[3].split(","))) for row in table(text, "place")[:2])
    assert ours == default_boundaries(32) and theirs == tuple(boundary - 1 for boundary in ours)
    assert ", ".join(map(str, default_boundaries(8))) in text
