"""Whether an autoscaler adds nodes to the cluster, and which ones it is starting.

Ray has no public call for it; `ray status` reads the same two places: what the first autoscaler's monitor reports, and the state of the second one.
Where nobody adds nodes (`ray start` without an autoscaling config, KubeRay without `enableInTreeAutoscaling`) Ray reports each node as a type of
its own. How far a cluster may grow stands in its autoscaler's configuration alone: a file on the head, a resource of Kubernetes.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.autoscaler.v2.schema import ClusterStatus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.experimental.internal_kv import _internal_kv_get

FIRST_REPORT_S = 15.0
"""A head that has just started has none; they come every five seconds."""

Starting = Counter[str]
"""Nodes that an autoscaler is starting, by their type."""


def starting_nodes(patience_s: float = 0.0) -> Starting | None:
    """What the autoscaler is starting; None: nobody adds nodes to this cluster, or nobody reported within `patience_s`."""
    if is_autoscaler_v2():
        return starting_by_state(get_cluster_status(ray.get_runtime_context().gcs_address))
    deadline_s = time.monotonic() + patience_s
    while (report := _newest_report()) is None and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return starting_by_report(report, [node["NodeID"] for node in ray.nodes()]) if report else None


def starting_by_report(report: Mapping[str, Any], node_ids: Iterable[str]) -> Starting | None:
    """From the first autoscaler's summary, and the nodes that Ray knows."""
    starting = Counter[str](report["pending_launches"])
    starting.update(node_type for _, node_type, _ in report["pending_nodes"])
    return starting if _has_types({*report["node_type_mapping"].values(), *starting}, node_ids) else None


def starting_by_state(status: ClusterStatus) -> Starting | None:
    """From the state of the second autoscaler."""
    starting = Counter[str](node.ray_node_type_name for node in status.pending_nodes)
    for launch in status.pending_launches:
        starting[launch.ray_node_type_name] += launch.count
    up = [*status.active_nodes, *status.idle_nodes]
    types = {*(node.ray_node_type_name for node in up), *starting}
    return starting if _has_types(types, (node.node_id for node in up)) else None


def _newest_report() -> dict[str, Any] | None:
    """Nothing before the first one that knows the nodes."""
    status = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    return json.loads(status).get("autoscaler_report") if status else None


def _has_types(types: set[str], node_ids: Iterable[str]) -> bool:
    return bool(types - {f"node_{node_id}" for node_id in node_ids})
