"""A promoted head that gets worse gives an alarm; other tasks, or chance, give none."""

from dataclasses import replace

import numpy as np
import pytest

from components.config import ExperimentConfig, WatchConfig
from components.experiment.acceptance import Acceptance, Recorded
from components.experiment.sessions import Session
from components.experiment.watch import Watch
from tests.components.experiment.records import CHALLENGER, left, live_record, live_traffic

POLICY, CONFIG = ExperimentConfig(), WatchConfig(sessions=100)
LONG_AFTER = 1e9


def traffic(seed, sessions=100, **more):
    return live_traffic(np.random.default_rng(seed), sessions, share=1.0, **more)


@pytest.fixture(scope="module")
def reference():
    return Acceptance.of([Session("all", CHALLENGER, 0, traffic(0, 400))], "the experiment")


def alarms(records, reference):
    return [a.figure for a in Watch(CHALLENGER, POLICY, CONFIG, reference).add(records, LONG_AFTER)]


def test_the_same_head_gives_no_alarm(reference):
    quiet = [alarms(traffic(seed), reference) for seed in range(1, 31)]
    assert quiet == [[]] * 30  # 60 tests at 0.001 against margins of 5% and 25%


def test_a_drop_of_al_gives_an_alarm(reference):
    assert alarms(traffic(1, effect=-0.15), reference) == ["acceptance length"]
    assert alarms(traffic(1, effect=-0.03), reference) == []


def test_a_time_is_compared_with_the_first_window_whatever_the_load_was_before(reference):
    """A head with all of the traffic is slower than it was with a part of it, and no worse for that."""
    loaded = traffic(1, slower=2.0)
    assert alarms(loaded, reference) == []
    assert alarms([*loaded, *traffic(2, first=1000, slower=2.1)], reference) == []
    assert alarms([*loaded, *traffic(2, first=1000, slower=4.0)], reference) == ["p95 latency"]


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_head_that_leaves_its_clients_waiting_gives_an_alarm_in_any_window(reference, share):
    """Also in the first one, where the times of those who stayed are what is usual, and where nobody stayed."""
    hanging = left(np.random.default_rng(0), traffic(1), share, [CHALLENGER])
    assert alarms(hanging, reference) == ["p95 latency"]
    assert alarms([*traffic(2, first=-1000), *hanging], reference) == ["p95 latency"]


@pytest.mark.parametrize(("after_s", "ttft_s"), [(0.05, None), (60.0, 0.1)], ids=["at once", "after some text"])
def test_clients_that_leave_for_a_reason_of_their_own_are_no_alarm(reference, after_s, ttft_s):
    leaving = [
        left(np.random.default_rng(day), traffic(day, first=1000 * day), 0.3, [CHALLENGER], after_s, ttft_s)
        for day in range(5)
    ]
    assert alarms([record for day in leaving for record in day], reference) == []


def test_another_mix_of_tasks_is_no_drop(reference):
    """Chat has an AL of 2.5 where code has 3."""
    chat_only = [r for r in traffic(1, 250) if r.task == "chat"]
    overall = 1 + sum(reference.accepted.values()) / sum(reference.rounds.values())
    mine = 1 + sum(r.accepted for r in chat_only) / sum(r.rounds for r in chat_only)
    assert mine < overall * (1 - CONFIG.al_drop / 2)
    assert alarms(chat_only, reference) == []


def test_a_task_that_is_new_is_compared_with_all_tasks_together(reference):
    """Clients may begin to name their tasks, or name them otherwise."""
    assert alarms([replace(r, task="new") for r in traffic(1)], reference) == []
    assert alarms([replace(r, task="new") for r in traffic(1, effect=-0.2)], reference) == ["acceptance length"]


def test_a_first_window_in_which_nothing_was_drafted_is_no_reference():
    watch = Watch(CHALLENGER, POLICY, CONFIG)
    silent = [replace(r, rounds=0, accepted=0, histogram=[]) for r in traffic(0)]
    assert watch.add(silent, 1000.0) == []
    assert watch.reference is None
    assert watch.add(traffic(1, first=2000), 4000.0) == []
    assert watch.add(traffic(2, first=5000, effect=-0.2), LONG_AFTER)[0].figure == "acceptance length"


def test_without_a_reference_the_first_window_becomes_it():
    watch = Watch(CHALLENGER, POLICY, CONFIG)
    assert watch.add(traffic(0), 1000.0) == []
    assert watch.add(traffic(1, first=2000, effect=-0.2), LONG_AFTER)[0].figure == "acceptance length"


def test_a_window_that_is_not_full_is_not_tested(reference):
    assert alarms(traffic(1, sessions=99, effect=-0.5), reference) == []


def test_a_watch_without_an_end_remembers_one_window_of_sessions(reference):
    watch = Watch(CHALLENGER, POLICY, CONFIG, reference)
    for day in range(30):
        assert watch.add(traffic(day, 250, first=1000 * day), 1000.0 * day + 900) == []
        assert watch.ledger.num_over + watch.ledger.num_open < CONFIG.sessions


def test_a_client_that_never_ends_counts_once_in_a_window(reference):
    """Its AL is low, and one of a hundred sessions is too few for an alarm."""
    watch = Watch(CHALLENGER, POLICY, CONFIG, reference)
    wrong = {"rounds": 100, "accepted": 0, "task": "code", "duration_s": 0.1}
    client = [live_record("always", treated=True, started_at=0.2 * i, **wrong) for i in range(5 * 300)]
    records = [*traffic(1, 298), *client]
    assert watch.add(records, LONG_AFTER) == []
    assert watch.ledger.requests + watch.ledger.uncounted == len(records)
    assert watch.ledger.uncounted > POLICY.session_requests


def test_the_al_of_a_registered_version_is_a_reference_for_every_task():
    recorded = Recorded("version 3", 2.65, num_speculative_tokens=3)
    assert alarms(traffic(1), recorded) == []
    assert alarms(traffic(1, effect=-0.2), recorded) == ["acceptance length"]
    watch = Watch(CHALLENGER, POLICY, CONFIG, recorded)
    watch.add(traffic(1), LONG_AFTER)
    al, time = watch.tested
    assert (al.reference, al.source, al.alarm) == ("2.650", "version 3", False)
    assert time.source == "the first window"


def test_an_al_of_another_k_is_no_reference_and_the_first_window_becomes_it(caplog):
    watch = Watch(CHALLENGER, POLICY, CONFIG, Recorded("version 3", 4.0, num_speculative_tokens=5))
    assert watch.add(traffic(0), 1000.0) == []
    assert "version 3 is of K=5" in caplog.text
    assert watch.tested[0].source == "the first window"
    assert watch.add(traffic(1, first=2000, effect=-0.2), LONG_AFTER)[0].figure == "acceptance length"
