"""One MLflow run for one set of settings, on a real server: found again, nothing twice, nothing non-finite, four writers."""

import logging
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from components.config_loading import load_settings
from components.section import ConfigError
from components.storage import Location
from components.tracking import PARAM_VALUE_LIMIT, Tracker, flatten, run_key
from tests.conftest import free_port, project_environment, run_mlflow_server

WRITE_STEPS = """
import sys
from components.tracking import Tracker
from components.storage import Location
tracker = Tracker(sys.argv[1], "writers", sys.argv[2], Location(sys.argv[4]))
for step in range(20):
    tracker.log_metrics({f"writer_{sys.argv[3]}": float(step)}, step)
    tracker.set_tags({f"writer_{sys.argv[3]}": str(step)})
"""


@pytest.fixture
def lease(tmp_path: Path) -> Location:
    return Location(str(tmp_path / "_runs" / "key.json"))


@pytest.fixture
def tracker(mlflow_server: str, lease: Location) -> Tracker:
    return Tracker(mlflow_server, "tracking", uuid4().hex, lease)


def test_the_same_settings_find_the_same_run(tracker: Tracker) -> None:
    again = replace(tracker)
    other = replace(tracker, run_key=uuid4().hex)
    assert tracker.run_id == again.run_id
    assert other.run_id != tracker.run_id


def test_a_run_is_closed_by_whoever_ends_the_job(tracker: Tracker) -> None:
    run_id = tracker.run_id
    replace(tracker).finish("FINISHED")
    ended = tracker.client.get_run(run_id).info
    assert ended.status == "FINISHED"
    tracker.finish("FAILED")  # it is closed: a later no-op run writes nothing
    assert tracker.client.get_run(run_id).info.to_proto() == ended.to_proto()


def test_nothing_non_finite_reaches_mlflow(tracker: Tracker, caplog: pytest.LogCaptureFixture) -> None:
    """+inf would be stored as 1.8e308 and win every "best"; NaN makes a later registration fail."""
    with caplog.at_level(logging.INFO, "aerie"):
        tracker.log_metrics({"good": 1.5, "inf": math.inf, "nan": math.nan, "missing": None})
    assert tracker.client.get_run(tracker.run_id).data.metrics == {"good": 1.5}
    assert {"inf is inf: not logged to MLflow", "nan is nan: not logged to MLflow"} <= set(caplog.messages)


def test_a_curve_logged_twice_is_there_once(tracker: Tracker) -> None:
    rows = [(step, {"train/loss": 3.0 - step, "train/nan": math.nan}) for step in range(3)]
    tracker.report(rows[0][1], 0)  # as the running stage sends it
    tracker.log_curves(rows)
    tracker.log_curves(rows)
    history = tracker.client.get_metric_history(tracker.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert tracker.client.get_metric_history(tracker.run_id, "train/nan") == []


def test_parameters_may_be_repeated_and_long_ones_are_cut(tracker: Tracker) -> None:
    params = {"train": {"epochs": 3, "note": "x" * 10_000}, "many": {f"p{i}": i for i in range(150)}}
    tracker.log_params(params)
    tracker.log_params(params)
    logged = tracker.client.get_run(tracker.run_id).data.params
    assert logged["train.epochs"] == "3"
    assert len(logged["train.note"]) == PARAM_VALUE_LIMIT
    assert len(logged) == 152


def test_four_writers_at_once_share_one_run(mlflow_server: str, lease: Location) -> None:
    key = uuid4().hex
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE_STEPS, mlflow_server, key, str(n), lease.uri], env=project_environment()
        )
        for n in range(4)
    ]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0, 0, 0]
    tracker = Tracker(mlflow_server, "writers", key, lease)
    for number in range(4):
        history = tracker.client.get_metric_history(tracker.run_id, f"writer_{number}")
        assert [m.value for m in history] == [float(step) for step in range(20)]


def test_runs_made_at_the_same_moment_become_one(mlflow_server: str, lease: Location) -> None:
    key = uuid4().hex
    trackers = [Tracker(mlflow_server, "racers", key, lease) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        ids = list(pool.map(lambda tracker: tracker.run_id, trackers))
    found = Tracker(mlflow_server, "racers", key, lease)
    assert set(ids) == {found.run_id}
    assert len(found._runs()) == 1


def test_without_a_server_reports_warn_and_checks_say_what_to_do(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, lease: Location
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = Tracker(f"http://127.0.0.1:{free_port()}", "x", "key", lease)
    tracker.report({"train/loss": 1.0}, 1)
    tracker.finish("FAILED")
    assert "MLflow did not take ['train/loss'] at step 1" in caplog.text
    with pytest.raises(ConfigError, match=r"mlflow\.tracking_uri: no MLflow server answers"):
        tracker.check()


def test_a_server_that_comes_back_has_the_same_run(tmp_path: Path, lease: Location) -> None:
    port = free_port()
    with run_mlflow_server(tmp_path, port) as address:
        first = Tracker(address, "x", "key", lease).run_id
    with run_mlflow_server(tmp_path, port) as address:
        again = Tracker(address, "x", "key", lease)
        again.check()
        assert again.run_id == first


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": [3]}) == {"a.b": 1, "a.c.d": 2, "e": [3]}


def test_the_run_key_is_what_can_change_a_result() -> None:
    base = run_key(load_settings(None))
    assert run_key(load_settings(None, None, ["resources.train.replicas=2", "storage.uri=/x"])) == base
    assert run_key(load_settings(None, None, ["train.epochs=9"])) != base
