"""Serve's declarative configuration, which is the whole set of applications: ours change, those of others are listed again as they are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
import requests
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.dashboard.utils import ray_address_to_api_server_url

from components.section import ConfigError
from components.serving.routing import Routing

Application = dict[str, Any]
Applications = dict[str, Application]
"""Configurations by application name."""

PREFIX = "aerie-"
"""Applications with other names are not ours."""
ROUTER = f"{PREFIX}router"
CONTROLLER_ENV = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "45"}
"""Serve gives its HTTP proxy 5 s to start and then begins again: too little for a busy small machine."""


class DeploymentFailed(RuntimeError):
    """Serve did not do what it was told; the message says why, in the replicas' own words where they have any."""


class DashboardAway(DeploymentFailed):
    """Ray's dashboard, which takes Serve's configuration, does not answer any more."""


class Dashboard(ServeSubmissionClient):
    """Serve's REST API; what goes wrong on the way is told as its own, not as that of another server that is asked meanwhile."""

    def get_serve_details(self) -> dict[str, Any]:
        with _own_errors():
            return super().get_serve_details()

    def deploy_applications(self, config: dict[str, Any]) -> None:
        with _own_errors():
            super().deploy_applications(config)

    def delete_applications(self) -> None:
        with _own_errors():
            super().delete_applications()


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except requests.RequestException as error:
        raise DashboardAway(f"Ray's dashboard went away ({type(error).__name__}): repeat the command") from error


def connect() -> Dashboard:
    """A client of the cluster that this process is connected to.

    Raises:
        ConfigError: the cluster has no dashboard.
    """
    try:
        return Dashboard(ray_address_to_api_server_url(ray.get_runtime_context().gcs_address))
    except (ConnectionError, ValueError, RuntimeError, requests.RequestException) as error:
        raise ConfigError(
            "ray",
            f"no dashboard takes Serve's configuration ({error})",
            "start one with `make up` or `ray start --head --include-dashboard=true`",
        ) from None


def cluster_name() -> str:
    """Of the Ray cluster that this process is connected to; a cluster that is started again has another one."""
    return str(ray.get_runtime_context().get_session_name())


def ours(live: Mapping[str, Any]) -> Applications:
    """Our applications, without those that are being removed: listed again they would come back."""
    return {name: config for name, config in _staying(live).items() if name.startswith(PREFIX)}


def others(live: Mapping[str, Any]) -> Applications:
    """Applications of others; those without a configuration were not made by one and need no mention."""
    return {name: config for name, config in _staying(live).items() if not name.startswith(PREFIX) and config}


def _staying(live: Mapping[str, Any]) -> Applications:
    return {name: a["deployed_app_config"] for name, a in live.items() if a["status"] != "DELETING"}


def listed(client: ServeSubmissionClient) -> Applications:
    """Our applications, as Serve lists them now."""
    return ours(client.get_serve_details()["applications"])


def put(client: ServeSubmissionClient, host: str, port: int, applications: Applications) -> None:
    """Makes `applications` all of ours. What others deployed or removed until this moment stays so: Serve cannot compare and set."""
    foreign = others(client.get_serve_details()["applications"])
    client.deploy_applications(
        {
            "proxy_location": "HeadOnly",
            "http_options": {"host": host, "port": port},
            "controller_options": {"runtime_env": {"env_vars": CONTROLLER_ENV}},
            "applications": list((foreign | applications).values()),
        }
    )


def routing_of(application: Application | None) -> Routing | None:
    """What the router is configured with; None without a router, or with one of another version."""
    if not application:
        return None
    try:
        return Routing.model_validate(application["deployments"][0]["user_config"])
    except ValueError:
        return None


def with_routing(application: Application, routing: Routing) -> Application:
    """The router's application with other traffic and nothing else changed, so that no process restarts.

    What has its default is left out: it is no news to a router of an older version. A router with other code takes over when it is up, and
    the old one ends what runs through it.
    """
    deployment = {
        "name": "router",
        "user_config": routing.model_dump(mode="json", exclude_defaults=True),
        "graceful_shutdown_timeout_s": routing.drain_timeout_s,
        "max_surge_percent": 100,
    }
    return {**application, "deployments": [deployment]}


def keep_routing(routing: Routing) -> None:
    """Makes `routing` what the running router is configured with.

    Raises:
        LookupError: the router was not started by a configuration.
    """
    client = connect()
    details = client.get_serve_details()
    applications = ours(details["applications"])
    if not applications.get(ROUTER):
        raise LookupError("the router was not started by a configuration")
    applications[ROUTER] = with_routing(applications[ROUTER], routing)
    put(client, details["http_options"]["host"], details["http_options"]["port"], applications)
