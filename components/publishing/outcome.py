"""What a verdict leads to: who is champion and who has the endpoint's traffic, both at once, and the sentences that say so."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from mlflow.entities.model_registry import ModelVersion

from components.lease import Lease
from components.publishing import registry
from components.publishing.evidence import Evidence
from components.publishing.incumbent import Candidate
from components.publishing.promotion import promote
from components.publishing.registry import Registry

log = logging.getLogger("aerie")

ServeAlone = Callable[[int | None], bool]
"""Gives a registered version, or plain decoding for None, all traffic of the endpoint; False where no endpoint of this target is up."""


@dataclass(frozen=True)
class Standing:
    """Where things stand after a verdict."""

    champion: int | None
    serves: bool
    """Whether an endpoint is up, with all its traffic for the champion, or for plain decoding while there is none."""
    moved: bool = False
    """Whether the champion alias was moved."""


def settle(
    evidence: Evidence, heads: Registry, version: int, incumbent: int | None, serve_alone: ServeAlone
) -> Standing:
    """Give traffic and alias to the version if it may have them, else all traffic to whoever is champion.

    Args:
        evidence: With the final verdict.
        heads: The registered model.
        version: Of the head.
        incumbent: The version that it was measured against.
        serve_alone: Moves the traffic, under the lease and before the alias.

    Raises:
        ChampionChanged: the champion is no longer the incumbent.
        LeaseHeld: another run changes this champion at this moment.
    """
    if not may_serve(evidence):
        with Lease(heads.lease, heads.lease_ttl_s):
            champion = registry.holder(heads.client, heads.name, registry.CHAMPION)
            return Standing(champion, serve_alone(champion))
    twin = champion_twin(evidence, heads)
    winner = version if twin is None else int(twin.version)  # the same run's earlier bundle of this head stays champion
    served = False

    def move_traffic() -> None:
        nonlocal served
        served = serve_alone(winner)

    try:
        promotion = promote(heads, winner, incumbent, move_traffic)
    except Exception:
        if served:
            log.warning("version %d serves, but the registry does not say so yet: repeat the command", winner)
        raise
    return Standing(winner, served, promotion.moved)


def may_serve(evidence: Evidence) -> bool:
    """Whether the head takes the champion's place."""
    return evidence.verdict.promote and evidence.settings.publish.promote


def champion_twin(evidence: Evidence, heads: Registry) -> ModelVersion | None:
    """The champion, if it is this very head at this K."""
    champion = registry.champion(heads.client, heads.name)
    ours = Candidate(evidence.head_digest, evidence.num_speculative_tokens, evidence.target["digest"])
    return champion if champion is not None and ours.is_served_by(champion) else None


def verdict_sentence(evidence: Evidence, version: int, incumbent: int | None) -> str:
    """What the verdict means for the version, before anything has moved."""
    name = evidence.settings.publish.name
    if not evidence.verdict.promote:
        failed = ", ".join(reason.check for reason in evidence.verdict.failures)
        return f"Version {version} of {name} is a challenger only. Failed: {failed}."
    place = "as the first champion" if incumbent is None else f"in place of version {incumbent}"
    off = "" if evidence.settings.publish.promote else "; publish.promote is off, so it stays a challenger"
    return f"Version {version} of {name} may serve {place}{off}."


def standing_sentence(standing: Standing) -> str:
    """Who is champion and who has the traffic, after all has moved."""
    is_none = standing.champion is None
    champion = "There is no champion" if is_none else f"Version {standing.champion} is the champion"
    if not standing.serves:
        return f"{champion}; no endpoint is up."
    return f"{champion}; all traffic of the endpoint goes to {'plain decoding' if is_none else 'it'}."
