"""What to serve: the fastest that is surely faster than no speculation, the smaller K of two equals, else nothing."""

import pytest

from components.evaluation.statistics import Interval
from components.speed.recommendation import Option, Recommendation, recommend

OFF = Recommendation("none", None, 0.0, 0.0, 0.0)


def option(arm: str, k: int, tokens_per_s: float, low: float | None = 1.05) -> Option:
    ratio = None if low is None else Interval(low + 0.1, low, low + 0.2)
    return Option(arm, k, tokens_per_s, ratio)


def test_the_fastest_of_the_sure_ones() -> None:
    options = [option("head", 3, 120), option("head", 7, 150), option("ngram", 3, 130)]
    best = recommend(options, "none")
    assert (best.arm, best.num_speculative_tokens) == ("head", 7)
    assert (best.gain, best.low, best.high) == pytest.approx((0.15, 0.05, 0.25))


def test_a_gain_in_doubt_is_no_gain() -> None:
    assert recommend([option("head", 7, 200, low=0.99), option("head", 3, 180, low=None)], "none") == OFF
    assert recommend([option("head", 7, 200, low=1.0)], "none") == OFF
    sure = recommend([option("head", 7, 200, low=0.99), option("head", 3, 120)], "none")
    assert sure.num_speculative_tokens == 3


def test_nothing_measured_is_off() -> None:
    assert recommend([], "none") == OFF


def test_of_equals_the_smaller_k_whatever_the_order() -> None:
    options = [option("head", 7, 150.0), option("head", 3, 150.0), option("other", 5, 150.0)]
    for given in (options, options[::-1]):
        assert recommend(given, "none").num_speculative_tokens == 3
