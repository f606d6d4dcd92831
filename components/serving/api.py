"""The router's HTTP API, as an ASGI application around a gateway: OpenAI's routes, health, metrics, operators' changes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from components.serving.gateway import Gateway
from components.serving.protocol import ApiError, error_body, read_body
from components.serving.routing import AskedChange, change_arms, kill_all_but_control

MAX_CHANGE_BYTES = 10_000
MAX_REQUESTS = 1000
"""Of clients, at once; those that still send or read count too."""


class Places:
    """Lets so many requests in at once and turns the others away, so that nothing else has to queue behind them."""

    def __init__(self, app: ASGIApp, num_free: int, turn_away: Callable[[], ApiError]) -> None:
        self._app, self._num_free, self._turn_away = app, num_free, turn_away

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._num_free:
            raise self._turn_away()
        self._num_free -= 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_free += 1


def make_api(gateway: Gateway) -> Starlette:
    """The application; `gateway.configure` decides what it answers."""

    async def chat(request: Request) -> Response:
        return await gateway.answer(request, "chat")

    async def completions(request: Request) -> Response:
        return await gateway.answer(request, "completions")

    async def models(request: Request) -> Response:
        return JSONResponse(gateway.models(request.headers))

    async def health(request: Request) -> Response:
        return JSONResponse(gateway.health())

    async def metrics(request: Request) -> Response:
        return Response(gateway.metrics(), media_type=CONTENT_TYPE_LATEST)

    async def change_arm(request: Request) -> Response:
        gateway.check_operator(request.headers)
        asked = AskedChange.model_validate_json(await read_body(request, MAX_CHANGE_BYTES))
        changes = {request.path_params["arm"]: asked}
        return JSONResponse(await gateway.change(lambda routing: change_arms(routing, changes), asked.weight_epoch))

    async def kill(request: Request) -> Response:
        gateway.check_operator(request.headers)
        return JSONResponse(await gateway.change(kill_all_but_control))

    @asynccontextmanager
    async def lifespan(api: Starlette) -> AsyncIterator[None]:
        yield
        gateway.close()

    of_clients = [
        Route("/chat/completions", chat, methods=["POST"]),
        Route("/completions", completions, methods=["POST"]),
        Route("/models", models),
    ]
    routes = [
        Mount("/v1", routes=of_clients, middleware=[Middleware(Places, MAX_REQUESTS, gateway.turn_away)]),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/admin/arms/{arm}", change_arm, methods=["POST"]),
        Route("/admin/kill", kill, methods=["POST"]),
    ]
    handlers: dict[Any, Callable[..., Any]] = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ValidationError: _bad_change,
        Exception: _own_fault,
    }
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


async def _api_error(request: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code)


async def _bad_change(request: Request, error: ValidationError) -> JSONResponse:
    first = error.errors(include_input=False, include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    return JSONResponse(error_body(400, f"{path}: {first['msg']}" if path else first["msg"], param=path or None), 400)


async def _own_fault(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(500, f"the router failed: {type(error).__name__}"), 500)
