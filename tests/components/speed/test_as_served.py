"""What the gate is told: the candidate at its K against the champion at its own, at every concurrency, over all tasks."""

import json

import pytest

from components.config import GateConfig
from components.evaluation.arms import Arm, head_arm
from components.speed.as_served import compare_as_served, under_load
from components.speed.loads import Load
from tests.components.speed.loads import make_load

NONE = Arm("none", "none")
CANDIDATE, CHAMPION = head_arm("candidate", "/heads/new", 3), head_arm("champion", "/heads/old", 5)


def loads(invalid: str | None = None) -> list[Load]:
    times = {
        ("none", None): 1.0,
        ("candidate", 1): 0.1,
        ("candidate", 3): 0.5,
        ("champion", 3): 0.1,
        ("champion", 5): 0.6,
    }
    return [
        make_load(arm, k, c, seconds * c, task=task, invalid=invalid if (arm, k, c) == ("candidate", 3, 8) else None)
        for (arm, k), seconds in times.items()
        for task in ("code", "chat")
        for c in (1, 8)
    ]


@pytest.mark.parametrize(("baseline", "ratio"), [(CHAMPION, 1.2), (NONE, 2.0)])
def test_each_at_the_k_that_it_is_served_with(baseline: Arm, ratio: float) -> None:
    found = under_load(
        {"as_served": json.loads(json.dumps(compare_as_served(loads(), CANDIDATE, baseline, GateConfig())))}
    )

    assert [(load.concurrency, load.baseline) for load in found] == [(1, baseline.name), (8, baseline.name)]
    for load in found:
        assert load.ratio is not None
        assert load.ratio.estimate == pytest.approx(ratio, rel=0.02)
        assert load.ratio.low > 1


def test_an_invalid_or_a_missing_load_has_no_ratio() -> None:
    invalid = compare_as_served(loads("empty"), CANDIDATE, CHAMPION, GateConfig())["ratio"]
    missing = compare_as_served(loads()[:-1], CANDIDATE, CHAMPION, GateConfig())["ratio"]

    assert [invalid["8"], missing["8"]] == [None, None]
    assert None not in (invalid["1"], missing["1"])


def test_a_speed_pass_that_was_left_out_says_nothing() -> None:
    assert under_load({"left_out": True, "points": []}) == []
