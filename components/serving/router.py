"""The endpoint as a Serve deployment: OpenAI's API in front of the arms, one arm a session.

The arms, their weights and all else that may change come as Serve's `user_config`: a change of them is live and restarts nothing.
Serve copies the class as it is when its decorator runs, so what it calls is imported, never defined below it.
"""

import asyncio
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from components.serving.api import MAX_REQUESTS, make_api
from components.serving.delivery import Inbox
from components.serving.gateway import Gateway
from components.serving.listing import keep_routing
from components.serving.routing import Routing
from components.serving.upstream import Upstream

MAX_ONGOING_REQUESTS = MAX_REQUESTS + 200
"""More than clients get: operators' changes, `/health`, `/metrics` and commands never queue behind an arm that is stuck."""
DIRECT_PATH = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}
"""Every chunk passes through this process: in one event loop instead of three, and without an object reference of its own."""
DELIVER: dict[str, Any] = {
    "method_name": "deliver",
    "request_serialization": "pickle",
    "response_serialization": "pickle",
}
"""How arms are called: with plain values and classes that both sides import, for which the default (cloudpickle) is several times as slow."""


class RouterArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    revision: str


@serve.deployment(
    name="router",
    num_replicas=1,
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": DIRECT_PATH}},
    logging_config={"enable_access_log": False},  # metrics and records know more, and cost less
)
@serve.ingress()
class Router:
    def __init__(self) -> None:
        self._gateway = Gateway(self._ask, self._keep)
        self._handles: dict[str, DeploymentHandle] = {}
        self._inbox = Inbox()

    def __serve_build_asgi_app__(self) -> Starlette:
        return make_api(self._gateway)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:  # async: in the loop that the requests run in
        await self._inbox.open(ray.util.get_node_ip_address())  # loopback where Ray is on loopback
        self._gateway.configure(Routing.model_validate(user_config))

    async def replace_traffic(self, user_config: dict[str, Any]) -> dict[str, Any]:
        """For commands, through Serve's handle. See `Gateway.replace`."""
        live = await self._gateway.replace(Routing.model_validate(user_config))
        return live.model_dump(mode="json")

    def _ask(self, application: str, route: str, body: dict[str, Any]) -> Upstream:
        handle = self._handle(application)
        return self._inbox.call(lambda reply_to: handle.remote(route, body, reply_to))

    def _handle(self, application: str) -> DeploymentHandle:
        if application not in self._handles:
            try:
                self._handles[application] = serve.get_app_handle(application).options(**DELIVER)
            except RayServeException as error:
                raise LookupError(str(error)) from None
        return self._handles[application]

    async def _keep(self, routing: Routing) -> None:
        await asyncio.to_thread(keep_routing, routing)


def build_router(args: RouterArgs) -> Application:
    """The Serve application of the endpoint; everything that changes comes as `user_config`."""
    return Router.bind()  # type: ignore[attr-defined]  # serve.deployment made a Deployment of it
