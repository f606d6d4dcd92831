"""Moving the champion: the traffic first, the alias last, under a lease, and only from the version that a head was measured against."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import requests
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from components.lease import Lease
from components.publishing.registry import CHAMPION, PREVIOUS, Registry, holder, set_alias

log = logging.getLogger("aerie")

REPLACED_VERSION_TAG = "aerie.replaced_version"
ROLLBACK_TAG = "aerie.rollback"
"""Of the registered model while a rollback is under way: from>to."""


class ChampionChanged(Exception):
    """The champion is another version than the one that the head was measured against."""


class NothingToRollBack(Exception):
    """No version held the champion alias before."""


@dataclass(frozen=True)
class Promotion:
    """What became of the champion alias."""

    version: int
    replaced: int | None
    moved: bool
    """False when the alias was at `version` already."""


def promote(
    registry: Registry, version: int, incumbent: int | None, move_traffic: Callable[[], None] = lambda: None
) -> Promotion:
    """Make `version` the champion, in place of `incumbent`, the one that it was measured against.

    The alias `previous` and the tag of what was replaced are written first, the champion alias last: a command killed
    anywhere in between does the rest when it is repeated.

    Args:
        registry: The registered model.
        version: The new champion.
        incumbent: The champion so far; None for the first one.
        move_traffic: Called under the lease before any alias moves; what it raises leaves the registry as it was.

    Raises:
        ChampionChanged: the champion is neither `incumbent` nor `version` by now.
        LeaseHeld: another run changes this champion at this moment.
    """
    client, name = registry.client, registry.name
    with Lease(registry.lease, registry.lease_ttl_s) as lease:
        champion = holder(client, name, CHAMPION)
        if champion not in (version, incumbent):
            raise ChampionChanged(
                f"{name}: the champion was {_text(incumbent)} when this head was measured and is {_text(champion)} now; "
                f"repeat the command: it measures against {_text(champion)}"
            )
        move_traffic()
        lease.check()
        if _open_rollback(client, name):  # that was given up
            client.delete_registered_model_tag(name, ROLLBACK_TAG)
        if champion == version:
            return Promotion(version, incumbent, moved=False)
        client.set_model_version_tag(name, str(version), REPLACED_VERSION_TAG, str(incumbent or ""))
        if incumbent is not None:
            set_alias(client, name, PREVIOUS, incumbent)
        set_alias(client, name, CHAMPION, version)
    log.info("%s: version %d is the champion, in place of %s", name, version, _text(incumbent))
    return Promotion(version, incumbent, moved=True)


def rollback(
    registry: Registry,
    move_traffic: Callable[[int], None] = lambda version: None,
    only: tuple[int, int] | None = None,
) -> Promotion:
    """Give the champion alias back to the version that held it before; the two swap, so that a second call undoes it.

    A tag says from where to where until all is done: a command that was interrupted anywhere is finished by the next one, never undone.

    Args:
        registry: The registered model.
        move_traffic: Called under the lease, before the aliases move, with the version that is champion again.
        only: (from, to) that is meant; None: whatever held the alias before.

    Raises:
        ChampionChanged: the rollback would be another one than `only`; nothing was done.
        NothingToRollBack: there is no `previous` version.
        LeaseHeld: another run changes this champion at this moment.
    """
    client, name = registry.client, registry.name
    with Lease(registry.lease, registry.lease_ttl_s) as lease:
        holders = holder(client, name, CHAMPION), holder(client, name, PREVIOUS)
        now, before = (any(holders) and _open_rollback(client, name)) or holders
        if holders[0] not in (now, before):  # the rollback under way was of another champion
            now, before = holders
        if only is not None and (now, before) != only:
            raise ChampionChanged(
                f"{name}: {_text(only[0])} was to give way to {_text(only[1])}, but the champion is {_text(now)} "
                f"and was {_text(before)} before"
            )
        if before is None or before == now:
            raise NothingToRollBack(f"{name} has no earlier champion: promote a version instead")
        client.set_registered_model_tag(name, ROLLBACK_TAG, f"{now or ''}>{before}")
        move_traffic(before)
        lease.check()
        set_alias(client, name, CHAMPION, before)
        if now is not None:
            set_alias(client, name, PREVIOUS, now)
        try:
            client.delete_registered_model_tag(name, ROLLBACK_TAG)
        except (MlflowException, requests.RequestException) as error:
            log.warning("%s: all is rolled back, but the next rollback will finish this one again (%s)", name, error)
    log.info("%s: rolled back from %s to version %d", name, _text(now), before)
    return Promotion(before, now, moved=holders != (before, now))


def _open_rollback(client: MlflowClient, name: str) -> tuple[int | None, int] | None:
    """(from, to) of a rollback that was not finished."""
    text = client.get_registered_model(name).tags.get(ROLLBACK_TAG)
    if text is None:
        return None
    now, before = text.split(">")
    return (int(now) if now else None), int(before)


def replaced_version(version: ModelVersion) -> int | None:
    """The version that `version` took the champion alias from; None for the first champion."""
    text = version.tags.get(REPLACED_VERSION_TAG, "")
    return int(text) if text else None


def _text(version: int | None) -> str:
    return "none" if version is None else f"version {version}"
