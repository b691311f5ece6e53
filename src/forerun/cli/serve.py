"""``forerun serve MODEL`` runs an OpenAI-compatible server."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from forerun.cli import session
from forerun.cli.options import LOADING, SPECULATION, Model, SpeculationOptions, TargetOptions
from forerun.errors import ArgumentError
from forerun.option_groups import CAPACITY, NETWORK
from forerun.serve.listening import listen
from forerun.serve.settings import ServeSettings
from forerun.shipped import MEMBER, REAL

if TYPE_CHECKING:
    from forerun import AsyncLLM

log = logging.getLogger(__name__)
SETTINGS = ServeSettings()


@Parameter(name="*", group=CAPACITY.group)
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """The engine's options, as `AsyncLLM` has them."""

    max_num_seqs: int = 8
    """Completions that run at once."""
    max_num_batched_tokens: int | None = None
    """Most prompt tokens of a pass; if not given as many as keep others waiting for three decoding steps at most."""
    enable_prefix_caching: bool = True
    """Read only the part of a prompt that no row holds already."""
    kv_cache_tokens: int | None = None
    """Most tokens that all rows together hold; completions that do not fit are preempted and go on
    later.
    """
    seed: int | None = None
    """Requests that bring none get one each, derived from this and from how many came before."""


ENGINE = EngineOptions()


def serve(
    model: Model = REAL,
    *,
    config: Path | None = None,
    host: Annotated[str, NETWORK] = "127.0.0.1",
    port: Annotated[int, NETWORK, Parameter(validator=validators.Number(gte=0, lte=65535))] = 8000,
    engine: EngineOptions = ENGINE,
    settings: ServeSettings = SETTINGS,
    speculation: SpeculationOptions = SPECULATION,
    loading: TargetOptions = LOADING,
) -> int:
    """Serve a model behind OpenAI's API, with speculation if a drafter is named.

    Parameters
    ----------
    config
        YAML, JSON or TOML file with any of these options; flags and environment win over it.
    host
        Address to listen on; 0.0.0.0 for every interface.
    port
        TCP port.
    """
    speculative = speculation.config()
    session.check(model, loading, speculative, **asdict(engine))
    options = {"speculative_config": speculative, **asdict(engine)}
    with listen(host, port) as listener:
        try:
            from forerun.serve.logs import configure_logging
            from forerun.serve.server import run
            from forerun.serve.session import Session
        except ModuleNotFoundError as error:
            raise ArgumentError(f"serving needs {error.name}: pip install 'forerun[serve]'") from error
        aliases = (*_short_names(model), model)
        settings = replace(settings, model_names=settings.model_names or aliases[:1])
        configure_logging(settings)
        if not settings.api_keys and not settings.share_unnamed:
            log.info(
                "no API key is set: cached prefixes and what drafters learn end with each request; add --share-unnamed "
                "if all requests are yours, or --api-key"
            )
        return run(Session(settings, lambda: _load(model, loading, options), aliases), host=host, listener=listener)


def _short_names(model: str) -> tuple[str, ...]:
    """Return what clients call a model, the name for responses first: the last part of a directory's path, or a GGUF
    file's name without its ending and with it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return (path.name or path.resolve().name,)
    if path.is_file():
        return path.stem, path.name
    file = Path(MEMBER)  # That of the model that is downloaded
    return (model, file.stem, file.name) if model == REAL else (model,)


def _load(model: str, loading: TargetOptions, options: dict[str, Any]) -> AsyncLLM:
    with session.pause_collection():
        from forerun import AsyncLLM

        session.quiet_libraries()
        session.warn_of_loss(options["speculative_config"])
        return AsyncLLM(model, **options, **asdict(loading))
