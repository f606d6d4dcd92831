"""The endpoint while the A/B stage tries arms on it: who had answers keeps getting them, and no arm that nobody judged is left with traffic."""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum

from components.section import ConfigError
from components.serving.apps import Service, application_name
from components.serving.deploy import deploy, teardown
from components.serving.listing import ROUTER, connect, listed, routing_of
from components.serving.routing import Routing
from components.storage import Location

log = logging.getLogger("aerie")


@contextmanager
def under_test(service: Service, note: Location) -> Iterator[str]:
    """The address of the endpoint while these arms share its traffic. In the end the control alone has it: nobody has judged the others yet.

    Whoever gets answers from the endpoint goes on getting them. One that was not up before goes in the end where `ab.keep_serving` is off.

    Args:
        service: The control first.
        note: File that says whether one was up, for the next try.

    Raises:
        ConfigError: the endpoint serves another model, or there is no room beside what serves; then nothing has changed.
        DeploymentFailed: an arm did not start; what served serves on.
    """
    before = live_routing()
    if before is not None and before.model != service.model:
        raise ConfigError(
            "target.model",
            f"the endpoint of this Ray cluster serves {before.model}, and its users would lose it to {service.model}",
            "stop it with `serve shutdown`, or use another Ray cluster; then repeat the command: it goes on",
        )
    arms = {served.name: application_name(service, served) for served in service.arms}
    others_had_it = was_up(before, arms, noted=note.exists() and json.loads(note.read_bytes()))
    note.write_bytes(json.dumps(others_had_it).encode())
    stays = service.settings.ab.keep_serving or others_had_it
    started = time.monotonic()
    try:
        address = deploy(service)
        log.info("ab: %s serves %s after %.0f s", address, _weights(service), time.monotonic() - started)
        yield address
    finally:
        end = ending(live_routing(), arms, stays)
        log.info("ab: %s", end.value)
        if end == Ending.DOWN:
            teardown()
        elif end == Ending.CONTROL:
            deploy(control_alone(service))


class Ending(StrEnum):
    """What becomes of the endpoint after the test."""

    CONTROL = "the control has all traffic, until the publication"
    DOWN = "the endpoint goes"
    LEFT = "the endpoint is left as it is"


def was_up(before: Routing | None, arms: Mapping[str, str], noted: bool) -> bool:
    """Whether the endpoint was up before the test.

    Args:
        before: Its traffic; None where none is up.
        arms: Of the test: {name: application}.
        noted: What the try said that was killed and left the test's own arms.
    """
    return before is not None and (noted or _applications(before) != arms)


def ending(live: Routing | None, arms: Mapping[str, str], stays: bool) -> Ending:
    """What to do with the endpoint in the end.

    Args:
        live: Its traffic then; other arms are an operator's, or those that the test's never replaced.
        arms: Of the test: {name: application}.
        stays: Whether it is to serve on.
    """
    if live is not None and not _applications(live).items() <= arms.items():
        return Ending.LEFT
    if not stays:
        return Ending.DOWN
    return Ending.CONTROL if live is not None and _applications(live) == arms else Ending.LEFT


def live_routing() -> Routing | None:
    """The traffic of this cluster's endpoint; None where none of this project is up."""
    routing = routing_of(listed(connect()).get(ROUTER))
    return routing if routing is not None and routing.arms else None


def control_alone(service: Service) -> Service:
    """All traffic to the first arm; the engines of the others stay up."""
    control, *others = service.arms
    return replace(service, arms=[replace(control, weight=1.0), *(replace(arm, weight=0.0) for arm in others)])


def _applications(routing: Routing) -> dict[str, str]:
    return {name: arm.app for name, arm in routing.arms.items()}


def _weights(service: Service) -> str:
    return ", ".join(f"{served.name} {served.weight:.0%}" for served in service.arms)
