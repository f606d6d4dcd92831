"""`pipelines/serve.py --experiment`: both heads behind the endpoint, looks until there is a decision, and what follows from it.

The same command after an interruption goes on: the plan, the weights and the decision are in the journal, findings come from the records, and
each step that follows a decision may be repeated. Traffic moves before the alias does: a command killed in between finds the same pair again.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from components.config import Settings
from components.experiment.conduct import Show, ask_health, conduct, live_weight
from components.experiment.follow import Follower
from components.experiment.journal import Journal, Plan, open_journal
from components.experiment.monitor import Arms
from components.experiment.policy import Action, Decision, Findings
from components.experiment.sessions import Ledger, ended_at
from components.experiment.table import findings_line, findings_table
from components.experiment.watch import Alarm, Reference, Watch
from components.publishing import registry
from components.publishing.promotion import promote, rollback
from components.publishing.stages import registry_of
from components.publishing.versions import check_verdict, find
from components.section import ConfigError
from components.serving.apps import Service
from components.serving.deploy import deploy
from components.serving.records import live_records
from components.serving.stages import CHALLENGER, CHAMPION, registered_arm
from components.stage import Artifact
from components.storage import Location
from components.target.stages import target_path

log = logging.getLogger("aerie")

ARMS = Arms(CHALLENGER, CHAMPION)
Weights = Mapping[str, float]


def run_experiment(
    settings: Settings,
    storage: Location,
    artifacts: Mapping[str, Artifact],
    watch: bool = False,
    override: str | None = None,
    allow_gap: bool = False,
) -> Action:
    """Serves, looks, decides and acts.

    Args:
        settings: Of the run.
        storage: Where records and journal are.
        artifacts: `target`, `champion` and `challenger`.
        watch: Go on watching a promoted head until there is an alarm.
        override: Why a challenger that the gate refused may meet live traffic; kept as a tag when it is promoted.
        allow_gap: See `deploy`.

    Raises:
        ConfigError: the two heads cannot be compared, the gate refused the challenger, live records are off, or the plan changed.
        ChampionChanged: somebody else promoted another head meanwhile.
    """
    check_pair(artifacts)
    heads = registry_of(settings, storage)
    challenger = find(heads.client, heads.name, str(artifacts[CHALLENGER].facts["version"]))
    check_verdict(challenger, override)
    records = live_records(settings, storage)
    if records is None:
        raise ConfigError("ab.record_requests", "an experiment reads the live records", "set it to true")
    journal = open_journal(storage, make_plan(settings, artifacts))

    def serve(weights: Weights) -> None:
        arms = [registered_arm(name, artifacts[name], weights[name]) for name in (CHAMPION, CHALLENGER)]
        deploy(Service(settings, target_path(artifacts["target"]), arms, records), allow_gap)

    address = f"http://{settings.ab.host}:{settings.ab.port}"
    action = journal.decided()
    if action is None:
        serve(_start_weights(settings, address, artifacts))
        log.info("experiment: %s/v1 serves both heads; interrupt and repeat the command at will", address)
        with _shown(journal) as show:
            decision, _ = conduct(journal, ARMS, records, lambda: ask_health(address), show)
        action = decision.action
    act(action, journal, serve, heads)
    if action == Action.PROMOTE and override:
        heads.client.set_model_version_tag(heads.name, challenger.version, registry.OVERRIDE_TAG, override)
    if action == Action.PROMOTE and watch:
        alarms = keep_watch(journal, records, settings)
        if settings.ab.watch.rollback:
            roll_back(journal, serve, heads, alarms)
    return action


def act(action: Action, journal: Journal, serve: Callable[[Weights], None], heads: registry.Registry) -> None:
    """Traffic to the winner, and after a promotion the alias; may be repeated.

    Raises:
        ChampionChanged: somebody else moved the alias; then traffic stays where it is.
    """
    plan, promoted = journal.plan, action == Action.PROMOTE
    weights = {CHALLENGER: float(promoted), CHAMPION: float(not promoted)}
    if promoted:
        promote(heads, plan.challenger_version, plan.champion_version, lambda: serve(weights))
    else:
        serve(weights)
    log.info("experiment: %s; all traffic goes to %s", action, CHALLENGER if promoted else CHAMPION)


def roll_back(
    journal: Journal, serve: Callable[[Weights], None], heads: registry.Registry, alarms: list[Alarm]
) -> None:
    """Traffic and alias back to the champion before, unless somebody moved the alias meanwhile."""
    champion = registry.champion(heads.client, heads.name)
    if champion is None or int(champion.version) != journal.plan.challenger_version:
        log.warning("watch: the champion is another version by now, nothing is rolled back")
        return
    rollback(heads, lambda version: serve({CHALLENGER: 0.0, CHAMPION: 1.0}))
    log.warning("watch: rolled back because of %s", ", ".join(alarm.figure for alarm in alarms))


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


def make_plan(settings: Settings, artifacts: Mapping[str, Artifact]) -> Plan:
    champion, challenger = artifacts[CHAMPION].facts, artifacts[CHALLENGER].facts
    policy = settings.ab.experiment.model_dump(mode="json")
    versions = challenger["version"], champion["version"]
    return Plan(settings.publish.name, *versions, champion["target_digest"], policy, time.time())


def keep_watch(journal: Journal, records: Location, settings: Settings) -> list[Alarm]:
    """Watches the promoted head until there is an alarm, and returns it."""
    follower = Follower(records, journal.plan.started_at)
    decided_at = journal.decided_at()
    found = follower.new()
    reference = Reference()
    ledger = Ledger([CHALLENGER], journal.policy)
    for record in found:
        if ended_at(record) <= decided_at:
            for session in [*ledger.silent(ended_at(record)), *ledger.add(record)]:
                reference.add(session)
    for session in ledger.close():
        reference.add(session)
    watch = Watch(CHALLENGER, journal.policy, settings.ab.watch, reference)
    new = [record for record in found if record.started_at > decided_at]
    while not (alarms := watch.add(new, time.time())):
        time.sleep(journal.policy.poll_s)
        new = follower.new()
    for alarm in alarms:
        log.warning("watch: %s is %s, it was %s", alarm.figure, alarm.measured, alarm.reference)
    return alarms


def _start_weights(settings: Settings, address: str, artifacts: Mapping[str, Artifact]) -> dict[str, float]:
    """Those that are live, if both heads are (an operator may have changed them), else `ab.challenger_weight`."""
    health = ask_health(address)
    wanted = {name: registered_arm(name, artifacts[name], 0.0).head for name in (CHALLENGER, CHAMPION)}
    if health is not None and all(health["arms"].get(name, {}).get("head") == head for name, head in wanted.items()):
        return {name: live_weight(health, name) for name in wanted}
    return {CHALLENGER: settings.ab.challenger_weight, CHAMPION: 1 - settings.ab.challenger_weight}


@contextmanager
def _shown(journal: Journal) -> Iterator[Show]:
    """A table that stays in place on a terminal; elsewhere a line when something has come."""
    end, console = journal.policy.max_requests, Console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda findings, decision: live.update(findings_table(findings, decision, ARMS, end), refresh=True)
        return
    said = ""

    def say(findings: Findings, decision: Decision) -> None:
        nonlocal said
        line = findings_line(findings, decision, end)
        if line != said:
            said = line
            log.info("experiment: %s", line)
        if decision.is_final:
            console.print(findings_table(findings, decision, ARMS, end))

    yield say
