"""Models write tool calls in these formats; adding one is one file and one line here.

The most particular formats come first: the first whose signs a chat template shows is taken for its
own.
"""

from __future__ import annotations

from forerun.errors import ArgumentError, choices
from forerun.serve.tools.base import ToolFormat
from forerun.serve.tools.deepseek_v3 import DeepSeekV3
from forerun.serve.tools.glm45 import Glm45
from forerun.serve.tools.hermes import Hermes
from forerun.serve.tools.llama3_json import Llama3Json
from forerun.serve.tools.mistral import Mistral
from forerun.serve.tools.qwen3_coder import Qwen3Coder

FORMATS: dict[str, type[ToolFormat]] = {
    one.name: one for one in (Qwen3Coder, Glm45, Hermes, Mistral, DeepSeekV3, Llama3Json)
}


def check_parser(name: str) -> None:
    """Refuse an unknown ``--tool-call-parser``."""
    known = ("auto", "none", *FORMATS)
    if name not in known:
        raise ArgumentError(f"there is no tool-call-parser {name!r}.{choices(name, known)}")


def find_format(parser: str, template: str) -> type[ToolFormat] | None:
    """Return the format called `parser`; for ``auto`` the one that a chat template shows; None
    where there is none.
    """
    if parser != "auto":
        return FORMATS.get(parser)
    return next((one for one in FORMATS.values() if all(sign in template for sign in one.signs)), None)
