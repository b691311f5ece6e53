"""The routes of a trainer that takes its rollouts from this server: it changes the weights, and sends it to sleep.

Names and shapes are SGLang's (``/update_weights_from_disk``, ``/get_weight_version``) and vLLM's (``/sleep``,
``/wake_up``, ``/is_sleeping``). The operator turns them on, and they need the operator's key.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Response

from forerun.errors import EngineError, ForerunError
from forerun.serve.guards import UPDATE_WEIGHTS
from forerun.serve.protocol.errors import ApiError
from forerun.serve.protocol.requests import UpdateWeightsRequest
from forerun.serve.session import Session

Tags = Annotated[list[Literal["weights", "kv_cache"]] | None, Query()]


def add_trainer_routes(app: FastAPI, session: Session) -> None:
    """Add the routes, which the `Guard` closes to everybody else."""
    version = "default"  # SGLang's word for the weights that the server was started with

    async def update(body: UpdateWeightsRequest) -> dict[str, Any]:
        nonlocal version
        mode = "abort" if body.abort_all_requests else body.mode
        engine = session.engine
        await _told(engine.update_weights_from_disk(body.model_path, mode=mode), body.model_path)
        version = body.weight_version or body.model_path
        message = "new requests are answered with the new weights"
        return {"success": True, "message": message, "weight_version": version, "num_paused_requests": 0}

    async def weight_version() -> dict[str, str]:
        return {"weight_version": version}

    async def sleep(level: int = 1, mode: Literal["wait", "abort"] = "abort") -> Response:
        await _told(session.engine.sleep(level, mode=mode))
        return Response()

    async def wake_up(tags: Tags = None) -> Response:
        await _told(session.engine.wake_up(tags))
        return Response()

    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": session.engine.llm.is_sleeping}

    for path in UPDATE_WEIGHTS:
        app.add_api_route(path, update, methods=["POST"], include_in_schema=False)
    app.add_api_route("/get_weight_version", weight_version, methods=["GET"], include_in_schema=False)
    app.add_api_route("/sleep", sleep, methods=["POST"], include_in_schema=False)
    app.add_api_route("/wake_up", wake_up, methods=["POST"], include_in_schema=False)
    app.add_api_route("/is_sleeping", is_sleeping, methods=["GET"], include_in_schema=False)


async def _told(work: Awaitable[None], path: str = "") -> None:
    """Wait for the engine; what it refuses is a 400 that quotes the trainer's own `path`."""
    try:
        await work
    except EngineError:
        raise
    except ForerunError as error:
        raise ApiError(400, str(error), param="model_path" if path else None, quoted=path) from error
