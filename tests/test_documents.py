"""What README and CONTRIBUTING claim is there, and the drafter that the documents show works as it stands."""

import dataclasses
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

from engine.conftest import checkpoint
from forerun import LLM, SamplingParams
from forerun.certify.contract import CHECKS
from forerun.decode.drafter import DraftContext
from forerun.drafters import DRAFTERS
from forerun.types import Source

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

__all__ = ["checkpoint"]


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)\b(?= {2,}#|`| ARGS)", README + CONTRIBUTING))
    assert {"demo", "test", "test-slow", "check", "bench", "docs"} <= targets
    assert {"demo", "test", "test-slow"} <= named <= targets


def test_every_path_that_make_hands_to_a_program_exists() -> None:
    """A folder that was renamed ended a target of before with no test run."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS", "WORKERS"))}
    made = [f"{name}/.ready" for name in (".venv", ".venv-vllm", ".venv-sglang", ".venv-llama")] + [".venv/.docs-ready"]
    targets = ["waits", "docs", "test-vllm", "test-sglang", "test-llama"]
    command = ["make", "-n", *(word for mark in made for word in ("-o", mark)), *targets]
    said = subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, check=True).stdout
    paths = {word for word in said.split() if re.fullmatch(r"(tests|docs|benchmarks|recipes)(_\w+|/[\w./-]+)", word)}
    assert {"tests/simulated/waits.py", "docs/make_reference.py", "tests_vllm", "tests_sglang", "tests_llama"} <= paths
    assert not {path for path in paths if not (ROOT / path).exists()}


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_tree_for_contributors_is_the_tree() -> None:
    [block] = re.findall(r"^```text\n(.*?)^```$", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    inside = re.findall(r"^  ([a-z_./ ]+?) {2,}", block, re.MULTILINE)
    names = [name for line in inside for name in line.split()]
    assert len(names) > 8
    for name in names:
        assert (ROOT / "src" / "forerun" / name).exists(), name
    packages = {path.parent.name for path in (ROOT / "src" / "forerun").glob("*/__init__.py")}
    assert packages <= {name.rstrip("/") for name in names}


SOURCES = ("src", "tests", "tests_cuda", "docs", "benchmarks", "deploy", "examples", "recipes")
"""Folders whose files the pages name."""
NOT_OURS = {"ar_validate.py", "calibrate_draft_vocab.py", "chunk.py", "echo.py", "llm_args.py", "vllm_engine.py"}
"""Names of files of other projects, of Python's library and of a reader's own."""


def test_every_source_file_that_a_page_names_exists() -> None:
    """A path in backticks ends like one of ours, so `model/cache.py` and `cache.py` both name a file."""
    files = [path.relative_to(ROOT).as_posix() for folder in SOURCES for path in (ROOT / folder).rglob("*")]
    endings = {file.split("/", start)[-1] for file in files for start in range(file.count("/") + 1)}
    folders = {path.name for root in (ROOT, ROOT / "src" / "forerun") for path in root.iterdir() if path.is_dir()}
    folders -= {"build"}  # Nothing in it is in the repository
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = set[tuple[str, str]]()
    for page in pages:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for path in re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", prose):
            if re.search(r"\.(py|c|h|jinja)$", path) or (path.split("/")[0] in folders and "/" in path):
                named.add((page.name, path))
    assert ("design.md", "decode/step.py") in named and ("design.md", "core/") in named
    missing = [one for one in sorted(named) if one[1].strip("/") not in endings and not (ROOT / one[1]).exists()]
    assert [one for one in missing if one[1].split("/")[-1] not in NOT_OURS] == []


def anchors(page: Path) -> set[str]:
    """What a link can name of a page: its headings in lower case, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not heading or heading in anchors(there), f"{page.name}: {target}#{heading}"


@pytest.mark.parametrize(("number", "name"), [(0, "EchoDrafter"), (1, "AfterDrafter"), (2, "RecentDrafter")])
def test_a_drafter_on_its_page_works(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    """As a file of the reader's own, which keeps its contract."""
    page = (ROOT / "docs/write-a-drafter.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]
    (tmp_path / f"on_a_page_{number}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    config = {"method": f"on_a_page_{number}:{name}", "adaptive": False}
    assert [said for _, look in CHECKS.values() for passed, said in [look(config)] if not passed] == []
    llm = LLM(checkpoint, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=24)
    plain = llm.generate(["the cat"], params, speculative=False)[0].outputs[0]
    drafted = llm.generate(["the cat"], params)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids and drafted.speculation.num_draft_tokens > 0


def test_the_page_names_every_field_of_the_context() -> None:
    page = (ROOT / "docs/write-a-drafter.md").read_text(encoding="utf-8")
    hidden = {"cache_salts", "failures"}  # of which the page names `salt` and `fail`
    fields = {field.name for field in dataclasses.fields(DraftContext)} - hidden
    assert not {name for name in fields if f"context.{name}" not in page}


def test_the_page_names_every_source_of_a_token() -> None:
    page = (ROOT / "docs" / "generating.md").read_text()
    [said] = re.findall(r"A `source` is (.*?)\n\* ", page, re.DOTALL)
    assert re.findall(r'`"(\w+)"`', said) == [source.value for source in Source]


def test_the_menu_of_the_site_has_every_page() -> None:
    def pages(item: object) -> list[str]:
        if isinstance(item, str):
            return [item]
        return [page for one in (item.values() if isinstance(item, dict) else item) for page in pages(one)]

    menu = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(menu) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_the_reference_is_what_the_source_says() -> None:
    page = runpy.run_path(str(ROOT / "docs/make_reference.py"))["page"]()
    assert page == (ROOT / "docs/reference.md").read_text(encoding="utf-8"), "run: python docs/make_reference.py"
    for name in DRAFTERS:
        assert f"### `{name}`\n" in page
    for option in ("prompt_lookup_max", "training.learning_rate", "max_body_bytes", "objective.", "LLM.generate"):
        assert option in page
    assert "0x" not in page, "no address of an object"


def test_tokens_per_pass_has_one_name() -> None:
    """All tokens over all passes; the other figure is vLLM's mean acceptance length, and called so."""
    others = re.compile(r"per (target|drafted|speculative|verifying|verification) pass|tokens_per_step", re.IGNORECASE)
    folders = ("src", "docs", "deploy", "benchmarks", "examples")
    files = [ROOT / "README.md", *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.suffix in {".py", ".md", ".js", ".html", ".json", ".ipynb"}
        for match in others.finditer(path.read_text(encoding="utf-8"))
    ]
    # What `forerun train --dry-run` calls so are tokens of a step of the optimizer.
    assert [one for one in found if not one.startswith("src/forerun/training/dry_run.py")] == []
