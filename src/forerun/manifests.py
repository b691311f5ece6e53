"""``manifest.json``: what a directory of forerun's own holds, and when it is refused. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import DataError
from forerun.writing import written

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestKind:
    """Directories of one kind."""

    format: str
    """What the manifest calls itself."""
    version: int
    """That this forerun writes and reads."""
    what: str
    """For people: a datastore."""
    remedy: str
    """How such a directory is made."""

    def write(self, folder: Path, entries: Mapping[str, Any]) -> None:
        """Save what the directory holds; a killed run leaves the old file or the new one."""
        text = json.dumps({"format": self.format, "version": self.version, **entries}, indent=2)
        with written(folder / MANIFEST) as fresh:
            fresh.write_text(text + "\n", encoding="utf-8")

    def read(self, folder: Path) -> dict[str, Any]:
        """What was written; `damaged` is for what is missing in it.

        Raises:
            DataError: there is no manifest, it is broken, of another kind of directory or of another version.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(f"{folder} is not {self.what}, it has no {MANIFEST}; {self.remedy}")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is no JSON ({error}); {self.remedy}") from error
        if not isinstance(found, dict) or found.pop("format", None) != self.format:
            raise DataError(f"{path} does not describe {self.what}; {self.remedy}")
        version = found.pop("version", None)
        if version != self.version:
            raise DataError(f"{path} has format version {version!r}, this forerun reads {self.version}; {self.remedy}")
        return found

    def damaged(self, folder: Path, how: object) -> DataError:
        """The error for entries that are missing or garbled."""
        return DataError(f"{folder / MANIFEST} lacks or garbles an entry ({how}); {self.remedy}")
