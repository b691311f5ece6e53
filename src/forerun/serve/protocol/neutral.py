"""Parameters that clients send by habit, and that ask for nothing as long as they say what this server does anyway.

Any other value of theirs is refused by name. One with an effect belongs to the request that has it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from forerun.serve.protocol.common import Strict

Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]
Nothing = Annotated[list[Any], Field(max_length=0)] | None
Label = Annotated[str, Field(max_length=512)]


class Neutral(Strict):
    """Of all of OpenAI's endpoints."""

    store: Literal[False] = False
    """Nothing is kept here."""
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None
    """For what is kept; ``/v1/responses`` gives it back."""
    service_tier: Literal["auto", "default"] = "auto"
    prompt_cache_key: Label | None = None
    """A hint about prompts that begin alike, which are found without it."""
    prompt_cache_retention: Literal["in_memory", "in-memory"] = "in_memory"
    safety_identifier: Label | None = None


class NeutralSampling(Neutral):
    """Of the completion endpoints, whose clients also know vLLM and llama-server."""

    use_beam_search: Literal[False] = False
    length_penalty: One = 1.0
    early_stopping: Literal[False] = False
    spaces_between_special_tokens: Literal[True] = True
    cache_prompt: Literal[True] = True
    id_slot: Literal[-1] = -1
    mirostat: Literal[0] = 0
    typical_p: One = 1.0
    tfs_z: One = 1.0
    dry_multiplier: Zero = 0.0
    xtc_probability: Zero = 0.0
    dynatemp_range: Zero = 0.0
    min_keep: Literal[0] = 0
    n_probs: Literal[0] = 0
    post_sampling_probs: Literal[False] = False
    timings_per_token: Literal[False] = False
    return_progress: Literal[False] = False


class NeutralChat(NeutralSampling):
    """Of ``/v1/chat/completions``."""

    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    verbosity: Literal["medium"] = "medium"
    functions: Nothing = None
    """The deprecated form of `tools`."""
    function_call: Literal["none", "auto"] | None = None
    add_special_tokens: Literal[False] = False
    """The chat template writes them."""
    include_reasoning: Literal[True] = True


class NeutralCompletion(NeutralSampling):
    """Of ``/v1/completions``."""

    best_of: Literal[1] = 1
    suffix: Literal[""] = ""
    add_special_tokens: Literal[True] = True


class NeutralResponses(Neutral):
    """Of ``/v1/responses``."""

    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    include: Nothing = None
    top_logprobs: Literal[0] = 0
