"""Sticky assignment: shares follow the weights, and a change of weights moves no more than it must."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.serving.assignment import Sessions, assign, session_hash, session_key

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


@given(
    key=st.text(max_size=20),
    salt=st.text(max_size=5),
    weights=st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e6), min_size=1),
    arm=st.sampled_from("abcdef"),
    weight=st.floats(0, 1e6),
)
def test_one_changed_weight_moves_a_session_only_to_or_from_its_arm(key, salt, weights, arm, weight):
    before, after = assign(key, weights, salt), assign(key, weights | {arm: weight}, salt)
    if weight >= weights.get(arm, 0):
        assert after in (before, arm), "a raise moves sessions to the raised arm only"
    elif before != arm:
        assert after == before, "a cut moves sessions of the cut arm only"


@given(
    key=st.text(min_size=1, max_size=20),
    order=st.permutations("abcd"),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
)
def test_the_order_of_the_arms_decides_nothing(key, order, weights):
    named = dict(zip("abcd", weights, strict=True))
    assert assign(key, named, "s") == assign(key, {arm: named[arm] for arm in order}, "s")


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


def test_a_sessions_hash_is_not_its_key_and_another_salt_hides_it_anew():
    assert session_hash("somebody", "s") == session_hash("somebody", "s")
    assert (
        len({session_hash("somebody", "s"), session_hash("somebody", "t"), session_hash("other", "s"), "somebody"}) == 4
    )


def test_sessions_are_remembered_up_to_a_number_and_a_silence():
    now = [0.0]
    sessions = Sessions(idle_s=10, max_sessions=2, clock=lambda: now[0])
    for name in ("x", "y", "x", "z"):
        sessions.saw(name, "a")
    assert [sessions.arm_of(name) for name in ("x", "y", "z")] == ["a", None, "a"]
    now[0] = 10.0
    sessions.saw("x", "b")
    now[0] = 10.5
    assert [sessions.arm_of(name) for name in ("x", "z")] == ["b", None]
    assert (sessions.num_on("a"), sessions.num_on("b")) == (0, 1)
