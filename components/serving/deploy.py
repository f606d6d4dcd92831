"""Bringing a service up, changing it and taking it down, by Serve's declarative configuration.

Serve takes the listed applications for the whole set, so those of others are listed again as they are. An arm gets
traffic only while it is up: its weight is dropped before it is changed or removed, and given after it has started.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.dashboard.utils import ray_address_to_api_server_url

from components.config import ConfigError
from components.serving.apps import (
    PREFIX,
    ROUTER,
    ServedArm,
    Service,
    arm_application,
    code_revision,
    router_application,
)
from components.serving.waiting import wait_until_gone, wait_until_live, wait_until_running

Application = dict[str, Any]
Applications = dict[str, Application]
"""Configurations by application name."""

CONTROLLER_ENV = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "45"}
"""Serve gives its HTTP proxy 5 s to start and then begins again: too little for a busy small machine."""


def deploy(service: Service) -> str:
    """Makes `service` what is served and waits until every arm answers; what has not changed keeps its processes.

    Returns:
        The address of the endpoint.

    Raises:
        ConfigError: no dashboard to talk to, or the address or the route is somebody else's.
        DeploymentFailed: an arm or the router did not start.
    """
    client = connect()
    _make_room(client, service)
    live = client.get_serve_details()["applications"]
    others = _others(live)
    arms = {arm.app: _arm(service, arm, live) for arm in service.arms}
    steady = [arm for arm in service.arms if _is_steady(live, arms[arm.app])]
    steps = [
        others | _ours(live) | _rerouted(live, service, steady),  # no traffic to what is about to change
        others | arms | _router(service, steady, live),
        others | arms | _router(service, service.arms, live),
    ]
    for step, traffic, awaited in zip(steps, (steady, steady, service.arms), ([], arms, arms), strict=True):
        if step != _configured(client):
            _put(client, service, step)
            wait_until_running(client, [*awaited, ROUTER])
            wait_until_live(service, traffic)
    return service.address


def teardown() -> None:
    """Removes our applications, and Serve itself when nothing else uses it; nothing there is no error."""
    client = connect()
    applications = client.get_serve_details()["applications"]
    others = _others(applications)
    foreign = [name for name in applications if not name.startswith(PREFIX)]
    if foreign:
        client.deploy_applications({"applications": list(others.values())})
    else:
        client.delete_applications()
    wait_until_gone(client)


def connect() -> ServeSubmissionClient:
    """A client of the cluster that this process is connected to.

    Raises:
        ConfigError: the cluster has no dashboard.
    """
    try:
        return ServeSubmissionClient(ray_address_to_api_server_url(ray.get_runtime_context().gcs_address))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "ray",
            f"no dashboard takes Serve's configuration ({error})",
            "start one with `make up` or `ray start --head --include-dashboard=true`",
        ) from None


def _arm(service: Service, arm: ServedArm, live: Mapping[str, Any]) -> Application:
    return _with_revision(lambda revision: arm_application(service, arm, revision, _job_files()), live.get(arm.app))


def _router(service: Service, arms: Sequence[ServedArm], live: Mapping[str, Any]) -> Applications:
    application = _with_revision(
        lambda revision: router_application(service, arms, revision, _job_files()), live.get(ROUTER)
    )
    return {ROUTER: application}


def _with_revision(make: Callable[[str], Application], live: Mapping[str, Any] | None) -> Application:
    """The application with a revision that is new where code changed or the last start failed."""
    revision = code_revision()
    if live is None or not live.get("deployed_app_config"):
        return make(revision)
    old = str(live["deployed_app_config"]["args"].get("revision", ""))
    code, _, attempt = old.partition("+")
    if live["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
        return make(f"{revision}+{int(attempt or 0) + 1}")
    return make(old if code == revision else revision)


def _is_steady(live: Mapping[str, Any], wanted: Application) -> bool:
    """Whether the application runs already as it is wanted."""
    found = live.get(wanted["name"])
    return found is not None and found["status"] == "RUNNING" and found["deployed_app_config"] == wanted


def _ours(live: Mapping[str, Any]) -> Applications:
    return {name: a["deployed_app_config"] for name, a in live.items() if name.startswith(PREFIX)}


def _others(live: Mapping[str, Any]) -> Applications:
    """Applications of others; those without a configuration were not made by one and need no mention."""
    configs = {name: a["deployed_app_config"] for name, a in live.items() if not name.startswith(PREFIX)}
    return {name: config for name, config in configs.items() if config}


def _rerouted(live: Mapping[str, Any], service: Service, arms: Sequence[ServedArm]) -> Applications:
    """The running router, if there is one, with traffic to `arms` only."""
    if live.get(ROUTER, {}).get("status") != "RUNNING":
        return {}
    routing = router_application(service, arms, "", {})["deployments"]
    return {ROUTER: {**live[ROUTER]["deployed_app_config"], "deployments": routing}}


def _configured(client: ServeSubmissionClient) -> Applications:
    applications = client.get_serve_details()["applications"]
    return _ours(applications) | _others(applications)


def _put(client: ServeSubmissionClient, service: Service, applications: Applications) -> None:
    ab = service.settings.ab
    client.deploy_applications(
        {
            "proxy_location": "HeadOnly",
            "http_options": {"host": ab.host, "port": ab.port},
            "controller_options": {"runtime_env": {"env_vars": CONTROLLER_ENV}},
            "applications": list(applications.values()),
        }
    )


def _job_files() -> dict[str, Any]:
    """The code that this job uploaded, for the replicas too; without an upload they import the installed project."""
    runtime_env = ray.get_runtime_context().runtime_env
    return {name: runtime_env[name] for name in ("working_dir", "py_modules") if runtime_env.get(name)}


def _make_room(client: ServeSubmissionClient, service: Service) -> None:
    """Raises ConfigError when the address or the route is somebody else's."""
    ab = service.settings.ab
    details = client.get_serve_details()
    foreign = {name: a for name, a in details["applications"].items() if not name.startswith(PREFIX)}
    for name, application in foreign.items():
        if application["route_prefix"] == "/":
            raise ConfigError("ab", f"Serve application {name!r} has the route /", f"give {name!r} another route")
    options = details.get("http_options") or {}
    if details.get("controller_info", {}).get("actor_id") is None:
        _check_port_is_free(ab.host, ab.port)
    elif (options.get("host"), options.get("port")) != (ab.host, ab.port):
        if foreign:
            where = f"{options.get('host')}:{options.get('port')}"
            raise ConfigError(
                "ab.port", f"Serve already listens on {where} for {sorted(foreign)}", f"set it to {where}"
            )
        teardown()


def _check_port_is_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                "ab.port", f"cannot listen on {host}:{port} ({error.strerror})", "choose another"
            ) from None
