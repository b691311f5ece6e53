"""What is installed: wheel and sdist are built from the checkout, looked into, and the wheel is used from elsewhere."""

import datetime
import email
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from caches import empty_cache
from forerun.shipped import MODELS

ROOT = Path(__file__).parents[1]
MEBI = 2**20


def build(source: Path, folder: Path, kind: str = "wheel") -> Path:
    """What hatchling makes of a checkout: its wheel or its sdist."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo models' wheel."""
    return build(ROOT / "forerun-demo", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel holds, and nothing of this checkout."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


def committed(folder: str) -> set[str]:
    said = subprocess.run(["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(said.splitlines())


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    weights = tuple(f"src/forerun/demo/{folder}/" for folder in MODELS.values())
    own = {name.removeprefix("src/") for name in committed("src/forerun") if not name.startswith(weights)}
    assert len(own) > 250 and own <= names and "forerun/py.typed" in names
    assert not {name for name in names if not name.startswith("forerun") or "__pycache__" in name}
    assert not {name for name in names if name.endswith(".safetensors")}
    assert wheel.stat().st_size < 3 * MEBI


def test_the_demo_models_are_a_package_of_their_own(models: Path) -> None:
    with zipfile.ZipFile(models) as opened:
        names = {name for name in opened.namelist() if name.startswith("forerun_demo/")}
    weights = {name for folder in MODELS.values() for name in committed(f"src/forerun/demo/{folder}")}
    assert names == {"forerun_demo/__init__.py"} | {one.replace("src/forerun/demo", "forerun_demo") for one in weights}


@pytest.mark.slow
def test_the_sdist_builds_the_wheel_again(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
        opened.extractall(tmp_path / "unpacked", filter="data")
    beside = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "mkdocs.yml"}
    assert committed("src/forerun") | committed("docs") | beside <= names
    assert sdist.stat().st_size < 64 * MEBI
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build(unpacked, tmp_path / "dist")) as second, zipfile.ZipFile(wheel) as first:
        assert {one.filename: one.CRC for one in second.filelist} == {one.filename: one.CRC for one in first.filelist}


def test_the_metadata_names_licence_extras_and_entry_points(installed: Path) -> None:
    (folder,) = installed.glob("forerun-*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text(encoding="utf-8"))
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert {"serve", "gguf", "train", "bench", "peft"} <= set(metadata.get_all("Provides-Extra", []))
    points = (folder / "entry_points.txt").read_text()
    assert "forerun = forerun.cli:main" in points and "[sglang.srt.plugins]" in points
    assert (folder / "licenses" / "LICENSE").is_file()


ANSWERS = """
import json, sys
import forerun.cli

refused, models, command = sys.argv[1:]
print(forerun.__file__)
print([forerun.cli.main(words) for words in json.loads(refused)])
sys.path.append(models)
sys.exit(forerun.cli.main(json.loads(command)))
"""


def test_the_installed_package_answers(installed: Path, models: Path, tmp_path: Path) -> None:
    """The main job, from a folder that is not this one: nothing is found beside the package by chance. Without the demo
    models a line says how to get one."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "FORERUN_CACHE": empty_cache(tmp_path / "cache")}
    environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9", "FORERUN_MODELS": str(tmp_path / "models")}
    shutil.unpack_archive(models, tmp_path / "wheel", "zip")  # not `demo`: a folder of that name would be the model
    command = ["generate", "demo", "--prompt", "import os", "-n", "8", "--drafter", "eagle3"]
    command += ["--drafter-model", "demo-eagle3", "-t", "0", "--json"]
    refused = [command, ["demo"], ["demo", "--offline"]]
    words = [sys.executable, "-c", ANSWERS, json.dumps(refused), str(tmp_path / "wheel"), json.dumps(command)]
    ran = subprocess.run(words, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    where, codes, answer = ran.stdout.splitlines()
    assert Path(where).is_relative_to(installed) and codes == "[2, 2, 2]" and json.loads(answer)["text"]
    lines = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 3 and all("pip install ./forerun-demo" in line for line in lines)


@pytest.mark.slow
def test_an_empty_environment_runs_the_demo(wheel: Path, models: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    torch = re.search(r"^TORCH .?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    for wanted in ([torch[1]], [f"{wheel}[serve,train,bench]", str(models)]):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True, capture_output=True)
    command = [str(python.with_name("forerun")), "demo", "--json"]
    ran = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert json.loads(ran.stdout)["identical"] is True
    subprocess.run([str(python), "-m", "pip", "check"], check=True, capture_output=True)


@pytest.fixture(scope="module")
def release() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "recipes/release.py")))


DAY = datetime.date(2026, 12, 1)
LOG = "# Changelog\n\n## Unreleased\n### Added\n- A thing.\n\n## 0.1.0 - 2026-01-01\n- First.\n"


def test_a_release_moves_the_changelog_and_the_version(release: SimpleNamespace) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    changelog, changed = release.released(LOG, project, "99.0.0", DAY)
    assert "## Unreleased\n\n## 99.0.0 - 2026-12-01\n### Added\n- A thing.\n" in changelog
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    assert changed == project.replace(f'version = "{version}"', 'version = "99.0.0"', 1) != project
    ours = (ROOT / "CHANGELOG.md").read_text()
    assert ours.count("## Unreleased\n") == 1 and (version == "0.1.0" or f"## {version} - " in ours)


@pytest.mark.parametrize(
    ("changelog", "version", "words"),
    [
        (LOG, "0.0.9", "not newer"),
        (LOG, "0.1.0", "released already"),
        (LOG, "1.0", "three numbers"),
        (LOG.replace("- A thing.\n", ""), "0.2.0", "nothing stands"),
        ("# Changelog\n", "0.2.0", "a heading"),
    ],
)
def test_what_is_no_release_is_refused(release: SimpleNamespace, changelog: str, version: str, words: str) -> None:
    with pytest.raises(release.ReleaseError, match=words):
        release.released(changelog, 'version = "0.1.0"\n', version, DAY)


def test_a_release_of_what_is_not_committed_is_refused(
    release: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "CHANGELOG.md").write_text(LOG)
    assert release.main(["0.2.0"], root=tmp_path) == 2 and "commit or stash" in capsys.readouterr().err
    assert (tmp_path / "CHANGELOG.md").read_text() == LOG
    assert release.main(["2"], root=tmp_path) == 2 and "three numbers" in capsys.readouterr().err
