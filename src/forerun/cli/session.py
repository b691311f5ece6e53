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
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def load(model: str, options: LoadOptions, speculative_config: dict[str, Any] | None, **more: Any) -> LLM:
    """The model behind the Python API, with a spinner on stderr while it loads. An unknown rule is refused first."""
    with console.working(f"loading {model}"):
        quiet_libraries()
        from forerun import LLM, SpeculativeConfig
        from forerun.verify import rule_named

        wish = SpeculativeConfig.parse(speculative_config)
        if wish is not None and wish.rule is not None:
            rule_named(wish.rule)

        return LLM(model, speculative_config=speculative_config, **loading_arguments(options), **more)


def loading_arguments(options: LoadOptions) -> dict[str, Any]:
    """The options as `LLM` and `AsyncLLM` take them."""
    return {
        "dtype": options.dtype,
        "device": options.device,
        "max_model_len": options.max_model_len,
        "reproducible": options.reproducible,
        **({"compile": True} if options.compile else {}),
    }


class Printer:
    """Prints a stream of chunks as they come.

    Args:
        stdout: where the text goes; byte for byte unless colours are shown.
        show_draft: colour each token by its source, where there is a terminal to do so.
    """

    def __init__(self, stdout: Console, *, show_draft: bool) -> None:
        self.stdout, self.coloured = stdout, show_draft and stdout.is_terminal

    def run(self, chunks: Iterable[StreamChunk]) -> RequestOutput | None:
        """Print everything and end the line, also when interrupted; None where the stream ended without an output."""
        output = None
        try:
            for chunk in chunks:
                self._print(chunk)
                output = chunk.output or output
        finally:
            self.stdout.print()
            self.stdout.file.flush()
        return output

    def _print(self, chunk: StreamChunk) -> None:
        if self.coloured:
            self.stdout.print(show.coloured(chunk.tokens, self.stdout), end="")
        else:
            self.stdout.file.write(chunk.text)
        self.stdout.file.flush()
