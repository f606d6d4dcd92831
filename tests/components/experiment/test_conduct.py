"""A live experiment against records that are being written: it ends by itself, and an interrupted one goes on."""

import json
import threading
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from components.config import ExperimentConfig
from components.experiment.conduct import conduct, hold_back, live_weight, note_weights
from components.experiment.journal import Plan, check_kept, open_journal
from components.experiment.monitor import Arms, Monitor
from components.experiment.policy import Action, Decision, decide
from components.experiment.table import findings_line, findings_table, shown
from components.section import ConfigError
from components.serving.records import RecordWriter, encode_records
from components.storage import Location
from tests.components.experiment.records import CHALLENGER, CONTROL, EPOCH, live_record, live_traffic

ARMS = Arms(CHALLENGER, CONTROL)
POLICY = ExperimentConfig(min_sessions=40, max_requests=400, session_idle_s=0.3, poll_s=0.05)
HEALTH = {
    "weight_epoch": EPOCH,
    "arms": {name: {"weight": 0.5, "state": "serving"} for name in (CHALLENGER, CONTROL)},
}


def plan(started_at, policy=POLICY):
    return Plan("aerie-head", 2, 1, "d" * 64, policy.model_dump(mode="json"), started_at)


def write_traffic(folder, effect, sessions=250):
    """The router's own writer, sessions one after another within a second."""
    writer = RecordWriter(folder, None, flush_s=0.05)
    now = time.time()
    for record in live_traffic(np.random.default_rng(0), sessions, effect):
        pace = 1.0 / sessions
        writer.add(replace(record, started_at=now + record.started_at * pace, duration_s=record.duration_s * pace))
        time.sleep(0.001)
    writer.close()


@pytest.mark.parametrize(
    ("effect", "action"), [(0.1, Action.PROMOTE), (-0.1, Action.STOP_HARM), (0.0, Action.STOP_FUTILE)]
)
def test_it_ends_with_the_decision_that_its_traffic_calls_for(tmp_path, effect, action):
    storage, records = Location(str(tmp_path)), Location(str(tmp_path / "live"))
    journal = open_journal(storage, plan(time.time()))
    thread = threading.Thread(target=write_traffic, args=(records, effect))
    looks = []

    def show(found, made):
        if not looks:
            thread.start()
        looks.append((found, made))

    decision, monitor = conduct(journal, ARMS, records, lambda: HEALTH, show)
    thread.join()
    assert decision.action == action or (effect < 0 and decision.action == Action.STOP_FUTILE)
    assert len(looks) > 1
    assert open_journal(storage, plan(time.time())).decided() == decision.action
    kept = json.loads(journal.location.join("decision.json").read_bytes())
    assert kept["reasons"] == [asdict(reason) for reason in decision.reasons]
    assert kept["al"] == monitor.findings().al
    acceptance = journal.acceptance(CHALLENGER)
    assert acceptance is not None
    assert (acceptance.pooled, set(acceptance.rounds)) == (kept["al"][CHALLENGER], {"code", "chat"})
    table = findings_table(*looks[-1], ARMS, POLICY.max_requests)
    assert table.row_count == len(decision.reasons) + 1
    assert str(decision.action) in findings_line(*looks[-1], POLICY.max_requests)


def test_a_terminal_shows_one_table_that_stays_in_place_and_a_log_a_line_when_something_has_come(caplog):
    monitor = Monitor(ARMS, {EPOCH: 0.5}, POLICY)
    looks = []
    for num in (10, 10, 20):
        monitor.add(live_record(f"s{num}-{i}", i % 2 == 0) for i in range(num - monitor.ledger.requests))
        monitor.wait_until(1e9)
        findings = monitor.findings()
        looks.append((findings, decide(findings, CONTROL, POLICY)))
    terminal, pipe = (
        Console(file=StringIO(), force_terminal=is_terminal, width=300, legacy_windows=False)
        for is_terminal in (True, False)
    )
    caplog.set_level("INFO", "aerie")
    for console in (terminal, pipe):
        with shown(ARMS, POLICY.max_requests, console) as show:
            for look in looks:
                show(*look)
    drawn = terminal.file.getvalue()
    at = [drawn.index(f"continue, {requests}/400 requests") for requests in (10, 20)]
    up = "\x1b[1A"
    assert up in drawn[at[0] : at[1]], "the next table is drawn over the one before"
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records if record.name == "aerie"] == [
        findings_line(*look, POLICY.max_requests) for look in (looks[0], looks[2])
    ]
    assert pipe.file.getvalue() == ""


class Interrupted(Exception):
    pass


def test_an_interrupted_experiment_goes_on_where_it_was(tmp_path):
    storage, records = Location(str(tmp_path)), Location(str(tmp_path / "live"))
    began = time.time()
    journal = open_journal(storage, plan(began))
    write_traffic(records, 0.1, sessions=10)

    def stop(found, made):
        raise Interrupted

    with pytest.raises(Interrupted):
        conduct(journal, ARMS, records, lambda: HEALTH, stop)
    write_traffic(records, 0.1, sessions=250)
    again = open_journal(storage, plan(time.time() + 100))
    assert (again.plan.started_at, again.shares, again.decided()) == (began, {EPOCH: 0.5}, None)
    decision, monitor = conduct(again, ARMS, records, lambda: HEALTH, lambda found, made: None)
    assert decision.action == Action.PROMOTE
    assert monitor.ledger.requests > 300


def test_only_its_heads_traffic_counts_once_nothing_that_began_before_is_missing(tmp_path):
    storage, records = Location(str(tmp_path)), Location(str(tmp_path / "live"))
    began, heads = time.time() - 30, {CHALLENGER: "v2-b", CONTROL: "v1-a"}
    rows = []
    for i in range(20):
        row = live_record(f"s{i}", i % 2 == 0, started_at=began + i, duration_s=0.1)
        rows += [
            replace(row, head=heads[row.arm], assigned_head=heads[row.arm]),
            replace(row, session=f"another-{i}", head="v9-z", assigned_head="v9-z"),
        ]
    records.join(f"{datetime.fromtimestamp(began, UTC):%Y-%m-%d}", "a.jsonl").write_bytes(encode_records(rows))
    said = iter([HEALTH | {"oldest_running_at": began + 9.5}, None, HEALTH | {"oldest_running_at": None}])
    found = []

    def look(findings, decision):
        found.append(findings.requests)
        if len(found) == 3:
            raise Interrupted

    journal = open_journal(storage, plan(began, POLICY.model_copy(update={"session_idle_s": 600.0})))
    with pytest.raises(Interrupted):
        conduct(journal, ARMS, records, lambda: next(said), look, heads)
    assert found == [10, 10, 20]


def told(**states):
    return {"weight_epoch": EPOCH, "arms": {name: {"weight": 0.5, "state": state} for name, state in states.items()}}


@pytest.mark.parametrize(
    ("health", "held"),
    [
        (HEALTH, []),
        (None, [Action.PROMOTE]),
        (told(challenger="killed", champion="serving"), [Action.PROMOTE]),
        (told(champion="serving"), [Action.PROMOTE]),
        (told(challenger="serving", champion="paused"), [Action.PROMOTE, Action.STOP_HARM, Action.STOP_FUTILE]),
    ],
)
def test_no_decision_gives_traffic_to_an_arm_that_an_operator_took_out(health, held):
    for action in (Action.PROMOTE, Action.STOP_HARM, Action.STOP_FUTILE, Action.CONTINUE):
        found = hold_back(Decision(action, ()), ARMS, health)
        assert found.action == (Action.CONTINUE if action in held else action)
        assert [reason.passed for reason in found.reasons] == [False] * (action in held)


def test_a_promotion_waits_until_an_operator_lets_the_challenger_serve_again(tmp_path):
    storage, records = Location(str(tmp_path)), Location(str(tmp_path / "live"))
    journal = open_journal(storage, plan(time.time()))
    write_traffic(records, 0.1)
    killed = told(challenger="killed", champion="serving") | {"weight_epoch": EPOCH + 1}
    journal.note_epoch(EPOCH, 0.5)
    looks = []

    def health():
        return killed if len(looks) < 3 else HEALTH

    def show(found, made):
        looks.append(made)

    decision, _ = conduct(journal, ARMS, records, health, show)
    assert decision.action == Action.PROMOTE
    assert [made.action for made in looks] == [Action.CONTINUE] * 3 + [Action.PROMOTE]
    assert all(made.reasons[-1].measured == "challenger is killed" for made in looks[:3])


def test_a_storage_that_fails_for_a_while_ends_no_experiment(tmp_path, monkeypatch, caplog):
    """Reading the records, noting the weights and noting the decision fail twice each."""
    storage, records = Location(str(tmp_path)), Location(str(tmp_path / "live"))
    journal = open_journal(storage, plan(time.time()))
    write_traffic(records, 0.1)
    failures = {"live": 2, "epochs": 2, "decision.json": 2}

    def failing(method):
        def call(location, *args):
            for part in failures:
                if part in location.uri and failures[part]:
                    failures[part] -= 1
                    raise OSError("the storage is away")
            return method(location, *args)

        return call

    for name in ("read_bytes", "write_bytes"):
        monkeypatch.setattr(Location, name, failing(getattr(Location, name)))
    decision, monitor = conduct(journal, ARMS, records, lambda: HEALTH, lambda found, made: None)
    assert (decision.action, set(failures.values())) == (Action.PROMOTE, {0})
    assert monitor.ledger.requests > 300
    again = open_journal(storage, plan(0.0))
    assert (again.decided(), again.shares) == (Action.PROMOTE, {EPOCH: 0.5})
    assert caplog.text.count("the storage is away") == 6


def test_a_plan_does_not_change_after_its_first_look(tmp_path):
    storage = Location(str(tmp_path))
    open_journal(storage, plan(1.0))
    open_journal(storage, plan(1.0, POLICY.model_copy(update={"poll_s": 1.0})))
    with pytest.raises(ConfigError, match=r"ab\.experiment\.max_requests: .*400"):
        open_journal(storage, plan(1.0, POLICY.model_copy(update={"max_requests": 800})))


def test_a_setting_that_was_none_when_it_was_planned_has_its_default(tmp_path):
    storage, old = Location(str(tmp_path)), plan(1.0)
    open_journal(storage, replace(old, policy={k: v for k, v in old.policy.items() if k != "min_own_answers"}))
    assert open_journal(storage, plan(1.0)).policy == POLICY
    with pytest.raises(ConfigError, match=r"ab\.experiment\.min_own_answers: .*planned with 0\.99"):
        open_journal(storage, plan(1.0, POLICY.model_copy(update={"min_own_answers": 0.5})))


def test_an_experiment_whose_first_records_are_gone_does_not_go_on(tmp_path):
    storage, records, day_s = Location(str(tmp_path)), Location(str(tmp_path / "live")), 86_400.0
    began = 1_800_000_000.0  # 2027-01-15, 08:00 UTC
    journal = open_journal(storage, plan(began))
    records.join("2027-01-15", "a.jsonl").write_bytes(b"")
    for retention_days, days in ((1, 1), (30, 30), (None, 300)):
        check_kept(journal, records, retention_days, began + days * day_s)
    with pytest.raises(ConfigError, match=r"ab\.records_retention_days: .*2027-01-15, .*kept for 1 days"):
        check_kept(journal, records, 1, began + 2 * day_s)
    records.join("2027-01-15").delete()
    check_kept(journal, records, 30, began + day_s)  # nobody has asked anything yet
    with pytest.raises(ConfigError, match="of that day are gone"):
        check_kept(journal, records, 30, began + 2 * day_s)


def test_the_weights_of_an_epoch_are_those_of_the_arms_that_take_sessions(tmp_path):
    journal = open_journal(Location(str(tmp_path)), plan(1.0))
    arms = {CHALLENGER: {"weight": 1.0, "state": "serving"}, CONTROL: {"weight": 3.0, "state": "serving"}}
    paused = arms | {CHALLENGER: {"weight": 1.0, "state": "paused"}}
    note_weights(journal, ARMS, {"weight_epoch": 1, "arms": arms})
    note_weights(journal, ARMS, {"weight_epoch": 2, "arms": paused})
    note_weights(journal, ARMS, {"weight_epoch": 3, "arms": {CONTROL: arms[CONTROL]}})
    note_weights(journal, ARMS, None)
    assert journal.shares == {1: 0.25, 2: 0.0}
    assert open_journal(Location(str(tmp_path)), plan(1.0)).shares == journal.shares
    assert live_weight({"arms": paused}, CHALLENGER) == 0.0
