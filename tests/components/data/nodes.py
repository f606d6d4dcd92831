"""A job on three Ray nodes of this machine, one of which is killed in the middle of it: `python -m ... OUTPUT`."""

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

from components.data.part_map import make_parts
from components.data.part_worker import PartTask
from components.storage import Location
from tests.components.data.counting import CountingWorker, counting_job, times_made

NUM_PARTS, ROWS_PER_PART = 24, 8
SECONDS_A_ROW = 0.05
KILL_AFTER_ROWS = 40
SAID, DOOMED = "_said.json", "_doomed"
STUCK_AFTER_S = 150
NOTICED_AFTER_S = 60


class NotingWorker(CountingWorker):
    """Notes the nodes that rows were made on, and waits for the doomed one to be among them."""

    def row(self, number: int) -> dict[str, Any]:
        self.output.join("_nodes", ray.get_runtime_context().get_node_id()).create(b"")
        while not self.output.join("_nodes", self.output.join(DOOMED).read_bytes().decode()).exists():
            time.sleep(0.05)
        return super().row(number)


def main(output: Location) -> None:
    faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    doomed = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)][0]
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    output.join(DOOMED).write_bytes(doomed.node_id.encode())
    killer = threading.Thread(target=kill_in_the_middle, args=(cluster, doomed, output), daemon=True)
    killer.start()
    job = counting_job(output, ROWS_PER_PART, (), (), "", SECONDS_A_ROW, worker=NotingWorker, replicas=4)
    make_parts(job, [PartTask(number) for number in range(NUM_PARTS)])
    killer.join()
    nodes = output.join("_nodes").files()
    said = {"doomed": doomed.node_id, "nodes": nodes, "alive": count_alive(2)}
    output.join(SAID).write_bytes(json.dumps(said).encode())
    ray.shutdown()
    cluster.shutdown()


def kill_in_the_middle(cluster: Cluster, node: Any, output: Location) -> None:
    """Without a warning, once a part of the job is done; like a host, it takes all its processes along."""
    while times_made(output).total() < KILL_AFTER_ROWS:
        time.sleep(0.05)
    processes = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
    cluster.remove_node(node, allow_graceful=False)
    for process in processes:  # Ray's agents would outlive it
        with suppress(psutil.NoSuchProcess):
            process.kill()


def count_alive(expected: int) -> int:
    """Nodes that Ray takes for alive, once they are as many as expected or it had a minute to notice."""
    deadline_s = time.monotonic() + NOTICED_AFTER_S
    while True:
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive == expected or time.monotonic() > deadline_s:
            return alive
        time.sleep(0.2)


if __name__ == "__main__":
    main(Location(sys.argv[1]))
