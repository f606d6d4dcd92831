"""The whole job on a tiny target whose next token is a known permutation, on real Ray, vLLM, Serve and MLflow."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from tests.cluster import RayHead
from tests.conftest import free_port
from tests.pipelines.runs import Project, make_project
from tests.tiny import make_permutation_llama

pytestmark = pytest.mark.timeout(1500)  # several engines one after another; minutes on two cores

K = 3
SPEED = "faster than plain decoding"
NUM_LAYERS = 32  # deep for its size, so that four tokens a step beat one by far


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory,
    ray_cluster: RayHead,
    mlflow_server: str,
) -> Project:
    folder = tmp_path_factory.mktemp("full")
    target = folder / "target"
    make_permutation_llama(target, layers=NUM_LAYERS)
    return make_project(folder, target, ray_cluster.environment, mlflow_server, free_port())


@pytest.fixture(scope="module")
def first_run(project: Project) -> str:
    """What the first run printed."""
    done = project.run()
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_first_run_ends_with_a_verdict_on_a_head_that_drafts_perfectly(
    project: Project, first_run: str, mlflow_server: str
) -> None:
    candidate = project.manifests("evaluation")[0]["facts"]["arms"]["candidate"]
    assert candidate["al"] == pytest.approx(K + 1, abs=0.1)
    verdict = read_verdict(project)
    # how fast it is depends on what else this machine does; all else does not
    assert all(reason["passed"] for reason in verdict["reasons"] if reason["check"] != SPEED)
    assert verdict["promote"] == all(reason["passed"] for reason in verdict["reasons"])
    aliases = MlflowClient(mlflow_server).get_registered_model(project.registered_name).aliases
    assert aliases["challenger"] == "1"
    assert aliases.get("champion") == ("1" if verdict["promote"] else None)
    assert "Verdict" in first_run
    assert f"http://127.0.0.1:{project.port}/v1" in first_run


def read_verdict(project: Project) -> dict[str, Any]:
    return json.loads((project.output("publish") / "verdict.json").read_text())


def test_registered_files_are_the_trained_ones(
    project: Project, first_run: str, mlflow_server: str, tmp_path: Path
) -> None:
    client = MlflowClient(mlflow_server)
    version = client.get_model_version_by_alias(project.registered_name, "challenger")
    assert version.run_id is not None
    bundle = Path(client.download_artifacts(version.run_id, "bundle", str(tmp_path)))
    downloaded = load_file(next(bundle.rglob("model.safetensors")))
    trained = load_file(project.output("head") / "head" / "model.safetensors")
    assert downloaded.keys() == trained.keys()
    assert all((downloaded[name] == trained[name]).all() for name in trained)
    metrics = client.get_run(version.run_id).data.metrics
    assert metrics["eval/candidate/al"] == pytest.approx(K + 1, abs=0.1)
    assert "validation/loss" in metrics


def test_rows_are_accounted_for(project: Project, first_run: str) -> None:
    for stage in ("prompts", "responses", "features"):
        rows = project.manifests(stage)[0]["rows"]
        lost = sum(rows["dropped"].values()) + sum(rows["failed"].values())
        assert rows["rows_in"] == rows["kept"] + rows["truncated"] + lost
    assert project.manifests("responses")[0]["rows"]["rows_in"] == 6 * 8 + 6  # two-turn prompts have two answers


def test_report_is_one_file(project: Project, first_run: str) -> None:
    html = (project.output("publish") / "report.html").read_text()
    assert "candidate" in html
    for outside in ('src="http', 'href="http', "@import", "url(http"):
        assert outside not in html
