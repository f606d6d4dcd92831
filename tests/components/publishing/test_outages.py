"""MLflow or S3 goes away at every step of a publication: nothing half published serves, and the same command finishes."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import boto3
import psutil
import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from components.pipeline import Pipeline, Selection
from components.publishing import registry
from components.publishing.bundle import SUMS, seal_bundle
from components.publishing.promotion import ROLLBACK_TAG, promote, rollback
from components.publishing.registry import CHAMPION, PREVIOUS, Registry, holder
from components.publishing.upload import upload_bundle
from components.publishing.versions import verify
from components.section import ConfigError
from components.storage import Location
from tests.components.publishing.rehearsal import rehearse, write_head
from tests.conftest import free_port, run_mlflow_server
from tests.relay import Relay, relay_to

STEPS = {
    "curves": (b"POST /api/2.0/mlflow/runs/log-batch", b'"metrics": [{'),
    "half of the bundle": (b"PUT ", b"model.safetensors"),
    "the bundle's sums": (b"PUT ", b"SHA256SUMS"),
    "version": (b"POST /api/2.0/mlflow/model-versions/create",),
    "version's tags": (b"POST /api/2.0/mlflow/model-versions/set-tag", b"aerie.verdict"),
    "challenger": (b"POST /api/2.0/mlflow/registered-models/alias", b'"challenger"'),
    "report": (b"PUT ", b"report.html"),
    "what it replaces": (b"POST /api/2.0/mlflow/model-versions/set-tag", b"aerie.replaced_version"),
    "champion": (b"POST /api/2.0/mlflow/registered-models/alias", b'"champion"'),
}
"""In the order of a publication."""
ROLLBACK_STEPS = {
    "from and to": (b"POST /api/2.0/mlflow/registered-models/set-tag",),
    "champion": STEPS["champion"],
    "previous": (b"POST /api/2.0/mlflow/registered-models/alias", b'"previous"'),
}
END = (b"DELETE /api/2.0/mlflow/registered-models/delete-tag",)


def at(first: bytes, *others: bytes) -> Callable[[bytes], bool]:
    """Whether a request is this one, by its first line and what else it holds."""
    return lambda request: first in request.split(b"\r\n", 1)[0] and all(part in request for part in others)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients give up at once."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


@pytest.fixture
def relay(mlflow_server: str) -> Iterator[Relay]:
    with relay_to(urlsplit(mlflow_server).port or 0, free_port()) as relay:
        yield relay


def test_mlflow_goes_away_at_every_step_and_the_same_command_goes_on_from_there(
    tmp_path: Path, mlflow_server: str, relay: Relay
) -> None:
    """Every step is done by the server, but its reply is lost: the next try must find it done."""
    name, client = f"head-{uuid4().hex[:8]}", MlflowClient(mlflow_server)
    overrides = [f"publish.name={name}"]
    relay.heard = True
    address = f"http://127.0.0.1:{relay.port}"
    rehearse(tmp_path, address, *overrides).run(Selection(last="ab"))
    for step in STEPS:
        relay.trip = at(*STEPS[step])
        with pytest.raises(ConfigError, match=r"mlflow\.tracking_uri: .* Fix: "):
            rehearse(tmp_path, address, *overrides).run(Selection())
        assert relay.tripped, f"{step} never came"
        relay.stop()
        if step != "champion":
            assert registry.champion(client, name) is None, f"{step}: half published and it serves"
        relay.start()
    done = rehearse(tmp_path, address, *overrides)
    done.run(Selection())
    assert done.made == ["publish"]
    assert dict(client.get_registered_model(name).aliases) == {"champion": "1", "challenger": "1"}
    (version,) = client.search_model_versions(f"name = '{name}'")
    verify(client, version)
    history = client.get_metric_history(version.run_id, "train/loss")
    assert [metric.step for metric in history] == list(range(1, 9)), "no point twice"


def test_a_reply_that_is_lost_once_makes_no_second_version(
    tmp_path: Path, mlflow_server: str, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks again by itself, and the server has done it already."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    name, client = f"head-{uuid4().hex[:8]}", MlflowClient(mlflow_server)
    relay.trip, relay.heard, relay.stays_up = at(*STEPS["version"]), True, True
    rehearse(tmp_path, f"http://127.0.0.1:{relay.port}", f"publish.name={name}").run(Selection())
    assert relay.tripped
    assert dict(client.get_registered_model(name).aliases) == {"champion": "1", "challenger": "1"}
    assert len(client.search_model_versions(f"name = '{name}'")) == 1


@pytest.fixture
def heads(mlflow_server: str, relay: Relay, tmp_path: Path) -> Registry:
    """Version 2 is the champion and version 1 was; the way to MLflow is the relay."""
    client, name = MlflowClient(mlflow_server), f"heads-{uuid4().hex[:8]}"
    client.create_registered_model(name)
    for alias in (PREVIOUS, CHAMPION):
        run_id = client.create_run("0").info.run_id
        version = client.create_model_version(name, f"runs:/{run_id}/bundle", run_id)
        client.set_registered_model_alias(name, alias, version.version)
    address = f"http://127.0.0.1:{relay.port}"
    return Registry(MlflowClient(address, address), name, Location(str(tmp_path / "_lease.json")), 60.0)


def test_a_rollback_that_loses_mlflow_anywhere_is_finished_by_the_same_command_and_not_undone(
    heads: Registry, relay: Relay
) -> None:
    now, before = 2, 1
    for step in ROLLBACK_STEPS.values():
        for relay.heard in (False, True):
            relay.trip, served = at(*step), []
            with pytest.raises(MlflowException):
                rollback(heads, served.append)
            relay.stop()
            relay.start()
            relay.trip = lambda request: False
            assert rollback(heads, served.append).version == before
            assert set(served) == {before}, "traffic goes where the alias goes"
            assert (holder(heads.client, heads.name, CHAMPION), holder(heads.client, heads.name, PREVIOUS)) == (
                before,
                now,
            )
            assert ROLLBACK_TAG not in heads.client.get_registered_model(heads.name).tags
            now, before = before, now


def test_a_rollback_whose_last_word_is_lost_is_done(heads: Registry, relay: Relay) -> None:
    relay.trip = at(*END)
    assert rollback(heads).version == 1
    assert relay.tripped
    relay.start()
    relay.trip = lambda request: False
    finished = rollback(heads)
    assert (finished.version, finished.moved) == (1, False), "the same command again finishes"
    assert rollback(heads).version == 2, "and then a rollback is undone as always"


def test_traffic_that_cannot_move_leaves_the_registry_as_it_was(heads: Registry) -> None:
    def fail(version: int = 0) -> None:
        raise ConfigError("resources.ab", "no room", "add a node")

    for move in (lambda: rollback(heads, fail), lambda: promote(heads, 1, 2, fail)):
        with pytest.raises(ConfigError, match="no room"):
            move()
        assert (holder(heads.client, heads.name, CHAMPION), holder(heads.client, heads.name, PREVIOUS)) == (2, 1)
    assert promote(heads, 1, 2).moved
    assert rollback(heads).version == 2, "the rollback that was given up is forgotten"


def test_a_killed_mlflow_server_leaves_nothing_half_published(tmp_path: Path) -> None:
    """SIGKILL for the server and its workers, right before the version is made."""
    name, port, front = f"head-{uuid4().hex[:8]}", free_port(), free_port()
    address = f"http://127.0.0.1:{front}"
    with relay_to(port, front) as relay:
        with run_mlflow_server(tmp_path, port):
            relay.trip = lambda request: at(*STEPS["version"])(request) and kill_listener(port)
            with pytest.raises(ConfigError, match=r"mlflow\.tracking_uri"):
                publish_all(tmp_path / "s", address, name)
        with pytest.raises(ConfigError, match=rf"mlflow\.tracking_uri: no MLflow server answers at .*:{front}"):
            publish_all(tmp_path / "s", address, name)
        relay.start()
        relay.trip = lambda request: False
        with run_mlflow_server(tmp_path, port):
            assert registry.champion(MlflowClient(address), name) is None
            assert publish_all(tmp_path / "s", address, name).made == ["publish"]
            assert dict(MlflowClient(address).get_registered_model(name).aliases) == {
                "champion": "1",
                "challenger": "1",
            }


def publish_all(folder: Path, address: str, name: str) -> Pipeline:
    done = rehearse(folder, address, f"publish.name={name}")
    done.run(Selection())
    return done


def kill_listener(port: int) -> bool:
    """Kills the processes that listen there; they are the test's own."""
    listening = {
        c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == psutil.CONN_LISTEN
    }
    for pid in listening - {None}:
        os.kill(pid, signal.SIGKILL)
    return True


def test_s3_goes_away_at_every_file_and_half_a_bundle_has_no_sums(
    tmp_path: Path, s3_server: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, bucket = tmp_path / "bundle", s3_bucket.removeprefix("s3://")
    write_head(folder, 0.5)
    (folder / "README.md").write_text("a head")
    digest = seal_bundle(folder)
    direct = boto3.client("s3", endpoint_url=s3_server)
    with relay_to(urlsplit(s3_server).port or 0, free_port()) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{relay.port}")
        for name in ("README.md", "config.json", "model.safetensors", SUMS):
            for relay.heard in (False, True):
                relay.trip = at(b"PUT ", name.encode())
                there = objects(direct, bucket)
                if any(key.endswith(name) for key in there):
                    continue  # it arrived though nobody said so: it is not sent again
                with pytest.raises(ConfigError, match=r"publish\.bundle_uri: .*what arrived is kept"):
                    upload_bundle(folder, f"{s3_bucket}/heads")
                assert relay.tripped, name
                after = objects(direct, bucket)
                assert there.items() <= after.items(), "what had arrived was not sent again"
                assert not any(key.endswith(SUMS) for key in after) or name == SUMS
                relay.stop()
                relay.start()
        relay.trip = lambda request: False
        assert upload_bundle(folder, f"{s3_bucket}/heads") == f"{s3_bucket}/heads/{digest[:16]}"
        assert len(objects(direct, bucket)) == 4


def objects(client: Any, bucket: str) -> dict[str, str]:
    """{key: when it was written}."""
    found = client.list_objects_v2(Bucket=bucket).get("Contents", [])
    return {item["Key"]: str(item["LastModified"]) for item in found}
