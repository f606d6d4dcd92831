"""Sticky assignment: shares follow the weights, and a change of weights moves no more than it must."""

from collections import Counter

import pytest

from components.serving.assignment import assign, session_key

KEYS = [f"session-{i}" for i in range(4000)]


def assignments(weights, salt="s"):
    return {key: assign(key, weights, salt) for key in KEYS}


@pytest.mark.parametrize("weights", [{"a": 0.5, "b": 0.5}, {"a": 0.9, "b": 0.1}, {"a": 2, "b": 1, "c": 1}])
def test_shares_follow_the_weights(weights):
    counts = Counter(assignments(weights).values())
    for arm, weight in weights.items():
        expected = weight / sum(weights.values())
        spread = (expected * (1 - expected) / len(KEYS)) ** 0.5
        assert abs(counts[arm] / len(KEYS) - expected) < 4 * spread


def test_raising_one_weight_moves_sessions_to_that_arm_only():
    before, after = assignments({"a": 1, "b": 1, "c": 1}), assignments({"a": 1, "b": 1, "c": 3})
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved
    assert {after[key] for key in moved} == {"c"}


def test_removing_an_arm_moves_its_own_sessions_only():
    before, after = assignments({"a": 1, "b": 2, "c": 1}), assignments({"a": 1, "b": 2, "c": 0})
    assert {before[key] for key in KEYS if before[key] != after[key]} == {"c"}
    assert "c" not in after.values()


def test_scaling_all_weights_moves_nobody():
    assert assignments({"a": 1, "b": 3}) == assignments({"a": 10, "b": 30})


def test_another_salt_deals_anew():
    weights = {"a": 1, "b": 1}
    first, second = assignments(weights), assignments(weights, salt="t")
    same = sum(first[key] == second[key] for key in KEYS)
    assert 0.45 < same / len(KEYS) < 0.55


def test_no_arm_with_a_weight_gives_none():
    assert assign("k", {"a": 0.0}, "s") is None
    assert assign("k", {}, "s") is None


def test_the_session_key_is_the_header_then_the_user_then_the_body():
    assert session_key({"x-session-id": "h"}, {"user": "u"}, b"x") == "h"
    assert session_key({}, {"user": "u"}, b"x") == "u"
    assert session_key({}, {}, b"x") == session_key({}, {}, b"x") != session_key({}, {}, b"y")
