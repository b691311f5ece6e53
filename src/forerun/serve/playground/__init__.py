"""The page at ``/``: one HTML, one CSS and one JavaScript file, served as they are."""

from __future__ import annotations

from importlib.resources import files

FILES = {"index.html": "text/html", "playground.css": "text/css", "playground.js": "text/javascript"}
"""Name -> media type."""


def page(name: str) -> tuple[str, str]:
    """Text and media type of one of the page's files."""
    return (files(__name__) / name).read_text(encoding="utf-8"), FILES[name]
