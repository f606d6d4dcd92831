"""What somebody else does while a deployment waits for engines stays: changes of the traffic, of which it says so, and Serve's other applications."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.config import Settings
from components.evaluation.arms import head_arm
from components.section import ConfigError
from components.serving import deploy as deploying
from components.serving.apps import ServedArm, Service, application_name
from components.serving.deploy import RoutingChanged, deploy, teardown
from components.serving.listing import PREFIX, ROUTER, Applications, DeploymentFailed
from components.serving.routing import ArmChange, ArmState, Routing, change_arms, kill_all_but_control
from tests.components.serving.local import wait_until
from tests.components.serving.serve_table import ServeTable, serve_table


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeTable]:
    with serve_table(monkeypatch) as table:
        yield table


def make_service(serve: ServeTable, **weights: float) -> Service:
    url = serve.router.client.base_url
    arms = [ServedArm(head_arm(name, f"/heads/{name}", 3), weight, f"v1-{name}") for name, weight in weights.items()]
    return Service(Settings.model_validate({"ab": {"host": url.host, "port": url.port}}), Path("/models/target"), arms)


def elsewhere(service: Service) -> Service:
    """The same, at the next port."""
    ab = service.settings.ab
    moved = ab.model_copy(update={"port": ab.port + 1})
    return replace(service, settings=service.settings.model_copy(update={"ab": moved}))


def foreign(name: str, route: str | None = None, **args: Any) -> Applications:
    """Somebody else's application, declared as ours are."""
    return {name: {"name": name, "route_prefix": route or f"/{name}", "import_path": "theirs:app", "args": args}}


def of_others(serve: ServeTable) -> Applications:
    return {name: app for name, app in serve.applications.items() if not name.startswith(PREFIX)}


def states(routing: Routing) -> dict[str, tuple[float, str]]:
    return {name: (arm.weight, arm.state.value) for name, arm in routing.arms.items()}


def test_alone_it_serves_what_was_asked_and_repeated_it_changes_nothing(serve: ServeTable) -> None:
    deploy(make_service(serve, champion=1.0))
    service = make_service(serve, champion=0.5, challenger=0.5)
    deploy(service, epoch=serve.routing.weight_epoch)
    assert states(serve.routing) == {"champion": (0.5, "serving"), "challenger": (0.5, "serving")}
    assert set(serve.applications) == {ROUTER, *(application_name(service, arm) for arm in service.arms)}
    num_put = serve.num_put
    deploy(service)
    assert serve.num_put == num_put


@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_switch_while_engines_start_is_not_undone(serve: ServeTable, step: int) -> None:
    deploy(make_service(serve, champion=1.0, other=0.0))
    serve.num_put, serve.act_after = 0, {step: lambda: serve.operator(kill_all_but_control)}
    with pytest.raises(RoutingChanged, match=r"somebody else changed the traffic .*other killed"):
        deploy(make_service(serve, champion=0.0, other=0.0, challenger=1.0))
    assert states(serve.routing)["other"] == (0.0, "killed")
    assert serve.routing.weights == {"champion": 1.0}


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_weight_given_while_a_second_arm_starts_stays(serve: ServeTable, step: int) -> None:
    deploy(make_service(serve, champion=1.0))
    change = {"champion": ArmChange(weight=3.0)}
    serve.num_put, serve.act_after = 0, {step: lambda: serve.operator(lambda routing: change_arms(routing, change))}
    with pytest.raises(RoutingChanged, match="champion serving 3"):
        deploy(make_service(serve, champion=0.5, challenger=0.5))
    assert serve.routing.arms["champion"].weight == 3.0


def test_what_was_decided_before_a_kill_switch_is_not_deployed_after_it(serve: ServeTable) -> None:
    service = make_service(serve, champion=0.5, challenger=0.5)
    deploy(service)
    seen, num_put = serve.routing.weight_epoch, serve.num_put
    serve.operator(kill_all_but_control)
    with pytest.raises(RoutingChanged, match="challenger killed"):
        deploy(make_service(serve, champion=0.0, challenger=1.0), epoch=seen)
    assert (serve.num_put, serve.routing.weights) == (num_put, {"champion": 0.5})
    deploy(make_service(serve, champion=0.0, challenger=1.0))
    assert serve.routing.weights == {"champion": 0.0, "challenger": 1.0}


def test_a_successor_that_does_not_start_leaves_an_operators_change_alone(
    serve: ServeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy(make_service(serve, champion=0.5, other=0.5))

    def fail(service: Service, name: str) -> None:
        serve.operator(lambda routing: change_arms(routing, {"other": ArmChange(state=ArmState.PAUSED)}))
        raise DeploymentFailed(f"{name} does not answer")

    monkeypatch.setattr(deploying, "wait_until_answering", fail)
    with pytest.raises(DeploymentFailed, match="does not answer"):
        deploy(make_service(serve, challenger=1.0))
    assert serve.routing.weights == {"champion": 0.5}
    assert len(serve.applications) == 3


def test_of_two_commands_at_once_one_wins_and_the_other_has_told_serve_nothing(
    serve: ServeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy(make_service(serve, champion=1.0))
    winner, loser = make_service(serve, champion=0.5, first=0.5), make_service(serve, champion=0.2, second=0.8)
    compare_and_set = serve.replace_traffic

    def while_another_one_wins(routing: Routing) -> Routing:
        monkeypatch.setattr(deploying, "replace_traffic", compare_and_set)
        deploy(winner)
        return compare_and_set(routing)

    monkeypatch.setattr(deploying, "replace_traffic", while_another_one_wins)
    with pytest.raises(RoutingChanged, match=r"champion serving 0\.5, first serving 0\.5"):
        deploy(loser)
    assert states(serve.routing) == {"champion": (0.5, "serving"), "first": (0.5, "serving")}
    assert set(serve.applications) == {ROUTER, *(application_name(winner, arm) for arm in winner.arms)}


def test_a_command_that_comes_while_another_one_tells_serve_loses(serve: ServeTable) -> None:
    deploy(make_service(serve, champion=0.5, other=0.5))
    serve.num_put, told = 0, []

    def also() -> None:
        with pytest.raises(RoutingChanged, match=r"champion serving 0\.9") as error:
            deploy(make_service(serve, champion=0.1, other=0.9))
        told.append(str(error.value))

    serve.act_before[1] = also
    deploy(make_service(serve, champion=0.9, other=0.1))
    assert serve.routing.weights == {"champion": 0.9, "other": 0.1}
    assert len(told) == 1
    assert "\n" not in told[0]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_kill_switch_between_a_commands_look_and_its_change_stays_and_serve_hears_of_it(
    serve: ServeTable, step: int
) -> None:
    deploy(make_service(serve, champion=0.5, other=0.5))
    serve.num_put, serve.act_before = 0, {step: lambda: serve.operator(kill_all_but_control)}
    with pytest.raises(RoutingChanged, match=r"other killed"):
        deploy(make_service(serve, champion=0.4, other=0.2, challenger=0.4))
    wait_until(lambda: serve.routing.arms["other"].state == ArmState.KILLED)
    health = serve.router.client.get("/health").json()
    assert (health["arms"]["other"]["state"], health["weight_epoch"]) == ("killed", serve.routing.weight_epoch)


def test_a_command_waits_for_the_router_that_hears_of_anothers_change_and_then_loses(
    serve: ServeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy(make_service(serve, champion=0.5, other=0.5))
    num_put = serve.num_put

    def change_meanwhile(routing: Routing) -> Routing:
        assert serve.statuses == {}, "asked when it runs again"
        return serve.replace_traffic(routing)

    def settle() -> None:
        serve.operator(kill_all_but_control)
        serve.statuses.clear()

    serve.statuses[ROUTER] = "DEPLOYING"
    monkeypatch.setattr(deploying, "replace_traffic", change_meanwhile)
    seen = serve.router.gateway.live().weight_epoch
    threading.Timer(0.3, settle).start()
    with pytest.raises(RoutingChanged, match="other killed"):
        deploy(make_service(serve, champion=0.1, other=0.9), epoch=seen)
    assert serve.num_put == num_put


@pytest.mark.parametrize("step", [1, 2])
def test_what_others_deploy_change_and_remove_while_engines_start_stays_so(serve: ServeTable, step: int) -> None:
    deploy(make_service(serve, champion=1.0))
    serve.applications |= foreign("kept") | foreign("changed") | foreign("removed") | foreign("leaving")

    def others_act() -> None:
        serve.applications |= foreign("changed", version=2) | foreign("new")
        del serve.applications["removed"]
        serve.statuses["leaving"] = "DELETING"

    serve.num_put, serve.act_after = 0, {step: others_act}
    deploy(make_service(serve, challenger=1.0))
    assert serve.num_put == 3
    assert of_others(serve) == foreign("kept") | foreign("changed", version=2) | foreign("new")


def test_a_successor_that_does_not_start_and_a_teardown_leave_what_others_deployed(
    serve: ServeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy(make_service(serve, champion=1.0))

    def fail(service: Service, name: str) -> None:
        serve.applications |= foreign("new")
        raise DeploymentFailed(f"{name} does not answer")

    monkeypatch.setattr(deploying, "wait_until_answering", fail)
    with pytest.raises(DeploymentFailed, match="does not answer"):
        deploy(make_service(serve, challenger=1.0))
    assert of_others(serve) == foreign("new")
    teardown()
    assert serve.applications == foreign("new")


def test_an_address_that_is_somebody_elses_is_refused_and_nothing_changes(serve: ServeTable) -> None:
    service = make_service(serve, champion=1.0)
    serve.applications |= foreign("theirs", route="/")
    with pytest.raises(ConfigError, match="'theirs' has the route /"):
        deploy(service)
    serve.applications = foreign("theirs")
    with pytest.raises(ConfigError, match=r"Serve already listens on .* for \['theirs'\]"):
        deploy(elsewhere(service))
    serve.applications, serve.listens = {}, False
    with pytest.raises(ConfigError, match="cannot listen on"):
        deploy(service)
    assert serve.num_put == 0


def test_an_endpoint_that_answers_is_not_moved_to_another_port_unasked(serve: ServeTable) -> None:
    service = make_service(serve, champion=1.0)
    deploy(service)
    before, num_put = serve.applications, serve.num_put
    with pytest.raises(ConfigError, match="the endpoint is up at"):
        deploy(elsewhere(service))
    assert (serve.applications, serve.num_put) == (before, num_put)
