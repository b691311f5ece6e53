"""Every command that a recipe prints runs as printed, on small models and little data in place of the large ones."""

import glob
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from assistant import assistant
from forerun import shipped
from forerun.cli import build_app, main
from forerun.training.recipe import read_recipe
from training.data.conftest import CHAT, byte_tokenizer, write_lines

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "eagle3").glob("*.yaml"))
SHORT = ("training.steps=2", "evaluation.count=1", "evaluation.prompt_tokens=32", "evaluation.settings={max_tokens: 4}")
"""As little training as there can be."""
SHORTER = ("training.optimizer=adamw", "windows.rows=1", "objective.steps=1")
"""For the shipped target, whose matrices take Muon ten seconds a step where bfloat16 is slow."""
SMALL = {
    **{"vocab_size": 34_000, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16_384},
}
"""Of a stand-in, whose number of layers is the large one's: the recipes' boundaries and draft vocabularies must fit."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with assistant() as url:
        yield url


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the names of the large models are small ones'."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer(extra=(f"{number:05}" for number in range(30_000)))
    large = {
        "meta-llama/Llama-3.1-8B-Instruct": LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, **SMALL)),
        "Qwen/Qwen3-8B": Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=36, **SMALL)),
    }
    assert 32_000 < len(tokenizer) < SMALL["vocab_size"]
    for name, model in large.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def workplace(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's root as the recipes see it."""
    for path in (ROOT / "recipes", ROOT / "src", *models.iterdir()):
        (tmp_path / path.name).symlink_to(path)
    write_lines(tmp_path / "prompts.jsonl", [{"messages": CHAT[:2]}, {"messages": CHAT[:4]}])
    write_lines(tmp_path / "heldout.jsonl", [{"messages": CHAT}])
    (tmp_path / "library").mkdir()
    for number in range(3):
        (tmp_path / "library" / f"{number}.py").write_text(f"import os\n\nprint(os.listdir('{number}'))\n" * 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(recipe: Path) -> list[str]:
    """The commands in a recipe's head."""
    lines = [line.lstrip("# ").rstrip() for line in recipe.read_text().splitlines() if line.startswith("#  ")]
    return [line for line in lines if re.match(r"forerun |torchrun ", line)]


def words_of(command: str, library: str) -> list[str]:
    """What the shell hands to the command line: variables and patterns replaced; one process instead of several."""
    words = []
    for word in shlex.split(command.replace("$LIBRARY", library)):
        words += sorted(glob.glob(word)) if "*" in word else [word]
    return words[words.index("forerun.cli" if words[0] == "torchrun" else "forerun") + 1 :]


def train(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Plan as it is written but for the length of windows, then train for two steps."""
    words = [word for word in words if word != "--dry-run"] + ["windows.length=16"]
    capsys.readouterr()
    assert main([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    output = Path(plan["recipe"]["output"])
    assert plan["seconds_per_step"] > 0 and not output.exists()
    shorter = SHORTER if plan["trainable_parameters"] > 2_000_000 else ()
    assert main([*words, *SHORT, *shorter]) == 0
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in lines) and any("eval/chain_t0" in line for line in lines)
    assert (output / "head" / "config.json").is_file()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_command_of_a_recipe_is_understood(recipe: Path) -> None:
    for command in printed(recipe):
        words = words_of(command, "library")
        build_app().parse_args(words, exit_on_error=False, print_error=False)
        if words[:2] == ["train", "eagle3"]:
            assert read_recipe("eagle3", recipe, [], {}).kind == "eagle3"


@pytest.mark.parametrize("text", ["training:\nevaluation:\n  settings:\n", ""])
def test_a_section_or_file_may_be_empty(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    words = ["target=t", "data=d", "output=o", "training.steps=5"]
    assert read_recipe("eagle3", tmp_path / "recipe.yaml", words).training.steps == 5
    assert read_recipe("eagle3", tmp_path / "recipe.yaml", [*words, "evaluation="]).evaluation.count == 8


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_command_of_a_recipe_runs(
    recipe: Path, workplace: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = printed(recipe)
    assert len(commands) >= 4
    trained = ""
    for command in commands:
        words = words_of(command.replace("http://localhost:8000/v1", endpoint), str(workplace / "library"))
        if words[:2] != ["train", "eagle3"]:
            assert main([*words, *(("--max-tokens", "8") if words[0] == "generate" else ())]) == 0, command
        elif not trained:  # the next one is the same without --dry-run
            trained = command
            train(words, capsys)
    assert str(recipe.relative_to(ROOT)) in trained


@pytest.mark.slow
def test_the_shipped_heads_recipe_runs_as_its_stage_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`recipes/demo/make.py head`, on three files, two prompts and two steps."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "demo"))
    import corpus
    import head

    names = ("library.py", "test_one.py", "other.py")
    files = [
        corpus.SourceFile(name=name, text="def first(value):\n    found = value\n    return found\n\n\n" * 100)
        for name in names
    ]
    monkeypatch.setattr(corpus, "read_standard_library", lambda: files)
    monkeypatch.setattr(corpus, "split", lambda found: (found[:2], found[2:]))
    monkeypatch.setattr(corpus, "is_prompt", lambda file: True)
    monkeypatch.setattr(head, "PIECES", 2)
    monkeypatch.setattr(head, "EDITS", 2)
    for name in ("ANSWER_TOKENS", "EDIT_TOKENS"):
        monkeypatch.setattr(head, name, 8)
    ran: list[str] = []

    def run(words: list[str]) -> int:
        ran.append(" ".join(words[:2]))
        if words[0] != "train":
            return main(words)
        train(list(words), capsys)
        return 0

    monkeypatch.setattr(head, "main", run)
    (tmp_path / "target").symlink_to(shipped.resolve("demo"))
    head.make_head(tmp_path)
    assert ran == ["data regenerate", "data regenerate", "data prepare", "data prepare", "train eagle3"]
