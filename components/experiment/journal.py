"""What an experiment must not forget when it is interrupted: its plan, the weights of each epoch, and its decision.

Findings are not kept: they are rebuilt from the live records.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from components.config import ExperimentConfig
from components.experiment.policy import Action, Decision
from components.section import ConfigError
from components.storage import Location

FOLDER = "experiments"
"""Of a storage."""
PLAN, EPOCHS, DECISION = "plan.json", "epochs", "decision.json"


@dataclass(frozen=True)
class Plan:
    """Which heads, by which policy, since when."""

    name: str
    """Of the registered model."""
    challenger_version: int
    champion_version: int
    target_digest: str
    policy: Mapping[str, Any]
    started_at: float
    """Unix time in seconds: earlier requests are no part of it."""


class Journal:
    """An experiment's folder; whoever opens it again finds what the first one planned."""

    def __init__(self, location: Location, plan: Plan) -> None:
        self.location, self.plan = location, plan
        self.shares: dict[int, float] = {}
        """Chance of the challenger by weight epoch."""
        for name in location.join(EPOCHS).files():
            self.shares[int(name.removesuffix(".json"))] = json.loads(location.join(EPOCHS, name).read_bytes())

    @property
    def policy(self) -> ExperimentConfig:
        return ExperimentConfig.model_validate(self.plan.policy)

    def note_epoch(self, epoch: int, share: float) -> None:
        """The weights of an epoch never change: the first note stays."""
        if epoch not in self.shares:
            self.location.join(EPOCHS, f"{epoch}.json").write_bytes(json.dumps(share).encode())
            self.shares[epoch] = share

    def decided(self) -> Action | None:
        """What was decided; None while it is open."""
        place = self.location.join(DECISION)
        return Action(json.loads(place.read_bytes())["action"]) if place.exists() else None

    def decided_at(self) -> float:
        """Unix time in seconds of the decision; FileNotFoundError before."""
        return float(json.loads(self.location.join(DECISION).read_bytes())["decided_at"])

    def decide(self, decision: Decision, shown: Mapping[str, Any]) -> None:
        """Notes the decision with its reasons and the figures `shown` with it, before anybody acts on it."""
        text = {"action": decision.action, "reasons": [asdict(r) for r in decision.reasons], "decided_at": time.time()}
        self.location.join(DECISION).write_bytes(json.dumps(text | dict(shown), indent=1).encode())


def open_journal(storage: Location, wanted: Plan) -> Journal:
    """The journal of this pair of heads, begun unless there is one.

    Raises:
        ConfigError: it was begun under another policy. A plan that changes after a look no longer keeps its promises.
    """
    folder = f"v{wanted.challenger_version}-against-v{wanted.champion_version}-{wanted.target_digest[:8]}"
    location = storage.join(FOLDER, wanted.name, folder)
    text = json.dumps(asdict(wanted), indent=1)
    if location.join(PLAN).create(text.encode()):
        return Journal(location, wanted)
    plan = Plan(**json.loads(location.join(PLAN).read_bytes()))
    differing = [name for name, value in wanted.policy.items() if plan.policy.get(name) != value and name != "poll_s"]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"ab.experiment.{name}",
            f"the experiment in {location.uri} was planned with {plan.policy.get(name)!r}",
            "set it back, or remove that folder and begin anew",
        )
    return Journal(location, plan)
