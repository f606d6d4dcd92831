"""Waiting for what Serve was told, with progress in the log and the replicas' own words when it fails."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import httpx
from ray import serve
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from components.serving.apps import Service
from components.serving.listing import ROUTER, DeploymentFailed
from components.serving.routing import Routing

log = logging.getLogger("aerie")

POLL_S = 1.0
QUIET_LOOKS = 2
PROGRESS_S = 10.0
START_TIMEOUT_S = 3600.0
"""A large target loads for long; an engine that fails says so before."""
LIVE_TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
LEAVING_TIMEOUT_S = 30.0
"""A router that is only slow, as on a machine where engines start, still has its requests."""


def wait_until_running(client: ServeSubmissionClient, names: Sequence[str]) -> None:
    """Until these applications run.

    Raises:
        DeploymentFailed: one of them says that it failed, Ray's dashboard goes away, or nothing happens for very long.
    """
    started = said = time.monotonic()
    explained = ""
    while True:
        live = client.get_serve_details()["applications"]
        _raise_for_failure(live, names)
        waiting = [name for name in names if live.get(name, {}).get("status") != "RUNNING"]
        now = time.monotonic()
        if not waiting:
            return
        if now - started > START_TIMEOUT_S:
            raise DeploymentFailed(f"not running after {START_TIMEOUT_S:.0f} s: {_messages(live, waiting)}")
        if now - said >= PROGRESS_S:
            said, why = now, " ".join(_messages(live, waiting).split())
            shown = ", ".join(waiting) if why == explained else why
            explained = why
            log.info(
                "serving: %d/%d run after %.0f s; starting: %s",
                len(names) - len(waiting),
                len(names),
                now - started,
                shown,
            )
        time.sleep(POLL_S)


def _raise_for_failure(live: Mapping[str, Any], names: Iterable[str]) -> None:
    failed = [name for name in names if live.get(name, {}).get("status") in ("DEPLOY_FAILED", "UNHEALTHY")]
    if failed:
        raise DeploymentFailed(f"did not start: {_messages(live, failed)}")


def _messages(live: Mapping[str, Any], names: Iterable[str]) -> str:
    """What Serve says of these applications and of their deployments."""
    lines = []
    for name in names:
        application = live.get(name, {})
        said = [application.get("message", "")] + [d["message"] for d in application.get("deployments", {}).values()]
        lines.append(": ".join([name, *dict.fromkeys(text.strip() for text in said if text)]))
    return "; ".join(lines)


def wait_until_settled(client: ServeSubmissionClient, is_changing: Callable[[Mapping[str, Any]], bool]) -> None:
    """Until Serve no longer says of the router that it `is_changing`; not for ever."""
    deadline = time.monotonic() + LIVE_TIMEOUT_S
    while is_changing(client.get_serve_details()["applications"].get(ROUTER, {})) and time.monotonic() < deadline:
        time.sleep(0.1)


def wait_until_live(service: Service, routing: Routing) -> Mapping[str, Any] | None:
    """Until the endpoint itself says that it deals traffic by `routing`; what it says where a later change took its place, else None."""
    deadline = time.monotonic() + LIVE_TIMEOUT_S
    said = ""
    while time.monotonic() < deadline:
        try:
            reply = httpx.get(f"{service.address}/health", timeout=5, trust_env=False)
            said, told = reply.text, reply.json()
            epoch = told.get("weight_epoch")
            if not routing.arms or epoch == routing.weight_epoch:
                return None
            if epoch is not None and epoch > routing.weight_epoch:
                return told
        except (httpx.TransportError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        time.sleep(0.1)
    wanted = {name: arm.weight for name, arm in routing.arms.items()}
    raise DeploymentFailed(f"the endpoint at {service.address} does not route to {wanted}; it says {said!r}")


def wait_until_answering(service: Service, application: str) -> None:
    """Until an arm that runs has answered a request of one token, past the router.

    Raises:
        DeploymentFailed: it does not answer, or with an error.
    """
    body = {"model": service.model, "prompt": "a", "max_tokens": 1}

    async def ask() -> dict[str, Any]:
        handle = serve.get_app_handle(application).options(stream=True)
        return await asyncio.wait_for(anext(handle.answer.remote("completions", body)), ANSWER_TIMEOUT_S)

    try:
        reply = asyncio.run(ask())
    except Exception as error:  # whatever the engine raised arrives wrapped by Ray
        raise DeploymentFailed(f"{application} does not answer ({type(error).__name__}: {error})") from error
    if "error" in reply:
        raise DeploymentFailed(f"{application} does not answer: {reply['error'].get('message')}")


def wait_until_left(service: Service, applications: Iterable[str]) -> None:
    """Until the router has nothing that runs on these applications, which no arm names any more, or `ab.drain_timeout_s` is over.

    Two looks in a row must find nothing: a request that was dealt a moment ago is on its way.
    """
    started = said = time.monotonic()
    timeout_s = service.settings.ab.drain_timeout_s
    wanted, quiet = set(applications), 0
    while wanted and quiet < QUIET_LOOKS:
        running = {name: num for name, num in _leaving(service.address).items() if name in wanted}
        quiet = 0 if running else quiet + 1
        now = time.monotonic()
        if now - started > timeout_s:
            log.warning("serving: %s are cut off after %.0f s (ab.drain_timeout_s)", _requests(running), timeout_s)
            return
        if running and now - said >= PROGRESS_S:
            said = now
            log.info("serving: waiting for %s", _requests(running))
        time.sleep(POLL_S)


def _leaving(address: str) -> Mapping[str, int]:
    """Requests that still run, by application that no arm names any more."""
    try:
        reply = httpx.get(f"{address}/health", timeout=LEAVING_TIMEOUT_S, trust_env=False)
        return reply.json().get("leaving", {})
    except (httpx.TransportError, ValueError):  # no router, no requests
        return {}


def _requests(running: Mapping[str, int]) -> str:
    return ", ".join(f"{num} requests on {name}" for name, num in running.items())


def wait_until_gone(client: ServeSubmissionClient, are_going: Callable[[str, str], bool]) -> None:
    """Until Serve lists no application for which `are_going(name, status)` holds."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while True:
        listed = client.get_serve_details()["applications"]
        left = sorted(name for name, application in listed.items() if are_going(name, application["status"]))
        if not left:
            return
        if time.monotonic() > deadline:
            raise DeploymentFailed(f"still there after {REMOVE_TIMEOUT_S:.0f} s: {left}")
        time.sleep(POLL_S)
