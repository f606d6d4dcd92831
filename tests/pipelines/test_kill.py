"""kill -9 of the driver in any stage, then the same command: it goes on, and nothing is lost, doubled or rewritten."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cluster import RayHead
from tests.conftest import free_port
from tests.pipelines.runs import Project, make_project

PART = "part-*.parquet"

pytestmark = pytest.mark.timeout(1800)  # eight runs, each killed but the last


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory,
    permutation_target: tuple[Path, list[int]],
    ray_cluster: RayHead,
    mlflow_server: str,
) -> Project:
    folder = tmp_path_factory.mktemp("kill")
    return make_project(folder, permutation_target[0], ray_cluster.environment, mlflow_server, free_port())


def test_killed_in_every_stage_the_same_command_goes_on(project: Project) -> None:
    finished: dict[str, tuple[int, int]] = {}
    for stage, pattern in {
        "responses": PART,
        "features": PART,
        "head": "_train/**/optimizer.pt",
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


def is_inside(project: Project, printed: str, stage: str, pattern: str | None) -> bool:
    """The stage is running and, where it writes files one by one, one of them is there."""
    if f"{stage}: running" not in printed:
        return False
    return pattern is None or any(project.storage.glob(f"{stage}/*/{pattern}"))


def finished_files(project: Project) -> dict[str, tuple[int, int]]:
    """Shards, arms and outputs that later runs must leave alone."""
    keep = ("part-", "_manifest", "arms/", "model.safetensors", "prompts.jsonl")
    return {p: seen for p, seen in project.snapshot().items() if any(k in p for k in keep) and ".tmp-" not in p}


def assert_untouched(project: Project, finished: dict[str, tuple[int, int]]) -> None:
    now = project.snapshot()
    changed = [path for path, seen in finished.items() if now.get(path) != seen]
    assert not changed


def assert_rows_once(project: Project) -> None:
    prompts = project.output("prompts") / "prompts.jsonl"
    assert len(prompts.read_text().splitlines()) == 48
    for stage in ("responses", "features"):  # this target's template does not let two turns merge into one document
        keys = [
            key for path in sorted(project.output(stage).glob(PART)) for key in pq.read_table(path)["key"].to_pylist()
        ]
        assert len(keys) == 54
        assert max(Counter(keys).values()) == 1
