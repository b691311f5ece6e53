"""What the verbs that run a model have in common: load it, stream an answer to the terminal, stop cleanly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.cli import console, show
from forerun.cli.options import LoadOptions

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.types import RequestOutput, StreamChunk


def quiet_libraries() -> None:
    """Keep other people's progress bars and advice out of the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load(model: str, options: LoadOptions, speculative_config: dict[str, Any] | None, **more: Any) -> LLM:
    """The model behind the Python API, with a spinner on stderr while it loads."""
    with console.working(f"loading {model}"):
        quiet_libraries()
        from forerun import LLM

        return LLM(
            model,
            speculative_config=speculative_config,
            dtype=options.dtype,
            device=options.device,
            max_model_len=options.max_model_len,
            **({"compile": True} if options.compile else {}),
            **more,
        )


class Printer:
    """Prints a stream of chunks as they come.

    Args:
        stdout: where the text goes.
        show_draft: colour each token by its source.
    """

    def __init__(self, stdout: Console, *, show_draft: bool) -> None:
        self.stdout, self.show_draft = stdout, show_draft

    def run(self, chunks: Iterable[StreamChunk]) -> RequestOutput | None:
        """Print everything; returns the finished request, None where the stream ended without one."""
        output = None
        for chunk in chunks:
            if self.show_draft:
                self.stdout.print(show.coloured(chunk.tokens, self.stdout), end="")
            else:
                self.stdout.out(chunk.text, end="", highlight=False)
            self.stdout.file.flush()
            output = chunk.output or output
        self.stdout.out("")
        return output
