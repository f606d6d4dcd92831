"""Bringing a service up, changing it and taking it down, by Serve's declarative configuration.

Serve takes the listed applications for the whole set, so those of others are listed again as they are. An arm gets
traffic only while it is up: its weight is dropped before it is changed or removed, and given after it has started.
"""

import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from components.section import ConfigError
from components.serving.apps import (
    ServedArm,
    Service,
    arm_application,
    code_revision,
    make_routing,
    router_application,
)
from components.serving.listing import (
    PREFIX,
    ROUTER,
    Application,
    Applications,
    connect,
    listed,
    others,
    ours,
    put,
    routing_of,
    with_routing,
)
from components.serving.routing import Routing, with_epoch
from components.serving.waiting import wait_until_gone, wait_until_live, wait_until_running


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
    foreign = others(live)
    arms = {arm.app: _arm(service, arm, live) for arm in service.arms}
    steady = [arm for arm in service.arms if _is_steady(live, arms[arm.app])]
    before = routing_of(live.get(ROUTER, {}).get("deployed_app_config"))
    kept = with_epoch(make_routing(service, steady), before)  # no traffic to what is about to change
    wanted = with_epoch(make_routing(service, service.arms), kept)
    steps = [
        (foreign | ours(live) | _rerouted(live, kept), kept, []),
        (foreign | arms | _router(kept, live), kept, arms),
        (foreign | arms | _router(wanted, live), wanted, arms),
    ]
    for step, routing, awaited in steps:
        if step != listed(client):
            _put(client, service, step)
            wait_until_running(client, [*awaited, ROUTER])
            wait_until_live(service, routing)
    return service.address


def teardown() -> None:
    """Removes our applications, and Serve itself when nothing else uses it; nothing there is no error."""
    client = connect()
    applications = client.get_serve_details()["applications"]
    foreign = [name for name in applications if not name.startswith(PREFIX)]
    if foreign:
        client.deploy_applications({"applications": list(others(applications).values())})
    else:
        client.delete_applications()
    wait_until_gone(client)


def _arm(service: Service, arm: ServedArm, live: Mapping[str, Any]) -> Application:
    return _with_revision(lambda revision: arm_application(service, arm, revision, _job_files()), live.get(arm.app))


def _router(routing: Routing, live: Mapping[str, Any]) -> Applications:
    application = _with_revision(lambda revision: router_application(routing, revision, _job_files()), live.get(ROUTER))
    return {ROUTER: application}


def _rerouted(live: Mapping[str, Any], routing: Routing) -> Applications:
    """The running router, if there is one, with this traffic."""
    if live.get(ROUTER, {}).get("status") != "RUNNING":
        return {}
    return {ROUTER: with_routing(live[ROUTER]["deployed_app_config"], routing)}


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


def _put(client: ServeSubmissionClient, service: Service, applications: Applications) -> None:
    put(client, service.settings.ab.host, service.settings.ab.port, applications)


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
