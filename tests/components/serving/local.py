"""The router's HTTP API on a real port of this process, in front of arms of this process: no Ray, so a test takes milliseconds."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from components.serving.api import make_api
from components.serving.gateway import Gateway
from components.serving.routing import Routing
from tests.components.serving.faulty import Faulty
from tests.conftest import free_port

CHAT = "/v1/chat/completions"
THREAD = "local-router"
"""Where all of it runs."""
LONG_S = 60.0
"""For what takes milliseconds on a machine that is not busy."""


class LocalCall:
    """An arm's items as they come."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items
        self._closing: asyncio.Future[None] | None = None

    def __aiter__(self) -> "LocalCall":
        return self

    async def __anext__(self) -> list[Any]:
        return [await anext(self._items)]

    def cancel(self) -> None:
        self._closing = asyncio.ensure_future(self._items.aclose())


class LocalRouter:
    """A gateway whose arms are called by name, and a client of it."""

    def __init__(self, arms: Mapping[str, Faulty], **gateway: Any) -> None:
        self.arms = arms
        self.kept: list[Routing] = []
        self.gateway = Gateway(self._ask, self._keep, **gateway)
        self.client: httpx.Client
        self.loop: asyncio.AbstractEventLoop

    def configure(self, routing: Routing) -> None:
        """In the server's loop, as Serve does."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (self.gateway.configure(routing), done.set()))
        assert done.wait(LONG_S)

    def restart(self) -> None:
        """As a new process does, it takes whatever it is told first."""
        self.gateway._routing = None

    def ask(self, do: str = "good", session: str | None = None, headers: Mapping[str, str] | None = None, **body: Any):
        more = {"x-session-id": session} if session else {}
        return self.client.post(CHAT, json={"do": do, **body}, headers={**more, **(headers or {})})

    def figure(self, name: str, **labels: str) -> float:
        """The sum of a metric over all lines with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name and all(w in line for w in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def _ask(self, application: str, route: str, body: dict[str, Any]) -> LocalCall:
        if application not in self.arms:
            raise LookupError("no such application")
        return LocalCall(self.arms[application].answer(route, body))

    async def _keep(self, routing: Routing) -> None:
        self.kept.append(routing)


def routing_to(*arms: str, app: str | None = None, **changes: Any) -> Routing:
    """Equal weights; an arm may be written as `name=weight` or `name:state`. Its application has its name, or is `app`."""
    parsed = {}
    for text in arms:
        name, state = text.partition(":")[::2]
        name, weight = name.partition("=")[::2]
        parsed[name] = {
            "app": app or name,
            "weight": float(weight or 1),
            "head": f"{name}-head",
            "state": state or "serving",
        }
    return Routing.model_validate({"model": "m", "salt": "s", "arms": parsed, "weight_epoch": 1} | changes)


def wait_until(happens: Callable[[], bool], timeout_s: float = LONG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def local_router(arms: Mapping[str, Faulty], routing: Routing, **gateway: Any) -> Iterator[LocalRouter]:
    router = LocalRouter(arms, **gateway)
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(make_api(router.gateway), host="127.0.0.1", port=port, log_level="warning", lifespan="on")
    )
    ready = threading.Event()

    async def run() -> None:
        router.loop = asyncio.get_running_loop()
        ready.set()
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name=THREAD)
    thread.start()
    try:
        assert ready.wait(LONG_S)
        while not server.started:
            time.sleep(0.005)
        router.configure(routing)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            router.client = client
            yield router
    finally:
        server.should_exit = True
        thread.join(LONG_S)
