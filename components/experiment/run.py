"""`pipelines/serve.py --experiment`: both heads behind the endpoint, looks until there is a decision, and what follows from it.

The same command after an interruption goes on: the plan, the weights and the decision are in the journal, findings come from the records, and
each step that follows a decision may be repeated.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console

from components.config import Settings
from components.experiment.conduct import ask_health, conduct
from components.experiment.journal import (
    FOLDER,
    LEASE,
    Journal,
    Plan,
    check_kept,
    describe_plan,
    find_journal,
    open_journal,
)
from components.experiment.monitor import Arms
from components.experiment.outcome import act, publish_decision, roll_back, settle, until_it_works
from components.experiment.pair import Pair, check_pair
from components.experiment.policy import Action
from components.experiment.recorded import recorded_acceptance
from components.experiment.table import decision_table, shown, watch_table
from components.experiment.watch import Figure
from components.experiment.watching import watch_endpoint
from components.lease import Lease
from components.publishing import registry
from components.publishing.promotion import replaced_version
from components.publishing.run_log import mlflow_errors
from components.publishing.stages import registry_of
from components.publishing.versions import check_verdict, find
from components.section import ConfigError
from components.serving.claim import claimed_endpoint
from components.serving.deploy import served_routing
from components.serving.records import live_records
from components.serving.stages import CHALLENGER, CHAMPION
from components.stage import Artifact
from components.storage import Location

log = logging.getLogger("aerie")

ARMS = Arms(CHALLENGER, CHAMPION)


def run_experiment(
    settings: Settings,
    storage: Location,
    artifacts: Mapping[str, Artifact],
    watch: bool = False,
    override: str | None = None,
    allow_gap: bool = False,
) -> Action:
    """Serves, looks, decides and acts; of an experiment that is over it tells the decision.

    Args:
        settings: Of the run.
        storage: Where records and journal are.
        artifacts: `target`, `champion` and `challenger`; the champion is the one before (`opponent`) where the challenger was promoted.
        watch: Go on watching a promoted head.
        override: Why a challenger that the gate refused may meet live traffic; kept as a tag when it is promoted.
        allow_gap: See `deploy`.

    Raises:
        ConfigError: the two heads cannot be compared, the gate refused the challenger, live records are off, or the plan changed.
            Or another command tries arms on this endpoint.
        LeaseHeld: another command conducts an experiment of this model.
        ChampionChanged: somebody else promoted another head meanwhile.
        RoutingChanged: somebody else changed what is served meanwhile.
    """
    check_pair(artifacts)
    heads, uri = registry_of(settings, storage), settings.mlflow.tracking_uri
    with mlflow_errors(uri):
        check_verdict(find(heads.client, heads.name, str(artifacts[CHALLENGER].facts["version"])), override)
    pair = Pair(settings, artifacts, records_of(settings, storage), allow_gap)
    plan, ttl_s = make_plan(settings, artifacts), settings.storage.lease_ttl_s
    claim = claimed_endpoint(describe_plan(plan), storage, ttl_s)
    with Lease(storage.join(FOLDER, heads.name, LEASE), ttl_s) as lease, ExitStack() as trying:
        claimed = trying.enter_context(claim)
        journal = find_journal(storage, plan)
        with mlflow_errors(uri):
            over = journal is not None and is_over(journal, heads)
        if journal is None or not over:
            journal = decide(journal, plan, pair, storage)
            lease.check()
            claimed.check()
            finish(journal, pair, heads, override)
        else:
            settle(journal, pair)
            tell(journal)
        publish_decision(journal, heads)
        action = journal.decided()
        assert action is not None, "it is over"
        if action == Action.PROMOTE and watch and journal.rolled_back() is None:
            if not settings.ab.watch.rollback:
                trying.close()  # a watch that only speaks may go on for ever, and leaves the endpoint to others
            watch_promoted(journal, pair, heads)
    return action


def decide(journal: Journal | None, plan: Plan, pair: Pair, storage: Location) -> Journal:
    """The journal with its decision; serves both heads until there is one."""
    if journal is not None and journal.decided() is None:
        check_kept(journal, pair.records, pair.settings.ab.records_retention_days, time.time())
    if journal is None:
        pair.begin(goes_on=False)
        # what came while engines started is no part of it
        journal = open_journal(storage, replace(plan, started_at=time.time()))
    elif journal.decided() is None or (journal.decided() == Action.PROMOTE and served_routing() is None):
        pair.begin(goes_on=True)
    if journal.decided() is None:
        log.info("experiment: %s/v1 serves both heads; interrupt and repeat the command at will", pair.address)
        with shown(ARMS, journal.policy.max_requests, Console()) as show:
            conduct(journal, ARMS, pair.records, pair.look, show, pair.heads)
    return journal


def finish(journal: Journal, pair: Pair, heads: registry.Registry, override: str | None) -> None:
    """What the decision calls for; a promotion in spite of the gate is tagged first."""
    action, version = journal.decided(), str(journal.plan.challenger_version)
    assert action is not None, "it is decided"
    if action == Action.PROMOTE and override:
        until_it_works(
            "the override's tag",
            lambda: heads.client.set_model_version_tag(heads.name, version, registry.OVERRIDE_TAG, override),
            journal.policy.poll_s,
        )
    act(action, journal, pair, heads)


def is_over(journal: Journal, heads: registry.Registry) -> bool:
    """Whether traffic and alias have been moved as decided: the alias is the last of both."""
    return journal.is_applied or (
        journal.decided() == Action.PROMOTE
        and registry.holder(heads.client, heads.name, registry.CHAMPION) == journal.plan.challenger_version
    )


def opponent(settings: Settings, storage: Location) -> int | None:
    """The version that the champion's arm stands for when it is not the alias's: after a promotion by an experiment, the one before."""
    heads = registry_of(settings, storage)
    with mlflow_errors(settings.mlflow.tracking_uri):
        champion = registry.champion(heads.client, heads.name)
        challenger = registry.holder(heads.client, heads.name, registry.CHALLENGER)
    if champion is None or int(champion.version) != challenger:
        return None
    before, target = replaced_version(champion), champion.tags.get(registry.TARGET_DIGEST_TAG)
    if before is None or target is None:
        return None
    journal = find_journal(storage, Plan(heads.name, challenger, before, target, {}, 0.0))
    return before if journal is not None and journal.decided() == Action.PROMOTE else None


def records_of(settings: Settings, storage: Location) -> Location:
    """Where the live records are; ConfigError when they are off."""
    records = live_records(settings, storage)
    if records is None:
        raise ConfigError("ab.record_requests", "experiment and watch read the live records", "set it to true")
    return records


def make_plan(settings: Settings, artifacts: Mapping[str, Artifact]) -> Plan:
    champion, challenger = artifacts[CHAMPION].facts, artifacts[CHALLENGER].facts
    policy = settings.ab.experiment.model_dump(mode="json")
    versions = challenger["version"], champion["version"]
    return Plan(settings.publish.name, *versions, champion["target_digest"], policy, time.time())


def tell(journal: Journal) -> None:
    """What was decided before, and what became of it."""
    kept, undone = journal.decision(), journal.rolled_back()
    assert kept is not None, "it is over"
    Console().print(decision_table(kept, ARMS))
    if undone is not None:
        log.info("experiment: the promotion was rolled back because %s", undone)
    log.info("experiment: it is over; remove %s to begin anew", journal.location.uri)


def watch_promoted(journal: Journal, pair: Pair, heads: registry.Registry) -> None:
    """Watches the promoted head; ends after a rollback, else when it is interrupted."""
    decision, config = journal.decision(), pair.settings.ab.watch
    assert decision is not None, "it was promoted"
    decided_at, head, known = float(decision["decided_at"]), pair.heads[CHALLENGER], journal.acceptance(CHALLENGER)

    def health() -> Mapping[str, Any] | None:
        return ask_health(pair.address)

    endpoint = watch_endpoint(
        health, pair.records, journal.policy, config, decided_at, head, known,
        recorded=lambda other: recorded_acceptance(heads, other), show=show_window,
    )  # fmt: skip
    began_at = time.time()
    for served, alarms in endpoint:
        # Windows since the decision are tested again, for the first one is the reference of times: what they said was said before
        new = [alarm for alarm in alarms if alarm.last_at >= began_at]
        if new and config.rollback and served == head and roll_back(journal, pair, heads, new):
            publish_decision(journal, heads)
            return


def show_window(head: str, arm: str, figures: Iterable[Figure]) -> None:
    """A window of a watch, on the terminal."""
    Console().print(watch_table(head, arm, figures))
