"""The bounds hold at every look: the maths behind them, and how often they err."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from components.experiment.difference import Centre, Difference, Part, early_quantile, mixing_scale
from components.experiment.sequential import Plan, SequentialDifference

ALPHA = 0.05
CHANCE = 1e-6
"""Of a Monte Carlo test failing although the error rate is exactly `ALPHA`; the true rates lie below it."""


def watch(treated, share, accepted, rounds, plan, task=None, peek=True):
    """Sessions [replications, sessions] in order, with a look after each: whether the lower bound was ever above 0, and the last bounds."""
    n, num_sessions = treated.shape
    task = np.zeros(treated.shape, int) if task is None else task
    watched = SequentialDifference(plan, int(task.max()) + 1, (n,))
    above = np.zeros(n, bool)
    for i in range(num_sessions):
        part = Part(task[:, i], accepted[:, i], rounds[:, i], accepted[:, i] + rounds[:, i])
        watched.add(treated[:, i], share[:, i], [part], np.full(n, i + 1))
        if peek:
            above |= watched.bounds().low > 0
    return above, watched.bounds(last=True)


def draw(seed, n, num_sessions, effect=0.0, weights=(0.1, 0.5), drift=0.3):
    """Heavy-tailed sessions (a Pareto number of rounds) of two tasks, AL drifting while the weight changes."""
    rng = np.random.default_rng(seed)
    shape = (n, num_sessions)
    epoch = np.arange(num_sessions) * len(weights) // num_sessions
    share = np.broadcast_to(np.array(weights)[epoch], shape)
    treated = rng.random(shape) < share
    task = (rng.random(shape) < 0.3).astype(int)
    tokens = 100 * np.minimum((1 - rng.random(shape)) ** (-1 / 1.3), 200)
    length = (2.5 + task) * np.exp(0.15 * rng.standard_normal(shape)) * (1 + drift * epoch / len(weights))
    rounds = tokens / (length * (1 + effect * treated))
    return treated, share, tokens - rounds, rounds, task


def test_the_inequality_under_the_supermartingale_holds():
    x = np.linspace(-60, 60, 400_001)
    assert (np.exp(x - x**2 / 6) <= 1 + x + x**2 / 3 + 1e-12).all()


@given(st.floats(0, 1e6), st.floats(1e-3, 1e3), st.floats(1e-6, 0.4))
def test_the_early_quantile_solves_its_equation(variance, mixing, level):
    x = float(early_quantile(np.asarray(variance), np.asarray(mixing), level))
    mixture = 2 * np.sqrt(mixing / (variance + mixing)) * np.exp(x**2 / 2) * norm.cdf(x)
    assert mixture == pytest.approx(1 / level, rel=1e-6)


def test_the_early_boundary_is_tightest_where_it_was_planned():
    at, level = np.asarray(100.0), 0.01

    def width(mixing):
        return early_quantile(at, mixing, level) * np.sqrt(at + mixing)

    best = mixing_scale(at, level)
    assert width(best) < min(width(best * 1.5), width(best / 1.5))
    assert width(best) < 1.01 * min(width(best * factor) for factor in np.linspace(0.5, 2, 200))


def test_peeking_at_heavy_tails_drift_and_changing_weights_promotes_at_most_alpha():
    n = 400
    treated, share, accepted, rounds, task = draw(1, n, 300)
    early, last = watch(treated, share, accepted, rounds, Plan(ALPHA, 40, 300), task)
    assert (early | (last.low > 0)).sum() <= binom.ppf(1 - CHANCE, n, ALPHA)
    assert (last.high < 0).sum() <= binom.ppf(1 - CHANCE, n, ALPHA)


def test_a_plain_test_at_every_look_would_promote_far_too_often():
    """So many experiments can tell a method that does not hold from one that does."""
    n = 400
    treated, share, accepted, rounds, task = draw(1, n, 300, weights=(0.5,), drift=0.0)
    naive = np.zeros(n, bool)
    watched = SequentialDifference(Plan(ALPHA, 40, 300), 2, (n,))
    for i in range(300):
        part = Part(task[:, i], accepted[:, i], rounds[:, i], accepted[:, i] + rounds[:, i])
        watched.add(treated[:, i], share[:, i], [part], np.full(n, i + 1))
        naive |= (watched.difference.final(ALPHA).low > 0) & (i >= 40)
    assert naive.sum() > binom.ppf(1 - CHANCE, n, ALPHA)


def test_the_bounds_cover_a_true_difference():
    n = 300
    treated, share, accepted, rounds, task = draw(2, n, 300, effect=0.2, weights=(0.5,), drift=0.0)
    rng = np.random.default_rng(3)
    tokens = 100 * np.minimum((1 - rng.random(200_000)) ** (-1 / 1.3), 200)
    kinds = (rng.random(200_000) < 0.3).astype(int)
    lengths = (2.5 + kinds) * np.exp(0.15 * rng.standard_normal(200_000))
    truth = 0.2 * tokens.sum() / (tokens / lengths).sum()
    early, last = watch(treated, share, accepted, rounds, Plan(ALPHA, 40, 300), task)
    # two sides, and 3% for a truth that is itself drawn and bounds that are asymptotic away from no difference
    assert ((last.low > truth) | (last.high < truth)).sum() <= binom.ppf(1 - CHANCE, n, 2 * ALPHA + 0.03)
    assert (early | (last.low > 0)).mean() > 0.9


def test_the_estimate_is_the_difference_of_the_ratios_of_sums():
    rng = np.random.default_rng(4)
    shape = (20, 2000)
    treated = rng.random(shape) < 0.5
    tokens = rng.integers(50, 400, shape)
    rounds = tokens / (2.5 * np.exp(0.15 * rng.standard_normal(shape)) * (1 + 0.1 * treated))
    share = np.full(shape, 0.5)
    _, last = watch(treated, share, tokens - rounds, rounds, Plan(ALPHA, 40, 2000), peek=False)

    def al(mine):
        return np.where(mine, tokens, 0).sum(axis=1) / np.where(mine, rounds, 0).sum(axis=1)

    assert last.estimate == pytest.approx(al(treated) - al(~treated), abs=0.01)


def test_drift_while_weights_change_does_not_pass_for_a_gain():
    """Most of the challenger's sessions come late, when everybody's AL is higher."""
    treated, share, accepted, rounds, task = draw(5, 1, 2000, weights=(0.1, 0.8), drift=0.5)
    naive = accepted[treated].sum() / rounds[treated].sum() - accepted[~treated].sum() / rounds[~treated].sum()
    _, last = watch(treated, share, accepted, rounds, Plan(ALPHA, 40, 2000), task, peek=False)
    assert naive > 0.3
    assert last.low[0] < 0 < last.high[0]
    assert abs(last.estimate[0]) < 0.1


def test_tasks_are_taken_out_of_the_noise():
    treated, share, accepted, rounds, task = draw(6, 50, 300, weights=(0.5,), drift=0.0)
    _, apart = watch(treated, share, accepted, rounds, Plan(ALPHA, 40, 300), task, peek=False)
    _, mixed = watch(treated, share, accepted, rounds, Plan(ALPHA, 40, 300), peek=False)
    assert np.median(apart.high - apart.low) < 0.8 * np.median(mixed.high - mixed.low)


def test_replications_are_independent_of_each_other():
    drawn = draw(7, 3, 120)
    _, together = watch(*drawn[:4], Plan(ALPHA, 40, 120), drawn[4])
    alone = [watch(*(x[i : i + 1] for x in drawn[:4]), Plan(ALPHA, 40, 120), drawn[4][i : i + 1])[1] for i in range(3)]
    assert together.low == pytest.approx([bounds.low[0] for bounds in alone])


def test_nothing_is_known_before_the_first_look():
    treated, share, accepted, rounds, task = draw(8, 1, 39, effect=1.0)
    early, _ = watch(treated, share, accepted, rounds, Plan(ALPHA, 40, 300), task)
    assert not early.any()
    empty = Difference().final(ALPHA)
    assert np.isnan(empty.estimate)
    assert (empty.low, empty.high) == (-np.inf, np.inf)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_session_without_a_choice_says_nothing(share):
    difference = Difference()
    difference.add(np.asarray(share == 1.0), share, (np.asarray(5.0), np.asarray(3.0)))
    assert difference.sessions == 0
    assert not difference.score.any()


def test_the_first_session_has_nothing_to_be_compared_with():
    centre = Centre()
    part = Part(np.asarray(0), np.asarray(30.0), np.asarray(20.0), np.asarray(50.0))
    assert [float(x) for x in centre.centre(np.asarray(True), part)] == [0.0, 0.0]
