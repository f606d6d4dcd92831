"""An arm that fails in a row is out for a while, then probed by one request."""

import pytest

from components.serving.ejection import Ejector


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ejector(clock):
    return Ejector(failures_to_eject=3, ejected_s=10.0, clock=clock)


def fail(ejector, times):
    for _ in range(times):
        ejector.failed("a", ejector.started("a"))


def answer(ejector):
    ejector.succeeded("a", ejector.started("a"))


def test_an_arm_is_out_after_failures_in_a_row_only(ejector):
    fail(ejector, 2)
    answer(ejector)
    fail(ejector, 2)
    assert ejector.admits("a")
    fail(ejector, 1)
    assert not ejector.admits("a")
    assert ejector.admits("b")


def test_one_probe_after_the_time_and_success_brings_the_arm_back(ejector, clock):
    fail(ejector, 3)
    clock.now_s += 10
    assert ejector.admits("a")
    sent_at = ejector.started("a")
    assert not ejector.admits("a"), "the others wait for the probe"
    ejector.succeeded("a", sent_at)
    assert ejector.admits("a")
    fail(ejector, 1)
    assert ejector.admits("a"), "the count began anew"


def test_a_probe_that_fails_or_is_abandoned_costs_another_while(ejector, clock):
    fail(ejector, 3)
    clock.now_s += 10
    fail(ejector, 1)
    assert not ejector.admits("a")
    clock.now_s += 10
    ejector.started("a")  # and the client goes away
    clock.now_s += 9
    assert not ejector.admits("a")
    clock.now_s += 1
    assert ejector.admits("a")


def test_an_arm_that_fails_half_of_the_time_is_out_too(ejector, clock):
    for _ in range(9):
        fail(ejector, 1)
        answer(ejector)
    assert ejector.admits("a"), "too few to tell"
    answer(ejector)
    fail(ejector, 1)
    assert not ejector.admits("a")
    clock.now_s += 10
    answer(ejector)
    fail(ejector, 1)
    assert ejector.admits("a"), "what was before its ejection counts no more"


def test_an_arm_that_fails_now_and_then_stays(ejector):
    for _ in range(50):
        fail(ejector, 1)
        for _ in range(3):
            answer(ejector)
    assert ejector.admits("a")
    assert not ejector.is_out("a")


def test_what_was_sent_before_an_arm_went_out_says_nothing_of_it(ejector, clock):
    good, bad = ejector.started("a"), ejector.started("a")
    clock.now_s += 1
    fail(ejector, 3)
    ejector.succeeded("a", good)
    assert ejector.is_out("a")
    clock.now_s += 9
    ejector.failed("a", bad)
    clock.now_s += 1
    assert ejector.admits("a"), "the failure of old kept no probe away"
    probe = ejector.started("a")
    clock.now_s += 1
    fail(ejector, 1)
    ejector.succeeded("a", probe)
    assert ejector.is_out("a"), "another one failed after the probe was sent"
    answer(ejector)
    assert not ejector.is_out("a")
