"""What an experiment must not forget when it is interrupted: its plan, the weights of each epoch, and its decision.

Findings are not kept: they are rebuilt from the live records.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from components.config import ExperimentConfig
from components.experiment.acceptance import Acceptance
from components.experiment.policy import Action, Decision
from components.section import ConfigError
from components.serving.records import day_of, oldest_day
from components.storage import Location

FOLDER = "experiments"
"""Of a storage."""
PLAN, EPOCHS, DECISION, APPLIED, ROLLED_BACK = (
    "plan.json",
    "epochs",
    "decision.json",
    "applied.json",
    "rolled_back.json",
)
LEASE = "_lease.json"
"""Of a registered model: one experiment with its heads at a time."""


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
        self._kept = set(self.shares)

    @property
    def policy(self) -> ExperimentConfig:
        return ExperimentConfig.model_validate(self.plan.policy)

    def note_epoch(self, epoch: int, share: float) -> None:
        """The weights of an epoch never change: the first note stays. After an OSError it counts here, and the next call writes it again."""
        self.shares.setdefault(epoch, share)
        for new in sorted(self.shares.keys() - self._kept):
            self.location.join(EPOCHS, f"{new}.json").write_bytes(json.dumps(self.shares[new]).encode())
            self._kept.add(new)

    def decision(self) -> dict[str, Any] | None:
        """What was decided, with its reasons and the figures of that moment; None while it is open."""
        return self._read(DECISION)

    def acceptance(self, arm: str) -> Acceptance | None:
        """What AL an arm had when it was decided; None where nothing was counted. Live records may be gone by then."""
        found = (self.decision() or {}).get("acceptance", {}).get(arm)
        kept = None if found is None else Acceptance(**found)
        return None if kept is None or kept.pooled is None else kept

    def decided(self) -> Action | None:
        """The action of the decision; None while it is open."""
        found = self.decision()
        return None if found is None else Action(found["action"])

    def decide(self, decision: Decision, shown: Mapping[str, Any]) -> None:
        """Notes the decision with its reasons and the figures `shown` with it, before anybody acts on it."""
        text = {"action": decision.action, "reasons": [asdict(r) for r in decision.reasons], "decided_at": time.time()}
        self._write(DECISION, text | dict(shown))

    @property
    def is_applied(self) -> bool:
        """Whether traffic and alias are, or were, as decided: what moved them later was somebody else's decision."""
        return self.location.join(APPLIED).exists()

    def note_applied(self) -> None:
        if not self.is_applied:
            self._write(APPLIED, {"applied_at": time.time()})

    def rolled_back(self) -> str | None:
        """Why the promotion was undone; None where it was not."""
        found = self._read(ROLLED_BACK)
        return None if found is None else str(found["why"])

    def note_rolled_back(self, why: str) -> None:
        self._write(ROLLED_BACK, {"why": why, "rolled_back_at": time.time()})

    def _read(self, name: str) -> dict[str, Any] | None:
        place = self.location.join(name)
        return json.loads(place.read_bytes()) if place.exists() else None

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        self.location.join(name).write_bytes(json.dumps(content, indent=1).encode())


def describe_plan(plan: Plan) -> str:
    """For people."""
    return (
        f"the experiment with version {plan.challenger_version} of {plan.name} against version {plan.champion_version}"
    )


def folder_name(plan: Plan) -> str:
    """Of an experiment, below its model's."""
    return f"v{plan.challenger_version}-against-v{plan.champion_version}-{plan.target_digest[:8]}"


def find_journal(storage: Location, wanted: Plan) -> Journal | None:
    """The journal of this pair of heads; None where it was not begun.

    Raises:
        ConfigError: it was begun under another policy. A plan that changes after a look no longer keeps its promises.
    """
    location = storage.join(FOLDER, wanted.name, folder_name(wanted))
    if not location.join(PLAN).exists():
        return None
    plan = Plan(**json.loads(location.join(PLAN).read_bytes()))
    journal = Journal(location, plan)
    planned = journal.policy.model_dump(mode="json")  # with the default of what was no setting then
    differing = [name for name, value in wanted.policy.items() if planned[name] != value and name != "poll_s"]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"ab.experiment.{name}",
            f"the experiment in {location.uri} was planned with {planned[name]!r}",
            "set it back, or remove that folder and begin anew",
        )
    return journal


def check_kept(journal: Journal, records: Location, retention_days: int | None, now_s: float) -> None:
    """Raises ConfigError when live records of the experiment's beginning are gone, or go as soon as its router is up: what is left would be
    another experiment."""
    began, path = day_of(journal.plan.started_at), "ab.records_retention_days"
    problem = f"the experiment in {journal.location.uri} began on {began}, and its live records"
    if retention_days is not None and began < oldest_day(retention_days, now_s):
        raise ConfigError(path, f"{problem} are kept for {retention_days} days", "set it to more days, or to null")
    kept = {name.split("/")[0] for name in records.files()}
    if began < oldest_day(1, now_s) and began not in kept:  # any retention keeps one day
        raise ConfigError(path, f"{problem} of that day are gone", "remove that folder and begin anew")


def open_journal(storage: Location, plan: Plan) -> Journal:
    """The journal of this pair of heads, begun with this plan unless there is one. Raises as `find_journal`."""
    location = storage.join(FOLDER, plan.name, folder_name(plan))
    if location.join(PLAN).create(json.dumps(asdict(plan), indent=1).encode()):
        return Journal(location, plan)
    found = find_journal(storage, plan)
    assert found is not None, "it exists, and nobody removes it"
    return found
