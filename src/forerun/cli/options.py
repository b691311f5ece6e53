"""These dataclasses hold the options that verbs share, and translate them into the Python API's
arguments.

Defaults are written here once and only where the API has none. Imports no torch until a translation is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from cyclopts import Parameter, validators

from forerun import option_groups
from forerun.errors import ArgumentError, DataError, refuse_constant
from forerun.types import SamplingParams

Number = TypeVar("Number", int, float)
Flag = Annotated[bool, Parameter(negative="")]
"""A `Flag` is a switch without a ``--no-...`` form."""
AnswerLength = Parameter(alias="-n", validator=validators.Number(gte=1))
"""An option with `AnswerLength` says how many tokens a completion may have."""
Json = Annotated[bool, Parameter(negative="", help="JSON on stdout instead of words and tables.")]
SkipBad = Annotated[bool, Parameter(negative="", help="Leave unusable records out instead of stopping at the first.")]
Model = Annotated[str, Parameter(help="Directory or hub id of a Hugging Face causal LM, a GGUF file, or ollama:NAME.")]


@Parameter(name="*", group=option_groups.DRAFTING.group)
@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationOptions:
    """The options that say what drafts, how much, and which rule verifies it."""

    drafter: str | None = None
    """Name of the drafter, see `forerun drafters`, or module:Class, one of your own."""
    drafter_model: str | None = None
    """Directory, hub id or GGUF file of the drafter's model, or a head's directory or hub id."""
    num_speculative_tokens: Annotated[int | None, Parameter(alias="-k")] = None
    """Tokens to draft per step."""
    speculative_config: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """vLLM's JSON as it stands: '{"method": ..., "model": ..., "num_speculative_tokens": ...}'."""
    drafter_option: tuple[str, ...] = ()
    """key=value, options of the drafter."""
    rule: str | None = None
    """Verification rule instead of the one that suits the draft."""
    adaptive: bool | None = None
    """Let measured costs decide how much to draft, or nothing, as is the default. `--no-adaptive`: always the same."""

    def config(self) -> dict[str, Any] | None:
        """Return the `speculative_config` of the Python API, None where nothing was requested.

        A flag wins over the same key of the JSON, but for what drafts: that is named once.
        """
        config = json_object(self.speculative_config, "--speculative-config") if self.speculative_config else {}
        options = dict(key_value(pair) for pair in self.drafter_option)
        for key, flag, given in (
            ("method", "--drafter", self.drafter),
            ("model", "--drafter-model", self.drafter_model),
        ):
            named = [("--speculative-config", config.get(key)), ("--drafter-option", options.get(key)), (flag, given)]
            if key == "method":
                named.insert(0, ("--speculative-config", config.get("drafter")))
            different = {repr(value): option for option, value in named if value is not None}
            if len(different) > 1:
                two = " and ".join(f"{value} ({option})" for value, option in different.items())
                raise ArgumentError(f"two different values of {key!r} are given, {two}: name one")
        short: dict[str, Any] = {
            "method": self.drafter,
            "model": self.drafter_model,
            **{name: getattr(self, name) for name in ("num_speculative_tokens", "rule", "adaptive")},
        }
        config.update({key: value for key, value in short.items() if value is not None} | options)
        if config and not (config.get("method") or config.get("model")):
            raise ArgumentError("speculation options without a drafter; add --drafter NAME (see: forerun drafters)")
        return config or None


@Parameter(name="*", group=option_groups.SAMPLING.group)
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """The options that say how to choose tokens; the others come from the checkpoint's generation_config.json."""

    temperature: Annotated[float | None, Parameter(alias="-t")] = None
    """0 is greedy."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose mass reaches this, in (0, 1]."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest, in [0, 1]."""
    max_tokens: Annotated[int, AnswerLength] = 256
    """Most tokens of the completion."""
    seed: int | None = None
    """Same seed, same text."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; one that begins with a hyphen is written `--stop=---`."""

    def params(self) -> SamplingParams:
        """Return the options as `SamplingParams`."""

        return SamplingParams(**{**asdict(self), "stop": self.stop or None})


@Parameter(name="*", group=option_groups.MODEL.group)
@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOptions:
    """The options that say how to load the target."""

    dtype: str = "auto"
    """auto (the checkpoint's own; float32 on a CPU that only emulates it), float32, bfloat16 or float16."""
    device: str | None = None
    """cpu, cuda, cuda:1, ...; the accelerator if there is one."""
    backend: Literal["auto", "transformers", "llama.cpp", "llamacpp"] = "auto"
    """llama.cpp (or llamacpp) runs GGUF files at their own size, transformers everything else; auto chooses."""
    adapter: str | None = None
    """Directory or hub id of a PEFT adapter (LoRA), which the model is loaded with."""
    max_model_len: int | None = None
    """Longest sequence in tokens; the model's own context if not given."""
    chat_template: str | None = None
    """A Jinja file or the template itself, in place of the model's own; hermes: one that takes tools, for ChatML."""
    reproducible: bool = False
    """Keep the bits the same with and without speculation in bfloat16 too, at some cost."""

    def handing_out_layers(self) -> Self:
        """Return the same for what reads hidden states or runs layers of the target: transformers runs it."""
        return replace(self, backend="transformers") if self.backend == "auto" else self


@Parameter(name="*", group=option_groups.DRAFTING.group)
@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSpeculation(SpeculationOptions):
    """The options that say what drafts in the demo."""

    drafter: str | None = None
    """Name of the drafter, see `forerun drafters`, or module:Class; auto if not given, suffix for the demo model."""


@Parameter(name="*", group=option_groups.MODEL.group)
@dataclass(frozen=True, kw_only=True, slots=True)
class DemoTarget(TargetOptions):
    """The options that say how to load the model of the demo."""

    dtype: str = "auto"
    """auto (float32 for a prompt of the demo model as it ships; else the checkpoint's own, but float32 on a CPU that
    only emulates it), float32, bfloat16 or float16."""


@Parameter(name="*", group=option_groups.MODEL.group)
@dataclass(frozen=True, kw_only=True, slots=True)
class CertifiedOptions(TargetOptions):
    """The options that say how to load the model that is certified."""

    dtype: Annotated[str, Parameter(show_default=False)] = "auto"
    """float32 if not given or auto, bfloat16 or float16; a GGUF file that llama.cpp runs stays as it is."""


@Parameter(name="*", group=option_groups.MODEL.group)
@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedOptions(TargetOptions):
    """The options that say how to load the MODEL, or where a target that is not here runs."""

    dtype: str = "auto"
    """A MODEL has auto, float32, bfloat16 or float16. With --params: bf16 (auto), fp16, fp32, fp8, int8, int4."""
    device: str | None = None
    """A MODEL runs on cpu, cuda, ...; with --params: 3090, 4090, l4, l40s, a100, h100, h200, b200, mi300x or cpu."""


SPECULATION = SpeculationOptions()
SAMPLING = SamplingOptions()
LOADING = TargetOptions()
"""These defaults of the verbs' parameters request nothing."""


def key_value(pair: str) -> tuple[str, Any]:
    """Parse ``"min_match=2"`` into ``("min_match", 2)``; the value is JSON where it reads as JSON,
    else the string.
    """
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise ArgumentError(f"--drafter-option takes key=value, got {pair!r}")
    try:
        return key.replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return key.replace("-", "_"), value


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the prompt from ``--prompt``, ``--prompt-file`` or, where stdin is no terminal, from
    there.
    """
    if prompt is not None and prompt_file is not None:
        raise ArgumentError("give --prompt or --prompt-file, not both")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return read_text(prompt_file, "the prompt")
    if sys.stdin is None or sys.stdin.isatty():
        raise ArgumentError("no prompt: give --prompt TEXT, --prompt-file FILE, or pipe it in")
    return sys.stdin.read()


def read_text(path: Path, what: str) -> str:
    """Read a file of UTF-8; `what` it holds is for the message of the DataError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {what} from {path}: {error}") from error


def traffic_files(traffic: Path) -> list[Path]:
    """Return the files of what a server recorded: a directory's, or the one that was named."""
    files = sorted(traffic.glob("*.jsonl")) if traffic.is_dir() else [traffic]
    if not files or not all(file.is_file() for file in files):
        raise ArgumentError(f"{traffic} holds no recorded traffic (.jsonl); see forerun serve --record-traffic")
    return files


def numbers(text: str, option: str, kind: Callable[[str], Number]) -> list[Number]:
    """Parse the numbers that an option lists with commas between them, each read by `kind`."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ArgumentError(f"{option} takes numbers with commas between them, got {text!r}") from error


def json_object(text: str, flag: str) -> dict[str, Any]:
    """Parse what was given to `flag`; ArgumentError if it is no JSON object."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{flag} is not JSON ({error}); quote it in the shell with '...'") from error
    if not isinstance(value, dict):
        raise ArgumentError(f"{flag} must be a JSON object, got {type(value).__name__}")
    return value
