"""Who gets which traffic: the router's `user_config`, and changes of it. A change is live and restarts nothing."""

import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from components.serving.protocol import ApiError


class ArmState(StrEnum):
    SERVING = "serving"
    """Answers its share of the sessions."""
    PAUSED = "paused"
    """Gets no new request; those that run end in peace. Its weight waits for it."""
    DRAINING = "draining"
    """Gets no new session, and keeps those that it has until they fall silent."""
    SHADOW = "shadow"
    """Gets a copy of every request; nobody sees its answers."""
    KILLED = "killed"
    """As paused, and what runs is cut off at once."""


class RoutedArm(BaseModel):
    model_config = ConfigDict(frozen=True)

    app: str
    """Its Serve application."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    head: str
    """Version and digest of its head, or `none`."""
    state: ArmState = ArmState.SERVING


class Routing(BaseModel):
    """The router's `user_config`; a field that a router's code does not know is not for it, so newer commands can still tell it their traffic."""

    model_config = ConfigDict(frozen=True)

    model: str
    salt: str
    arms: dict[str, RoutedArm]
    weight_epoch: int = 0
    """Larger after every change of `arms` or `salt`."""
    replaces: int | None = None
    """The epoch that this one was made from; a router that deals by another one by then refuses it. None: there was none."""
    control: str | None = None
    """The arm that is left when the kill switch ends all others."""
    first_item_timeout_s: float = 120.0
    drain_timeout_s: float = 600.0
    """A router whose code is replaced ends what runs through it for so long."""
    max_body_bytes: int = 8 << 20
    api_keys_file: str | None = None
    admin_token_file: str | None = None
    records: str | None = None
    """Folder or S3 prefix of the live records."""
    records_retention_days: int | None = None

    @property
    def weights(self) -> dict[str, float]:
        """Of the arms that take new sessions."""
        return {name: arm.weight for name, arm in self.arms.items() if arm.state == ArmState.SERVING}

    @property
    def shadows(self) -> list[str]:
        return [name for name, arm in self.arms.items() if arm.state == ArmState.SHADOW]


class ArmChange(BaseModel):
    """What an operator may change of an arm while it serves; what is left out stays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    state: ArmState | None = None


class AskedChange(ArmChange):
    """What an operator asks for."""

    weight_epoch: int | None = None
    """The epoch that the operator saw: in another one nothing is changed. None: whatever serves now is changed."""


def change_arms(routing: Routing, changes: Mapping[str, ArmChange]) -> Routing:
    """The routing after the changes, in an epoch of its own.

    Raises:
        ApiError: 404 for an arm that is not there.
    """
    unknown = sorted(set(changes) - set(routing.arms))
    if unknown:
        raise ApiError(404, f"there is no arm {unknown[0]!r}; arms: {', '.join(routing.arms)}", "arm_not_found")
    arms = {
        name: arm.model_copy(update=_changed_fields(changes[name])) if name in changes else arm
        for name, arm in routing.arms.items()
    }
    return with_epoch(routing.model_copy(update={"arms": arms}), routing)


def kill_all_but_control(routing: Routing) -> Routing:
    """The routing with the control alone; the control serves, whatever it did before.

    Raises:
        ApiError: 409 where no control was named, for then nobody would be left to answer.
    """
    if routing.control not in routing.arms:
        raise ApiError(409, "this service has no control arm: pause or kill its arms by name", "no_control")
    changes = {name: ArmChange(state=ArmState.KILLED) for name in routing.arms if name != routing.control}
    weight = routing.arms[routing.control].weight or 1.0
    return change_arms(routing, changes | {routing.control: ArmChange(weight=weight, state=ArmState.SERVING)})


def with_epoch(routing: Routing, before: Routing | None) -> Routing:
    """`routing` in the epoch of the one before if both deal traffic alike, else in a new one.

    Epochs are seconds of the clock, so they grow even over services that were taken down.
    """
    if before is not None and (routing.salt, routing.arms) == (before.salt, before.arms):
        return routing.model_copy(update={"weight_epoch": before.weight_epoch, "replaces": before.replaces})
    latest, replaces = (-1, None) if before is None else (before.weight_epoch, before.weight_epoch)
    return routing.model_copy(update={"weight_epoch": max(int(time.time()), latest + 1), "replaces": replaces})


def deals_as(routing: Routing, other: Routing) -> bool:
    """Whether both are one epoch's. Two that were made from the same one within a second have the same number."""
    return (routing.weight_epoch, routing.salt, routing.arms) == (other.weight_epoch, other.salt, other.arms)


def follows(routing: Routing, live: Routing | None) -> bool:
    """Whether `routing` was made from the live one, or deals as it does: what a router compares before it takes one."""
    return live is None or deals_as(routing, live) or routing.replaces == live.weight_epoch


def check_epoch(live: Routing, epoch: int | None) -> None:
    """Raises ApiError 409 where an operator saw another epoch than the live one; None: saw none."""
    if epoch is not None and epoch != live.weight_epoch:
        problem = f"the traffic was changed since weight epoch {epoch}: it is {live.weight_epoch} now ({describe_changes(live)})"
        raise ApiError(409, f"{problem}; nothing was changed", "weight_epoch_changed", "weight_epoch")


def describe_changes(routing: Routing) -> str:
    """One line for people."""
    return ", ".join(f"{name} {arm.state.value} {arm.weight:g}" for name, arm in routing.arms.items())


def describe_arms(routing: Routing, out: Mapping[str, bool], sessions: Mapping[str, int]) -> dict[str, Any]:
    """What `/health` and the operator are told of every arm."""
    return {
        name: {
            "weight": arm.weight,
            "head": arm.head,
            "state": arm.state.value,
            "ejected": out[name],
            **({"sessions": sessions[name]} if name in sessions else {}),
        }
        for name, arm in routing.arms.items()
    }


def _changed_fields(change: ArmChange) -> dict[str, Any]:
    return change.model_dump(include=set(ArmChange.model_fields), exclude_none=True)
