"""Serve's API as a table in this process, whose router is a real one without Ray: deployments and operators' changes in milliseconds."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from components.serving import claim, running
from components.serving import deploy as deploying
from components.serving.listing import ROUTER, Applications, routing_of, with_routing
from components.serving.routing import Routing
from tests.components.serving.local import LONG_S, LocalRouter, local_router, routing_to

Act = Callable[[], None]


@dataclass
class ServeTable:
    """What `ServeSubmissionClient` answers: everything listed runs at once."""

    router: LocalRouter
    applications: Applications
    act_after: dict[int, Act]
    """What somebody else does after the first, second, ... configuration."""
    act_before: dict[int, Act] = field(default_factory=dict)
    """The same, when a command has looked and before it configures."""
    statuses: dict[str, str] = field(default_factory=dict)
    """Of applications that are not running."""
    listens: bool = True
    """Whether Serve runs."""
    num_put: int = 0
    put_at: dict[int, float] = field(default_factory=dict)
    """Unix time in seconds at which each of them was in effect."""

    def get_serve_details(self) -> dict[str, Any]:
        url = self.router.client.base_url
        return {
            "controller_info": {"actor_id": "one" if self.listens else None},
            "http_options": {"host": url.host, "port": url.port},
            "applications": {
                name: {
                    "status": self.statuses.get(name, "RUNNING"),
                    "deployed_app_config": app,
                    "route_prefix": app["route_prefix"],
                }
                for name, app in self.applications.items()
            },
        }

    def deploy_applications(self, config: dict[str, Any]) -> None:
        self.act_before.pop(self.num_put + 1, lambda: None)()
        if ROUTER not in self.applications:
            self.router.restart()
        self.applications = {app["name"]: app for app in config["applications"]}
        if ROUTER in self.applications:
            self.router.configure(self.routing)
        self.num_put += 1
        self.act_after.pop(self.num_put, lambda: None)()
        self.put_at[self.num_put] = time.time()

    @property
    def routing(self) -> Routing:
        found = routing_of(self.applications.get(ROUTER))
        assert found is not None
        return found

    def replace_traffic(self, routing: Routing) -> Routing:
        return asyncio.run_coroutine_threadsafe(self.router.gateway.replace(routing), self.router.loop).result(LONG_S)

    async def keep(self, routing: Routing) -> None:
        """What the router tells Serve."""
        self.applications[ROUTER] = with_routing(self.applications[ROUTER], routing)

    def operator(self, change: Callable[[Routing], Routing]) -> None:
        """As the router does with an operator's change: live, and then kept."""
        changed = change(self.router.gateway.live())
        self.router.configure(changed)
        self.applications[ROUTER] = with_routing(self.applications[ROUTER], changed)


@contextmanager
def serve_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeTable]:
    """What `deploy` talks to until the block ends, with room for everything."""
    with local_router({}, routing_to("none")) as router:
        table = ServeTable(router, {}, {})
        monkeypatch.setattr(router.gateway, "_keep", table.keep)
        monkeypatch.setattr(deploying, "connect", lambda: table)
        monkeypatch.setattr(deploying, "replace_traffic", table.replace_traffic)
        monkeypatch.setattr(deploying, "has_room", lambda bundles: True)
        monkeypatch.setattr(deploying, "wait_until_answering", lambda service, name: None)
        monkeypatch.setattr(running, "_job_files", dict)
        monkeypatch.setattr(claim, "cluster_name", lambda: "cluster")
        yield table
