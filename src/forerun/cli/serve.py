"""``forerun serve MODEL``: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.adapting import ADAPTING, AdaptOptions
from forerun.cli.options import LOADING, SPECULATION, LoadOptions, SpeculationOptions
from forerun.errors import ArgumentError
from forerun.serve.settings import ServeSettings

if TYPE_CHECKING:
    from forerun import AsyncLLM

SETTINGS = ServeSettings()


def serve(
    model: str = "demo",
    *,
    config: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int | None = None,
    enable_prefix_caching: bool = True,
    kv_cache_tokens: int | None = None,
    seed: int | None = None,
    settings: ServeSettings = SETTINGS,
    speculation: SpeculationOptions = SPECULATION,
    adapting: AdaptOptions = ADAPTING,
    loading: LoadOptions = LOADING,
) -> int:
    """Serve a model behind OpenAI's API.

    Parameters
    ----------
    model
        Directory or hub id of a Hugging Face causal LM.
    config
        YAML, JSON or TOML file with any of these options; flags and environment win over it.
    host
        Address to listen on; 0.0.0.0 for every interface.
    port
        TCP port.
    max_num_seqs
        Answers that run at once.
    max_num_batched_tokens
        Most prompt tokens of a pass while answers are being decoded; 512 if not given.
    enable_prefix_caching
        Read of a prompt only what no row holds already.
    kv_cache_tokens
        Most tokens that all rows together hold; answers that do not fit give way and go on later.
    seed
        For requests that bring none.
    """
    wish = speculation.config()
    try:
        from forerun.serve.logs import configure_logging
        from forerun.serve.running import run
        from forerun.serve.session import Session, State
    except ModuleNotFoundError as error:
        raise ArgumentError(f"serving needs {error.name}: pip install 'forerun[serve]'") from error
    settings = replace(settings, model_name=settings.model_name or Path(model).name or model)
    configure_logging(settings)
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": enable_prefix_caching,
        "kv_cache_tokens": kv_cache_tokens,
        "adapt": adapting.wish(wish),
    }
    session = Session(settings, lambda: _load(model, wish, loading, seed, limits))
    run(session, host=host, port=port)
    return 1 if session.state is State.FAILED else 0


def _load(
    model: str, wish: dict[str, Any] | None, loading: LoadOptions, seed: int | None, limits: dict[str, Any]
) -> AsyncLLM:
    from forerun import AsyncLLM
    from forerun.cli.session import loading_arguments, quiet_libraries

    quiet_libraries()
    return AsyncLLM(model, speculative_config=wish, seed=seed, **limits, **loading_arguments(loading))
