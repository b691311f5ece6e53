"""Reads a chat template that is given in place of a model's own. Imports no torch."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import ArgumentError, nearest

if TYPE_CHECKING:
    from jinja2.nodes import Template
    from transformers import PreTrainedTokenizerBase

SHIPPED = ("hermes",)  # Names of templates that come with forerun: ``NAME.jinja`` beside this module
_MARKS = re.compile(r"<\|im_(?:start|end)\|>")  # Of ChatML: as text instead of tokens they would mean nothing
_TRANSFORMERS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # A tag of transformers' own


def read_template(given: str | Path | None) -> str | None:
    """Return the text of a chat template: a shipped one's by its name, a file's, or `given` itself where it is Jinja,
    as in vLLM. None for None.

    Raises:
        ArgumentError: there is no such file, it cannot be read, or its Jinja is broken.
    """
    if given is None:
        return None
    text = str(given)
    if text in SHIPPED:
        return (files("forerun.model") / f"{text}.jinja").read_text(encoding="utf-8")
    if not any(mark in text for mark in ("{{", "{%", "\n")):
        path = Path(given).expanduser()
        if not path.is_file():
            raise ArgumentError(
                f"there is no chat template {text}: expected a Jinja file, the template's own text (with {{{{ or "
                f"{{%), or {' or '.join(SHIPPED)}.{nearest(text, SHIPPED)}"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"the chat template {path} cannot be read: {error}") from error
    _check_syntax(text)
    return text


def check_fits(template: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ArgumentError if a template writes ChatML's marks and the tokenizer has no tokens for them."""
    lacking = sorted(set(_MARKS.findall(template)) - tokenizer.get_vocab().keys())
    if lacking:
        raise ArgumentError(
            f"the chat template writes {' and '.join(lacking)}, which this model has no tokens for: it is another "
            "model's template"
        )


@lru_cache(maxsize=16)
def read_variables(template: str) -> frozenset[str]:
    """Return the variables that a chat template reads. Raises ArgumentError if its Jinja is broken."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(_check_syntax(template)))


def _check_syntax(text: str) -> Template:
    from jinja2 import Environment, TemplateSyntaxError

    try:
        return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TRANSFORMERS.sub("", text))
    except TemplateSyntaxError as error:
        raise ArgumentError(f"the chat template is no Jinja that can be read: line {error.lineno}: {error}") from error
