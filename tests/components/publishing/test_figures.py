"""NaN and infinity: no head with such a figure is promoted, and none of them reaches MLflow."""

import math
from pathlib import Path
from uuid import uuid4

import pytest
from mlflow.tracking import MlflowClient

from components.evaluation.gate import Reason, Verdict
from components.pipeline import Selection
from components.publishing import registry
from components.publishing.publication import check_figures
from tests.components.publishing.rehearsal import rehearse

SOUND = Verdict(True, (Reason("lossless", True, "0 faults", "none"),))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_figure_that_is_no_number_refuses_the_head_and_is_named(bad: float) -> None:
    verdict = check_figures(SOUND, {"eval/candidate/al": 2.0, "ab/none/al": None, "data/prompts/lost": bad}, 2.0)
    assert not verdict.promote
    (reason,) = verdict.failures
    assert reason.measured == f"data/prompts/lost is {bad}"


def test_finite_figures_change_no_verdict() -> None:
    figures = {"eval/candidate/al": 2.0, "ab/none/al": None}
    assert check_figures(SOUND, figures, 2.0).promote
    assert not check_figures(Verdict(False, SOUND.reasons), figures, 2.0).promote


def test_a_head_without_an_acceptance_length_is_refused() -> None:
    assert not check_figures(SOUND, {"eval/candidate/al": None}, None).promote


@pytest.mark.parametrize(("stage", "figure"), [("evaluation", "eval/candidate/al"), ("ab", "ab/challenger/al")])
def test_a_publication_with_nan_is_refused_and_mlflow_never_sees_it(
    tmp_path: Path, mlflow_server: str, stage: str, figure: str
) -> None:
    name, client = f"head-{uuid4().hex[:8]}", MlflowClient(mlflow_server)
    overrides = [f"publish.name={name}"]
    rehearsed = rehearse(tmp_path, mlflow_server, *overrides)
    rehearsed.run(Selection(last="ab"))
    arm = figure.split("/")[1]
    al = rehearsed.artifacts[stage].facts["arms"][arm]["al"]
    (manifest,) = tmp_path.glob(f"{stage}/*/_manifest.json")
    text = manifest.read_text()
    assert f'"al": {al}' in text
    manifest.write_text(text.replace(f'"al": {al}', '"al": NaN'))
    done = rehearse(tmp_path, mlflow_server, *overrides)
    done.run(Selection())
    facts = done.artifacts["publish"].facts
    assert (done.made, facts["verdict"]) == (["publish"], "refuse")
    (measured,) = [reason["measured"] for reason in facts["reasons"] if not reason["passed"]]
    assert f"{figure} is nan" in measured
    assert registry.champion(client, name) is None
    version = client.get_model_version(name, "1")
    assert (registry.AL_TAG in version.tags) == (stage == "ab")
    assert "nan" not in {value.lower() for value in version.tags.values()}
    metrics = client.get_run(version.run_id).data.metrics
    assert figure not in metrics
    assert all(map(math.isfinite, metrics.values()))


def test_a_version_is_not_registered_with_nan(mlflow_server: str) -> None:
    client, name = MlflowClient(mlflow_server), f"head-{uuid4().hex[:8]}"
    with pytest.raises(ValueError, match=r"aerie\.al must be finite, not nan"):
        registry.register_version(client, name, "no-run", "bundle", {registry.AL_TAG: "nan"})
    assert not client.search_registered_models(f"name = '{name}'")
