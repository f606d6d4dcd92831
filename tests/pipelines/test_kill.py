"""kill -9 of the driver in any stage, then the same command: it goes on, and nothing is lost, doubled or rewritten. All of it on S3."""

import io
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load

from tests.cluster import RayHead
from tests.conftest import free_port, new_bucket, s3_environment
from tests.pipelines.runs import Project, make_project

PART = "part-*.parquet"

pytestmark = pytest.mark.timeout(1800)  # eight runs, each killed but the last


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory,
    permutation_target: tuple[Path, list[int]],
    ray_cluster: RayHead,
    mlflow_server: str,
    s3_server: str,
) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("kill")
    server = (ray_cluster.environment | s3_environment(s3_server), mlflow_server, free_port())
    with new_bucket(s3_server) as bucket:
        yield make_project(folder, permutation_target[0], *server, storage=f"{bucket}/runs")


def test_killed_in_every_stage_the_same_command_goes_on(project: Project) -> None:
    finished: dict[str, tuple[int, int]] = {}
    for stage, pattern in {
        "responses": PART,
        "features": PART,
        "head": "_train/*/optimizer.pt",
        "preflight": None,
        "evaluation": "arms/*.json",
        "ab": None,
        "publish": None,
    }.items():
        project.run_and_kill(lambda printed, s=stage, p=pattern: is_inside(project, printed, s, p))
        assert not project.manifests(stage), f"the kill came after {stage} was finished"
        assert_untouched(project, finished)
        finished = finished_files(project)
    last = project.run()
    assert last.returncode == 0, last.stdout[-6000:]
    assert_untouched(project, finished)
    assert_rows_once(project)
    assert project.arms() is None, "ab.keep_serving is off"


def test_a_stream_killed_within_an_epoch_ends_in_the_head_of_stored_features(project: Project) -> None:
    settings = (
        "train.checkpoint_every_steps=10",
        "train.epochs=2",
        "data.batch_tokens=1",
    )  # a document's states are its own
    common = ("--until", "head", *(part for setting in settings for part in ("--set", setting)))
    stream = ("--set", "data.mode=stream", *common)
    killed = project.run_and_kill(lambda printed: max(trained_steps(printed), default=0) >= 10, *stream)
    assert max(trained_steps(killed)) < 25, "an epoch ended first: its checkpoint proves nothing"
    streamed = project.run(*stream)
    assert streamed.returncode == 0, streamed.stdout[-6000:]
    assert min(trained_steps(streamed.stdout)) > 10, "it began anew"
    stored = project.run(*common)
    assert stored.returncode == 0, stored.stdout[-6000:]
    ours, theirs = (load(project.output("head", n).join("head/model.safetensors").read_bytes()) for n in (-2, -1))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name])


def trained_steps(printed: str) -> list[int]:
    return [int(step) for step in re.findall(r"train (\d+)/\d+ ", printed)]


def is_inside(project: Project, printed: str, stage: str, pattern: str | None) -> bool:
    """The stage is running and, where it writes files one by one, one of them is there."""
    if f"{stage}: running" not in printed:
        return False
    return pattern is None or any(fnmatch(path, f"*/{pattern}") for path in project.storage.join(stage).files())


def finished_files(project: Project) -> dict[str, tuple[int, int]]:
    """Shards, arms and outputs that later runs must leave alone."""
    keep = ("part-", "_manifest", "arms/", "model.safetensors", "prompts.jsonl")
    return {p: seen for p, seen in project.snapshot().items() if any(k in p for k in keep) and ".tmp-" not in p}


def assert_untouched(project: Project, finished: dict[str, tuple[int, int]]) -> None:
    now = project.snapshot()
    changed = [path for path, seen in finished.items() if now.get(path) != seen]
    assert not changed


def assert_rows_once(project: Project) -> None:
    prompts = project.output("prompts").join("prompts.jsonl").read_bytes()
    assert len(prompts.splitlines()) == 48
    for stage in ("responses", "features"):  # this target's template does not let two turns merge into one document
        output = project.output(stage)
        parts = [io.BytesIO(output.join(path).read_bytes()) for path in output.files() if fnmatch(path, PART)]
        keys = [key for part in parts for key in pq.read_table(part)["key"].to_pylist()]
        assert len(keys) == 54
        assert max(Counter(keys).values()) == 1
