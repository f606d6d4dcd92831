"""The endpoint while the A/B stage tries arms on it: who had answers keeps getting them, and no arm that nobody judged is left with traffic."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from components.section import ConfigError
from components.serving.apps import Service, application_name
from components.serving.deploy import deploy, teardown
from components.serving.listing import ROUTER, connect, listed, routing_of
from components.serving.routing import Routing

log = logging.getLogger("aerie")


@contextmanager
def under_test(service: Service) -> Iterator[str]:
    """The address of the endpoint while these arms share its traffic. In the end the control alone has it: nobody has judged the others yet.

    Whoever gets answers from the endpoint goes on getting them. One that was not up before goes in the end where `ab.keep_serving` is off.

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
    was_up = before is not None and _applications(before) != arms  # else nothing is, or what a killed try left
    stays = service.settings.ab.keep_serving or was_up
    started = time.monotonic()
    try:
        address = deploy(service)
        log.info("ab: %s serves %s after %.0f s", address, _weights(service), time.monotonic() - started)
        yield address
    finally:
        live = live_routing()
        if live is not None and not _applications(live).items() <= arms.items():
            log.info("ab: the endpoint serves other arms by now, and is left to them")
        elif not stays:
            teardown()
        elif live is not None and _applications(live) == arms:
            deploy(control_alone(service))


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
