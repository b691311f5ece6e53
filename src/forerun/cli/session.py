"""This module loads a model, streams a completion coloured by the tokens' sources, and prints
statistics.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forerun.cli import console
from forerun.cli.options import TargetOptions
from forerun.control.config import SpeculativeConfig, check_models_named, check_sizes
from forerun.core import rules
from forerun.drafters import DRAFTERS, check_option_names, declared_options
from forerun.model import checks
from forerun.model.templates import read_template
from forerun.params import NEUTRAL
from forerun.types import OutputToken, RequestOutput, SamplingParams, Source, StreamChunk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun import LLM

SOURCES: dict[Source, tuple[str, str, str]] = {
    Source.DRAFT: ("accepted draft", "on #1f4d2b", "bold"),
    Source.RECOVERED: ("recovered", "yellow underline", "underline"),
    Source.BONUS: ("bonus", "#6cb6d9", "dim"),
    Source.TARGET: ("plain", "", ""),
}
"""A token's source is shown in words, in colour, and by shape alone where ``NO_COLOR`` is set."""


def colour_tokens(tokens: Iterable[OutputToken], console: Console) -> Text:
    """Return the tokens' text, each in the style of its source; a line break is never tinted."""
    text = Text()
    for token in tokens:
        _, colour, shape = SOURCES[token.source]
        for line in token.text.splitlines(keepends=True):
            body = line.rstrip("\r\n")
            text.append(body, shape if console.no_color else colour).append(line[len(body) :])
    return text


def print_legend(place: Console) -> None:
    """Print one line that names the styles of tokens, where stdout is a terminal and so has them."""
    if console.out().is_terminal:
        styles = ((words, shape if place.no_color else colour) for words, colour, shape in SOURCES.values())
        place.print(Text("  ").join(Text(f" {words} ", style) for words, style in styles))


def tokens_per_second(output: RequestOutput) -> float | None:
    """Return the decoding speed of the first completion: tokens after the first over the time after the
    first.
    """
    answer = output.outputs[0]
    if not output.decode_s or len(answer.token_ids) < 2:
        return None
    return (len(answer.token_ids) - 1) / output.decode_s


def statistics_line(output: RequestOutput) -> Text:
    """Return tokens, speed and acceptance of one finished request in a line; a lossy rule is red."""
    from forerun.core.rules import rule_named

    answer = output.outputs[0]
    speed = tokens_per_second(output)
    first = output.time_to_first_token_s
    stats = answer.speculation
    parts = [f"{len(answer.token_ids)} tokens"]
    parts += [] if speed is None else [f"{speed:.1f} tokens/s"]
    parts += [] if first is None else [f"TTFT {first * 1000:.0f} ms"]
    parts.append(f"{stats.tokens_per_pass:.2f} tokens per pass")
    if stats.num_spec_steps:
        parts.append(f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafted tokens accepted")
    parts.append(f"finish_reason {answer.finish_reason}")
    lossy = [rule for rule in stats.steps_per_rule if not rule_named(rule).lossless]
    line = Text(" · ".join(parts), "dim")
    return line.append(f" · LOSSY rule {', '.join(lossy)}", "bold red") if lossy else line


def describe_asking(llm: LLM, params: SamplingParams, *, raw: bool) -> Text:
    """Say in a line how the model is prompted: with its chat template or without, and with which
    sampling, by whose wish.
    """
    from forerun.plan.measured import describe_request

    return Text(f"{describe_request(llm, raw=raw)}; {describe_sampling(llm, params)}", "dim")


def describe_sampling(llm: LLM, params: SamplingParams) -> str:
    """Describe the sampling of `params` on this model, and the part of it that comes from the
    checkpoint.
    """
    defaults = llm.get_default_sampling_params()
    chosen = list[str]()
    inherited = list[str]()
    for name, neutral in NEUTRAL.items():
        requested, default = getattr(params, name), getattr(defaults, name)
        if requested is not None and (requested != neutral or name == "temperature"):
            chosen.append(f"{name} {requested:g}")
        elif requested is None and default != neutral:
            inherited.append(f"{name} {default:g}")
    if (params.temperature if params.temperature is not None else defaults.temperature) == 0:
        return "greedy (temperature 0)"
    if params.temperature is None and defaults.temperature == NEUTRAL["temperature"]:
        chosen.insert(0, "temperature 1, since the checkpoint has none (-t 0 is greedy)")
    parts = [", ".join(chosen)] if chosen else []
    parts += [f"{', '.join(inherited)} from its generation_config.json"] if inherited else []
    return f"sampling: {'; '.join(parts)}"


def answer_record(output: RequestOutput, *, with_tokens: bool) -> dict[str, Any]:
    """Return the first completion as ``generate --json`` prints it."""
    speed = tokens_per_second(output)
    answer = output.outputs[0]
    stats = answer.speculation
    record: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "speculation": {
            "tokens_per_pass": round(stats.tokens_per_pass, 4),
            "passes": stats.num_passes,
            "steps": stats.num_spec_steps,
            "plain_steps": stats.num_plain_steps,
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_draft_tokens,
            "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
            "draft_acceptance_rate": round(stats.draft_acceptance_rate, 4),
            "acceptance_per_depth": [round(share, 4) for share in stats.acceptance_per_depth],
        },
        "time_to_first_token_s": output.time_to_first_token_s,
        "tokens_per_second": None if speed is None else round(speed, 3),
    }
    if with_tokens:
        record["tokens"] = [
            {"id": token.id, "text": token.text, "source": str(token.source)} for token in answer.tokens
        ]
    return record


def quiet_libraries() -> None:
    """Keep other people's progress bars and advice out of the terminal."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory, a hub id or a shipped model, with a spinner on stderr
    while it loads.
    """
    with console.telling(f"loading the tokenizer of {name}"):
        from forerun.model.names import load_tokenizer

        quiet_libraries()
        loaded = load_tokenizer(name, None)
    assert loaded is not None, "a name always leads to a tokenizer or an error"
    return loaded


def load(
    model: str,
    options: TargetOptions,
    speculative_config: dict[str, Any] | None,
    *,
    longest: int | None = None,
    announce: bool = False,
    **more: Any,
) -> LLM:
    """Load a model behind the Python API, with its progress on stderr.

    With `announce` a line stays that says how long that took. What is known to be wrong beforehand
    is refused first. No text has more than `longest` tokens: many rows as long as the context could
    take all memory.
    """
    began = time.perf_counter()
    check(model, options, speculative_config, **more)
    with console.telling(f"loading {model}") as tell, _forward_progress(tell), pause_collection():
        quiet_libraries()
        from forerun import LLM

        if longest is not None and options.max_model_len is None:
            from forerun.model.back_ends import context_of

            options = replace(options, max_model_len=min(longest, context_of(model)))
        warn_of_loss(speculative_config)
        llm = LLM(model, speculative_config=speculative_config, **asdict(options), **more)
    if announce:
        console.log().print(
            Text(
                f"{model}: {llm.target.runs_as}, ready in {time.perf_counter() - began:.1f} s",
                "dim",
            )
        )
    return llm


def check(model: str, options: TargetOptions, speculative_config: dict[str, Any] | None, **engine: Any) -> None:
    """Refuse, within the first second, what is known to be wrong before torch is imported and a
    model loaded.

    `engine` are arguments of `LLM`.
    """
    checks.check(model, options.dtype, options.device, options.adapter)
    read_template(options.chat_template)
    check_sizes(options.max_model_len, engine["max_num_seqs"], engine.get("kv_cache_tokens"))
    config = SpeculativeConfig.parse(speculative_config)
    if config is None:
        return
    if config.rule is not None:
        rules.check_named(config.rule)
    if config.method not in DRAFTERS:
        return
    check_option_names(config.method, config.drafter_options, declared_options(config.method))
    check_models_named(config, model)


@contextmanager
def pause_collection() -> Iterator[None]:
    """Switch Python's garbage collector off while open, and then exempt the objects that exist by
    then.

    Imports and loading make half a million objects that stay; they would be searched again and
    again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _forward_progress(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass what loading says of its progress to `tell` while open."""
    log = logging.getLogger("forerun.model.prepare")
    handler = _Telling(tell)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _Telling(logging.Handler):
    """A log handler that passes on messages of the level INFO alone."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._tell(record.getMessage())


def warn_of_loss(speculative_config: dict[str, Any] | None) -> None:
    """Warn of a lossy verification rule, and say what it does."""
    config = SpeculativeConfig.parse(speculative_config)
    name = None if config is None else config.rule
    if name is not None and not rules.rule_named(name).lossless:
        console.warn(
            f"the rule {name} is LOSSY: above temperature 0 completions have another distribution than the target's. "
            "Leave --rule away for a lossless one.",
            "bold red",
        )


def print_stream(chunks: Iterable[StreamChunk], *, show_draft: bool) -> RequestOutput | None:
    """Print chunks as they come, byte for byte, and end the line, also when interrupted.

    With `show_draft` a terminal shows tokens coloured by source. Returns None where the stream
    ended without an output.
    """
    stdout = console.out()
    output = None
    try:
        for chunk in chunks:
            if show_draft and stdout.is_terminal:
                stdout.print(colour_tokens(chunk.tokens, stdout), end="")
            else:
                stdout.file.write(chunk.text)
            stdout.file.flush()
            output = chunk.output or output
    finally:
        stdout.print()
        stdout.file.flush()
    return output
