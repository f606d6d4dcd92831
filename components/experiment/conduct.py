"""Conducting a live experiment: read what has come, look, show, and end when the policy says so. It deploys nothing and may be interrupted."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import httpx

from components.evaluation.gate import Reason
from components.experiment.follow import Follower
from components.experiment.journal import Journal
from components.experiment.monitor import Arms, Monitor
from components.experiment.policy import Action, Decision, Findings, decide
from components.experiment.sessions import complete_until
from components.storage import Location

log = logging.getLogger("aerie")

HEALTH_TIMEOUT_S = 5.0
SERVING = "serving"

Health = Callable[[], Mapping[str, Any] | None]
"""What the endpoint says of its arms; None while it does not answer."""
Show = Callable[[Findings, Decision], None]


def conduct(
    journal: Journal,
    arms: Arms,
    records: Location,
    health: Health,
    show: Show,
    heads: Mapping[str, str] | None = None,
) -> tuple[Decision, Monitor]:
    """Looks every `poll_s` seconds until there is a decision, notes it in the journal and returns it.

    Args:
        journal: Of this experiment; its records are read from its beginning, so nothing is lost by an interruption.
        arms: Names in the records.
        records: Folder of the live records.
        health: The weights and their epoch.
        show: Called at every look.
        heads: {arm: its head}, so that no other head's traffic counts under the arm's name; None: whatever the arms' heads.
    """
    policy = journal.policy
    monitor = Monitor(arms, journal.shares, policy)
    follower = Follower(records, journal.plan.started_at, heads)
    while True:
        asked_at = time.time()
        said = health()  # before the records are read: of what it no longer counts as running none is missing
        with _outages_logged():
            note_weights(journal, arms, said)
        monitor.add(follower.new())
        oldest_running_at = 0.0 if said is None else said.get("oldest_running_at")
        monitor.wait_until(complete_until(oldest_running_at, asked_at, policy))
        findings = monitor.findings()
        decision = hold_back(decide(findings, arms.control, policy), arms, said)
        show(findings, decision)
        if decision.is_final:
            with _outages_logged():
                counted = {"requests": findings.requests, "sessions": dict(findings.sessions), "al": dict(findings.al)}
                acceptance = {arm: asdict(tally.acceptance) for arm, tally in monitor.tallies.items()}
                journal.decide(decision, counted | {"acceptance": acceptance})
                return decision, monitor
        time.sleep(policy.poll_s)


def hold_back(decision: Decision, arms: Arms, health: Mapping[str, Any] | None) -> Decision:
    """The decision, or `continue` where it would give traffic to an arm that an operator took out, or promote what nobody sees serving."""
    promotes = decision.action == Action.PROMOTE
    if not decision.is_final or (health is None and not promotes):
        return decision
    needed = (arms.challenger, arms.control) if promotes else (arms.control,)
    states = {name: "not known" if health is None else arm_state(health, name) for name in needed}
    out = {name: state for name, state in states.items() if state != SERVING}
    if not out:
        return decision
    measured = ", ".join(f"{name} is {state}" for name, state in out.items())
    reason = Reason(f"arms serve ({decision.action})", False, measured, "serving, or end this command")
    return Decision(Action.CONTINUE, (*decision.reasons, reason))


def note_weights(journal: Journal, arms: Arms, health: Mapping[str, Any] | None) -> None:
    """Notes the chance of the challenger in the epoch that runs now."""
    if health is None or not {arms.challenger, arms.control} <= health["arms"].keys():
        return
    weights = [live_weight(health, name) for name in (arms.challenger, arms.control)]
    if sum(weights) > 0:
        journal.note_epoch(health["weight_epoch"], weights[0] / sum(weights))


def live_weight(health: Mapping[str, Any], arm: str) -> float:
    """The arm's weight for new sessions."""
    return float(health["arms"][arm]["weight"]) if arm_state(health, arm) == SERVING else 0.0


def arm_state(health: Mapping[str, Any], arm: str) -> str:
    """What the operators let the arm do; `gone` where the endpoint has no such arm."""
    return str(health["arms"].get(arm, {}).get("state", "gone"))


def ask_health(address: str) -> Mapping[str, Any] | None:
    """What the endpoint at `address` says of itself; None while it does not answer."""
    try:
        reply = httpx.get(f"{address}/health", timeout=HEALTH_TIMEOUT_S, trust_env=False)
        return reply.json() if reply.is_success else None
    except (httpx.TransportError, ValueError):
        return None


@contextmanager
def _outages_logged() -> Iterator[None]:
    """A storage that does not take the journal now is asked again at the next look."""
    try:
        yield
    except OSError as error:
        log.warning("experiment: the journal cannot be written now, and is tried again: %s", error)
