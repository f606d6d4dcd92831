"""Bringing a service up, changing it and taking it down, by Serve's declarative configuration.

Serve takes the listed applications for the whole set, so those of others are listed again as they are. An arm gets traffic only while it
is up. Where none of the new arms runs yet, the first one starts beside those that serve and takes over when it answers; what is replaced
goes when nothing runs on it any more.
"""

import logging
import socket
from collections.abc import Mapping
from typing import Any

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from components.section import ConfigError
from components.serving.apps import ARM_PREFIX, ServedArm, Service, application_name, make_routing
from components.serving.listing import (
    PREFIX,
    ROUTER,
    Applications,
    DeploymentFailed,
    connect,
    listed,
    others,
    ours,
    put,
    routing_of,
)
from components.serving.room import has_room
from components.serving.routing import ArmState, Routing, deals_as, describe_changes, with_epoch
from components.serving.running import (
    answers,
    arms_beside,
    can_compare,
    has_this_code,
    replace_traffic,
    rerouted,
    router_as_it_runs,
    routing_now,
    runs,
)
from components.serving.waiting import (
    wait_until_answering,
    wait_until_gone,
    wait_until_left,
    wait_until_live,
    wait_until_running,
    wait_until_settled,
)

log = logging.getLogger("aerie")


class RoutingChanged(DeploymentFailed):
    """Somebody else changed the traffic since it was looked at; what they did stays."""


def deploy(service: Service, allow_gap: bool = False, epoch: int | None = None) -> str:
    """Makes `service` what is served and waits until every arm answers; what has not changed keeps its processes.

    Args:
        service: The arms; states that an operator gave them before are forgotten.
        allow_gap: Where there is no room for a second copy, remove the old arms first: nobody answers until a new one is up.
        epoch: The weight epoch in which the caller decided this; None: whatever serves now.

    Returns:
        The address of the endpoint.

    Raises:
        ConfigError: no dashboard to talk to, the address or the route is somebody else's, or no room; then what served serves on.
        DeploymentFailed: an arm or the router did not start, or Ray's dashboard went away; what served serves on, if only there was room.
        RoutingChanged: somebody else changed the traffic, before this or between two of its steps; what they did stays.
    """
    client = connect()
    _claim_address(client, service, allow_gap)
    names = {application_name(service, arm) for arm in service.arms}
    wait_until_gone(client, lambda name, status: name in names and status == "DELETING")
    live = client.get_serve_details()["applications"]
    arms = arms_beside(service, live)
    steady = [arm for arm in service.arms if runs(live, application_name(service, arm))]
    before = routing_now(live)
    if epoch is not None and before is not None and before.weight_epoch != epoch:
        raise _changed(before, epoch)
    if answers(before, live) and not any(map(_takes_sessions, steady)):
        steady += _start_successor(client, service, arms, live, allow_gap)
        live = client.get_serve_details()["applications"]
    kept = with_epoch(make_routing(service, steady), before)  # no traffic to what is about to start or to go
    wanted = with_epoch(make_routing(service, service.arms), kept)
    gone = [name for name in ours(live) if name.startswith(ARM_PREFIX) and name not in arms]
    steps = [
        (ours(live) | rerouted(live, kept), kept, [], gone),
        (arms | router_as_it_runs(kept, live), kept, arms, []),
        (arms | router_as_it_runs(wanted, live), wanted, arms, []),
    ]
    seen = before
    for step, routing, awaited, leaving in steps:
        _check_unchanged(_listed_routing(client), seen)
        if ROUTER in step and (seen is None or not deals_as(routing, seen)):
            _compare_and_set(client, routing)
        seen = routing_of(step.get(ROUTER))
        if step != listed(client):
            _put(client, service, step)
            wait_until_running(client, [*awaited, ROUTER])
            _check_unchanged(_listed_routing(client), seen)
            if later := wait_until_live(service, routing):
                raise _moved(_told_arms(later), later["weight_epoch"], routing.weight_epoch)
        wait_until_left(service, leaving)
    return service.address


def _check_unchanged(now: Routing | None, seen: Routing | None) -> None:
    """Raises RoutingChanged where the traffic is dealt in another epoch than the one that was seen last."""
    if now is not None and (seen is None or not deals_as(now, seen)):
        raise _changed(now, seen.weight_epoch if seen is not None else None)


def _compare_and_set(client: ServeSubmissionClient, routing: Routing) -> None:
    """The running router deals by `routing`, before Serve hears of it: whoever loses has told Serve nothing.

    Raises:
        RoutingChanged: it was made from an epoch that is no longer live.
    """
    # another command's router may be starting, or hearing of a change at this moment
    wait_until_settled(client, lambda router: has_this_code(router) and router["status"] == "DEPLOYING")
    if not can_compare(client.get_serve_details()["applications"]):
        return
    live = replace_traffic(routing)
    if not deals_as(live, routing):
        raise _changed(live, routing.replaces)


def _changed(now: Routing, epoch: int | None) -> RoutingChanged:
    return _moved(describe_changes(now), now.weight_epoch, epoch)


def _told_arms(health: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {arm['state']} {arm['weight']:g}" for name, arm in health["arms"].items())


def _moved(arms: str, now: int, epoch: int | None) -> RoutingChanged:
    return RoutingChanged(
        f"somebody else changed the traffic meanwhile ({arms}; weight epoch {now}, it was {epoch}): "
        "it stays as it is now. See the endpoint's /health, then repeat the command if it shall still be done"
    )


def _listed_routing(client: ServeSubmissionClient) -> Routing | None:
    """What the router is told to do; None where there is none, or one that is being removed."""
    return routing_of(listed(client).get(ROUTER))


def served_routing() -> Routing | None:
    """How this cluster's endpoint deals its traffic; None where no endpoint of this project is up."""
    routing = routing_now(connect().get_serve_details()["applications"])
    return routing if routing is not None and routing.arms else None


def routed_model() -> str | None:
    """The model behind the endpoint of this cluster; None where no endpoint of this project is up."""
    routing = served_routing()
    return None if routing is None else routing.model


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
    calm = {app: config for app, config in ours(live).items() if app != name}
    log.info("serving: %s starts beside what serves now", name)
    try:
        _put(client, service, calm | {name: arms[name]})
        wait_until_running(client, [name, ROUTER])
        wait_until_answering(service, name)
    except Exception:
        _put(client, service, {app: config for app, config in listed(client).items() if app != name})
        raise
    return [successor]


def _takes_sessions(arm: ServedArm) -> bool:
    return arm.state == ArmState.SERVING and arm.weight > 0


def _put(client: ServeSubmissionClient, service: Service, applications: Applications) -> None:
    put(client, service.settings.ab.host, service.settings.ab.port, applications)


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
        if not allow_gap and answers(routing_now(details["applications"]), details["applications"]):
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
