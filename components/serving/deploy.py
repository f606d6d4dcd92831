"""Bringing a service up, changing it and taking it down, by Serve's declarative configuration.

Serve takes the listed applications for the whole set, so those of others are listed again as they are. An arm gets traffic only while it
is up. Where none of the new arms runs yet, the first one starts beside those that serve and takes over when it answers; what is replaced
goes when nothing runs on it any more.
"""

import logging
import socket
from collections.abc import Mapping
from typing import Any

import ray
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from components.section import ConfigError
from components.serving.apps import (
    ARM_PREFIX,
    ServedArm,
    Service,
    application_name,
    arm_application,
    code_revision,
    make_routing,
    router_application,
)
from components.serving.cores import BIND_CORES, own_cores
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
from components.serving.room import has_room
from components.serving.routing import ArmState, Routing, with_epoch
from components.serving.waiting import (
    wait_until_answering,
    wait_until_gone,
    wait_until_left,
    wait_until_live,
    wait_until_running,
)

log = logging.getLogger("aerie")

FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


def deploy(service: Service, allow_gap: bool = False) -> str:
    """Makes `service` what is served and waits until every arm answers; what has not changed keeps its processes.

    Args:
        service: The arms; states that an operator gave them before are forgotten.
        allow_gap: Where there is no room for a second copy, remove the old arms first: nobody answers until a new one is up.

    Returns:
        The address of the endpoint.

    Raises:
        ConfigError: no dashboard to talk to, the address or the route is somebody else's, or no room; then what served serves on.
        DeploymentFailed: an arm or the router did not start; what served serves on, if only there was room.
    """
    client = connect()
    _claim_address(client, service, allow_gap)
    names = {application_name(service, arm) for arm in service.arms}
    wait_until_gone(client, lambda name, status: name in names and status == "DELETING")
    live = client.get_serve_details()["applications"]
    foreign = others(live)
    arms = _arms(service, live)
    steady = [arm for arm in service.arms if _runs(live, application_name(service, arm))]
    before = _routing(live)
    if _answers(before, live) and not any(map(_takes_sessions, steady)):
        steady += _start_successor(client, service, arms, live, allow_gap)
        live = client.get_serve_details()["applications"]
    kept = with_epoch(make_routing(service, steady), before)  # no traffic to what is about to start or to go
    wanted = with_epoch(make_routing(service, service.arms), kept)
    gone = [name for name in ours(live) if name.startswith(ARM_PREFIX) and name not in arms]
    steps = [
        (foreign | ours(live) | _rerouted(live, kept), kept, [], gone),
        (foreign | arms | _router(kept, live), kept, arms, []),
        (foreign | arms | _router(wanted, live), wanted, arms, []),
    ]
    for step, routing, awaited, leaving in steps:
        if step != listed(client):
            _put(client, service, step)
            wait_until_running(client, [*awaited, ROUTER])
            wait_until_live(service, routing)
        wait_until_left(service, leaving)
    return service.address


def routed_model() -> str | None:
    """The model behind the endpoint of this cluster; None where no endpoint of this project is up."""
    routing = _routing(connect().get_serve_details()["applications"])
    return routing.model if routing is not None and routing.arms else None


def teardown() -> None:
    """Removes our applications, and Serve itself when nothing else uses it; nothing there is no error."""
    client = connect()
    applications = client.get_serve_details()["applications"]
    foreign = [name for name in applications if not name.startswith(PREFIX)]
    if foreign:
        client.deploy_applications({"applications": list(others(applications).values())})
    else:
        client.delete_applications()
    wait_until_gone(client, lambda name, status: name.startswith(PREFIX))


def _routing(live: Mapping[str, Any]) -> Routing | None:
    return routing_of(live.get(ROUTER, {}).get("deployed_app_config"))


def _start_successor(
    client: ServeSubmissionClient, service: Service, arms: Applications, live: Mapping[str, Any], allow_gap: bool
) -> list[ServedArm]:
    """The first arm with traffic, up and answering beside all that serve now; none where there is no room and a gap is allowed."""
    successor = next((arm for arm in service.arms if _takes_sessions(arm)), None)
    if successor is None:
        return []
    name = application_name(service, successor)
    if name not in ours(live) and not has_room(service.bundles * service.settings.resources.ab.replicas):
        if not allow_gap:
            raise ConfigError(
                "resources.ab",
                f"there is no room for a second copy of the target ({service.bundles}) beside what serves; nothing was changed",
                "add a node or free these resources, or give --allow-gap: nobody answers between the old arm and the new one",
            )
        log.warning("serving: no room for a second copy of the target: nobody answers until the new arms are up")
        return []
    calm = {app: config for app, config in (others(live) | ours(live)).items() if app != name}
    log.info("serving: %s starts beside what serves now", name)
    try:
        _put(client, service, calm | {name: arms[name]})
        wait_until_running(client, [name, ROUTER])
        wait_until_answering(service, name)
    except Exception:
        _put(client, service, calm)
        raise
    return [successor]


def _takes_sessions(arm: ServedArm) -> bool:
    return arm.state == ArmState.SERVING and arm.weight > 0


def _answers(routing: Routing | None, live: Mapping[str, Any]) -> bool:
    """Whether users get answers now."""
    if routing is None or not _runs(live, ROUTER):
        return False
    taking = {name for name, weight in routing.weights.items() if weight > 0}
    taking |= {name for name, arm in routing.arms.items() if arm.state == ArmState.DRAINING}
    return any(_runs(live, routing.arms[name].app) for name in taking)


def _arms(service: Service, live: Mapping[str, Any]) -> Applications:
    """The arms' applications: those that run as they run, with their code and cores; new ones on cores of their own."""
    names = {application_name(service, arm): arm for arm in service.arms}
    running = {name: app["deployed_app_config"] for name, app in live.items() if name.startswith(ARM_PREFIX)}
    arms = {name: running[name] for name in names if name in running and live[name]["status"] not in FAILED}
    leaving = [_cores(config) for name, config in running.items() if name not in names]
    for name, served in names.items():
        if name not in arms:
            cores = own_cores(service.settings.resources.ab, [_cores(config) for config in arms.values()], leaving)
            attempt = _attempt(running[name]) + 1 if name in running else 0
            arms[name] = arm_application(service, served, _job_files(), cores, attempt)
    return arms


def _cores(application: Application) -> str:
    return str(application["args"]["env"].get(BIND_CORES, ""))


def _attempt(application: Application) -> int:
    return int(str(application["args"]["revision"]).partition("+")[2] or 0)


def _router(routing: Routing, live: Mapping[str, Any]) -> Applications:
    """The router as it runs, with this traffic; a new one where its code changed or its last start failed."""
    application = router_application(routing, code_revision(), _job_files())
    there = live.get(ROUTER, {})
    if config := there.get("deployed_app_config"):
        if there["status"] in FAILED:
            return {ROUTER: router_application(routing, f"{code_revision()}+{_attempt(config) + 1}", _job_files())}
        if config["args"]["revision"].partition("+")[0] == code_revision():
            return {ROUTER: with_routing(config, routing)}
    return {ROUTER: application}


def _rerouted(live: Mapping[str, Any], routing: Routing) -> Applications:
    """The running router, if there is one, with this traffic."""
    if not _runs(live, ROUTER):
        return {}
    return {ROUTER: with_routing(live[ROUTER]["deployed_app_config"], routing)}


def _runs(live: Mapping[str, Any], name: str) -> bool:
    return bool(live.get(name, {}).get("status") == "RUNNING")


def _put(client: ServeSubmissionClient, service: Service, applications: Applications) -> None:
    put(client, service.settings.ab.host, service.settings.ab.port, applications)


def _job_files() -> dict[str, Any]:
    """The code that this job uploaded, for the replicas too; without an upload they import the installed project."""
    runtime_env = ray.get_runtime_context().runtime_env
    return {name: runtime_env[name] for name in ("working_dir", "py_modules") if runtime_env.get(name)}


def _claim_address(client: ServeSubmissionClient, service: Service, allow_gap: bool) -> None:
    """Raises ConfigError when the address or the route is somebody else's, or ours at another address answers users."""
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
        where = f"{options.get('host')}:{options.get('port')}"
        if foreign:
            raise ConfigError(
                "ab.port", f"Serve already listens on {where} for {sorted(foreign)}", f"set it to {where}"
            )
        if not allow_gap and _answers(_routing(details["applications"]), details["applications"]):
            raise ConfigError(
                "ab.port", f"the endpoint is up at {where}", f"set it to {where}, or give --allow-gap to move it"
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
