"""An experiment from its first request to its rollback, with a real registry and a router without engines; and pairs that cannot be compared."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from components.config import Settings
from components.experiment import run
from components.experiment.journal import FOLDER, LEASE, Journal, open_journal
from components.experiment.outcome import act, roll_back
from components.experiment.pair import Pair, check_pair
from components.experiment.policy import Action, Decision
from components.experiment.recorded import recorded_acceptance
from components.experiment.run import make_plan, opponent, run_experiment
from components.experiment.watch import Alarm
from components.lease import Lease, LeaseHeld
from components.publishing import registry
from components.publishing.promotion import ChampionChanged, promote
from components.publishing.registry import Registry
from components.section import ConfigError
from components.serving.apps import Service
from components.serving.claim import check_unclaimed, claimed_endpoint
from components.serving.deploy import RoutingChanged, deploy
from components.serving.routing import ArmChange, ArmState, change_arms, kill_all_but_control
from components.serving.stages import CHALLENGER, CHAMPION, registered_arm
from components.storage import Location
from tests.components.experiment.pairs import (
    Users,
    add_version,
    make_artifacts,
    make_pair,
    make_settings,
    register_pair,
)
from tests.components.serving.serve_table import ServeTable, serve_table
from tests.conftest import free_port
from tests.relay import Relay, relay_to

ALARMS = [Alarm("acceptance length", "2.1", "2.5", 0.0)]
TO_CHALLENGER = {CHALLENGER: 1.0, CHAMPION: 0.0}
TO_CHAMPION = {CHALLENGER: 0.0, CHAMPION: 1.0}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeTable]:
    with serve_table(monkeypatch) as table:
        yield table


@pytest.fixture
def relay(mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """On the way to MLflow, whose clients give up at once."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with relay_to(urlsplit(mlflow_server).port or 0, free_port()) as relay:
        yield relay


@pytest.fixture
def storage(tmp_path) -> Location:
    return Location(str(tmp_path))


@pytest.fixture
def heads(relay: Relay, storage: Location) -> Registry:
    return register_pair(f"http://127.0.0.1:{relay.port}", storage)


@pytest.fixture
def settings(serve: ServeTable, storage: Location, heads: Registry) -> Settings:
    return make_settings(serve, storage, heads)


@pytest.fixture
def pair(settings: Settings, storage: Location) -> Pair:
    """Both heads serve, each half of the sessions."""
    made = make_pair(settings, storage)
    made.begin(goes_on=False)
    return made


@pytest.fixture
def journal(settings: Settings, storage: Location) -> Journal:
    return open_journal(storage, make_plan(settings, make_artifacts()))


def champion(heads: Registry) -> int | None:
    return registry.holder(heads.client, heads.name, registry.CHAMPION)


def tags(heads: Registry, version: int) -> dict[str, str]:
    return heads.client.get_model_version(heads.name, str(version)).tags


def promote_by_hand(serve: ServeTable, pair: Pair, heads: Registry, alias: bool = True) -> None:
    """As `publish.py promote 3` does."""
    third = make_artifacts(version=3, head_digest="c" * 64)[CHALLENGER]
    deploy(Service(pair.settings, "/models/target", [registered_arm(CHAMPION, third, 1.0)], pair.records))
    if alias:
        add_version(heads.client, heads.name, CHAMPION)


def test_traffic_promotes_a_head_and_takes_it_back_and_nothing_is_done_twice(
    serve: ServeTable, storage: Location, settings: Settings, heads: Registry
) -> None:
    def run(watch: bool = False) -> Action:
        return run_experiment(settings, storage, make_artifacts(), watch)

    def start_slowly() -> None:
        """The challenger's engine, while the champion answers."""
        threading.Event().wait(1.0)
        with pytest.raises(
            ConfigError, match=r"ab\.port: .*in use by the experiment with version 2 of .* against version 1"
        ):
            check_unclaimed(storage, 60.0)

    serve.act_after[2] = start_slowly
    with Users(serve, storage.join("live"), effect=0.1) as users:
        assert run() == Action.PROMOTE
        assert (champion(heads), serve.routing.weights, serve.routing.control) == (2, TO_CHALLENGER, CHALLENGER)
        journal = open_journal(storage, make_plan(settings, make_artifacts()))
        shares = list(journal.shares.values())
        assert shares == [0.5], "the epoch in which the engine started is no part of it"
        assert journal.plan.started_at > serve.put_at[2]
        kept = journal.decision()
        found = tags(heads, 2)
        assert found["aerie.live.decision"] == "promote"
        assert (found["aerie.live.against"], found["aerie.live.requests"]) == ("1", str(kept["requests"]))
        run_id = heads.client.get_model_version(heads.name, "2").run_id
        path = heads.client.download_artifacts(run_id, f"live/{journal.location.name}/decision.json")
        told = json.loads(Path(path).read_bytes())
        assert (told["decision"], told["plan"]["started_at"]) == (kept, journal.plan.started_at)

        num_put = serve.num_put
        assert opponent(settings, storage) == 1
        assert run() == Action.PROMOTE
        assert serve.num_put == num_put
        users.effect = -0.3
        assert run(watch=True) == Action.PROMOTE
        assert (champion(heads), serve.routing.weights) == (1, TO_CHAMPION)
        assert tags(heads, 2)["aerie.live.rolled_back"].startswith("acceptance length is ")

        num_put = serve.num_put
        assert opponent(settings, storage) is None
        assert run(watch=True) == Action.PROMOTE
        assert (serve.num_put, champion(heads)) == (num_put, 1)


def test_a_promoted_head_that_gets_slow_is_rolled_back_for_what_came_after_the_watch_began(
    serve: ServeTable, storage: Location, heads: Registry, pair: Pair, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was slow for a while before, when nobody watched, and is again once the watch has looked twice."""
    settings, pause = make_settings(serve, storage, heads, latency_increase=0.25), threading.Event()
    journal.decide(Decision(Action.PROMOTE, ()), {"requests": 400, "sessions": {}, "al": {}})
    tested: list[str] = []

    def slow_down(head: str, *window: object) -> None:
        tested.append(head)
        if len(tested) == 2:
            users.slower = 4.0

    monkeypatch.setattr(run, "show_window", slow_down)
    with Users(serve, storage.join("live"), effect=0.0) as users:
        act(Action.PROMOTE, journal, pair, heads)
        for slower in (1.0, 4.0, 1.0):
            users.slower = slower
            pause.wait(0.5)
        assert run_experiment(settings, storage, make_artifacts(), watch=True) == Action.PROMOTE
    assert (champion(heads), serve.routing.weights) == (1, TO_CHAMPION)
    assert tags(heads, 2)["aerie.live.rolled_back"].startswith("p95 latency is ")
    assert len(tested) > 2


def test_arms_that_the_ab_stage_tries_are_not_replaced_by_an_experiment(
    serve: ServeTable, storage: Location, settings: Settings, heads: Registry
) -> None:
    in_use = pytest.raises(ConfigError, match=r"ab\.port: .*in use by the A/B stage")
    with claimed_endpoint("the A/B stage", storage, 60.0), in_use:
        run_experiment(settings, storage, make_artifacts())
    assert serve.num_put == 0


def test_a_second_terminal_is_told_who_conducts_the_experiment(
    serve: ServeTable, storage: Location, settings: Settings, heads: Registry
) -> None:
    with Lease(storage.join(FOLDER, heads.name, LEASE), 60.0), pytest.raises(LeaseHeld, match="is held by process"):
        run_experiment(settings, storage, make_artifacts())
    assert serve.num_put == 0


@pytest.mark.parametrize("action", [Action.STOP_HARM, Action.STOP_FUTILE])
def test_a_stop_gives_all_traffic_back_and_moves_no_alias(
    serve: ServeTable, pair: Pair, journal: Journal, heads: Registry, action: Action
) -> None:
    for _ in range(2):
        act(action, journal, pair, heads)
        assert (serve.routing.weights, champion(heads)) == (TO_CHAMPION, 1)
    assert journal.is_applied


def test_a_stop_leaves_a_head_alone_that_somebody_promoted_meanwhile(
    serve: ServeTable, pair: Pair, journal: Journal, heads: Registry
) -> None:
    promote_by_hand(serve, pair, heads, alias=False)  # the traffic has moved, the alias has not
    for error in (RoutingChanged, ChampionChanged):
        for action in (Action.STOP_HARM, Action.PROMOTE):
            with pytest.raises(error):
                act(action, journal, pair, heads)
        assert serve.routing.arms[CHAMPION].head.startswith("v3-")
        if error is RoutingChanged:
            with pytest.raises(RoutingChanged, match="somebody moved it"):
                pair.look()
            add_version(heads.client, heads.name, CHAMPION)
    assert not roll_back(journal, pair, heads, ALARMS)
    assert (champion(heads), journal.is_applied, journal.rolled_back()) == (3, False, None)


def test_a_kill_switch_before_a_promotion_and_in_the_middle_of_it_stays(
    serve: ServeTable, pair: Pair, journal: Journal, heads: Registry
) -> None:
    serve.operator(kill_all_but_control)
    with pytest.raises(RoutingChanged, match="challenger is killed"):
        act(Action.PROMOTE, journal, pair, heads)
    assert serve.routing.weights == {CHAMPION: 0.5}
    serve.operator(lambda routing: change_arms(routing, {CHALLENGER: ArmChange(state=ArmState.SERVING)}))
    serve.act_after[serve.num_put + 1] = lambda: serve.operator(kill_all_but_control)
    with pytest.raises(RoutingChanged, match="challenger killed"):
        act(Action.PROMOTE, journal, pair, heads)
    assert (serve.routing.arms[CHALLENGER].state, champion(heads)) == (ArmState.KILLED, 1)
    act(Action.STOP_FUTILE, journal, pair, heads)
    assert serve.routing.weights == {CHAMPION: 1.0}, "and a stop does not undo it"


def test_a_promotion_that_was_decided_before_the_cluster_went_is_done_on_a_new_one(
    serve: ServeTable, storage: Location, settings: Settings, heads: Registry, pair: Pair, journal: Journal
) -> None:
    journal.decide(Decision(Action.PROMOTE, ()), {"requests": 400, "sessions": {}, "al": {}})
    serve.applications = {}
    assert run_experiment(settings, storage, make_artifacts()) == Action.PROMOTE
    assert (champion(heads), serve.routing.weights) == (2, TO_CHALLENGER)


def test_a_promotion_that_was_killed_after_the_alias_had_moved_is_finished(
    serve: ServeTable, storage: Location, settings: Settings, heads: Registry, pair: Pair, journal: Journal
) -> None:
    """Until then a kill switch would leave the champion before."""
    journal.decide(Decision(Action.PROMOTE, ()), {"requests": 400, "sessions": {}, "al": {}})
    promote(heads, 2, 1, lambda: pair.give_all(CHALLENGER))
    assert (champion(heads), serve.routing.control, journal.is_applied) == (2, CHAMPION, False)
    for _ in range(2):
        assert run_experiment(settings, storage, make_artifacts()) == Action.PROMOTE
        assert (serve.routing.control, serve.routing.weights, journal.is_applied) == (CHALLENGER, TO_CHALLENGER, True)


def test_an_mlflow_that_is_away_delays_a_promotion_and_a_rollback_but_no_stop(
    serve: ServeTable, pair: Pair, journal: Journal, heads: Registry, relay: Relay
) -> None:
    relay.stop()
    act(Action.STOP_HARM, journal, pair, heads)
    assert serve.routing.weights == TO_CHAMPION
    for follows, version in (
        (lambda: act(Action.PROMOTE, journal, pair, heads), 2),
        (lambda: roll_back(journal, pair, heads, ALARMS), 1),
    ):
        back = threading.Timer(0.5, relay.start)
        began = time.monotonic()
        back.start()
        follows()
        assert time.monotonic() - began > 0.4
        back.join()
        assert champion(heads) == version
        relay.stop()
    assert serve.routing.weights == TO_CHAMPION
    assert journal.rolled_back() == "acceptance length is 2.1, it was 2.5"


def test_a_rollback_to_another_version_than_the_experiments_is_refused(
    serve: ServeTable, pair: Pair, journal: Journal, heads: Registry
) -> None:
    act(Action.PROMOTE, journal, pair, heads)
    add_version(heads.client, heads.name, registry.PREVIOUS)
    assert not roll_back(journal, pair, heads, ALARMS)
    assert (champion(heads), serve.routing.weights) == (2, TO_CHALLENGER)


def test_what_was_recorded_of_a_head_is_found_by_the_name_under_which_it_serves(heads: Registry, relay: Relay) -> None:
    for key, value in ((registry.HEAD_DIGEST_TAG, "a" * 64), (registry.NUM_SPECULATIVE_TOKENS_TAG, "3")):
        heads.client.set_model_version_tag(heads.name, "1", key, value)
    found = recorded_acceptance(heads, "v1-aaaaaaaaaaaa")
    assert found is not None
    assert (found.al("any"), found.num_speculative_tokens) == (2.5, 3)
    assert "version 1" in found.source
    others = ("v1-bbbbbbbbbbbb", "v2-bbbbbbbbbbbb", "v9-aaaaaaaaaaaa", "none", "aaaaaaaaaaaa")
    assert [recorded_acceptance(heads, head) for head in others] == [None] * len(others)
    relay.stop()
    assert recorded_acceptance(heads, "v1-aaaaaaaaaaaa") is None


def test_an_interrupted_experiment_goes_on_with_the_weights_and_states_of_its_operators(
    serve: ServeTable, pair: Pair
) -> None:
    changes = {CHALLENGER: ArmChange(weight=0.1, state=ArmState.PAUSED), CHAMPION: ArmChange(weight=0.9)}
    serve.operator(lambda routing: change_arms(routing, changes))
    before, num_put = serve.routing, serve.num_put
    pair.begin(goes_on=True)
    assert (serve.routing, serve.num_put) == (before, num_put)
    pair.begin(goes_on=False)
    assert serve.routing.weights == {CHALLENGER: 0.5, CHAMPION: 0.5}


def test_heads_that_can_be_compared_pass() -> None:
    check_pair(make_artifacts())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"head_digest": "a" * 64}, "is the champion"),
        ({"num_speculative_tokens": 5}, "a larger K alone"),
        ({"target_digest": "u"}, "different targets"),
    ],
)
def test_a_difference_that_would_say_nothing_is_refused(changes, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_pair(make_artifacts(**changes))
