"""Records of live traffic: whole files only, in time, for as long as they shall be kept, on a folder and on S3."""

import dataclasses
import math
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from components.config import Settings
from components.experiment.follow import Follower
from components.serving import records
from components.serving.records import LiveRecord, RecordWriter, decode_records, encode_records, live_records
from components.storage import Location

FAST_S = 0.02


def record(number=0, **changes):
    figures = {"rounds": 3, "drafted": 9, "accepted": 4, "histogram": [1, 1, 0, 1]}
    times = {"started_at": 1e9 + number, "ttft_s": 0.5, "tpot_s": None, "error": None}
    return LiveRecord(
        arm="a", session="5e55", weight_epoch=1, task=None, prompt_tokens=3, output_tokens=number, assigned_arm="a",
        **figures | times | changes,
    )  # fmt: skip


def written(location):
    return [row for name in location.files() for row in decode_records(location.join(name).read_bytes())]


class Clock:
    """Midnight comes when the test says so."""

    def __init__(self):
        self.now = datetime(2027, 1, 15, 23, 59, 59, tzinfo=UTC)

    def __call__(self):
        return self.now.timestamp()


def wait_until(happens):
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(FAST_S)


def test_a_record_comes_back_as_it_went():
    rows = [record(1), record(2, forced=True), dataclasses.replace(record(3), error="arm_failed", task="x")]
    assert decode_records(encode_records(rows)) == rows


@pytest.mark.parametrize(("error", "failed"), [(None, False), ("client_closed", False), ("400", False), ("502", True)])
def test_refusals_and_clients_that_left_are_no_failures(error, failed):
    assert dataclasses.replace(record(), error=error).failed is failed


def test_records_are_there_soon_and_a_reader_never_sees_half_a_line(tmp_path):
    location = Location(str(tmp_path))
    writer = RecordWriter(location, None, FAST_S, clock=Clock())
    for number in range(200):
        writer.add(record(number))
        seen = written(location)
        assert seen == [record(i) for i in range(len(seen))]
        time.sleep(0.001)
    wait_until(lambda: len(written(location)) == 200)
    writer.close()
    assert len(location.files()) == 1


def test_parts_hold_so_many_rows_and_lose_none(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROWS_PER_PART", 10)
    location = Location(str(tmp_path))
    writer = RecordWriter(location, None, FAST_S)
    threads = [threading.Thread(target=lambda: [writer.add(record(i)) for i in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    sizes = [len(decode_records(location.join(name).read_bytes())) for name in location.files()]
    assert sorted(sizes) == [10] * 10


def test_two_writers_share_a_folder(tmp_path):
    location = Location(str(tmp_path))
    writers = [RecordWriter(location, None, FAST_S) for _ in range(2)]
    for number, writer in enumerate(writers):
        writer.add(record(number))
        writer.close()
    assert sorted(row.output_tokens for row in written(location)) == [0, 1]


def test_old_days_go_and_young_ones_stay(tmp_path):
    location = Location(str(tmp_path))
    clock = Clock()
    days = [f"{clock.now - timedelta(days=age):%Y-%m-%d}" for age in (1, 3, 40)]
    for day in days:
        location.join(day, "000000-x-00000.jsonl").write_bytes(encode_records([record()]))
    writer = RecordWriter(location, 2, FAST_S, clock=clock)
    writer.add(record())
    writer.close()
    assert {name.split("/")[0] for name in location.files()} == {days[0], f"{clock.now:%Y-%m-%d}"}


def test_what_cannot_be_written_yet_is_written_later(tmp_path):
    blocked = tmp_path / "live"
    blocked.write_text("a file where the folder should be")
    writer = RecordWriter(Location(str(blocked)), 30, FAST_S)
    writer.add(record(1))
    time.sleep(5 * FAST_S)
    blocked.unlink()
    wait_until(lambda: written(Location(str(blocked))) == [record(1)])  # it needs no new traffic
    writer.close()


def test_a_part_ends_with_its_day_and_those_who_follow_a_day_find_all_of_it(tmp_path):
    location, clock = Location(str(tmp_path)), Clock()
    writer = RecordWriter(location, None, FAST_S, clock=clock)
    writer.add(record(1, started_at=clock()))
    wait_until(lambda: len(written(location)) == 1)
    clock.now += timedelta(seconds=2)
    follower = Follower(location, clock())
    writer.add(record(2, started_at=clock()))
    writer.close()
    assert [name.split("/")[0] for name in location.files()] == ["2027-01-15", "2027-01-16"]
    assert [row.output_tokens for row in follower.new()] == [2]


def test_old_days_go_when_a_day_begins_without_any_request(tmp_path):
    location, clock = Location(str(tmp_path)), Clock()
    location.join("2027-01-14", "000000-x-00000.jsonl").write_bytes(encode_records([record()]))
    writer = RecordWriter(location, 1, FAST_S, clock=clock)
    time.sleep(5 * FAST_S)
    assert location.files(), "a day old"
    clock.now += timedelta(seconds=2)
    wait_until(lambda: not location.files())
    writer.close()


def test_what_is_lost_is_counted_and_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(records, "ROWS_PER_PART", 10)
    blocked = tmp_path / "live"
    blocked.write_text("a file where the folder should be")
    lost = []
    writer = RecordWriter(Location(str(blocked)), None, FAST_S, on_lost=lost.append)
    for number in range(35):
        writer.add(record(number))
    wait_until(lambda: sum(lost) == 20)
    blocked.unlink()
    writer.close()
    assert [row.output_tokens for row in written(Location(str(blocked)))] == list(range(20, 35))
    assert "10 live records are lost" in caplog.text
    blocked = tmp_path / "still-blocked"
    blocked.write_text("")
    writer = RecordWriter(Location(str(blocked)), None, FAST_S, on_lost=lost.append)
    writer.add(record())
    writer.close()
    assert sum(lost) == 21, "what is left at the end is lost as well"


def test_it_says_since_when_records_wait(tmp_path):
    blocked = tmp_path / "live"
    blocked.write_text("a file where the folder should be")
    writer = RecordWriter(Location(str(blocked)), None, FAST_S)
    assert writer.waiting_since == math.inf
    for number in (7, 5, 9):
        writer.add(record(number))
        assert writer.waiting_since == record(min(7, number) if number != 9 else 5).started_at
    time.sleep(5 * FAST_S)
    assert writer.waiting_since == record(5).started_at
    blocked.unlink()
    wait_until(lambda: writer.waiting_since == math.inf)
    assert len(written(Location(str(blocked)))) == 3
    writer.close()


def test_records_go_to_s3_as_well(s3_bucket):
    location = Location(f"{s3_bucket}/live")
    writer = RecordWriter(location, 30, FAST_S)
    writer.add(record(7))
    writer.close()
    assert written(location) == [record(7)]


def test_records_can_be_off(tmp_path):
    storage = Location(str(tmp_path))
    off = Settings.model_validate({"ab": {"record_requests": False}})
    assert live_records(off, storage) is None
    assert live_records(Settings(), storage) == storage.join("live")
