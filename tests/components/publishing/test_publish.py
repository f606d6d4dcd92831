"""Publishing on a real MLflow server: promotion, no-ops, refusals, crashes in the middle, a champion that changed meanwhile."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from mlflow.tracking import MlflowClient
from rich.console import Console

from components.config import TrainConfig
from components.pipeline import Pipeline, Selection
from components.publishing import registry
from components.publishing.bundle import HEAD_FILES, head_digest, verify_bundle
from components.publishing.promotion import ChampionChanged, NothingToRollBack, rollback
from components.publishing.stages import champion_stage, registry_of
from components.publishing.summary import print_summary
from components.section import ConfigError
from components.stage import run_stage
from tests.components.publishing.rehearsal import ENDPOINT, rehearse
from tests.conftest import project_environment

DIE_AT = """
import os, signal, sys
from pathlib import Path
from mlflow.tracking import MlflowClient
from components.pipeline import Selection
from tests.components.publishing.rehearsal import rehearse

def die(client, name, *arguments, **others):
    if sys.argv[4] in ("", *arguments):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(client, name, *arguments, **others)

original = getattr(MlflowClient, sys.argv[3])
setattr(MlflowClient, sys.argv[3], die)
rehearse(Path(sys.argv[1]), sys.argv[2], *sys.argv[5:]).run(Selection())
"""


@pytest.fixture
def name() -> str:
    return f"head-{uuid4().hex[:8]}"


@pytest.fixture
def client(mlflow_server: str) -> MlflowClient:
    return MlflowClient(mlflow_server)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, mlflow_server: str) -> Pipeline:
    """A first head, published. No test changes it."""
    return run(tmp_path_factory.mktemp("first"), mlflow_server, f"publish.name=head-{uuid4().hex[:8]}")


@pytest.fixture(scope="module")
def champion(tmp_path_factory: pytest.TempPathFactory, mlflow_server: str) -> Pipeline:
    """A champion of quality 0.6, beside whom tests publish what is not better."""
    return run(tmp_path_factory.mktemp("champion"), mlflow_server, f"publish.name=head-{uuid4().hex[:8]}", quality=0.6)


def again(done: Pipeline, *overrides: str, **how: Any) -> Pipeline:
    """The same job, but for what is said."""
    settings = done.settings
    return run(
        Path(settings.storage.uri),
        settings.mlflow.tracking_uri,
        f"publish.name={settings.publish.name}",
        *overrides,
        **how,
    )


def run(folder: Path, server: str, *overrides: str, **how: Any) -> Pipeline:
    pipeline = rehearse(folder, server, *overrides, **how)
    pipeline.run(Selection())
    return pipeline


class Endpoint:
    """Notes what the publication puts behind it, and who was champion at that moment."""

    def __init__(self, client: MlflowClient, name: str) -> None:
        self.client, self.name = client, name
        self.moves: list[tuple[int | None, int | None]] = []

    def __call__(self, version: int | None) -> bool:
        self.moves.append((version, registry.holder(self.client, self.name, registry.CHAMPION)))
        return True


def report(pipeline: Pipeline) -> str:
    return pipeline.artifacts["publish"].join("report.html").read_bytes().decode()


def facts(pipeline: Pipeline) -> Mapping[str, Any]:
    return pipeline.artifacts["publish"].facts


def aliases(client: MlflowClient, name: str) -> dict[str, str]:
    return dict(client.get_registered_model(name).aliases)


def test_the_first_head_is_promoted_and_alias_digest_and_download_agree(
    published: Pipeline, client: MlflowClient, tmp_path: Path
) -> None:
    done, name = published, published.settings.publish.name
    assert facts(done)["verdict"] == "promote", facts(done)["reasons"]
    assert aliases(client, name) == {"champion": "1", "challenger": "1"}
    version = client.get_model_version(name, "1")
    local = done.artifacts["publish"].join("bundle").path
    downloaded = registry.download_version(client, name, 1, tmp_path / "download")
    assert verify_bundle(downloaded) == verify_bundle(local) == version.tags["aerie.bundle_sha256"]
    assert head_digest(downloaded) == version.tags["aerie.head_digest"] == facts(done)["head_digest"]
    assert head_digest(done.artifacts["head"].join("head").path) == version.tags["aerie.head_digest"]
    assert {path.name for path in downloaded.iterdir()} == {
        *HEAD_FILES, "README.md", "evaluation.json", "ab.json", "prompts.json", "provenance.json", "SHA256SUMS",
    }  # fmt: skip
    assert version.tags["aerie.num_speculative_tokens"] == "3"
    assert version.tags["aerie.target_digest"] == "d" * 64
    assert version.tags["aerie.data_digest"] == done.artifacts["features"].digest
    lineage = {key.removeprefix("aerie.licence."): v for key, v in version.tags.items() if "licence" in key}
    assert lineage == json.loads((downloaded / "provenance.json").read_text())["licences"]
    assert lineage["target"] == "apache-2.0"


def test_the_run_holds_figures_curves_plots_and_the_report(published: Pipeline, client: MlflowClient) -> None:
    found = client.get_run(facts(published)["run_id"])
    evaluation = published.artifacts["evaluation"].facts["arms"]
    assert found.info.status == "FINISHED"
    assert found.data.metrics["eval/candidate/al"] == evaluation["candidate"]["al"]
    assert found.data.metrics["eval/candidate/accepted_at_1"] == evaluation["candidate"]["accepted_at"][0]
    assert found.data.metrics["data/prompts/lost"] == 2
    assert found.data.metrics["ab/challenger/al"] == 1.4
    assert "ab/none/al" not in found.data.metrics  # no rounds: undefined, not 0
    assert found.data.params["train.epochs"] == str(TrainConfig().epochs)
    history = client.get_metric_history(found.info.run_id, "validation/accuracy_depth_0")
    assert [m.step for m in history] == list(range(2, 9))  # step 1 is NaN
    files = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert {"report.html", "verdict.json", "settings.json", "plots", "bundle"} <= files
    plots = {Path(file.path).stem for file in client.list_artifacts(found.info.run_id, "plots")}
    assert plots >= {"loss", "accuracy", "walked_al", "accepted", "tokens_per_s", "tokens_per_step", "task_al", "ab_al"}


def test_the_same_job_again_writes_nothing_though_it_became_the_champion(
    published: Pipeline, client: MlflowClient
) -> None:
    folder, name = Path(published.settings.storage.uri), published.settings.publish.name
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    version_before = client.get_model_version(name, "1").last_updated_timestamp
    repeated = again(published)
    assert repeated.made == []
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert facts(repeated) == facts(published)
    assert client.get_model_version(name, "1").last_updated_timestamp == version_before


def test_a_better_head_replaces_the_champion_and_rollback_gives_it_back(
    tmp_path: Path, mlflow_server: str, client: MlflowClient, name: str
) -> None:
    endpoint = Endpoint(client, name)
    first = run(tmp_path, mlflow_server, f"publish.name={name}", quality=0.4, serve_alone=endpoint)
    better = run(tmp_path, mlflow_server, f"publish.name={name}", quality=0.8, serve_alone=endpoint)
    assert facts(better)["verdict"] == "promote", facts(better)["reasons"]
    assert endpoint.moves == [(1, None), (2, 1)], "traffic moves to the new head, and then the alias"
    for number, done in enumerate((first, better), 1):
        assert f"Version {number} is the champion; all traffic of the endpoint goes to it." in report(done)
    assert aliases(client, name) == {"champion": "2", "challenger": "2", "previous": "1"}
    assert better.artifacts["incumbent"].facts["version"] == 1
    assert run(tmp_path, mlflow_server, f"publish.name={name}", quality=0.8).made == []
    heads = registry_of(better.settings, better.storage)
    assert rollback(heads).version == 1
    assert aliases(client, name) == {"champion": "1", "challenger": "2", "previous": "2"}
    assert run(tmp_path, mlflow_server, f"publish.name={name}", quality=0.8).made == []
    assert aliases(client, name)["champion"] == "1"  # a repeated job does not undo a rollback
    assert rollback(heads).version == 2


def test_the_best_of_several_candidates_is_published_and_its_job_stays_a_no_op(
    tmp_path: Path, mlflow_server: str, client: MlflowClient, name: str
) -> None:
    overrides = [f"publish.name={name}", "evaluate.candidates=3"]
    first = run(tmp_path, mlflow_server, *overrides, quality=0.4)
    assert facts(first)["verdict"] == "promote", facts(first)["reasons"]
    logged = client.get_run(facts(first)["run_id"]).data.metrics
    ours = {name.removeprefix("eval/candidate_3/"): v for name, v in logged.items() if "/candidate_3/" in name}
    assert {"al", "walked_al", "accepted_at_1"} <= ours.keys()
    assert ours == {name.removeprefix("eval/chosen/"): v for name, v in logged.items() if "/chosen/" in name}
    chosen = first.artifacts["evaluation"].facts["candidate"]
    assert (chosen["arm"], chosen["place"], chosen["chosen_among"]) == ("candidate_3", "candidates/3", 3)
    assert set(first.artifacts["evaluation"].facts["arms"]) >= {"candidate", "candidate_2", "candidate_3"}
    best = first.artifacts["head"].join("candidates", "3").path
    assert head_digest(registry.download_version(client, name, 1, tmp_path / "download")) == head_digest(best)
    assert aliases(client, name)["champion"] == "1"
    assert run(tmp_path, mlflow_server, *overrides, quality=0.4).made == []
    better = run(tmp_path, mlflow_server, *overrides, quality=0.7)
    assert better.artifacts["incumbent"].facts["version"] == 1
    assert "(98.3%)" in next(r["measured"] for r in facts(better)["reasons"] if "acceptance length" in r["check"])
    assert aliases(client, name)["champion"] == "2"


@pytest.mark.parametrize(
    ("overrides", "quality", "failed"),
    [
        (["ab.salt=another"], 0.6, "another head than the champion"),
        (["train.epochs=4"], 0.59, "acceptance length at K=3"),
        (["train.epochs=5"], 0.3, "acceptance length at K=3"),
        (["evaluate.num_speculative_tokens=5"], 0.6, "another head"),
    ],
    ids=["the same head", "no real gain", "a worse head", "a larger K alone"],
)
def test_what_is_not_better_is_a_challenger_only(
    champion: Pipeline, client: MlflowClient, overrides: list[str], quality: float, failed: str
) -> None:
    name = champion.settings.publish.name
    endpoint, number = Endpoint(client, name), len(client.search_model_versions(f"name = '{name}'")) + 1
    refused = again(champion, *overrides, quality=quality, serve_alone=endpoint)
    assert endpoint.moves == [(1, 1)], "the champion alone"
    assert f"Version {number} of" in report(refused)
    assert "is a challenger only." in report(refused)
    assert "Version 1 is the champion; all traffic of the endpoint goes to it." in report(refused)
    assert facts(refused)["verdict"] == "refuse"
    assert failed in [reason["check"] for reason in facts(refused)["reasons"] if not reason["passed"]]
    assert aliases(client, name) == {"champion": "1", "challenger": str(number)}
    assert again(champion, *overrides, quality=quality).made == []


def test_promote_off_registers_and_leaves_the_champion(
    tmp_path: Path, mlflow_server: str, client: MlflowClient, name: str
) -> None:
    endpoint = Endpoint(client, name)
    done = run(tmp_path, mlflow_server, f"publish.name={name}", "publish.promote=false", serve_alone=endpoint)
    assert facts(done)["verdict"] == "promote"
    assert endpoint.moves == [(None, None)], "plain decoding alone"
    assert "There is no champion; all traffic of the endpoint goes to plain decoding." in report(done)
    assert aliases(client, name) == {"challenger": "1"}


@pytest.mark.parametrize(
    ("method", "argument"),
    [("create_model_version", ""), ("set_registered_model_alias", "champion")],
    ids=["after the upload", "before the alias"],
)
def test_kill_9_while_publishing_then_the_same_command_ends_with_one_version(
    tmp_path: Path, mlflow_server: str, client: MlflowClient, name: str, method: str, argument: str
) -> None:
    command = [sys.executable, "-c", DIE_AT, str(tmp_path), mlflow_server, method, argument, f"publish.name={name}"]
    killed = subprocess.run(command, env=project_environment(), capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert registry.champion(client, name) is None  # nothing half published serves
    done = run(tmp_path, mlflow_server, f"publish.name={name}")
    assert done.made == ["publish"]
    assert aliases(client, name) == {"champion": "1", "challenger": "1"}
    assert len(client.search_model_versions(f"name = '{name}'")) == 1
    history = client.get_metric_history(facts(done)["run_id"], "train/loss")
    assert [m.step for m in history] == list(range(1, 9))  # no point twice


def test_a_champion_that_changed_meanwhile_stops_the_promotion_and_the_next_run_measures_against_it(
    tmp_path: Path, mlflow_server: str, client: MlflowClient, name: str
) -> None:
    run(tmp_path, mlflow_server, f"publish.name={name}", quality=0.3)
    run(tmp_path, mlflow_server, f"publish.name={name}", "publish.promote=false", quality=0.5)

    def interfere(stage: str) -> None:
        if stage == "ab":
            client.set_registered_model_alias(name, "champion", "2")

    endpoint = Endpoint(client, name)
    late = rehearse(
        tmp_path, mlflow_server, f"publish.name={name}", quality=0.8, on_stage=interfere, serve_alone=endpoint
    )
    with pytest.raises(ChampionChanged, match=r"was version 1 .* is version 2 now; repeat the command"):
        late.run(Selection())
    assert aliases(client, name)["champion"] == "2"
    assert endpoint.moves == []
    done = run(tmp_path, mlflow_server, f"publish.name={name}", quality=0.8)
    assert done.artifacts["incumbent"].facts["version"] == 2
    assert aliases(client, name) == {"champion": str(facts(done)["version"]), "previous": "2", "challenger": "4"}


def test_a_head_for_another_target_is_not_compared(published: Pipeline) -> None:
    with pytest.raises(ConfigError, match=r"publish\.name: .* drafts for another target \(bundled:rehearsal\)"):
        again(published, quality=0.7, target_digest="e" * 64)


def test_a_bundle_made_again_leaves_the_champion_alone(
    tmp_path: Path, mlflow_server: str, client: MlflowClient, name: str
) -> None:
    run(tmp_path, mlflow_server, f"publish.name={name}")
    forced = rehearse(tmp_path, mlflow_server, f"publish.name={name}")
    forced.run(Selection(forced=("publish",)))
    assert aliases(client, name) == {"champion": "1", "challenger": "1"}  # the same bytes are the same version


def test_the_bundle_also_goes_to_s3(tmp_path: Path, mlflow_server: str, name: str, s3_bucket: str) -> None:
    done = run(tmp_path, mlflow_server, f"publish.name={name}", f"publish.bundle_uri={s3_bucket}/heads")
    assert facts(done)["bundle_uri"] == f"{s3_bucket}/heads/{facts(done)['bundle_sha256'][:16]}"


def test_the_champion_stage_serves_what_was_promoted(
    tmp_path: Path, mlflow_server: str, client: MlflowClient, name: str
) -> None:
    done = rehearse(tmp_path, mlflow_server, f"publish.name={name}")
    with pytest.raises(ConfigError, match=rf"publish\.name: {name} has no champion"):
        run_stage(champion_stage(done.settings), {}, done.storage, 30.0)
    done.run(Selection())
    served, _ = run_stage(champion_stage(done.settings), {}, done.storage, 30.0)
    assert served.facts["version"] == 1
    assert head_digest(served.join("head").path) == facts(done)["head_digest"]
    with pytest.raises(NothingToRollBack):
        rollback(registry_of(done.settings, done.storage))


def test_the_summary_is_the_same_after_a_no_op(published: Pipeline, mlflow_server: str) -> None:
    name, first, console = published.settings.publish.name, printed(published), Console(width=200, record=True)
    print_summary(again(published), console)
    text = console.export_text()
    assert text.replace("Everything was done already; nothing was written.\n", "") == first
    assert f"Verdict: promote. {name} version 1: challenger, champion; champion: version 1." in text
    assert f"{mlflow_server}/#/models/{name}/versions/1 " in text
    assert "no longer there" not in text
    assert f"{ENDPOINT}/v1 (nothing answers there" in text
    assert "bigram table (walked)" in text


def test_the_summary_says_when_mlflow_was_emptied(
    tmp_path: Path, mlflow_server: str, client: MlflowClient, name: str
) -> None:
    run(tmp_path, mlflow_server, f"publish.name={name}")
    client.delete_registered_model(name)
    assert "publish it again with --force publish" in printed(run(tmp_path, mlflow_server, f"publish.name={name}"))


def test_a_partial_job_says_what_is_done(tmp_path: Path, mlflow_server: str, name: str) -> None:
    partial = rehearse(tmp_path, mlflow_server, f"publish.name={name}")
    partial.run(Selection(last="head"))
    assert "Done up to here: target, prompts, responses, features, vocabulary, head." in printed(partial)


def printed(pipeline: Pipeline) -> str:
    console = Console(width=200, record=True)
    print_summary(pipeline, console)
    return console.export_text()
