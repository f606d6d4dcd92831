"""What is missing of the records is known while another folder is named, while a router gives way to another one, and after one was killed."""

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.serving.recording import Recording
from components.serving.records import _Part
from components.storage import Location
from tests.components.serving.local import wait_until
from tests.components.serving.test_records import record, written

FAST_S = 0.02
RUNNING_SINCE = 5e8


def make_recording(folder: Path, running: Callable[[], float] = lambda: math.inf) -> Recording:
    made = Recording(running, lambda num: None, FAST_S)
    made.open(str(folder), None)
    return made


def marks(folder: Path) -> list[str]:
    return Location(f"{folder}-routers").files()


def test_records_of_a_folder_that_is_no_longer_named_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, may_write = _Part.write, threading.Event()
    monkeypatch.setattr(_Part, "write", lambda part: (may_write.wait(30), write(part)))
    recording = make_recording(tmp_path / "live")
    recording.add(record(1))
    recording.open(str(tmp_path / "other"), None)
    wait_until(lambda: recording.waiting_since == record(1).started_at)
    may_write.set()
    wait_until(lambda: recording.waiting_since == math.inf)
    assert written(Location(str(tmp_path / "live"))) == [record(1)]
    recording.close()


def test_what_is_lost_in_the_end_is_not_waited_for(tmp_path: Path) -> None:
    blocked = tmp_path / "live"
    blocked.write_text("a file where the folder should be")
    recording = make_recording(blocked)
    recording.add(record(1))
    recording.open(None, None)
    wait_until(lambda: recording.waiting_since == math.inf)
    recording.close()


def test_a_router_knows_what_the_one_that_gives_way_has_not_written(tmp_path: Path) -> None:
    folder, since = tmp_path / "live", [RUNNING_SINCE]
    old = make_recording(folder, lambda: since[0])
    wait_until(lambda: len(marks(folder)) == 1)
    new = make_recording(folder)
    wait_until(lambda: new.waiting_since == RUNNING_SINCE)
    assert old.waiting_since == math.inf, "it tells of itself what it knows"
    since[0] = math.inf
    old.add(record(3))
    time.sleep(5 * FAST_S)
    assert new.waiting_since == RUNNING_SINCE
    old.close()
    wait_until(lambda: new.waiting_since == math.inf)
    assert written(Location(str(folder))) == [record(3)]
    new.close()
    assert marks(folder) == []


def test_before_the_marks_were_read_nothing_is_promised(tmp_path: Path) -> None:
    blocked = tmp_path / "live-routers"
    blocked.write_text("a file where the marks should be")
    recording = make_recording(tmp_path / "live")
    time.sleep(5 * FAST_S)
    assert recording.waiting_since == 0.0
    blocked.unlink()
    wait_until(lambda: recording.waiting_since == math.inf)
    recording.close()


def test_a_router_that_was_killed_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    for name, age_s in (("killed", 3600.0), ("alive", 0.0)):
        told = {"at": time.time() - age_s, "complete_until": RUNNING_SINCE - age_s}
        Location(f"{folder}-routers").join(f"{name}.json").write_bytes(json.dumps(told).encode())
    recording = make_recording(folder)
    wait_until(lambda: recording.waiting_since == RUNNING_SINCE)
    assert "killed.json" not in marks(folder)
    Location(f"{folder}-routers").join("alive.json").delete()
    wait_until(lambda: recording.waiting_since == math.inf)
    recording.close()
