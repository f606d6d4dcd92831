"""One arm's intervals: its own figures inside, the truth covered as often as stated, the turns of a session as one."""

import numpy as np

from components.evaluation.acceptance import total
from components.evaluation.estimates import acceptance_length_estimate, interval_facts, position_estimates
from components.evaluation.statistics import MIN_PROMPTS, Bootstrap, Estimate
from tests.components.evaluation.records import draw_records, make_record

QUICK = Bootstrap(samples=500)


def test_intervals_hold_the_arms_own_figures_and_cover_the_truth() -> None:
    rng = np.random.default_rng(8)
    repeats, covered = 300, 0
    for seed in range(repeats):
        records = draw_records(rng, 0.4, num_prompts=20, spread=0.1)
        bootstrap = Bootstrap(samples=300, seed=seed)
        al, positions = acceptance_length_estimate(records, bootstrap), position_estimates(records, bootstrap)
        assert al is not None
        assert al.low is not None
        assert al.high is not None
        sums = total(records)
        assert [al.estimate, *(p.estimate for p in positions if p)] == [sums.acceptance_length, *sums.rate_at]
        assert positions[1] == Estimate(0.0, 0.0, 0.0)  # never accepted by these records
        covered += al.low <= 1.4 <= al.high
    assert 0.90 <= covered / repeats <= 0.99


def test_the_turns_of_a_session_are_drawn_together() -> None:
    sessions = draw_records(np.random.default_rng(9), 0.4, num_prompts=8, spread=0.25)
    repeated = [make_record(r.key, r.accepted, r.rounds) for r in sessions for _ in range(10)]
    assert interval_facts(sessions) == interval_facts(repeated)  # ten equal turns say no more than one


def test_few_prompts_have_no_bounds_and_an_arm_without_rounds_has_nothing() -> None:
    few = [make_record(f"p{i}", 5, 10) for i in range(MIN_PROMPTS - 1)] + [
        make_record("bad", 9, 1, error="empty answer")
    ]
    assert acceptance_length_estimate(few, QUICK) == Estimate(1.5, None, None)
    silent = [make_record(f"p{i}", 0, 0) for i in range(9)]
    assert interval_facts(silent) == {"al": None, "accepted_at": [None, None, None]}
    assert interval_facts([]) == {"al": None, "accepted_at": []}


def test_positions_beyond_a_records_own_k_count_as_never_accepted() -> None:
    mixed = [make_record(f"p{i}", 10, 10, k=1 + i % 2) for i in range(10)]
    assert [p and p.estimate for p in position_estimates(mixed, QUICK)] == [1.0, 0.0]
