"""From records to findings: who counts, once, on which side; and what the guardrails see."""

import dataclasses
import random

import numpy as np
import pytest

from components.config import ExperimentConfig
from components.experiment.difference import Difference
from components.experiment.guardrails import ERRORS, FIRST_ERRORS, LATENCY, TPOT, is_dealt_as_weighted
from components.experiment.monitor import Arms, Monitor
from components.experiment.policy import Action, decide
from components.experiment.sessions import complete_until
from tests.components.experiment.records import CHALLENGER, CONTROL, EPOCH, left, live_record, live_traffic

ARMS = Arms(CHALLENGER, CONTROL)
ARM_NAMES = (CHALLENGER, CONTROL)
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
    by_other = [dataclasses.replace(r, arm=CONTROL) for r in records]
    assert monitor(by_other).findings() == dataclasses.replace(monitor(records).findings(), own_answers=0.0)


def test_a_challenger_that_others_answer_for_is_not_promoted():
    """It failed, was ejected, and came back, so half of its sessions had the control's answers."""
    records = [
        dataclasses.replace(r, arm=CONTROL) if r.assigned_arm == CHALLENGER and int(r.session[1:]) % 4 < 2 else r
        for r in traffic(effect=0.2, sessions=400)
    ]
    decision = act(records)
    assert decision.action == Action.CONTINUE
    assert [r.check for r in decision.reasons if not r.passed] == ["answered by its own arm"]
    rarely = [
        dataclasses.replace(r, arm=CONTROL) if r.session == "s7" else r for r in traffic(effect=0.2, sessions=400)
    ]
    assert act(rarely).action == Action.PROMOTE


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
    assert made.findings().requests == 2


def test_a_session_that_new_weights_move_counts_where_it_began():
    moved = [live_record("a"), live_record("a", True, started_at=1.0, weight_epoch=EPOCH + 1)]
    made = monitor(moved, shares={EPOCH: 0.5, EPOCH + 1: 0.9})
    assert made.findings().sessions == {CHALLENGER: 0, CONTROL: 1}
    assert made.ledger.uncounted == 1


def test_records_read_again_in_any_order_give_the_same():
    records = traffic(effect=0.05)
    by_end = sorted(records, key=lambda r: r.started_at + r.duration_s)
    stepwise, clock = monitor(now=0.0), 0.0
    while clock < 400:  # as a router that still answers what began before it is looked at
        clock += 3.7
        running = min(
            (r.started_at for r in records if r.started_at < clock < r.started_at + r.duration_s), default=None
        )
        stepwise.add(r for r in by_end if clock - 3.7 <= r.started_at + r.duration_s < clock)
        stepwise.wait_until(complete_until(running, clock, POLICY))
    stepwise.wait_until(LONG_AFTER)
    shuffled = random.Random(0).sample(records, len(records))
    assert monitor(shuffled).findings() == monitor(records).findings()
    for name in ("requests", "sessions", "begun", "al", "difference", "dealt_as_weighted"):
        assert getattr(stepwise.findings(), name) == getattr(monitor(records).findings(), name)


def test_a_request_that_still_runs_is_waited_for():
    """Of sessions that began together the slower arm's end later: what is counted meanwhile does not know which arm is slow."""
    records = [live_record(f"s{i}", i % 2 == 0, started_at=i / 10, duration_s=5.0 + 25 * (i % 2)) for i in range(100)]
    at = 20.0
    ended = [r for r in records if r.started_at + r.duration_s < at]
    assert {r.assigned_arm for r in ended} == {CHALLENGER}
    running = min(r.started_at for r in records if r not in ended)
    made = monitor(ended, now=complete_until(running, at, POLICY))
    assert made.findings().begun == {CHALLENGER: 1, CONTROL: 0}
    made.add(r for r in records if r not in ended)
    made.wait_until(complete_until(None, 100.0, POLICY))
    assert made.findings().begun == {CHALLENGER: 50, CONTROL: 50}


def test_a_request_that_never_ends_stops_nobody():
    assert complete_until(0.0, 10.0, POLICY) == 0.0
    assert complete_until(None, 10.0, POLICY) == 10.0
    assert complete_until(0.0, 10_000.0, POLICY) == 10_000.0 - POLICY.session_idle_s


def test_only_requests_that_count_use_up_the_plan():
    """What the champion answers while the challenger's engine starts, while it is paused, and what one client asks again and again."""
    policy = POLICY.model_copy(update={"max_requests": 100, "session_requests": 20})
    alone = [live_record(f"before{i}", started_at=float(i), weight_epoch=EPOCH - 1) for i in range(200)]
    paused = [live_record(f"paused{i}", started_at=300.0 + i, weight_epoch=EPOCH + 1) for i in range(200)]
    eager = [live_record("eager", started_at=600 + i / 10) for i in range(200)]
    made = monitor([*alone, *paused, *eager], policy, shares={EPOCH: 0.5, EPOCH + 1: 0.0})
    found = made.findings()
    assert (found.requests, found.left_out, made.ledger.uncounted) == (20, 400, 180)
    assert decide(found, CONTROL, policy).action == Action.CONTINUE


def test_weights_that_are_not_known_yet_are_waited_for():
    shares = {EPOCH: 0.5}
    records = [live_record("a"), live_record("b", True, started_at=1.0, weight_epoch=EPOCH + 1)]
    made = monitor(records, shares=shares, now=10.0)
    assert (made.findings().begun, made.findings().left_out) == ({CHALLENGER: 0, CONTROL: 1}, 0)
    shares[EPOCH + 1] = 0.2
    made.wait_until(11.0)
    assert (made.findings().begun, made.findings().expected) == ({CHALLENGER: 1, CONTROL: 1}, 0.7)
    made.add([live_record("c", True, started_at=2.0, weight_epoch=EPOCH + 2)])
    shares[EPOCH + 3] = 0.5
    made.wait_until(12.0)
    assert (made.findings().begun, made.findings().left_out) == ({CHALLENGER: 1, CONTROL: 1}, 1)


def test_the_planned_end_closes_every_session_and_ignores_the_rest():
    policy = POLICY.model_copy(update={"max_requests": 200})
    records = traffic(effect=0.0)
    made = monitor(records, policy)
    found = made.findings()
    assert (found.last, found.requests, made.ledger.num_open) == (True, 200, 0)
    made.add(records)
    made.wait_until(LONG_AFTER)
    assert made.findings() == found
    assert decide(found, CONTROL, policy).is_final


def test_an_arm_that_fails_is_stopped_within_a_few_sessions_and_without_waiting_for_their_end():
    records = traffic(sessions=60, fails=0.5)
    made = monitor(records, now=records[-1].started_at)
    assert made.findings().sessions == {CHALLENGER: 0, CONTROL: 0}
    decision = decide(made.findings(), CONTROL, POLICY)
    assert decision.action == Action.STOP_HARM
    failed = {r.check: r.measured for r in decision.reasons if not r.passed and "errors" in r.check}
    assert (FIRST_ERRORS in failed, failed[ERRORS]) == (True, "not measured")


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


def test_without_streams_the_time_of_a_token_is_not_measured_and_latency_still_is():
    whole = [dataclasses.replace(r, ttft_s=None, tpot_s=None) for r in traffic(effect=0.1)]
    decision = act(whole)
    measured = {reason.check: reason.measured for reason in decision.reasons}
    assert (decision.action, measured[TPOT]) == (Action.PROMOTE, "not measured")
    timeless = [r if r.assigned_arm == CONTROL else dataclasses.replace(r, error="client_closed") for r in whole]
    decision = act(timeless)
    assert decision.action == Action.CONTINUE
    assert [(r.check, r.measured) for r in decision.reasons if not r.passed] == [(LATENCY, "not measured")]


def decide_live(records, policy=POLICY):
    """With a look every 10 s, as an experiment has it."""
    made = Monitor(ARMS, {EPOCH: 0.5}, policy)
    made.add(records)
    for now in range(0, 900, 10):
        made.wait_until(float(now))
        decision = decide(made.findings(), CONTROL, policy)
        if decision.is_final:
            break
    return decision.action, [reason.check for reason in decision.reasons if not reason.passed]


@pytest.mark.parametrize(("share", "after_s"), [(0.1, 60.0), (0.5, 60.0), (0.3, 1.0)])
def test_a_challenger_whose_clients_wait_in_vain_is_stopped(share, after_s):
    """Its AL is larger. Clients of streams leave early too: after 1 s, where the first text comes after 0.1 s and the last one after 4 s."""
    for seed in range(3):
        action, failed = decide_live(
            left(np.random.default_rng(seed), traffic(seed, effect=0.1), share, [CHALLENGER], after_s)
        )
        assert (action, {FIRST_ERRORS, ERRORS} <= set(failed)) == (Action.STOP_HARM, True)


def test_a_challenger_whose_answers_break_off_until_clients_leave_is_slow():
    action, failed = decide_live(left(np.random.default_rng(0), traffic(effect=0.1), 0.3, [CHALLENGER], ttft_s=0.1))
    assert (action, LATENCY in failed, ERRORS in failed) == (Action.STOP_HARM, True, False)


@pytest.mark.parametrize(
    ("after_s", "ttft_s"), [(0.05, None), (60.0, None), (60.0, 0.1)], ids=["at once", "in vain", "after some text"]
)
def test_clients_that_leave_either_head_block_no_promotion(after_s, ttft_s):
    for seed in range(3):
        records = left(np.random.default_rng(seed), traffic(seed, 500, effect=0.1), 0.2, ARM_NAMES, after_s, ttft_s)
        assert act(records).action == Action.PROMOTE


def test_who_leaves_within_the_usual_time_says_nothing():
    records = left(np.random.default_rng(0), traffic(effect=0.1), 0.3, [CHALLENGER], after_s=0.09)
    action, failed = decide_live(records)
    assert (action, failed) == (Action.PROMOTE, [])


@pytest.mark.parametrize(("share", "of", "few"), [(0.5, 56, 11), (0.1, 300, 9), (0.05, 600, 8)])
def test_sessions_that_were_not_dealt_by_the_weights_are_noticed(share, of, few):
    """11 of 56 sessions at a weight of a half come by chance 5 times in a million."""

    def dealt(num_treated):
        records = [live_record(f"s{i}", i < num_treated) for i in range(of)]
        found = monitor(records, ExperimentConfig(), {EPOCH: share}).findings()
        return next(r for r in decide(found, CONTROL, ExperimentConfig()).reasons if "weighted" in r.check)

    assert not dealt(few).passed
    assert f"challenger {few}, champion {of - few}; {of * share:.1f} expected" in dealt(few).measured
    assert dealt(round(of * share)).passed


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_sessions_dealt_by_the_weights_are_rarely_taken_for_misdealt(share):
    """1000 experiments of 600 sessions with a look after each: one in a thousand may err (chance 1e-3 of more than 5)."""
    draws, assignment = np.random.default_rng(0).random((600, 1000)) < share, Difference((1000,))
    misdealt = np.zeros(1000, bool)
    for treated in draws:
        assignment.add(treated, share, (np.ones(1000), np.zeros(1000)))
        misdealt |= ~is_dealt_as_weighted(assignment, ExperimentConfig())
    assert misdealt.sum() <= 5


def test_alike_arms_are_promoted_at_most_alpha_through_the_whole_of_it():
    """Record by record, with a look every few; 40 experiments (chance 1e-6 of more than 11 that err)."""
    policy = POLICY.model_copy(update={"max_requests": 300})
    wrong = 0
    for seed in range(40):
        records = sorted(traffic(seed, 130), key=lambda r: r.started_at)
        made = Monitor(ARMS, {EPOCH: 0.5}, policy)
        made.add(records)
        for record in records[::20]:
            made.wait_until(record.started_at)
            if decide(made.findings(), CONTROL, policy).action == Action.PROMOTE:
                wrong += 1
                break
    assert wrong <= 11
