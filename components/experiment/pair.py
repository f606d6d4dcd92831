"""Both heads of an experiment behind the endpoint: how its traffic is dealt, and that nobody else's changes are undone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from components.config import Settings
from components.experiment.conduct import SERVING, arm_state, ask_health, live_weight
from components.section import ConfigError
from components.serving.apps import ServedArm, Service
from components.serving.deploy import RoutingChanged, deploy
from components.serving.routing import ArmState
from components.serving.stages import CHALLENGER, CHAMPION, registered_arm
from components.stage import Artifact
from components.storage import Location
from components.target.stages import target_path


def check_pair(artifacts: Mapping[str, Artifact]) -> None:
    """Raises ConfigError when a difference in AL between the two heads would say nothing."""
    champion, challenger = artifacts[CHAMPION].facts, artifacts[CHALLENGER].facts
    fix = "register another head (pipelines/full.py), or name another model"
    if champion["head_digest"] == challenger["head_digest"]:
        raise ConfigError("publish.name", f"the challenger, version {challenger['version']}, is the champion", fix)
    depths = [facts["num_speculative_tokens"] for facts in (challenger, champion)]
    if depths[0] != depths[1]:
        problem = f"the challenger drafts K={depths[0]} tokens and the champion K={depths[1]}: a larger K alone has a larger AL"
        raise ConfigError("evaluate.num_speculative_tokens", problem, f"register the challenger with K={depths[1]}")
    if champion["target_digest"] != challenger["target_digest"]:
        raise ConfigError("publish.name", "challenger and champion draft for different targets", fix)


@dataclass(frozen=True)
class Pair:
    """The arms `champion` and `challenger` of an endpoint."""

    settings: Settings
    artifacts: Mapping[str, Artifact]
    """`target`, `champion` and `challenger`."""
    records: Location
    """Folder of the live records."""
    allow_gap: bool = False

    @property
    def address(self) -> str:
        return f"http://{self.settings.ab.host}:{self.settings.ab.port}"

    @property
    def heads(self) -> dict[str, str]:
        """{arm: what the endpoint calls its head}."""
        return {name: self._arm(name, 0.0).head for name in (CHAMPION, CHALLENGER)}

    def begin(self, goes_on: bool) -> None:
        """Serves both: as they are where an interrupted experiment goes on and they still serve, else by `ab.challenger_weight`."""
        health, share = ask_health(self.address), self.settings.ab.challenger_weight
        told = self._told(health)
        if goes_on and len(told) == len(self.heads):
            self._deploy([self._as_told(name, told) for name in (CHAMPION, CHALLENGER)], health)
        else:
            self._deploy([self._arm(CHAMPION, 1 - share), self._arm(CHALLENGER, share)], health)

    def look(self) -> Mapping[str, Any] | None:
        """What the endpoint says of itself; None while it does not answer.

        Raises:
            RoutingChanged: it serves other heads by now: what its traffic says is no part of the experiment.
        """
        health = ask_health(self.address)
        if health is not None and len(self._told(health)) < len(self.heads):
            raise self._moved(health)
        return health

    def give_all(self, winner: str, needed: Sequence[str] = ()) -> None:
        """All traffic to one arm; the other one stays up without any, in the state that an operator gave it. May be repeated.

        Args:
            winner: Its name.
            needed: Arms that must be seen serving.

        Raises:
            RoutingChanged: an operator took the winner (or one that is needed) out, or somebody else's head is served; all stays as it is.
            ConnectionError: one is needed and the endpoint does not answer.
        """
        health = ask_health(self.address)
        if health is None and needed:
            raise ConnectionError(f"the endpoint at {self.address} does not answer")
        if health is not None:
            served = {told["head"] for name, told in health["arms"].items() if live_weight(health, name) > 0}
            if served - set(self.heads.values()):
                raise self._moved(health)
        told = self._told(health)
        missing = [name for name in needed if name not in told]
        out = [name for name in (winner, *needed) if health and name in told and arm_state(health, name) != SERVING]
        if missing or out:
            name = (missing or out)[0]
            raise RoutingChanged(
                f"{name} is {told[name]['state'] if out else 'not served'} at {self.address}: nothing is moved. "
                "Set it serving (POST /admin/arms), then repeat the command"
            )
        losers = [replace(self._as_told(name, told), weight=0.0) for name in told if name != winner]
        self._deploy([self._arm(winner, 1.0), *losers], health)  # the first one is what a kill switch leaves

    def _told(self, health: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
        """What the endpoint says of our arms, where they have our heads."""
        arms = {} if health is None else health["arms"]
        return {name: arms[name] for name, head in self.heads.items() if arms.get(name, {}).get("head") == head}

    def _moved(self, health: Mapping[str, Any]) -> RoutingChanged:
        served = ", ".join(f"{name} {told['head']}" for name, told in health["arms"].items())
        wanted = ", ".join(f"{name} {head}" for name, head in self.heads.items())
        return RoutingChanged(
            f"{self.address} serves {served}, and not the experiment's heads ({wanted}): somebody moved it, and it stays"
        )

    def _arm(self, name: str, weight: float) -> ServedArm:
        return registered_arm(name, self.artifacts[name], weight)

    def _as_told(self, name: str, told: Mapping[str, Mapping[str, Any]]) -> ServedArm:
        return replace(self._arm(name, float(told[name]["weight"])), state=ArmState(told[name]["state"]))

    def _deploy(self, arms: Sequence[ServedArm], health: Mapping[str, Any] | None) -> None:
        service = Service(self.settings, target_path(self.artifacts["target"]), arms, self.records)
        deploy(service, self.allow_gap, None if health is None else health["weight_epoch"])
