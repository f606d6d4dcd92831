"""Two registered heads behind a router without engines, and users who are answered as its weights say."""

import threading
import time
from dataclasses import replace
from types import TracebackType
from typing import Any
from uuid import uuid4

import numpy as np
from mlflow.tracking import MlflowClient

from components.config import Settings
from components.experiment.pair import Pair
from components.publishing import registry
from components.publishing.registry import Registry
from components.serving.records import RecordWriter, live_records
from components.serving.stages import CHALLENGER, CHAMPION
from components.stage import Artifact
from components.storage import Location
from tests.components.experiment.records import live_traffic
from tests.components.serving.serve_table import ServeTable

ANY_TIME = 1000.0
POLICY = {
    "min_sessions": 40,
    "max_requests": 400,
    "session_idle_s": 0.3,
    "poll_s": 0.05,
    "max_latency_increase": ANY_TIME,
    "max_tpot_increase": ANY_TIME,
}
TARGET = "d" * 64


def make_artifacts(**changes: Any) -> dict[str, Artifact]:
    """Version 1 is the champion, version 2 the challenger, with `changes` of its facts."""
    facts = {"version": 1, "head_digest": "a" * 64, "num_speculative_tokens": 3, "target_digest": TARGET}
    described = {
        "target": {"model": "/models/target", "path": "/models/target"},
        CHAMPION: facts,
        CHALLENGER: facts | {"version": 2, "head_digest": "b" * 64} | changes,
    }
    return {
        name: Artifact(name, Location(f"/outputs/{name}"), name, {"facts": facts, "files": {}, "digest": TARGET})
        for name, facts in described.items()
    }


def make_settings(
    serve: ServeTable, storage: Location, heads: Registry, latency_increase: float = ANY_TIME
) -> Settings:
    url = serve.router.client.base_url
    watch = {"sessions": 20, "latency_increase": latency_increase, "rollback": True}
    return Settings.model_validate(
        {
            "target": {"model": "/models/target"},
            "ab": {"host": url.host, "port": url.port, "experiment": POLICY, "watch": watch},
            "mlflow": {"tracking_uri": heads.client.tracking_uri},
            "publish": {"name": heads.name},
            "storage": {"uri": storage.uri},
        }
    )


def make_pair(settings: Settings, storage: Location) -> Pair:
    records = live_records(settings, storage)
    assert records is not None
    return Pair(settings, make_artifacts(), records)


def register_pair(address: str, storage: Location) -> Registry:
    """Version 1 is the champion, version 2 the challenger; both have passed the gate."""
    client, name = MlflowClient(address, address), f"heads-{uuid4().hex[:8]}"
    client.create_registered_model(name)
    for alias in (CHAMPION, CHALLENGER):
        add_version(client, name, alias)
    return Registry(client, name, storage.join("registry", name, "_lease.json"), 60.0)


def add_version(client: MlflowClient, name: str, alias: str) -> None:
    run_id = client.create_run("0").info.run_id
    tags = {registry.VERDICT_TAG: "promote", registry.AL_TAG: "2.5", registry.TARGET_DIGEST_TAG: TARGET}
    version = client.create_model_version(name, f"runs:/{run_id}/bundle", run_id, tags=tags)
    client.set_registered_model_alias(name, alias, version.version)


class Users:
    """Some hundred sessions a second, dealt by the weights that the router has, until the block ends."""

    def __init__(self, serve: ServeTable, records: Location, effect: float) -> None:
        self.serve, self.records, self.effect, self.slower = serve, records, effect, 1.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._come)

    def __enter__(self) -> "Users":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _come(self) -> None:
        rng, writer, num = np.random.default_rng(0), RecordWriter(self.records, None, flush_s=0.02), 0
        while not self._stop.wait(0.05):
            if not self.serve.applications:
                continue
            routing = self.serve.routing
            weights, epoch = routing.weights, routing.weight_epoch
            if not any(weights.values()):
                continue  # nobody answers yet
            share = weights.get(CHALLENGER, 0.0) / sum(weights.values())
            now = time.time()
            made = live_traffic(rng, 10, self.effect, share, slower=self.slower, first=num, weight_epoch=epoch)
            for record in made:
                head = routing.arms[record.arm].head
                times = {"started_at": now, "duration_s": record.duration_s * 1e-3}
                writer.add(replace(record, head=head, assigned_head=head, **times))
            num += 10
        writer.close()
