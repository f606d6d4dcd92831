import numpy as np
import pytest

from components.evaluation.statistics import (
    MIN_PROMPTS,
    Bootstrap,
    compare_acceptance,
    compare_acceptance_by_family,
    compare_speed,
    compare_throughput,
)
from tests.components.evaluation.records import draw_records, make_record

QUICK = Bootstrap(samples=500)


def test_acceptance_length_is_summed_before_it_is_divided() -> None:
    arm = [make_record(f"p{i}", accepted, rounds) for i, (accepted, rounds) in enumerate([(10, 10), (0, 90)] * 3)]
    baseline = [make_record(f"p{i}", 0, 50) for i in range(6)]

    comparison = compare_acceptance(arm, baseline, QUICK)

    assert comparison.acceptance_length == pytest.approx(1.1)  # a mean of the prompts' own would be 1.5
    assert comparison.baseline == 1.0
    assert comparison.difference is not None
    assert comparison.difference.estimate == pytest.approx(0.1)
    assert comparison.num_prompts == 6


def test_an_arm_against_itself_differs_by_exactly_nothing() -> None:
    records = draw_records(np.random.default_rng(0), 0.3)

    comparison = compare_acceptance(records, records, QUICK)

    assert comparison.difference is not None
    assert comparison.ratio is not None
    assert (comparison.difference.low, comparison.difference.high) == (0.0, 0.0)
    assert (comparison.ratio.low, comparison.ratio.high) == (1.0, 1.0)


def test_pairing_removes_what_the_prompts_have_in_common() -> None:
    rng = np.random.default_rng(1)
    easy = draw_records(rng, 0.4, spread=0.25)
    better = [make_record(r.key, r.accepted + 2, r.rounds) for r in easy]

    paired = compare_acceptance(better, easy, QUICK).difference
    shuffled = [make_record(f"p{(i + 7) % 40}", r.accepted, r.rounds) for i, r in enumerate(better)]
    unpaired = compare_acceptance(shuffled, easy, QUICK).difference

    assert paired is not None
    assert unpaired is not None
    assert paired.low > 0
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 3


@pytest.mark.parametrize("num_prompts", [8, 40])
def test_intervals_cover_the_truth_about_as_often_as_they_say(num_prompts: int) -> None:
    rng = np.random.default_rng(2)
    repeats, covered = 400, 0
    for seed in range(repeats):
        arm, baseline = (draw_records(rng, rate, num_prompts, spread=0.1) for rate in (0.5, 0.4))
        interval = compare_acceptance(arm, baseline, Bootstrap(samples=300, seed=seed)).difference
        assert interval is not None
        covered += interval.low <= 0.1 <= interval.high
    assert 0.90 <= covered / repeats <= 0.99


def test_the_seed_decides_the_interval() -> None:
    arm, baseline = (draw_records(np.random.default_rng(seed), 0.4) for seed in (3, 4))

    assert compare_acceptance(arm, baseline, QUICK) == compare_acceptance(arm, baseline, QUICK)
    assert compare_acceptance(arm, baseline, QUICK) != compare_acceptance(arm, baseline, Bootstrap(samples=500, seed=9))


def test_what_has_no_denominator_is_none() -> None:
    records = draw_records(np.random.default_rng(5), 0.4)
    silent = [make_record(r.key, 0, 0) for r in records]

    comparison = compare_acceptance(records, silent, QUICK)

    assert comparison.baseline is None
    assert comparison.difference is None
    assert comparison.ratio is None
    assert compare_acceptance([], [], QUICK).acceptance_length is None


def test_too_few_prompts_have_a_figure_but_no_interval() -> None:
    arm, baseline = (draw_records(np.random.default_rng(s), 0.4, MIN_PROMPTS - 1) for s in (6, 7))

    comparison = compare_acceptance(arm, baseline, QUICK)

    assert comparison.acceptance_length is not None
    assert comparison.difference is None


def test_failed_answers_and_prompts_of_one_arm_only_are_left_out() -> None:
    arm = [make_record(f"p{i}", 10, 20) for i in range(6)] + [make_record("bad", 900, 1, error="empty answer")]
    baseline = [make_record(f"p{i}", 5, 20) for i in range(5)] + [make_record("bad", 0, 1)]

    comparison = compare_acceptance(arm, baseline, QUICK)

    assert comparison.num_prompts == 5
    assert comparison.acceptance_length == pytest.approx(1.5)


def test_families_are_compared_one_by_one() -> None:
    arm = [make_record(f"{f}{i}", 10 if f == "code" else 2, 20, family=f) for f in ("code", "maths") for i in range(6)]
    baseline = [make_record(f"{f}{i}", 5, 20, family=f) for f in ("code", "maths") for i in range(6)]

    ratios = {name: c.ratio for name, c in compare_acceptance_by_family(arm, baseline, QUICK).items()}

    assert ratios["code"] is not None
    assert ratios["maths"] is not None
    assert ratios["code"].low > 1 > ratios["maths"].high


def test_speed_is_the_median_of_the_prompts_ratios() -> None:
    arm = {f"p{i}": 10.0 * (i + 1) for i in range(6)} | {"other": 1.0}
    baseline = {f"p{i}": 8.0 * (i + 1) for i in range(6)}

    ratio = compare_speed(arm, baseline, QUICK)

    assert ratio is not None
    assert ratio.estimate == ratio.low == ratio.high == pytest.approx(1.25)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_speed_with_an_impossible_figure_is_none(bad: float) -> None:
    good = {f"p{i}": 10.0 for i in range(6)}

    assert compare_speed(good | {"p3": bad}, good, QUICK) is None
    assert compare_speed({}, good, QUICK) is None


def times(seconds: float, spread: float = 0.05, repetitions: int = 2, num_prompts: int = 40) -> list[dict[str, float]]:
    """Seconds a token of prompts that differ, the same prompts in every repetition."""
    rng = np.random.default_rng(0)
    lengths = {f"p{i}": seconds * float(np.exp(0.5 * rng.standard_normal())) for i in range(num_prompts)}
    return [
        {key: value * float(1 + spread * rng.standard_normal()) for key, value in lengths.items()}
        for _ in range(repetitions)
    ]


def test_throughput_is_a_ratio_of_sums_on_the_same_prompts() -> None:
    found = compare_throughput(times(1.0, spread=0.01), times(1.25, spread=0.01), QUICK)

    assert found is not None
    assert found.estimate == pytest.approx(1.25, rel=0.01)
    assert found.low > 1.2
    assert found.high < 1.3


def test_repetitions_that_disagree_leave_a_gain_in_doubt() -> None:
    """One quiet moment made the arm a tenth faster, the next made it a tenth slower: prompts alone would be sure."""
    [base] = times(1.0, spread=0.0, repetitions=1)
    faster, slower = ({key: value * factor for key, value in base.items()} for factor in (0.88, 1.05))

    sure = compare_throughput([faster], [base], QUICK)
    doubtful = compare_throughput([faster, slower], [base, base], QUICK)

    assert sure is not None
    assert sure.low > 1.1
    assert doubtful is not None
    assert doubtful.low < 1 < doubtful.estimate < doubtful.high


@pytest.mark.parametrize(
    ("arm", "baseline"),
    [
        ([], times(1.0)),
        (times(1.0, num_prompts=4), times(1.0)),
        ([{"p0": 0.0} | times(1.0)[0] | {"p1": 0.0}], times(1.0)),
        ([times(1.0)[0] | {"p1": float("nan")}], times(1.0)),
    ],
)
def test_throughput_without_figures_is_not_known(arm: list[dict[str, float]], baseline: list[dict[str, float]]) -> None:
    assert compare_throughput(arm, baseline, QUICK) is None
