"""Both heads of an experiment behind the endpoint: how its traffic is dealt, and that nobody else's changes are undone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from components.config import Settings
from components.experiment.conduct import SERVING, ask_health
from components.section import ConfigError
from components.serving.apps import ServedArm, Service
from components.serving.deploy import RoutingChanged, deploy, served_routing
from components.serving.routing import RoutedArm, Routing
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
        routing, share = served_routing(), self.settings.ab.challenger_weight
        told = self._told(routing)
        if goes_on and len(told) == len(self.heads):
            self._deploy([self._as_told(name, told) for name in (CHAMPION, CHALLENGER)], routing)
        else:
            self._deploy([self._arm(CHAMPION, 1 - share), self._arm(CHALLENGER, share)], routing)

    def look(self) -> Mapping[str, Any] | None:
        """What the endpoint says of itself; None while it does not answer.

        Raises:
            RoutingChanged: it serves other heads by now: what its traffic says is no part of the experiment.
        """
        health = ask_health(self.address)
        if health is not None:
            served = {name: told["head"] for name, told in health["arms"].items()}
            if not self.heads.items() <= served.items():
                raise self._moved(served)
        return health

    def give_all(self, winner: str, control: str = CHAMPION, needed: Sequence[str] = ()) -> None:
        """All traffic to one arm; the other one stays up without any, in the state that an operator gave it. May be repeated.

        Args:
            winner: Its name.
            control: The arm that a kill switch leaves.
            needed: Arms that must be up and serving.

        Raises:
            RoutingChanged: an operator took the winner (or one that is needed) out, or somebody else's head is served; all stays as it is.
        """
        routing = served_routing()
        if routing is not None:
            taking = {routing.arms[name].head for name, weight in routing.weights.items() if weight > 0}
            if taking - set(self.heads.values()):
                raise self._moved({name: arm.head for name, arm in routing.arms.items()})
        told = self._told(routing)
        states = {name: told[name].state.value if name in told else "not served" for name in self.heads}
        wanted = {winner, *needed} if needed else {winner} & told.keys()
        out = [f"{name} is {states[name]}" for name in sorted(wanted) if states[name] != SERVING]
        if out:
            problem = f"{', '.join(out)} at {self.address}: nothing is moved"
            raise RoutingChanged(f"{problem}. Set it serving (POST /admin/arms/NAME), then repeat the command")
        arms = [replace(self._as_told(name, told), weight=0.0) for name in told if name != winner]
        self._deploy(sorted([self._arm(winner, 1.0), *arms], key=lambda arm: arm.name != control), routing)

    def _told(self, routing: Routing | None) -> dict[str, RoutedArm]:
        """What the router is told of our arms, where they have our heads."""
        arms = {} if routing is None else routing.arms
        return {name: arms[name] for name, head in self.heads.items() if name in arms and arms[name].head == head}

    def _moved(self, served: Mapping[str, str]) -> RoutingChanged:
        found, wanted = (", ".join(f"{name} {head}" for name, head in heads.items()) for heads in (served, self.heads))
        return RoutingChanged(
            f"{self.address} serves {found}, and not the experiment's heads ({wanted}): somebody moved it, and it stays"
        )

    def _arm(self, name: str, weight: float) -> ServedArm:
        return registered_arm(name, self.artifacts[name], weight)

    def _as_told(self, name: str, told: Mapping[str, RoutedArm]) -> ServedArm:
        return replace(self._arm(name, told[name].weight), state=told[name].state)

    def _deploy(self, arms: Sequence[ServedArm], seen: Routing | None) -> None:
        service = Service(self.settings, target_path(self.artifacts["target"]), arms, self.records)
        deploy(service, self.allow_gap, None if seen is None else seen.weight_epoch)
