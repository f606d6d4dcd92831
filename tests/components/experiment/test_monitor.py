"""From records to findings: who counts, once, on which side; and what the guardrails see."""

import dataclasses
import random

import numpy as np
import pytest

from components.config import ExperimentConfig
from components.experiment.monitor import ERRORS, FIRST_ERRORS, LATENCY, TPOT, Arms, Monitor
from components.experiment.policy import Action, decide
from tests.components.experiment.records import CHALLENGER, CONTROL, EPOCH, live_record, live_traffic

ARMS = Arms(CHALLENGER, CONTROL)
POLICY = ExperimentConfig(min_sessions=40, guardrail_sessions=20, max_requests=5000)
LONG_AFTER = 1e9


def monitor(records=(), policy=POLICY, shares=None, now=LONG_AFTER):
    made = Monitor(ARMS, {EPOCH: 0.5} if shares is None else shares, policy)
    made.add(records)
    made.wait_until(now)
    return made


def act(records, policy=POLICY, **more):
    return decide(monitor(records, policy, **more).findings(), CONTROL, policy)


def traffic(seed=0, sessions=300, **more):
    return live_traffic(np.random.default_rng(seed), sessions, **more)


def test_a_better_head_is_promoted_and_a_worse_one_stopped():
    assert act(traffic(effect=0.1)).action == Action.PROMOTE
    assert act(traffic(effect=-0.1)).action == Action.STOP_HARM
    assert act(traffic(effect=0.0)).action in (Action.CONTINUE, Action.STOP_FUTILE)


def test_al_is_shown_as_sums_divided_once_by_assigned_arm():
    records = traffic(effect=0.1)
    found = monitor(records).findings()
    for arm in (CHALLENGER, CONTROL):
        mine = [r for r in records if r.assigned_arm == arm]
        assert found.al[arm] == pytest.approx(1 + sum(r.accepted for r in mine) / sum(r.rounds for r in mine))
        assert found.sessions[arm] == len({r.session for r in mine})
    assert found.difference.estimate == pytest.approx(found.al[CHALLENGER] - found.al[CONTROL], abs=0.05)


def test_an_ejected_arms_requests_stay_its_own():
    records = traffic(effect=0.1)
    served_by_other = [dataclasses.replace(r, arm=CONTROL) for r in records]
    assert monitor(served_by_other).findings() == monitor(records).findings()


def test_copies_named_arms_and_other_arms_are_no_part_of_it():
    odd = [
        live_record("a", shadow=True),
        live_record("b", forced=True),
        live_record("c", assigned_arm="ngram"),
    ]
    made = monitor(odd)
    assert (made.ledger.requests, made.findings().sessions) == (0, {CHALLENGER: 0, CONTROL: 0})


def test_a_session_counts_once_when_it_is_silent():
    first = [live_record("a", started_at=float(i)) for i in range(3)]
    made = monitor(first, now=2 + POLICY.session_idle_s)
    assert (made.ledger.num_open, made.findings().sessions[CONTROL]) == (1, 0)
    made.wait_until(10 + POLICY.session_idle_s)
    assert (made.ledger.num_open, made.findings().sessions[CONTROL]) == (0, 1)
    made.add([live_record("a", started_at=5000.0)])
    made.wait_until(LONG_AFTER)
    assert (made.ledger.uncounted, made.findings().sessions[CONTROL]) == (1, 1)


def test_a_sessions_requests_beyond_the_limit_do_not_count():
    policy = POLICY.model_copy(update={"session_requests": 2})
    made = monitor([live_record("a", started_at=float(i)) for i in range(5)], policy)
    assert (made.tallies[CONTROL].requests, made.ledger.uncounted) == (2, 3)


def test_a_session_that_new_weights_move_counts_where_it_began():
    moved = [live_record("a"), live_record("a", True, started_at=1.0, weight_epoch=EPOCH + 1)]
    made = monitor(moved)
    assert made.findings().sessions == {CHALLENGER: 0, CONTROL: 1}
    assert made.ledger.uncounted == 1


def test_records_read_again_in_any_order_give_the_same():
    records = traffic(effect=0.05)
    stepwise = monitor()
    for start in range(0, len(records), 37):
        stepwise.add(records[start : start + 37])
    stepwise.wait_until(LONG_AFTER)
    shuffled = random.Random(0).sample(records, len(records))
    assert monitor(shuffled).findings() == monitor(records).findings()
    assert stepwise.findings().difference.low == pytest.approx(monitor(records).findings().difference.low, rel=0.05)


def test_the_planned_end_closes_every_session_and_ignores_the_rest():
    policy = POLICY.model_copy(update={"max_requests": 200})
    records = traffic(effect=0.0)
    made = monitor(records, policy, now=0.0)
    found = made.findings()
    assert (found.last, found.requests, made.ledger.num_open) == (True, 200, 0)
    made.add(records)
    assert made.findings() == found
    assert decide(found, CONTROL, policy).is_final


def test_an_arm_that_fails_is_stopped_within_a_few_sessions_and_without_waiting_for_their_end():
    records = traffic(sessions=60, fails=0.5)
    made = monitor(records, now=records[-1].started_at)
    assert made.findings().sessions == {CHALLENGER: 0, CONTROL: 0}
    decision = decide(made.findings(), CONTROL, POLICY)
    assert decision.action == Action.STOP_HARM
    assert [r.check for r in decision.reasons if not r.passed and "errors" in r.check] == [FIRST_ERRORS]


def test_later_requests_that_fail_count_when_their_session_is_over():
    records = [
        dataclasses.replace(r, error="502")
        if r.assigned_arm == CHALLENGER and r.started_at != float(r.session[1:])
        else r
        for r in traffic(sessions=200)
    ]
    passed = {reason.check: reason.passed for reason in act(records).reasons}
    assert (passed[FIRST_ERRORS], passed[ERRORS]) == (True, False)


def test_a_clients_own_mistake_is_no_error_of_the_arm():
    mistakes = [live_record(f"s{i}", i % 2 == 0, error="400" if i % 2 == 0 else None) for i in range(200)]
    found = monitor(mistakes).findings()
    assert found.guardrails[0].challenger == 0


def test_a_slow_arm_breaks_the_time_guardrails_and_a_little_slower_one_does_not():
    slow = {r.check: r.passed for r in act(traffic(sessions=400, slower=2.0)).reasons}
    assert (slow[LATENCY], slow[TPOT], slow[ERRORS]) == (False, False, True)
    fair = {r.check: r.passed for r in act(traffic(sessions=400, slower=1.05)).reasons}
    assert (fair[LATENCY], fair[TPOT]) == (True, True)


def test_sessions_that_were_not_dealt_by_the_weights_are_noticed():
    assert monitor(traffic(share=0.5)).findings().dealt_as_weighted
    assert not monitor(traffic(share=0.7)).findings().dealt_as_weighted


def test_unknown_weights_are_taken_from_the_sessions_so_far():
    known, unknown = monitor(traffic(effect=0.1)).findings(), monitor(traffic(effect=0.1), shares={}).findings()
    assert unknown.difference.estimate == pytest.approx(known.difference.estimate, abs=0.02)


def test_alike_arms_are_promoted_at_most_alpha_through_the_whole_of_it():
    """Record by record, with a look every few; 40 experiments (chance 1e-6 of more than 11 that err)."""
    policy = POLICY.model_copy(update={"max_requests": 300})
    wrong = 0
    for seed in range(40):
        records = sorted(traffic(seed, 130), key=lambda r: r.started_at + r.duration_s)
        made = Monitor(ARMS, {EPOCH: 0.5}, policy)
        for start in range(0, len(records), 20):
            made.add(records[start : start + 20])
            if decide(made.findings(), CONTROL, policy).action == Action.PROMOTE:
                wrong += 1
                break
    assert wrong <= 11
