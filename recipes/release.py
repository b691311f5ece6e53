"""Make a release: ``python recipes/release.py 0.2.0``.

The changelog's *Unreleased* becomes the version, which ``pyproject.toml`` gets, too; wheel and sdist are built, and the
wheel of the demo models, which keep their own version as long as they stay the same. Nothing is published: what is left
to do is printed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGELOG, PROJECT, DIST = "CHANGELOG.md", "pyproject.toml", "build/dist"
_VERSION = re.compile(r"^version = \"([^\"]+)\"$", re.MULTILINE)
_UNRELEASED = re.compile(r"^## Unreleased\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class ReleaseError(Exception):
    """What keeps this from being a release, and what to do."""


def numbers(version: str) -> tuple[int, ...]:
    """``"1.2.3"`` as (1, 2, 3). ReleaseError: it is none."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"a version is three numbers, for example 0.2.0; got {version}")
    return tuple(map(int, version.split(".")))


def released(changelog: str, project: str, version: str, day: datetime.date) -> tuple[str, str]:
    """Both files' texts for this version. ReleaseError: nothing is unreleased, or the version is not newer."""
    before, news = _VERSION.search(project), _UNRELEASED.search(changelog)
    if before is None or news is None:
        raise ReleaseError(f'{PROJECT} needs a line version = "...", {CHANGELOG} a heading ## Unreleased')
    if numbers(version) < numbers(before[1]) or f"## {version} " in changelog:
        raise ReleaseError(f"{version} is not newer than {before[1]}, or released already")
    if not re.search(r"^- ", news[1], re.MULTILINE):
        raise ReleaseError(f"nothing stands under ## Unreleased in {CHANGELOG}")
    heading = f"## Unreleased\n\n## {version} - {day.isoformat()}\n"
    return changelog.replace("## Unreleased\n", heading, 1), _VERSION.sub(f'version = "{version}"', project, count=1)


def main(arguments: list[str] | None = None, *, root: Path = ROOT) -> int:
    """Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    version = parser.parse_args(arguments).version
    try:
        numbers(version)
        if _told("git", "status", "--porcelain", root=root):
            raise ReleaseError("what is not committed would be missing from the tag; commit or stash it first")
        files = [root / CHANGELOG, root / PROJECT]
        today = datetime.datetime.now(datetime.UTC).date()
        texts = released(files[0].read_text(), files[1].read_text(), version, today)
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        _told(sys.executable, "-m", "hatchling", "build", "-d", DIST, root=root)
        models = ("build", "-t", "wheel", "-d", f"../{DIST}")
        _told(sys.executable, "-m", "hatchling", *models, root=root / "forerun-demo")
    except (ReleaseError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None)
        print(f"error: {said.strip() if said else error}", file=sys.stderr)  # noqa: T201
        return 2
    todo = (
        f"git commit -am 'Release {version}'",
        f"git tag -a v{version} -m 'forerun {version}'",
        f"git push origin HEAD v{version}",
        f"python -m twine upload --skip-existing {DIST}/forerun-{version}* {DIST}/forerun_demo-*",
    )
    print("\n".join(todo))  # noqa: T201
    return 0


def _told(*command: str, root: Path) -> str:
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
