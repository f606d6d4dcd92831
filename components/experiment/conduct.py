"""Conducting a live experiment: read what has come, look, show, and end when the policy says so. It deploys nothing and may be interrupted."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from components.experiment.follow import Follower
from components.experiment.journal import Journal
from components.experiment.monitor import Arms, Monitor
from components.experiment.policy import Decision, Findings, decide
from components.storage import Location

HEALTH_TIMEOUT_S = 5.0
SERVING = "serving"

Health = Callable[[], Mapping[str, Any] | None]
"""What the endpoint says of its arms; None while it does not answer."""
Show = Callable[[Findings, Decision], None]


def conduct(journal: Journal, arms: Arms, records: Location, health: Health, show: Show) -> tuple[Decision, Monitor]:
    """Looks every `poll_s` seconds until there is a decision, notes it in the journal and returns it.

    Args:
        journal: Of this experiment; its records are read from its beginning, so nothing is lost by an interruption.
        arms: Names in the records.
        records: Folder of the live records.
        health: The weights and their epoch.
        show: Called at every look.
    """
    policy = journal.policy
    monitor = Monitor(arms, journal.shares, policy)
    follower = Follower(records, journal.plan.started_at)
    while True:
        note_weights(journal, arms, health())
        monitor.add(follower.new())
        monitor.wait_until(time.time())
        findings = monitor.findings()
        decision = decide(findings, arms.control, policy)
        show(findings, decision)
        if decision.is_final:
            al = dict(findings.al)
            journal.decide(decision, {"requests": findings.requests, "sessions": dict(findings.sessions), "al": al})
            return decision, monitor
        time.sleep(policy.poll_s)


def note_weights(journal: Journal, arms: Arms, health: Mapping[str, Any] | None) -> None:
    """Notes the chance of the challenger in the epoch that runs now."""
    if health is None or not {arms.challenger, arms.control} <= health["arms"].keys():
        return
    weights = [live_weight(health, name) for name in (arms.challenger, arms.control)]
    if sum(weights) > 0:
        journal.note_epoch(health["weight_epoch"], weights[0] / sum(weights))


def live_weight(health: Mapping[str, Any], arm: str) -> float:
    """The arm's weight for new sessions."""
    told = health["arms"][arm]
    return float(told["weight"]) if told["state"] == SERVING else 0.0


def ask_health(address: str) -> Mapping[str, Any] | None:
    """What the endpoint at `address` says of itself; None while it does not answer."""
    try:
        reply = httpx.get(f"{address}/health", timeout=HEALTH_TIMEOUT_S, trust_env=False)
        return reply.json() if reply.is_success else None
    except (httpx.TransportError, ValueError):
        return None
