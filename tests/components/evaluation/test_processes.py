"""Fresh processes on a real Ray cluster: one a task, imported already, with the stage's environment, and gone with their actor."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from components.config import StageResources
from components.evaluation.processes import FreshProcesses
from tests.cluster import RayHead

MODULE = "statistics"  # one that neither Ray nor this file imports


def note(path: Path) -> None:
    facts = {"pid": os.getpid(), "imported": MODULE in sys.modules, "mark": os.environ["MARK"]}
    whole = path.with_name(f"{path.name}.whole")
    whole.write_text(json.dumps(facts))
    whole.rename(path)  # whoever waits for it reads it at once


def fail() -> None:
    raise ValueError("no arm starts with this setting")


def sleep_long(path: Path) -> None:
    note(path)
    time.sleep(600)


@pytest.fixture(scope="module", autouse=True)
def in_cluster(ray_cluster: RayHead) -> None:
    """Connected by the fixture."""


def processes() -> FreshProcesses:
    return FreshProcesses(StageResources(num_cpus=1), {"MARK": "here"}, MODULE)


def test_every_task_has_a_process_of_its_own_with_everything_imported(tmp_path: Path) -> None:
    with processes() as fresh:
        for name in ("a", "b"):
            fresh.run(name, note, tmp_path / name)
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a", "b"))
    assert first["pid"] != second["pid"]
    assert [(row["imported"], row["mark"]) for row in (first, second)] == [(True, "here")] * 2


def test_an_error_comes_back_and_a_death_is_an_error(tmp_path: Path) -> None:
    with processes() as fresh:
        with pytest.raises(ValueError, match="no arm starts"):
            fresh.run("fails", fail)
        with pytest.raises(Exception, match="terminated abruptly"):
            fresh.run("dies", os._exit, 3)
        fresh.run("goes on", note, tmp_path / "after")
    assert (tmp_path / "after").exists()


def test_a_killed_actor_takes_its_process_along(tmp_path: Path) -> None:
    with processes() as fresh:
        fresh.run("starts", note, tmp_path / "first")
        waiting = fresh._actor.run.remote(sleep_long, (tmp_path / "long",))
        while not (tmp_path / "long").exists():
            time.sleep(0.1)
        engine = psutil.Process(json.loads((tmp_path / "long").read_text())["pid"])
        _starter_of(engine).send_signal(signal.SIGKILL)
        engine.wait(timeout=120)
        del waiting


def _starter_of(engine: psutil.Process) -> psutil.Process:
    """The actor's process: the parent of the fork server that made this one."""
    return engine.parents()[1]
