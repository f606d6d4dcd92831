"""Traffic that decides, degrades, and is moved by hand, on two real engines: requests come by a fixed schedule and every one ends properly.

One sequence of commands on one endpoint: `serve.py --experiment --watch` promotes the better head; when it is no longer better, it rolls
back by itself; `publish.py promote` and `rollback` move the endpoint there and back, the last time with an engine that has to start. In the
end the figures of the client, of the router and of the engines are equal.
"""

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from mlflow.tracking import MlflowClient

from components.config import Settings
from components.draft.checkpoint import save_head
from components.publishing.promotion import promote
from components.publishing.stages import registry_of
from components.serving.deploy import teardown
from components.serving.listing import connect
from components.serving.records import LiveRecord, decode_records
from components.storage import Location
from components.target.chat import load_tokenizer, render
from pipelines.run_options import RunOptions
from tests.cluster import RayHead
from tests.components.evaluation.heads import make_permutation_heads
from tests.components.serving.engines import EngineCounters
from tests.components.serving.load import QUESTIONS, OpenLoop
from tests.conftest import free_port
from tests.pipelines.registered import register_head
from tests.pipelines.runs import ROOT, Project, make_project

pytestmark = pytest.mark.timeout(1200)  # engines start while others answer; minutes on two busy cores

K = 3
NUM_TOKENS = 24
RATE = 6.0
"""Requests a second."""
PROBES = 1
"""An engine that starts beside another one answers a request of the deployment's own first."""
DEGRADED = 2.0
"""At this temperature, the highest that vLLM takes, a draft is right about half of the time."""


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory,
    ray_cluster: RayHead,
    mlflow_server: str,
    permutation_target: tuple[Path, list[int]],
) -> Project:
    """Version 1, the champion, drafts nothing right; version 2, the challenger, everything."""
    folder = tmp_path_factory.mktemp("live")
    target, cycle = permutation_target
    any_time = 1000.0  # of a machine that is busy with other tests nothing is expected
    experiment = {
        "min_sessions": 20,
        "session_requests": 1,
        "session_idle_s": 30.0,
        "max_latency_increase": any_time,
        "max_tpot_increase": any_time,
        "poll_s": 0.5,
    }
    watch = {"sessions": 20, "latency_increase": any_time, "rollback": True}
    project = make_project(
        folder,
        target,
        ray_cluster.environment,
        mlflow_server,
        free_port(),
        ab={"experiment": experiment, "watch": watch},
    )
    tokenizer = load_tokenizer(target)
    prompts = [render(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    settings = RunOptions(project.config).settings()
    right, wrong = make_permutation_heads(target, cycle, prompts, NUM_TOKENS, K)
    for name, head, al in (("wrong", wrong, 1.0), ("right", right, 4.0)):
        version = register_head(settings, save_head(head, folder / name, torch.float32), al)
        if version == 1:
            promote(registry_of(settings, Location(settings.storage.uri)), 1, None)
    return project


def test_traffic_decides_and_operators_move_it_while_every_request_ends_properly(project: Project) -> None:
    settings = RunOptions(project.config).settings()
    address = f"http://{settings.ab.host}:{project.port}"
    log = project.folder / "experiment.log"
    command = project.command("--experiment", "--watch", pipeline="serve")
    with log.open("w") as out:
        experiment = subprocess.Popen(command, cwd=ROOT, env=os.environ | project.environment, stdout=out, stderr=out)
    try:
        with EngineCounters() as engines:
            wait_until(lambda: "serves both heads" in log.read_text(errors="replace"), experiment, log)
            with OpenLoop(address, Path(settings.target.model).name, RATE, NUM_TOKENS) as load:
                wait_until(lambda: champion(settings) == 2, experiment, log)
                load.temperature = DEGRADED
                wait_until(lambda: experiment.poll() is not None, None, log)
                load.temperature = 0.0
                assert (experiment.returncode, champion(settings)) == (0, 1), log.read_text(errors="replace")
                assert serving(address) == {"champion": "v1", "challenger": "v2"}

                promoted = project.run("promote", "2", pipeline="publish")
                assert promoted.returncode == 0, promoted.stdout
                assert (champion(settings), serving(address), num_engines()) == (2, {"champion": "v2"}, 1)
                load.wait_for(10)

                rolled_back = project.run("rollback", pipeline="publish")
                assert rolled_back.returncode == 0, rolled_back.stdout
                assert (champion(settings), serving(address), num_engines()) == (1, {"champion": "v1"}, 1)
                load.wait_for(10)
        assert load.problems == []
        assert {reply.head[:2] for reply in load.replies} == {"v1", "v2"}
        check_figures(load, engines, address, project)
    finally:
        experiment.kill()
        experiment.wait()
        teardown()


def wait_until(happens: Callable[[], bool], process: subprocess.Popen[bytes] | None, log: Path) -> None:
    deadline = time.monotonic() + 900
    while not happens():
        ended = process is not None and process.poll() is not None
        assert not ended, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.2)


def champion(settings: Settings) -> int:
    client = MlflowClient(settings.mlflow.tracking_uri)
    return int(client.get_model_version_by_alias(settings.publish.name, "champion").version)


def serving(address: str) -> dict[str, str]:
    """{arm: version of its head}."""
    arms = httpx.get(f"{address}/health", trust_env=False, timeout=60).json()["arms"]
    return {name: arm["head"].partition("-")[0] for name, arm in arms.items()}


def num_engines() -> int:
    return sum("-arm-" in name for name in connect().get_serve_details()["applications"])


def check_figures(load: OpenLoop, engines: EngineCounters, address: str, project: Project) -> None:
    """What the client counted, what the router recorded and published, and what the engines counted are equal."""
    num_requests, num_tokens = len(load.replies), sum(reply.num_tokens for reply in load.replies)
    assert num_tokens == NUM_TOKENS * num_requests
    records = wait_for_records(project.storage.join("live").path, num_requests)
    recorded = Counter(requests=len(records))
    for record in records:
        fields = {name: getattr(record, name) for name in ("output_tokens", "rounds", "drafted", "accepted")}
        recorded.update(fields)
        assert record.error is None
    assert (recorded["requests"], recorded["output_tokens"]) == (num_requests, num_tokens)
    text = httpx.get(f"{address}/metrics", trust_env=False, timeout=60).text
    published = {
        name: metric(text, name)
        for name in ("requests", "output_tokens", "rounds", "drafted_tokens", "accepted_tokens")
    }
    assert list(published.values()) == [
        recorded[name] for name in ("requests", "output_tokens", "rounds", "drafted", "accepted")
    ]
    assert metric(text, "errors") == 0
    counted = engines.total()
    counted["requests"] -= PROBES
    counted["output_tokens"] -= PROBES
    assert counted == recorded


def wait_for_records(folder: Path, num: int) -> list[LiveRecord]:
    deadline = time.monotonic() + 120
    while True:
        rows = [row for path in folder.rglob("*.jsonl") for row in decode_records(path.read_bytes())]
        if len(rows) >= num or time.monotonic() > deadline:
            return rows
        time.sleep(0.2)


def metric(text: str, name: str) -> float:
    """Of all arms."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"aerie_{name}_total{{", line))
