"""A registered head and what is known of it after a new vLLM, on a real MLflow server."""

import logging
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from components.config import Settings
from components.pipeline import Pipeline, Selection
from components.publishing.registry import VLLM_TAG, Registry
from components.publishing.regression import is_reproduced, mark, registered_stage, regression_stage, sentence
from components.publishing.stages import incumbent_stage, registry_of
from components.publishing.versions import list_versions
from components.section import ConfigError
from components.stage import Artifact, run_stage
from components.storage import Location
from components.versions import vllm_of
from tests.components.publishing.rehearsal import rehearse

FACTS = {
    "name": "h",
    "version": 1,
    "num_speculative_tokens": 3,
    "num_prompts": 8,
    "al": 1.53,
    "recorded_al": 1.5,
    "relative_difference": 0.02,
    "vllm": "9.9",
    "recorded_vllm": "0.32.0",
    "problems": [],
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, mlflow_server: str) -> Pipeline:
    """A run whose head became the champion."""
    done = rehearse(tmp_path_factory.mktemp("s"), mlflow_server, f"publish.name=head-{uuid4().hex[:8]}", quality=0.6)
    done.run(Selection())
    return done


@pytest.fixture
def heads(published: Pipeline) -> Registry:
    return registry_of(published.settings, published.storage)


def measured(**changes: Any) -> Artifact:
    return Artifact("regression", Location("/nowhere"), "f", {"facts": FACTS | changes, "versions": {}})


@pytest.mark.parametrize(
    ("changes", "reproduced"),
    [
        ({}, True),
        ({"relative_difference": -0.02}, True),
        ({"relative_difference": 0.021}, False),
        ({"relative_difference": -0.3}, False),
        ({"relative_difference": None, "al": None}, False),
        ({"problems": ["1 of 8 answers: empty answer"]}, False),
    ],
)
def test_within_two_percent_on_either_side_is_reproduced(changes: dict[str, Any], reproduced: bool) -> None:
    facts = FACTS | changes
    assert is_reproduced(facts, 0.02) is reproduced
    line = sentence(facts, 0.02, reproduced)
    assert "1.5000 recorded on vLLM 0.32.0" in line
    assert ("NOT within" in line) is not reproduced


def test_an_engine_that_may_say_something_else_answers_anew() -> None:
    plain, other, placed = (
        regression_stage(Settings.model_validate({"resources": {"evaluate": {"engine": engine}}})).config
        for engine in ({}, {"kv_cache_dtype": "fp8"}, {"gpu_memory_utilization": 0.5})
    )
    assert plain == placed
    assert plain != other


def test_a_version_is_stale_on_another_vllm_until_it_was_measured_there(heads: Registry) -> None:
    def stale() -> bool:
        return list_versions(heads.client, heads.name, "9.9")[0].is_stale

    assert stale()
    mark(heads, measured(), reproduced=True)
    assert not stale()
    assert list_versions(heads.client, heads.name, "8.8")[0].is_stale
    mark(heads, measured(al=1.2), reproduced=False)  # it held once, and no longer does
    assert stale()
    mark(heads, measured(al=1.2), reproduced=False)


def test_the_version_is_fetched_with_what_it_was_measured_on(published: Pipeline, tmp_path: Path) -> None:
    artifact, _ = run_stage(registered_stage(published.settings, "champion"), {}, Location(str(tmp_path)), 60.0)

    recorded = artifact.facts["recorded"]
    evaluation = published.artifacts["evaluation"]
    assert recorded["al"] == evaluation.facts["arms"]["candidate"]["al"]
    assert recorded["evaluate"]["max_new_tokens"] == published.settings.evaluate.max_new_tokens
    assert recorded["target"]["dtype"] == published.settings.target.dtype
    assert recorded["vllm"] == vllm_of()
    assert artifact.join("prompts.json").read_bytes() == evaluation.join("prompts.json").read_bytes()
    assert artifact.local("head").joinpath("model.safetensors").exists()


def test_a_bundle_without_prompts_cannot_be_measured_again(tmp_path: Path, mlflow_server: str) -> None:
    name = f"publish.name=head-{uuid4().hex[:8]}"
    done = rehearse(tmp_path / "s", mlflow_server, name, "publish.include_prompts=false", quality=0.6)
    done.run(Selection())

    with pytest.raises(ConfigError, match=r"has no prompts\.json.*Fix: register the head again"):
        run_stage(registered_stage(done.settings, "1"), {}, Location(str(tmp_path / "r")), 60.0)
    with pytest.raises(ConfigError, match="no version or alias '7'"):
        run_stage(registered_stage(done.settings, "7"), {}, Location(str(tmp_path / "r")), 60.0)


def test_a_stale_champion_is_called_stale_before_anything_runs(
    heads: Registry, published: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    stage = incumbent_stage(published.settings)
    with caplog.at_level(logging.WARNING, "aerie"):
        stage.check()
        assert "stale" not in caplog.text
        heads.client.set_model_version_tag(heads.name, "1", VLLM_TAG, "0.1")
        stage.check()
    assert f"version 1, is stale: measured on vLLM 0.1, installed is {vllm_of()}" in caplog.text
    heads.client.set_model_version_tag(heads.name, "1", VLLM_TAG, str(vllm_of()))


def test_no_server_is_no_reason_to_stop_before_the_stage_itself_says_so(published: Pipeline) -> None:
    mlflow = published.settings.mlflow.model_copy(update={"tracking_uri": "http://127.0.0.1:9"})
    incumbent_stage(published.settings.model_copy(update={"mlflow": mlflow})).check()
