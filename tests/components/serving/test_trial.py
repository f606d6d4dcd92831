"""What becomes of an endpoint that arms were tried on; test_serving.py and test_full.py try them on real ones."""

import pytest

from components.serving.routing import RoutedArm, Routing
from components.serving.trial import Ending, ending, was_up

ARMS = {"champion": "app-1", "challenger": "app-2"}


def routing(**apps: str) -> Routing:
    return Routing(
        model="m", salt="s", arms={name: RoutedArm(app=app, weight=1, head="h") for name, app in apps.items()}
    )


@pytest.mark.parametrize(
    ("before", "noted", "expected"),
    [
        (None, False, False),
        (None, True, False),
        (routing(**ARMS), False, False),
        (routing(**ARMS), True, True),
        (routing(champion="app-1"), False, True),
        (routing(champion="app-2"), False, True),
        (routing(champion="app-0", challenger="app-2"), False, True),
    ],
    ids=[
        "nothing",
        "what was there is gone",
        "what a killed try left",
        "what a killed try left of an endpoint that was up",
        "the champion alone",
        "the new head, promoted",
        "another experiment",
    ],
)
def test_whether_an_endpoint_was_up_before(before: Routing | None, noted: bool, expected: bool) -> None:
    assert was_up(before, ARMS, noted) is expected


@pytest.mark.parametrize(
    ("live", "stays", "expected"),
    [
        (routing(**ARMS), True, Ending.CONTROL),
        (routing(**ARMS), False, Ending.DOWN),
        (routing(champion="app-1"), True, Ending.LEFT),
        (routing(champion="app-1"), False, Ending.DOWN),
        (routing(champion="app-3"), True, Ending.LEFT),
        (routing(champion="app-3"), False, Ending.LEFT),
        (None, True, Ending.LEFT),
        (None, False, Ending.DOWN),
    ],
    ids=[
        "both were tried",
        "both were tried and nothing shall serve",
        "the challenger never came up beside the control",
        "the challenger never came up and nothing shall serve",
        "an operator moved it meanwhile",
        "an operator moved it meanwhile and nothing of ours shall serve",
        "no arm came up",
        "no arm came up and nothing shall serve",
    ],
)
def test_what_becomes_of_it(live: Routing | None, stays: bool, expected: Ending) -> None:
    assert ending(live, ARMS, stays) == expected
