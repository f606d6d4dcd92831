"""What the served engines count themselves, read while they live."""

import re
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import ray

from components.serving.apps import ARM_PREFIX
from components.serving.listing import connect

POLL_S = 0.2
COUNTERS = {
    "vllm:request_success_total": "requests",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:spec_decode_num_drafts_total": "rounds",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}


class EngineCounters:
    """`with EngineCounters() as engines:` keeps the last counters of every engine, also of those that have gone since."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[str, Counter[str]]] = {}
        """(application, counters) by replica."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> "EngineCounters":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.read()

    def total(self) -> Counter[str]:
        """Over all engines that there were."""
        return sum((counters for _, counters in self.last.values()), Counter())

    def read(self) -> None:
        for application, replica in self._replicas():
            with suppress(ray.exceptions.RayError, ValueError):  # it has just gone, or is not up yet
                actor = ray.get_actor(replica, namespace="serve")
                text = ray.get(actor.__ray_call__.remote(own_metrics), timeout=10)
                self.last[replica] = (application, parse_counters(text))

    def _poll(self) -> None:
        while not self._over.wait(POLL_S):
            self.read()

    def _replicas(self) -> list[tuple[str, str]]:
        live = connect().get_serve_details()["applications"]
        arms = {name: app for name, app in live.items() if name.startswith(ARM_PREFIX)}
        return [
            (name, replica["actor_name"])
            for name, app in arms.items()
            for deployment in app["deployments"].values()
            for replica in deployment["replicas"]
        ]


def own_metrics(replica: Any) -> str:
    """Runs in the replica's process, which is the one that vLLM counts in."""
    from prometheus_client import generate_latest

    return generate_latest().decode()


def parse_counters(text: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in text.splitlines():
        parsed = re.fullmatch(r"(vllm:\w+)(?:\{.*\})? (\S+)", line)
        if parsed and parsed[1] in COUNTERS:
            found[COUNTERS[parsed[1]]] += round(float(parsed[2]))
    return found
