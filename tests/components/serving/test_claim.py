"""One command at a time tries arms on a cluster's endpoint; an experiment's own test of it is in test_run.py."""

from collections.abc import Mapping
from contextlib import nullcontext

import pytest

from components.config import Settings
from components.pipeline import Selection
from components.publishing.outcome import ServeAlone
from components.section import ConfigError
from components.serving import claim
from components.serving.claim import check_unclaimed, claimed_endpoint
from components.serving.stages import ab_stage
from components.stage import Artifact, Outcome, Output, Stage
from components.storage import Location
from pipelines import cli, full

EXPERIMENT = "the experiment with version 2 of heads against version 1"
IN_USE = rf"ab\.port: .*in use by {EXPERIMENT} \(process \d+ on .*wait for its end or interrupt it"
TTL_S = 60.0


@pytest.fixture
def storage(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Location:
    monkeypatch.setattr(claim, "cluster_name", lambda: "one")
    return Location(str(tmp_path))


@pytest.fixture
def settings(storage: Location) -> Settings:
    return Settings.model_validate({"storage": {"uri": storage.uri}})


def test_a_second_command_is_refused_until_the_first_one_ends(storage: Location) -> None:
    second = claimed_endpoint("the A/B stage", storage, TTL_S)
    with claimed_endpoint(EXPERIMENT, storage, TTL_S), pytest.raises(ConfigError, match=IN_USE), second:
        pass
    with claimed_endpoint("the A/B stage", storage, TTL_S):
        pass
    check_unclaimed(storage, TTL_S)


def test_the_endpoint_of_another_cluster_is_free(storage: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed_endpoint(EXPERIMENT, storage, TTL_S):
        monkeypatch.setattr(claim, "cluster_name", lambda: "other")
        check_unclaimed(storage, TTL_S)


def test_the_ab_stage_leaves_the_arms_of_a_live_experiment_alone(storage: Location, settings: Settings) -> None:
    output = Output("ab", storage.join("ab", "0"), "0", lambda figures, step: None)
    with claimed_endpoint(EXPERIMENT, storage, TTL_S), pytest.raises(ConfigError, match=IN_USE):
        ab_stage(settings).run({}, output)  # nothing is read, so nothing can have started


def test_a_publication_at_the_end_of_a_job_moves_no_traffic_while_an_experiment_has_it(
    storage: Location, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[ServeAlone] = []
    monkeypatch.setattr(full, "publish_stage", lambda settings, serve_alone: moves.append(serve_alone))
    monkeypatch.setattr(full, "move_endpoint", lambda settings, version, allow_gap: True)
    full.define_stages(settings)
    with claimed_endpoint(EXPERIMENT, storage, TTL_S), pytest.raises(ConfigError, match=IN_USE):
        moves[0](3)
    assert moves[0](3)


@pytest.mark.parametrize(("last", "refused"), [("ab", True), ("publish", True), ("responses", False)])
def test_a_job_that_would_replace_them_is_refused_before_its_first_stage(
    storage: Location, settings: Settings, monkeypatch: pytest.MonkeyPatch, last: str, refused: bool
) -> None:
    monkeypatch.setattr(cli, "connect_to_ray", lambda: None)
    monkeypatch.setattr(cli, "check_room", lambda needs: None)
    ran: list[str] = []

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        ran.append(output.stage)
        return Outcome()

    pipeline = cli.make_pipeline([Stage("prompts", run, {}), Stage(last, run, {})], settings)
    outcome = pytest.raises(ConfigError, match=IN_USE) if refused else nullcontext()
    with claimed_endpoint(EXPERIMENT, storage, TTL_S), outcome:
        pipeline.run(Selection())
    assert ran == ([] if refused else ["prompts", last])
