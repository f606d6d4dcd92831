"""What a run asks of the cluster is refused before it starts when no arrangement of its actors fits."""

import pytest
from ray.autoscaler.v2.schema import ClusterStatus, LaunchRequest, NodeInfo

from components.autoscaler import starting_by_report, starting_by_state
from components.cluster_room import Need, check_fits, stage_needs
from components.config import ResourcesConfig, Settings
from components.section import ConfigError

HOST = {"CPU": 8.0, "GPU": 4.0, "memory": 1e9}


def need(num_actors: int, cpus: float, gpus: float = 0) -> Need:
    return Need("resources.train", num_actors, {"CPU": cpus, "GPU": gpus})


@pytest.mark.parametrize(
    ("asked", "nodes"),
    [
        (need(8, 1), [HOST]),
        (need(4, 2, 1), [HOST]),
        (need(2, 1, 4), [HOST, HOST]),
        (need(10, 0.1, 0.4), [HOST]),
        (need(30, 0.1), [{"CPU": 3.0}]),  # 30 x 0.1 is a little more than 3 in floating point
    ],
)
def test_what_fits_is_not_refused(asked: Need, nodes: list[dict[str, float]]) -> None:
    check_fits([asked], nodes)


@pytest.mark.parametrize(
    ("asked", "nodes", "problem"),
    [
        (need(9, 1), [HOST], "9 x 1 CPUs do not fit in the cluster, whose nodes have 1 x 8 CPUs and 4 GPUs"),
        (need(5, 1, 1), [HOST], "5 x 1 CPUs and 1 GPUs do not fit"),
        (need(1, 1, 8), [HOST, HOST], "1 x 1 CPUs and 8 GPUs do not fit in the cluster, whose nodes have 2 x 8 CPUs"),
        (need(1, 1), [], "1 x 1 CPUs do not fit"),
        (need(2, 5), [HOST, {"CPU": 4.0}], "2 x 5 CPUs do not fit"),
    ],
)
def test_what_no_node_has_is_refused_with_the_setting(asked: Need, nodes: list[dict[str, float]], problem: str) -> None:
    with pytest.raises(ConfigError, match=r"resources\.train: .*lower resources\.train\.replicas") as refused:
        check_fits([asked], nodes)
    assert problem in str(refused.value)


def test_capture_and_training_of_a_stream_must_fit_together() -> None:
    resources = {"features": {"replicas": 5}, "train": {"replicas": 4}}
    store, stream = (
        Settings.model_validate({"data": {"mode": mode}, "resources": resources}) for mode in ("store", "stream")
    )
    check_fits(stage_needs("head", store), [HOST])
    with pytest.raises(ConfigError, match=r"data\.mode: stream needs 9 CPUs .* the cluster has 8"):
        check_fits(stage_needs("head", stream), [HOST])


def test_every_kind_of_resources_is_asked_for_by_some_stage() -> None:
    stages = ("responses", "features", "head", "preflight", "evaluation", "speed", "ab")
    asked = {need.setting for stage in stages for need in stage_needs(stage, Settings())}
    assert asked == {f"resources.{name}" for name in ResourcesConfig.model_fields}
    assert stage_needs("vocabulary", Settings()) == []


def test_arms_of_several_gpus_may_spread_over_nodes() -> None:
    settings = Settings.model_validate({"resources": {"ab": {"num_cpus": 4, "num_gpus": 2, "replicas": 2}}})
    (arms,) = stage_needs("ab", settings)
    assert (arms.num_actors, arms.each) == (8, {"CPU": 2.0, "GPU": 1.0})


HEAD_ID, WORKER_ID = "0a" * 28, "0b" * 28
FIXED = {
    "active_nodes": {f"node_{HEAD_ID}": 1},
    "pending_nodes": [],
    "pending_launches": {},
    "node_type_mapping": {HEAD_ID: f"node_{HEAD_ID}"},
}
"""What Ray 2.60 reports of itself: of a head without an autoscaling config, and of one whose autoscaler has begun to add a node."""
GROWING = {
    "active_nodes": {},
    "pending_nodes": [[WORKER_ID, "worker", "uninitialized"]],
    "pending_launches": {"worker": 2},
    "node_type_mapping": {HEAD_ID: "ray.head.default", WORKER_ID: "worker"},
}


def test_a_cluster_grows_when_its_nodes_have_types() -> None:
    assert starting_by_report(FIXED, [HEAD_ID]) is None
    assert starting_by_report(GROWING, [HEAD_ID]) == {"worker": 3}
    idle = GROWING | {"pending_nodes": [], "pending_launches": {}}
    assert starting_by_report(idle, [HEAD_ID, WORKER_ID]) == {}


def test_the_second_autoscalers_state_says_the_same() -> None:
    def node(node_type: str) -> NodeInfo:
        return NodeInfo("", node_type, "", "", "RUNNING", HEAD_ID)

    launch = LaunchRequest("", "worker", 2, LaunchRequest.Status.PENDING, 0)
    assert starting_by_state(ClusterStatus(active_nodes=[node(f"node_{HEAD_ID}")])) is None
    assert starting_by_state(ClusterStatus(idle_nodes=[node("headgroup")])) == {}
    growing = ClusterStatus(active_nodes=[node("headgroup")], pending_nodes=[node("worker")], pending_launches=[launch])
    assert starting_by_state(growing) == {"worker": 3}
