"""A Ray head of one CPU whose autoscaler may add one of two CPUs, on this machine: `python -m ... FOLDER GCS_PORT`."""

import faulthandler
import json
import logging
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import ray
from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG
from ray.cluster_utils import Cluster

from components.autoscaler import starting_nodes
from components.cluster_room import Need, check_room

HEAD_ID = "f" * 51 + "00000"
"""What Ray's provider for tests takes for the head's."""
NEED = Need("resources.features", 1, {"CPU": 2})
STUCK_AFTER_S = 300


def main(folder: Path, gcs_port: int) -> None:
    faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
    logging.basicConfig(format="%(message)s")
    config = folder / "autoscaling.json"
    config.write_text(json.dumps(growing_config(gcs_port)))
    head = {"num_cpus": 1, "include_dashboard": False, "gcs_server_port": gcs_port}
    head |= {"autoscaling_config": str(config), "env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    check_room([NEED])
    asked = two_cpus.remote()
    while not ray.wait([asked], timeout=0.5)[0]:
        print("starting", starting_nodes())
    check_room([NEED])
    ray.shutdown()
    monitor = psutil.Process(cluster.head_node.all_processes["monitor"][0].process.pid)
    added = monitor.children(recursive=True)  # the node it added would outlive it
    cluster.shutdown()
    for process in added:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@ray.remote(num_cpus=2)
def two_cpus() -> None: ...


def growing_config(gcs_port: int) -> dict[str, object]:
    """For the provider whose nodes are processes of this machine."""
    provider = {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{gcs_port}"}
    provider |= {"disable_node_updaters": True, "disable_launch_config_check": True}
    worker = {"resources": {"CPU": 2, "object_store_memory": 80_000_000}, "node_config": {}, "max_workers": 1}
    head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    types = {"ray.head.default": head, "worker": worker}
    limits = {"max_workers": 1, "idle_timeout_minutes": 5}
    return BASE_READONLY_CONFIG | {"provider": provider, "available_node_types": types} | limits


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
