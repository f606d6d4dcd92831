"""What is kept is what an alias, a running stage or a pin needs, and all that it was made of; the rest can be removed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from uuid import uuid4

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from components.lease import Lease
from components.pipeline import Selection
from components.retention import needed_outputs, places_in_use, remove_output, stored_outputs
from components.section import ConfigError
from components.stage import LEASE, MANIFEST, PIN, Artifact, Outcome, Output, Stage, run_stage
from components.storage import Location
from pipelines.data import app
from tests.components.publishing.rehearsal import rehearse
from tests.conftest import free_port, run_mlflow_server

TTL_S = 60.0


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return Location(str(tmp_path / "s") if request.param == "folder" else f"{request.getfixturevalue('s3_bucket')}/s")


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return Location(str(tmp_path / "s"))


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One of its own: what is needed is asked of every model, and other tests leave many."""
    with run_mlflow_server(tmp_path_factory.mktemp("mlflow"), free_port()) as address:
        yield address


@pytest.fixture
def client(mlflow_server: str) -> MlflowClient:
    return MlflowClient(mlflow_server)


def stage(name: str, *inputs: str, seed: int = 0) -> Stage:
    def run(given: Mapping[str, Artifact], output: Output) -> Outcome:
        output.join("file").write_bytes(f"{name} {seed}".encode())
        output.join("deep", "file").write_bytes(b"x" * 100)
        return Outcome()

    return Stage(name, run, {"seed": seed}, inputs)


def make_chains(storage: Location) -> dict[str, Artifact]:
    """answers -> head -> report, and a second head of the same answers."""
    made: dict[str, Artifact] = {}
    for number, one in enumerate((stage("answers"), stage("head", "answers"), stage("report", "head"))):
        made[one.name], _ = run_stage(one, made, storage, TTL_S)
        assert len(made) == number + 1
    made["second"], _ = run_stage(stage("head", "answers", seed=1), made, storage, TTL_S)
    return made


def needed(storage: Location, client: MlflowClient, *keep: str, between_stages_s: float = 0.0) -> dict[str, str]:
    outputs = stored_outputs(storage, TTL_S)
    return {
        fingerprint: why for (_, fingerprint), why in needed_outputs(outputs, client, keep, between_stages_s).items()
    }


def test_nothing_is_needed_that_nobody_asks_for(storage: Location, client: MlflowClient):
    made = make_chains(storage)
    found = stored_outputs(storage, TTL_S)
    assert {output.fingerprint for output in found} == {artifact.fingerprint for artifact in made.values()}
    sizes = storage.join("head", made["second"].fingerprint).sizes_bytes()
    assert sum(sizes.values()) in [output.bytes for output in found if output.stage == "head"]
    assert not needed(storage, client).keys() & {artifact.fingerprint for artifact in made.values()}


@pytest.mark.parametrize("pin", ["file", "option"])
def test_a_pinned_output_keeps_all_it_was_made_of(folder: Location, client: MlflowClient, pin: str):
    made = make_chains(folder)
    if pin == "file":
        made["report"].join(PIN).write_bytes(b"")
    kept = needed(folder, client, *([made["report"].fingerprint] if pin == "option" else []))
    assert kept[made["report"].fingerprint].startswith("pinned")
    assert kept[made["head"].fingerprint] == f"read by report/{made['report'].fingerprint}"
    assert made["answers"].fingerprint in kept
    assert made["second"].fingerprint not in kept


def test_a_pin_survives_force(folder: Location):
    artifact, _ = run_stage(stage("answers"), {}, folder, TTL_S)
    artifact.join(PIN).write_bytes(b"")
    run_stage(stage("answers"), {}, folder, TTL_S, force=True)
    assert artifact.join(PIN).exists()


def test_a_running_stage_keeps_itself_and_all_that_its_run_has_made(folder: Location, client: MlflowClient):
    """A later stage of the run reads what this one does not: publish reads the speed, the A/B test does not."""
    made = make_chains(folder)
    second = made.pop("second")
    seen, in_use = {}, set()

    def look(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        seen.update(needed(folder, client), itself=output.fingerprint)
        in_use.update(places_in_use(folder, TTL_S))
        return Outcome()

    run_stage(Stage("evaluation", look, {}, ("head",)), made, folder, TTL_S)
    assert in_use == {("evaluation", seen["itself"]), *((name, of.fingerprint) for name, of in made.items())}
    assert places_in_use(folder, TTL_S) == set()
    assert made["report"].fingerprint in seen
    assert seen[seen["itself"]].startswith("being written by process")
    assert made["head"].fingerprint in seen
    assert made["answers"].fingerprint in seen
    assert second.fingerprint not in seen


def test_what_a_dead_run_left_is_not_needed_and_what_was_just_finished_is(folder: Location, client: MlflowClient):
    place = folder.join("answers", "0" * 16)
    place.join("part-0").write_bytes(b"x")
    dead = {"owner": "x", "host": "elsewhere", "pid": 1, "process_started_at": 0.0, "heartbeat_at": 0.0, "note": {}}
    place.join(LEASE).write_bytes(json.dumps(dead).encode())
    made, _ = run_stage(stage("head"), {}, folder, TTL_S)
    kept = needed(folder, client, between_stages_s=600.0)
    assert "0" * 16 not in kept
    assert "between two stages" in kept[made.fingerprint]


def test_a_damaged_manifest_keeps_nobody_from_looking_but_from_guessing(folder: Location, client: MlflowClient):
    """Of an output that is needed nobody knows any more what it was made of, which is needed as well."""
    made = make_chains(folder)
    made["head"].join(MANIFEST).write_bytes(b'{"inputs": {')
    assert not needed(folder, client).keys() & {artifact.fingerprint for artifact in made.values()}
    assert made["answers"].fingerprint in needed(folder, client, made["second"].fingerprint)
    for keep in ("head", "report"):
        with pytest.raises(ConfigError, match=rf"head/{made['head'].fingerprint}/_manifest\.json: it is no JSON"):
            needed(folder, client, made[keep].fingerprint)


def test_an_unknown_fingerprint_to_keep_is_refused(folder: Location, client: MlflowClient):
    make_chains(folder)
    with pytest.raises(ConfigError, match=r"--keep: there is no output 1234"):
        needed(folder, client, "1234")


def test_removing_takes_the_whole_output_and_nothing_else(storage: Location):
    made = make_chains(storage)
    others = {name for name in storage.files() if made["second"].fingerprint not in name}
    (second,) = [o for o in stored_outputs(storage, TTL_S) if o.fingerprint == made["second"].fingerprint]
    with Lease(second.location.join(LEASE), TTL_S):
        assert not remove_output(second, TTL_S)  # somebody writes it
    assert second.location.join("file").exists()
    assert remove_output(second, TTL_S)
    assert set(storage.files()) == others
    assert made["second"].fingerprint not in storage.join("head").folders()


def test_registered_heads_keep_what_they_were_made_of(folder: Location, client: MlflowClient, mlflow_server: str):
    name = f"head-{uuid4().hex[:8]}"
    fingerprints = []
    # the champion, a challenger, and one that takes its alias; qualities that no other test's registered heads have
    for quality in (0.51, 0.11, 0.21):
        pipeline = rehearse(folder.path, mlflow_server, f"publish.name={name}", quality=quality)
        artifacts = pipeline.run(Selection())
        fingerprints.append({stage: artifacts[stage].fingerprint for stage in ("head", "evaluation", "publish")})
    champion, replaced, challenger = fingerprints
    kept = needed(folder, client)
    assert {kept[f] for f in champion.values()} == {f"champion of {name}, version 1"}
    assert {kept[f] for f in challenger.values()} == {f"challenger of {name}, version 3"}
    assert not kept.keys() & set(replaced.values())
    assert {"features", "responses", "prompts"} <= {
        o.stage for o in stored_outputs(folder, 60) if o.fingerprint in kept
    }


def test_the_command_lists_first_and_removes_when_told(folder: Location, mlflow_server: str):
    made = make_chains(folder)
    options = ["--set", f"storage.uri={folder.uri}", "--set", f"mlflow.tracking_uri={mlflow_server}", "--gc"]
    for artifact in made.values():
        manifest = json.loads(artifact.join("_manifest.json").read_bytes())
        manifest["finished_at"] = "2026-01-01T00:00:00+00:00"
        artifact.join("_manifest.json").write_bytes(json.dumps(manifest).encode())
    before = folder.files()
    listed = CliRunner().invoke(app, [*options, "--keep", made["head"].fingerprint])
    assert listed.exit_code == 0, listed.output
    assert f"head/{made['head'].fingerprint}  pinned (--keep)" in listed.stdout
    assert f"answers/{made['answers'].fingerprint}  read by head/" in listed.stdout
    assert "not needed: 2 of 4 outputs" in listed.stdout
    assert folder.files() == before
    removed = CliRunner().invoke(app, [*options, "--keep", made["head"].fingerprint, "--yes"])
    assert "removed 2 outputs" in removed.stdout
    assert {output.place for output in stored_outputs(folder, TTL_S)} == {
        ("answers", made["answers"].fingerprint),
        ("head", made["head"].fingerprint),
    }
    assert isinstance(CliRunner().invoke(app, ["--yes"]).exception, ConfigError)
