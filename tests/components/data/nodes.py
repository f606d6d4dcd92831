"""Features recorded on three Ray nodes of this machine, one of which is killed in the middle: `python -m ... TARGET RESPONSES OUTPUT`."""

import faulthandler
import json
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from components.cluster_room import Need, lack_line
from components.config import Settings
from components.data.capturing import CaptureWorker
from components.data.features import record_features
from components.storage import Location

NUM_PARTS, ROWS_PER_PART = 12, 8
LAST_WORDS = 3
"""Documents, of a part's 8, that the doomed node captures before it is killed in the middle of its first part."""
MAX_TOKENS = 24
TARGET = {"num_layers": 6, "hidden_size": 64}
"""Of the tiny target."""
SETTINGS = Settings.model_validate(
    {
        "target": {"dtype": "float32"},
        "data": {"batch_tokens": 1},  # each document alone: its states do not depend on what it was captured with
        "draft": {"aux_layers": [1, 4]},
        "resources": {"features": {"replicas": 3}},
    }
)
SAID, DOOMED, NODES, CAPTURED = "_said.json", "_doomed", "_nodes", "_captured"
STUCK_AFTER_S = 500
NOTICED_AFTER_S = 60


class NotingWorker(CaptureWorker):
    """Notes every document and the node that it was captured on; no other node goes on before the doomed one is about to die."""

    def count(self, **done: int) -> None:
        node = ray.get_runtime_context().get_node_id()
        self.output.join(NODES, node).create(b"")
        self.output.join(CAPTURED, f"{node}-{time.time_ns()}").create(b"")
        doomed = self.output.join(DOOMED).read_bytes().decode()
        while (num_captured(self.output, doomed) >= LAST_WORDS) == (node == doomed):
            time.sleep(0.05)
        super().count(**done)


def main(target: str, responses: Location, output: Location) -> None:
    faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    doomed = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)][0]
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    output.join(DOOMED).write_bytes(doomed.node_id.encode())
    killer = threading.Thread(target=kill_in_the_middle, args=(cluster, doomed, output), daemon=True)
    killer.start()
    num_tokens = NUM_PARTS * ROWS_PER_PART * MAX_TOKENS
    outcome = record_features(SETTINGS, responses, num_tokens, TARGET, target, output, NotingWorker)
    killer.join()
    nodes = output.join(NODES).files()
    table = outcome.rows.table() if outcome.rows else None
    said = {"doomed": doomed.node_id, "nodes": nodes, "alive": count_alive(2), "rows": table}
    said["lack"] = lack_line([Need.of("resources.features", SETTINGS.resources.features)])
    output.join(SAID).write_bytes(json.dumps(said).encode())
    ray.shutdown()
    cluster.shutdown()


def kill_in_the_middle(cluster: Cluster, node: Any, output: Location) -> None:
    """Without a warning, in the middle of a part of its own; like a host, it takes all its processes along."""
    while num_captured(output, node.node_id) < LAST_WORDS:
        time.sleep(0.05)
    processes = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
    cluster.remove_node(node, allow_graceful=False)
    for process in processes:  # Ray's agents would outlive it
        with suppress(psutil.NoSuchProcess):
            process.kill()


def num_captured(output: Location, node: str = "") -> int:
    """Documents that were captured so far, on one node or on any; the same one twice counts twice."""
    return sum(name.startswith(node) for name in output.join(CAPTURED).files())


def count_alive(expected: int) -> int:
    """Nodes that Ray takes for alive, once they are as many as expected or it had a minute to notice."""
    deadline_s = time.monotonic() + NOTICED_AFTER_S
    while True:
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive == expected or time.monotonic() > deadline_s:
            return alive
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1], Location(sys.argv[2]), Location(sys.argv[3]))
