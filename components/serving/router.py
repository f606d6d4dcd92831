"""The endpoint: OpenAI's API in front of the arms, one arm a session.

The arms, their weights and the salt come as Serve's `user_config`: a change of them is live and restarts nothing.
Serve copies the class as it is when its decorator runs, so what it calls is imported, never defined below it.
"""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from components.serving.assignment import assign, session_key
from components.serving.ejection import Ejector
from components.serving.protocol import ARM_HEADER, HEAD_HEADER, STREAM_END, ApiError, error_body, parse_body
from components.serving.upstream import Call, next_item, raise_if_error

log = logging.getLogger("ray.serve")

MAX_ONGOING_REQUESTS = 1000


class RoutedArm(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    app: str
    """Its Serve application."""
    weight: float
    head: str
    """Version and digest of its head, or `none`."""


class Routing(BaseModel):
    """The router's `user_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    salt: str
    first_item_timeout_s: float
    arms: dict[str, RoutedArm]

    @property
    def weights(self) -> dict[str, float]:
        return {name: arm.weight for name, arm in self.arms.items()}


class RouterArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    revision: str


app = FastAPI(title="Aerie", docs_url=None, redoc_url=None, openapi_url=None)


@app.exception_handler(ApiError)
async def _api_error(request: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status)


@app.exception_handler(HTTPException)
async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code)


@serve.deployment(
    name="router", num_replicas=1, max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0}
)
@serve.ingress(app)
class Router:
    def __init__(self) -> None:
        self._routing: Routing | None = None
        self._ejector = Ejector()
        self._handles: dict[str, DeploymentHandle] = {}

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        self._routing = Routing.model_validate(user_config)

    @app.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        return await self._answer(request, "chat")

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return await self._answer(request, "completions")

    @app.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        card = {"id": self._live().model, "object": "model", "created": 0, "owned_by": "aerie"}
        return {"object": "list", "data": [card]}

    @app.get("/health")
    async def health(self) -> dict[str, Any]:
        arms = {
            name: {"weight": arm.weight, "head": arm.head, "ejected": not self._ejector.admits(name)}
            for name, arm in self._live().arms.items()
        }
        return {"status": "ok", "arms": arms}

    async def _answer(self, request: Request, route: str) -> Response:
        raw_body = await request.body()
        body = parse_body(raw_body, self._live().model)
        arm = self._choose(request, body, raw_body)
        headers = {ARM_HEADER: arm, HEAD_HEADER: self._live().arms[arm].head}
        try:
            call = self._call(arm, headers, route, body)
            return await self._respond(call, bool(body.get("stream")))
        except ApiError as error:
            if error.status >= 500:
                self._ejector.failed(arm)
                log.warning("arm %s failed with %d: %s", arm, error.status, error)
            else:  # an arm that refuses a request is alive
                self._ejector.succeeded(arm)
            return JSONResponse(error.body, error.status, headers)

    def _live(self) -> Routing:
        if self._routing is None or not self._routing.arms:
            raise ApiError(503, "no arm is being served yet", "no_arm")
        return self._routing

    def _choose(self, request: Request, body: dict[str, Any], raw_body: bytes) -> str:
        routing = self._live()
        wanted = request.headers.get(ARM_HEADER)
        if wanted is not None:
            if wanted not in routing.arms:
                raise ApiError(404, f"there is no arm {wanted!r}; arms: {', '.join(routing.arms)}", "arm_not_found")
            return wanted
        weights = routing.weights
        admitted = {name: weight for name, weight in weights.items() if self._ejector.admits(name)}
        key = session_key(request.headers, body, raw_body)
        arm = assign(key, admitted, routing.salt)
        if arm is None:  # all are out: better try one than refuse
            arm = assign(key, weights, routing.salt)
        if arm is None:
            raise ApiError(503, "every arm has weight 0", "no_arm")
        return arm

    def _call(self, arm: str, headers: dict[str, str], route: str, body: dict[str, Any]) -> Call:
        routing = self._live()
        try:
            handle = self._handle(routing.arms[arm].app)
        except RayServeException as error:
            raise ApiError(503, f"arm {arm} is not there: {error}", "arm_unavailable") from None
        self._ejector.started(arm)
        return Call(arm, headers, handle.answer.remote(route, body), routing.first_item_timeout_s)

    def _handle(self, application: str) -> DeploymentHandle:
        if application not in self._handles:
            self._handles[application] = serve.get_app_handle(application).options(stream=True)
        return self._handles[application]

    async def _respond(self, call: Call, stream: bool) -> Response:
        """The arm's answer; its first item decides the status, so nothing is sent before it is here."""
        try:
            first = await next_item(call)
        except BaseException:  # also when the client has gone
            call.upstream.cancel()
            raise
        if first is None:
            raise ApiError(502, f"arm {call.arm} gave no answer", "empty_answer")
        raise_if_error(first)
        if stream:
            events = self._relay(call, first)
            return StreamingResponse(events, media_type="text/event-stream", headers=call.headers)
        if not first.get("choices"):
            raise ApiError(502, f"arm {call.arm} gave an empty answer", "empty_answer")
        self._ejector.succeeded(call.arm)
        return JSONResponse(first, headers=call.headers)

    async def _relay(self, call: Call, first: str) -> AsyncIterator[str]:
        item: Any = first
        try:
            while item is not None:
                raise_if_error(item)
                yield item
                if item.startswith(STREAM_END):
                    self._ejector.succeeded(call.arm)
                    return
                item = await next_item(call)
            raise ApiError(502, f"the stream of arm {call.arm} broke off", "broken_stream")
        except ApiError as error:  # the status has been sent: the error goes into the stream
            self._ejector.failed(call.arm)
            log.warning("arm %s failed in a stream: %s", call.arm, error)
            yield f"data: {json.dumps(error.body)}\n\n{STREAM_END}\n\n"
        finally:
            call.upstream.cancel()


def build_router(args: RouterArgs) -> Application:
    """The Serve application of the endpoint; everything that changes comes as `user_config`."""
    return Router.bind()  # type: ignore[attr-defined]  # serve.deployment made a Deployment of it
