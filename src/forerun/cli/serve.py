"""``forerun serve MODEL``: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from forerun.cli.options import LOADING, SPECULATION, LoadOptions, SpeculationOptions
from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from forerun import AsyncLLM

KEY_VARIABLE = "FORERUN_API_KEY"


def serve(
    model: str = "demo",
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    max_num_seqs: int = 8,
    api_key: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    allowed_origins: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    client_drafters: Annotated[tuple[str, ...], Parameter(negative="")] = ("ngram",),
    max_queue: int = 256,
    max_n: int = 16,
    max_tokens: int | None = None,
    max_body_bytes: int = 4_000_000,
    drain_s: float = 60.0,
    seed: int | None = None,
    speculation: SpeculationOptions = SPECULATION,
    loading: LoadOptions = LOADING,
) -> int:
    """Serve a model behind OpenAI's API.

    Parameters
    ----------
    model
        Directory or hub id of a Hugging Face causal LM.
    host
        Address to listen on; 0.0.0.0 for every interface.
    port
        TCP port.
    served_model_name
        What clients call the model; its directory or hub id if not given.
    max_num_seqs
        Answers that run at once.
    api_key
        Key that clients must send; may be repeated; also read from FORERUN_API_KEY.
    allowed_origins
        Origins of web pages that may call the API; may be repeated.
    client_drafters
        Drafters that a request may choose besides the server's own; may be repeated.
    max_queue
        Answers that wait or run at once; more get a 429.
    max_n
        Most answers to one prompt.
    max_tokens
        Most tokens of one answer.
    max_body_bytes
        Largest request body.
    drain_s
        Seconds that running requests may take after SIGTERM.
    seed
        For requests that bring none.
    """
    wish = speculation.config()
    keys = (*api_key, *filter(None, [os.environ.get(KEY_VARIABLE)]))
    try:
        from forerun.serve.running import run
        from forerun.serve.session import Session, State
        from forerun.serve.settings import ServeSettings
    except ModuleNotFoundError as error:
        raise ArgumentError(f"serving needs {error.name}: pip install 'forerun[serve]'") from error
    settings = ServeSettings(
        model_name=served_model_name or Path(model).name or model,
        api_keys=keys,
        allowed_origins=allowed_origins,
        client_drafters=client_drafters,
        max_queue=max_queue,
        max_n=max_n,
        max_tokens=max_tokens,
        max_body_bytes=max_body_bytes,
        drain_s=drain_s,
    )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    session = Session(settings, lambda: _load(model, wish, loading, max_num_seqs, seed))
    run(session, host=host, port=port, log_level="info")
    return 1 if session.state is State.FAILED else 0


def _load(model: str, wish: dict[str, Any] | None, loading: LoadOptions, rows: int, seed: int | None) -> AsyncLLM:
    from forerun import AsyncLLM
    from forerun.cli.session import loading_arguments, quiet_libraries

    quiet_libraries()
    return AsyncLLM(model, speculative_config=wish, max_num_seqs=rows, seed=seed, **loading_arguments(loading))
