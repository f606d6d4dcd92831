"""Decisions are values: whatever the findings, what is promoted deserves it and what harms is stopped."""

import math

from hypothesis import given
from hypothesis import strategies as st

from components.config import ExperimentConfig
from components.experiment.difference import Bounds
from components.experiment.policy import Action, Findings, Guardrail, decide

POLICY = ExperimentConfig()
TWO = st.tuples(st.booleans(), st.booleans())
ENDS = st.floats(-5, 5) | st.just(math.inf) | st.just(-math.inf)


@st.composite
def any_bounds(draw):
    low, estimate, high = sorted([draw(ENDS), draw(st.floats(-5, 5)), draw(ENDS)])
    return Bounds(draw(st.just(estimate) | st.just(math.nan)), low, high)


@st.composite
def any_findings(draw):
    guardrails = tuple(
        Guardrail(name, draw(st.none() | st.floats(0, 1)), 0.1, draw(any_bounds()), draw(st.floats(0, 0.1)), *draw(TWO))
        for name in ("errors", "p95 latency", "time per output token")
    )
    al = {"new": draw(st.none() | st.floats(1, 6)), "old": draw(st.none() | st.floats(1, 6))}
    last, dealt = draw(st.booleans()), draw(st.booleans())
    own, sessions = draw(st.none() | st.floats(0, 1)), {"new": 50, "old": 50}
    return Findings(100, 0, sessions, sessions, 50.0, al, draw(any_bounds()), guardrails, dealt, own, last)


def findings(
    low,
    estimate,
    high,
    excess=-1.0,
    estimate_of_excess=0.0,
    dealt=True,
    own=1.0,
    last=False,
    al=2.5,
    measured=True,
    required=True,
):
    guardrail = Guardrail("errors", 0.0, 0.0, Bounds(estimate_of_excess, excess, 1.0), 0.01, measured, required)
    sessions, lengths = {"new": 500, "old": 500}, {"new": al, "old": al}
    bounds = Bounds(estimate, low, high)
    return Findings(900, 0, sessions, sessions, 500.0, lengths, bounds, (guardrail,), dealt, own, last)


def action(found):
    return decide(found, "old", POLICY).action


@given(any_findings())
def test_a_promotion_has_every_reason(found):
    decision = decide(found, "old", POLICY)
    if decision.action == Action.PROMOTE:
        assert found.difference.low > 0
        assert found.difference.estimate >= POLICY.min_effect * found.al["old"]
        assert found.dealt_as_weighted
        assert found.own_answers >= POLICY.min_own_answers
        assert all(guardrail.measured for guardrail in found.guardrails if guardrail.required)
        assert not any(g.excess.estimate > g.limit for g in found.guardrails if g.measured)
        assert all(reason.passed for reason in decision.reasons)


@given(any_findings())
def test_harm_beyond_doubt_always_stops(found):
    harm = found.difference.high < 0 or any(g.excess.low > g.limit for g in found.guardrails)
    assert (decide(found, "old", POLICY).action == Action.STOP_HARM) == harm


@given(any_findings())
def test_the_planned_end_ends_it_and_every_figure_has_its_reason(found):
    decision = decide(found, "old", POLICY)
    assert decision.is_final or not found.last
    named = [reason.check for reason in decision.reasons]
    assert {"acceptance length", "errors", "p95 latency", "sessions dealt as weighted"} <= set(named)
    assert all(reason.measured and reason.required for reason in decision.reasons)


def test_each_action_has_its_case():
    assert action(findings(0.01, 0.12, 0.3)) == Action.PROMOTE
    assert action(findings(-0.01, 0.12, 0.3)) == Action.CONTINUE
    assert action(findings(0.01, 0.03, 0.06)) == Action.CONTINUE  # real, and too small to be worth it so far
    assert action(findings(-0.3, -0.1, -0.01)) == Action.STOP_HARM
    assert action(findings(0.01, 0.12, 0.3, excess=0.02)) == Action.STOP_HARM
    assert action(findings(0.01, 0.12, 0.3, estimate_of_excess=0.05)) == Action.CONTINUE  # too much, and no proof yet
    assert action(findings(-0.2, -0.05, 0.04)) == Action.STOP_FUTILE
    assert action(findings(-0.01, 0.12, 0.3, last=True)) == Action.STOP_FUTILE
    assert action(findings(0.01, 0.12, 0.3, last=True)) == Action.PROMOTE
    assert action(findings(0.01, 0.12, 0.3, dealt=False)) == Action.CONTINUE
    assert action(findings(0.01, 0.12, 0.3, dealt=False, last=True)) == Action.STOP_FUTILE
    assert action(findings(0.01, 0.12, 0.3, own=0.985)) == Action.CONTINUE
    assert action(findings(0.01, 0.12, 0.3, own=0.99)) == Action.PROMOTE
    assert action(findings(0.01, 0.12, 0.3, measured=False)) == Action.CONTINUE
    assert action(findings(0.01, 0.12, 0.3, measured=False, required=False)) == Action.PROMOTE


def test_a_control_that_never_speculated_is_never_beaten():
    assert action(findings(0.01, 0.12, 0.3, al=None)) == Action.CONTINUE
