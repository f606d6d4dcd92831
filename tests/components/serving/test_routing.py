"""Changes of the traffic as values: what stays, what gets an epoch of its own, what is refused."""

import time

import pytest

from components.serving.protocol import ApiError
from components.serving.routing import ArmChange, change_arms, kill_all_but_control, with_epoch
from tests.components.serving.local import routing_to


def test_a_change_touches_what_it_names_and_nothing_else():
    before = routing_to("a=1", "b=2:paused")
    after = change_arms(before, {"b": ArmChange(state="serving")})
    assert after.arms["a"] == before.arms["a"]
    assert (after.arms["b"].weight, after.arms["b"].state, after.arms["b"].app) == (2, "serving", "b")
    assert after.weight_epoch > before.weight_epoch
    assert (
        after.model_copy(update={"arms": before.arms, "weight_epoch": before.weight_epoch, "replaces": None}) == before
    )
    assert after.replaces == before.weight_epoch


def test_a_change_to_what_is_there_already_begins_no_epoch():
    before = routing_to("a=1", "b=2")
    assert change_arms(before, {"a": ArmChange(weight=1)}) == before


@pytest.mark.parametrize("change", [{"a": ArmChange(weight=3)}, {"a": ArmChange(state="draining")}])
def test_epochs_grow_even_within_a_second_and_over_a_restart(change):
    before = int(time.time())
    first = with_epoch(routing_to("a"), None)
    assert before <= first.weight_epoch <= time.time()
    assert change_arms(first, change).weight_epoch > first.weight_epoch
    ahead = first.model_copy(update={"weight_epoch": int(time.time()) + 1000})
    assert change_arms(ahead, change).weight_epoch == ahead.weight_epoch + 1


def test_other_settings_begin_no_epoch_but_another_salt_does():
    before = routing_to("a")
    assert with_epoch(routing_to("a", max_body_bytes=5), before).weight_epoch == before.weight_epoch
    assert with_epoch(routing_to("a", salt="other"), before).weight_epoch > before.weight_epoch


def test_the_kill_switch_makes_the_control_serve_whatever_it_did():
    killed = kill_all_but_control(routing_to("a=0:paused", "b", "s:shadow", control="a"))
    assert {name: arm.state for name, arm in killed.arms.items()} == {"a": "serving", "b": "killed", "s": "killed"}
    assert killed.weights == {"a": 1.0}


@pytest.mark.parametrize("control", [None, "gone"])
def test_the_kill_switch_never_leaves_nobody(control):
    with pytest.raises(ApiError, match="no control arm"):
        kill_all_but_control(routing_to("a", control=control))


def test_an_unknown_arm_is_refused_with_those_that_are_there():
    with pytest.raises(ApiError, match="arms: a, b"):
        change_arms(routing_to("a", "b"), {"c": ArmChange(weight=1)})
