"""What follows from a decision: traffic, alias, and what MLflow keeps of it. Each step may be repeated, and waits while MLflow or the storage is away.

Traffic moves before the alias does: a command that is killed in between finds the same pair again.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TypeVar

import requests
from mlflow.exceptions import MlflowException
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_fixed

from components.experiment.journal import Journal
from components.experiment.pair import Pair
from components.experiment.policy import Action
from components.experiment.watch import Alarm
from components.lease import LeaseHeld
from components.publishing import registry
from components.publishing.promotion import ChampionChanged, promote, rollback
from components.serving.deploy import RoutingChanged
from components.serving.listing import DashboardAway
from components.serving.stages import CHALLENGER, CHAMPION

log = logging.getLogger("aerie")

T = TypeVar("T")

LIVE_TAG = "aerie.live."
"""Of a version that stood in a live experiment, with what is told behind it."""
TOO_MANY_REQUESTS, OWN_FAULT = 429, 500
"""HTTP statuses that pass."""


def until_it_works(what: str, do: Callable[[], T], wait_s: float) -> T:
    """What `do` returns, tried again every `wait_s` seconds while MLflow, the storage or another holder of the lease is in the way."""

    def say(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        log.warning("experiment: %s is tried again: %s", what, " ".join(str(error).split())[:300])

    return Retrying(retry=retry_if_exception(_passes), wait=wait_fixed(wait_s), before_sleep=say, reraise=True)(do)


def act(action: Action, journal: Journal, pair: Pair, heads: registry.Registry) -> None:
    """Traffic to the winner, and after a promotion the alias; noted in the journal.

    Raises:
        ChampionChanged: somebody else moved the alias; then traffic stays where it is.
        RoutingChanged: somebody else changed the traffic.
    """
    what = f"the end ({action})"
    until_it_works(what, lambda: _move(action, journal, pair, heads), journal.policy.poll_s)
    until_it_works(what, journal.note_applied, journal.policy.poll_s)
    winner = CHALLENGER if action == Action.PROMOTE else CHAMPION
    log.info("experiment: %s; all traffic goes to %s", action, winner)


def _move(action: Action, journal: Journal, pair: Pair, heads: registry.Registry) -> None:
    plan = journal.plan
    if action == Action.PROMOTE:
        both = (CHALLENGER, CHAMPION)
        promote(
            heads,
            plan.challenger_version,
            plan.champion_version,
            lambda: pair.give_all(CHALLENGER, needed=both),  # until the alias moves, a kill switch leaves the champion
        )
        return _leave_to_winner(pair)
    try:  # its alias stays where it is: this takes the lease, and sees that nobody promoted another head
        promote(heads, plan.champion_version, plan.champion_version, lambda: pair.give_all(CHAMPION))
    except (MlflowException, requests.RequestException) as error:
        if not _passes(error):
            raise
        log.warning("experiment: MLflow is away, and a stop does not wait for it: %s", error)
        pair.give_all(CHAMPION)


def settle(journal: Journal, pair: Pair) -> None:
    """The rest of a promotion whose command was killed after the alias had moved; nothing where it was applied."""
    if journal.is_applied:
        return
    until_it_works("the end", lambda: _leave_to_winner(pair), journal.policy.poll_s)
    until_it_works("the end", journal.note_applied, journal.policy.poll_s)


def _leave_to_winner(pair: Pair) -> None:
    """From now on a kill switch leaves the promoted challenger; what somebody else serves by now stays."""
    try:
        pair.give_all(CHALLENGER, control=CHALLENGER, needed=(CHALLENGER,))
    except RoutingChanged as error:
        log.warning("experiment: the challenger is the champion now, but: %s", error)


def roll_back(journal: Journal, pair: Pair, heads: registry.Registry, alarms: list[Alarm]) -> bool:
    """Traffic and alias back to the champion before; False where somebody moved the alias meanwhile, and nothing is done."""
    plan, wait_s = journal.plan, journal.policy.poll_s
    only = plan.challenger_version, plan.champion_version
    try:
        until_it_works("the rollback", lambda: rollback(heads, lambda version: pair.give_all(CHAMPION), only), wait_s)
    except ChampionChanged as error:
        log.warning("watch: nothing is rolled back: %s", error)
        return False
    why = "; ".join(f"{alarm.figure} is {alarm.measured}, it was {alarm.reference}" for alarm in alarms)
    until_it_works("the rollback", lambda: journal.note_rolled_back(why), wait_s)
    log.warning("watch: rolled back because of %s", ", ".join(alarm.figure for alarm in alarms))
    return True


def publish_decision(journal: Journal, heads: registry.Registry) -> None:
    """The decision with its plan and weights into the run that made the challenger, and what came of it into the version's tags."""
    until_it_works("the decision's way to MLflow", lambda: _publish(journal, heads), journal.policy.poll_s)


def _publish(journal: Journal, heads: registry.Registry) -> None:
    plan, decision = journal.plan, journal.decision()
    assert decision is not None, "it is made"
    version = heads.client.get_model_version(heads.name, str(plan.challenger_version))
    told = {"plan": asdict(plan), "challenger_share_by_epoch": journal.shares, "decision": decision}
    if version.run_id:
        heads.client.log_dict(version.run_id, told, f"live/{journal.location.name}/decision.json")
    difference = next((r["measured"] for r in decision["reasons"] if r["check"] == "acceptance length"), None)
    tags = {
        "decision": decision["action"],
        "against": plan.champion_version,
        "requests": decision["requests"],
        "al": decision["al"].get(CHALLENGER),
        "champion_al": decision["al"].get(CHAMPION),
        "al_difference": difference,
        "decided_at": datetime.fromtimestamp(decision["decided_at"], UTC).isoformat(timespec="seconds"),
        "rolled_back": journal.rolled_back(),
    }
    for name, value in tags.items():
        if value is not None:
            heads.client.set_model_version_tag(heads.name, version.version, f"{LIVE_TAG}{name}", str(value))


def _passes(error: BaseException) -> bool:
    """Whether waiting may help."""
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= OWN_FAULT or status == TOO_MANY_REQUESTS
    return isinstance(error, (OSError, LeaseHeld, DashboardAway))
