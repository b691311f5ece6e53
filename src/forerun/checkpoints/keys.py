"""Reads a configuration key by key, with types, and keeps account of what nobody read. Knows no format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import CheckpointError


class Keys:
    """The keys of a JSON object. A key that is absent and one that is null are the same."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values, self._where = dict(values), where
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """The value as it is, or None."""
        self._read.add(name)
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number.

        Raises:
            CheckpointError: it is none, or it is absent and there is no default.
        """
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(f"{self._where} has no {name}; a head's configuration needs it")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "a whole number")
        return value

    def number(self, name: str, default: float) -> float:
        """A number; CheckpointError if it is none."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; CheckpointError if it is neither."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string; CheckpointError if it is none."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers, None if it is absent or empty; CheckpointError if it is something else."""
        value = self.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list | tuple) or not all(type(entry) is int for entry in value):
            raise self._wrong(name, value, "a list of whole numbers")
        return tuple(value)

    def nested(self, name: str) -> Keys:
        """An object inside, empty if it is absent; CheckpointError if it is something else."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return Keys(value or {}, f"{name} in {self._where}")

    def rest(self) -> dict[str, Any]:
        """What has not been read so far."""
        return {name: value for name, value in self._values.items() if name not in self._read}

    def _wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{name} of {self._where} must be {wanted}, got {value!r}")
