"""The shipped models by name, and the shipped prompts."""

from pathlib import Path

import pytest

import forerun
from forerun import LLM, SamplingParams, demo, shipped
from forerun.errors import CheckpointError
from forerun.heads.files import TargetFacts, read_head
from forerun.types import SpeculationStats


def test_other_names_stay_as_they_are(tmp_path: Path) -> None:
    assert shipped.resolve("org/model") == "org/model"
    assert shipped.resolve(tmp_path) == tmp_path


def test_a_missing_demo_model_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match=r"pip install \./forerun-demo"):
        shipped.resolve("demo-draft")


def test_names_lead_to_folders_and_prompts_get_their_names_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").touch()
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "html--parser.py.txt").write_text("text")
    assert shipped.resolve("demo") == tmp_path / "target"
    assert [(prompt.name, prompt.text) for prompt in demo.prompts()] == [("html/parser.py", "text")]


def test_what_ships() -> None:
    total = sum(path.stat().st_size for path in shipped.FOLDER.rglob("*.safetensors"))
    assert 10e6 < total <= 64e6
    whole = ("generation_config.json", "tokenizer.json", "chat_template.jinja")
    for name in shipped.MODELS:
        folder = Path(shipped.resolve(name))
        for file in ("config.json", "README.md", *(() if name == "demo-eagle3" else whole)):
            assert (folder / file).is_file(), f"{name}: {file}"
    assert len(demo.prompts()) >= 10
    assert all(len(prompt.text) >= 4000 for prompt in demo.prompts())
    edits = demo.edits()
    assert len(edits) >= 40 and len({edit.name for edit in edits}) == len(edits)
    assert all(edit.request.partition("\n\n")[2] != edit.answer for edit in edits)


def test_the_shipped_head_is_what_the_target_needs() -> None:
    head = read_head(shipped.resolve("demo-eagle3"), num_layers=TargetFacts.read("demo").num_layers)
    assert head.config.target_hidden_size == TargetFacts.read("demo").hidden_size
    drafter = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 5, "adaptive": False}
    llm = LLM("demo", speculative_config=drafter)
    prompts = [prompt.text[:600] for prompt in demo.prompts()[:6]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    stats = SpeculationStats()
    for output in llm.generate(prompts, params):
        stats.add(output.outputs[0].speculation)
    assert stats.mean_acceptance_length > 1.8  # 2.0 or a little more, by the processor's last bits


def test_the_shipped_target_edits_functions_that_it_was_not_trained_on() -> None:
    """Exactly as asked, with every word of the function in its place."""
    llm = LLM("demo", dtype="float32", speculative_config={"method": "suffix"}, max_num_seqs=16)
    asked = [edit for edit in demo.edits() if edit.name.startswith(("rename", "constant"))][::2]
    outputs = llm.generate(
        [llm.chat_prompt(edit.messages) for edit in asked], SamplingParams(temperature=0, max_tokens=700)
    )
    right = [edit.name for edit, output in zip(asked, outputs, strict=True) if output.outputs[0].text == edit.answer]
    assert len(right) >= 0.6 * len(asked), right


def test_the_playgrounds_first_example_is_the_edit_of_the_demo() -> None:
    page = (Path(forerun.__file__).parent / "serve" / "playground" / "playground.js").read_text()
    [edit] = [question.text for question in demo.QUESTIONS if question.name == "edit"]
    asked, letter = edit.split("\n\n")
    assert f'const LETTER = "{letter.strip()}";' in page and f"chat: `{asked}\\n\\n${{LETTER}}`" in page
