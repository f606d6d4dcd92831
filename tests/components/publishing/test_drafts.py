"""What other arms draft with: folders, Hugging Face ids and heads of the registry, pinned and served as they were found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import huggingface_hub.constants
import pytest
from mlflow.tracking import MlflowClient

from components.arm_config import ArmConfig
from components.config import Settings
from components.evaluation.arms import SyntheticArm, baseline_arm
from components.pipeline import Selection
from components.publishing.bundle import HEAD_FILES, head_digest
from components.publishing.drafts import draft_keys, draft_label, find_drafts
from components.publishing.evidence import Evidence
from components.publishing.publication import publish
from components.publishing.stages import drafts_stage, registry_of
from components.section import ConfigError
from components.stage import Artifact, run_stage
from components.storage import Location
from tests.components.publishing.rehearsal import TARGET_DIGEST, rehearse

COMMIT = "c0ffee" * 6 + "c0de"
SYNTHETIC = [
    "evaluate.baselines.none.method=none",
    "resources.evaluate.num_gpus=1",  # vLLM's CPU sampler has no synthetic acceptance
    "evaluate.baselines.load={method: ngram, num_speculative_tokens: 3, rejection_sample_method: synthetic, synthetic_acceptance_length: 2}",
]


def no_client() -> MlflowClient:
    pytest.fail("asked MLflow although no arm names a head of it")


def find(model: str, client: Callable[[], MlflowClient] = no_client, **arm: Any) -> dict[str, Any]:
    config = ArmConfig.model_validate({"method": "peagle", "num_speculative_tokens": 3, "model": model} | arm)
    return find_drafts({"x": config, "none": ArmConfig(method="none")}, TARGET_DIGEST, client)["x"]


def make_folder(folder: Path, *files: str) -> Path:
    folder.mkdir()
    for name in files:
        (folder / name).write_text(name)
    return folder


def artifact(folder: Path, drafts: dict[str, Any]) -> Artifact:
    return Artifact("drafts", Location(str(folder)), "f", {"facts": {"drafts": drafts}, "files": {}, "digest": "d"})


def test_a_folder_is_known_by_its_content_and_served_where_it_lies(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "h", *HEAD_FILES)
    found = find(str(folder))
    assert draft_keys(artifact(tmp_path, {"x": found})) == {"x": {"model": str(folder)}}
    (folder / "model.safetensors").write_text("other weights")
    assert find(str(folder))["digest"] != found["digest"]


@pytest.mark.parametrize(
    ("files", "missing"), [(["model.safetensors"], r"config\.json"), (["config.json"], "safetensors")]
)
def test_a_folder_without_a_head_is_refused(tmp_path: Path, files: list[str], missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"evaluate\.baselines\.x\.model: the folder .* has no .*{missing}"):
        find(str(make_folder(tmp_path / "h", *files)))


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.baselines\.x\.revision"):
        find(str(make_folder(tmp_path / "h", *HEAD_FILES)), revision="main")


def test_a_hugging_face_id_is_pinned_to_the_commit_of_its_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--lab--head"
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "snapshots" / COMMIT / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "released").write_text(COMMIT)

    found = find("lab/head", method="eagle3", revision="released")

    keys = draft_keys(artifact(tmp_path, {"x": found}))["x"]
    assert keys == {"model": "lab/head", "revision": COMMIT}
    config = ArmConfig(method="eagle3", num_speculative_tokens=3, model="lab/head", revision="released")
    assert baseline_arm("x", config, keys).speculative_config() == keys | {
        "method": "eagle3",
        "num_speculative_tokens": 3,
    }
    with pytest.raises(ConfigError, match=r"evaluate\.baselines\.x\.model: lab/other is not in the local cache"):
        find("lab/other", method="eagle3")


@pytest.fixture(scope="module")
def registered(mlflow_server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Name of a registered model with one promoted head, and the folder of that head."""
    name = f"head-{uuid4().hex[:8]}"
    pipeline = rehearse(tmp_path_factory.mktemp("registered"), mlflow_server, f"publish.name={name}")
    pipeline.run(Selection())
    return name, pipeline.artifacts["head"].join("head").path


@pytest.mark.parametrize("which", ["champion", "challenger", "1"])
def test_a_head_of_the_registry_is_fetched_by_alias_or_version(
    which: str, registered: tuple[str, Path], mlflow_server: str, tmp_path: Path
) -> None:
    name, head = registered
    baselines = {
        "none": {"method": "none"},
        "old": {"method": "peagle", "num_speculative_tokens": 5, "model": f"registry:{name}@{which}"},
    }
    settings = Settings.model_validate(
        {"mlflow": {"tracking_uri": mlflow_server}, "evaluate": {"baselines": baselines}}
    )
    target = {"target": Artifact("target", Location("t"), "t", {"digest": "t", "facts": {"digest": TARGET_DIGEST}})}

    made, _ = run_stage(drafts_stage(settings), target, Location(str(tmp_path)), lease_ttl_s=60)
    again, made_again = run_stage(drafts_stage(settings), target, Location(str(tmp_path)), lease_ttl_s=60)

    keys = draft_keys(made)["old"]
    arm = baseline_arm("old", settings.evaluate.baselines["old"], keys)
    assert arm.speculative_config() == {
        "method": "eagle3",
        "parallel_drafting": True,
        "num_speculative_tokens": 5,
        "model": keys["model"],
    }
    assert head_digest(Path(keys["model"])) == head_digest(head)
    assert draft_label(made.facts["drafts"]["old"], 12) == f"v1-{head_digest(head)[:12]}"
    assert (made_again, again.facts) == (False, made.facts)


@pytest.mark.parametrize(
    ("model", "problem"),
    [("{name}@2", "has no 2 of"), ("{name}@old", "has no old of"), ("nobody@champion", "has no champion of nobody")],
)
def test_a_head_that_the_registry_has_not_is_named(
    model: str, problem: str, registered: tuple[str, Path], mlflow_server: str
) -> None:
    with pytest.raises(ConfigError, match=rf"evaluate\.baselines\.x\.model: .*{problem}"):
        find(f"registry:{model.format(name=registered[0])}", lambda: MlflowClient(mlflow_server))


def test_a_head_of_another_target_is_refused(registered: tuple[str, Path], mlflow_server: str) -> None:
    config = ArmConfig(method="peagle", num_speculative_tokens=3, model=f"registry:{registered[0]}@1")
    with pytest.raises(ConfigError, match="drafts for another target"):
        find_drafts({"x": config}, "another digest", lambda: MlflowClient(mlflow_server))


def test_the_publisher_refuses_synthetic_acceptance_before_anything_runs(tmp_path: Path, mlflow_server: str) -> None:
    stages: list[str] = []
    pipeline = rehearse(tmp_path, mlflow_server, *SYNTHETIC, on_stage=stages.append)
    with pytest.raises(SyntheticArm, match=r"evaluate\.baselines\.load\.rejection_sample_method: .*the publisher"):
        pipeline.run(Selection())
    assert stages == []


def test_the_publisher_refuses_what_a_load_test_measured(tmp_path: Path, mlflow_server: str) -> None:
    name = f"head-{uuid4().hex[:8]}"
    pipeline = rehearse(tmp_path, mlflow_server, *SYNTHETIC, f"publish.name={name}")
    pipeline.run(Selection(last="ab"))  # measuring it is what it is for
    evaluation = pipeline.artifacts["evaluation"].facts
    assert evaluation["arms"]["load"]["synthetic"]
    evidence = Evidence(pipeline.settings, pipeline.artifacts, None)  # type: ignore[arg-type]  # it gets no further
    heads = registry_of(pipeline.settings, pipeline.storage)
    with pytest.raises(SyntheticArm, match="the publisher"):
        publish(evidence, pipeline.tracker, heads, None, lambda version: pytest.fail("traffic moved"), tmp_path / "out")
    assert not MlflowClient(mlflow_server).search_registered_models(f"name = '{name}'")
    assert not (tmp_path / "out").exists()
