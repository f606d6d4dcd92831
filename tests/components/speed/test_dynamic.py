"""Dynamic K: the schedule made of each load's best K, who cannot have it, and what it must beat."""

from dataclasses import replace

import pytest

from components.arm_config import ArmConfig
from components.evaluation.arms import Arm, head_arm
from components.speed.dynamic import (
    FIXED_SLOTS,
    NO_SCHEDULE,
    SAME_AT_EVERY_LOAD,
    dynamic_server,
    judge,
    schedule_of,
    why_not,
)
from components.speed.loads import Load
from tests.components.speed.loads import make_load

NGRAM = Arm("ngram", "ngram", 3, options={"prompt_lookup_max": 4})


def test_every_batch_size_up_to_a_concurrency_has_its_best_k() -> None:
    assert schedule_of({1: 7, 8: 3, 32: 0}) == [(1, 1, 7), (2, 8, 3), (9, 32, 0)]
    assert schedule_of({1: 3, 2: 3, 4: 3, 8: 1}) == [(1, 4, 3), (5, 8, 1)]
    assert schedule_of({4: 2, 1: 5}) == [(1, 1, 5), (2, 4, 2)]


def test_the_server_states_what_the_settings_allow_to_state() -> None:
    arm = dynamic_server(NGRAM, {1: 5, 8: 2}).arm
    assert (arm.name, arm.num_speculative_tokens) == ("ngram_dynamic", 5)
    stated = {key: value for key, value in (arm.speculative_config() or {}).items() if key != "method"}
    ArmConfig.model_validate({"method": "ngram", **stated})


@pytest.mark.parametrize(
    ("arm", "best", "reason"),
    [
        (NGRAM, {1: 3, 8: 1}, None),
        (Arm("eagle3", "eagle3", 3, "/heads/e"), {1: 3, 8: 0}, None),
        (NGRAM, {1: 3, 8: 3}, SAME_AT_EVERY_LOAD),
        (NGRAM, {}, SAME_AT_EVERY_LOAD),
        (head_arm("candidate", "/heads/p", 3), {1: 3, 8: 1}, FIXED_SLOTS),
        (Arm("pard", "draft_model", 3, "/drafts", {"parallel_drafting": True}), {1: 3, 8: 1}, FIXED_SLOTS),
        (Arm("suffix", "suffix", 3), {1: 3, 8: 1}, NO_SCHEDULE),
        (replace(NGRAM, options={"num_speculative_tokens_per_batch_size": [[1, 8, 3]]}), {1: 3, 8: 1}, NO_SCHEDULE),
    ],
)
def test_who_cannot_have_it(arm: Arm, best: dict[int, int], reason: str | None) -> None:
    assert why_not(arm, best) == reason


def loads(dynamic_at_8: float) -> list[Load]:
    """Alone K=5 takes half the time of no speculation, at 8 K=1 does, and the other K is no better than none."""
    return [
        make_load("none", None, 1, 1.0),
        make_load("none", None, 8, 4.0),
        make_load("ngram", 1, 1, 0.9),
        make_load("ngram", 1, 8, 2.0),
        make_load("ngram", 5, 1, 0.5),
        make_load("ngram", 5, 8, 4.0),
        make_load("ngram_dynamic", 5, 1, 0.5),
        make_load("ngram_dynamic", 5, 8, dynamic_at_8),
    ]


def test_it_wins_over_the_single_k_that_is_best_for_all_loads() -> None:
    found = judge(loads(dynamic_at_8=2.0), "ngram", "none")
    assert (found["against"], found["wins"]) == (1, True)
    assert found["gain"] == pytest.approx((0.9 + 0.5) / (0.5 + 0.5) - 1, rel=0.02)
    assert found["low"] > 0


def test_a_slower_one_does_not_win_and_a_missing_one_is_not_judged() -> None:
    assert judge(loads(dynamic_at_8=4.0), "ngram", "none")["wins"] is False
    assert judge(loads(2.0)[:6], "ngram", "none") == {
        "against": None,
        "gain": None,
        "low": None,
        "high": None,
        "wins": False,
    }
