"""``--config FILE``: the options of a verb from a file. Knows no verb; imports no torch.

Flags win over environment variables, and those over the file.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection

FLAG = "--config"


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in what ``--config FILE`` says and the command line does not; nothing where no file was named.

    The signature is that of cyclopts' ``App.config``. Keys are the flags' names, with or without dashes; the file is
    YAML (so JSON is understood, too) or, with that suffix, TOML.

    Raises:
        ArgumentError: the file cannot be read or names another file.
        CycloptsError: it has an unknown key; the message names the nearest.
    """
    named = next((argument for argument in arguments if FLAG in argument.names and argument.tokens), None)
    if named is None:
        return
    from cyclopts.config import Dict

    path = named.tokens[0].value
    options = {str(key).lstrip("-").replace("_", "-"): _plain(value) for key, value in _read(path).items()}
    if "config" in options:
        raise ArgumentError(f"{path} names another file under 'config'; one file is read")
    given = {key: value for key, value in options.items() if value is not None}
    Dict(given, source=path, use_commands_as_keys=False)(app, commands, arguments)


def _read(path: str) -> dict[str, Any]:
    from cyclopts import CycloptsError
    from cyclopts.config import Toml, Yaml

    reader = Toml if path.endswith(".toml") else Yaml
    try:
        found = reader(path, must_exist=True).config
    except (CycloptsError, OSError, TypeError, ValueError) as error:
        raise ArgumentError(f"cannot read the options in {path}: {error}") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{path} must hold options, 'name: value' a line, got {type(found).__name__}")
    return found


def _plain(value: Any) -> Any:
    """A mapping is what the flag takes as JSON, as --speculative-config does."""
    return json.dumps(value) if isinstance(value, dict) else value
