"""Records are given once, however their parts grow."""

import time

import pytest

from components.experiment.follow import Follower
from components.serving.records import RecordWriter, encode_records
from components.storage import Location
from tests.components.experiment.records import live_record

NOON = 1_800_000_000.0
"""2027-01-15."""


@pytest.fixture
def folder(tmp_path):
    return Location(str(tmp_path / "live"))


def write(folder, name, sessions):
    records = [live_record(session, started_at=NOON + i) for i, session in enumerate(sessions)]
    folder.join(name).write_bytes(encode_records(records))


def names(records):
    return [record.session for record in records]


def test_a_part_that_grows_gives_what_is_new(folder):
    follower = Follower(folder, NOON)
    assert follower.new() == []
    write(folder, "2027-01-15/a.jsonl", "xy")
    assert names(follower.new()) == ["x", "y"]
    assert follower.new() == []
    write(folder, "2027-01-15/a.jsonl", "xyz")
    write(folder, "2027-01-16/b.jsonl", "u")
    assert sorted(names(follower.new())) == ["u", "z"]
    assert sorted(names(Follower(folder, NOON).new())) == ["u", "x", "y", "z"]


def test_requests_of_before_are_left_out(folder):
    write(folder, "2027-01-15/a.jsonl", "xyz")
    write(folder, "2027-01-14/a.jsonl", "u")
    assert names(Follower(folder, NOON + 1).new()) == ["y", "z"]


def test_traffic_of_a_head_counts_whatever_its_arm_was_called(folder):
    """Before, v4 was the champion and v5 the challenger; since the promotion v5 is the champion, against v6."""
    told = [  # arm, head, assigned arm, assigned head
        ("champion", "v4-d", "champion", "v4-d"),
        ("challenger", "v5-e", "challenger", "v5-e"),
        ("champion", "v5-e", "champion", "v5-e"),
        ("champion", "v5-e", "challenger", "v6-f"),
        ("champion", "v5-e", "challenger", "v4-d"),
        ("champion", "none", "champion", "none"),
    ]
    names_of = ("arm", "head", "assigned_arm", "assigned_head")
    rows = [live_record(str(i), started_at=NOON, **dict(zip(names_of, t, strict=True))) for i, t in enumerate(told)]
    folder.join("2027-01-15/a.jsonl").write_bytes(encode_records(rows))
    found = Follower(folder, NOON, {"control": "v5-e", "treated": "v6-f"}).new()
    assert {r.session: (r.arm, r.assigned_arm) for r in found} == {
        "1": ("control", "control"),
        "2": ("control", "control"),
        "3": ("control", "treated"),
    }
    assert len(Follower(folder, NOON).new()) == len(rows)


def test_what_the_router_writes_is_read(folder):
    writer = RecordWriter(folder, None, flush_s=0.01)
    follower = Follower(folder, time.time() - 60)
    writer.add(live_record("x", started_at=time.time()))
    writer.close()
    assert names(follower.new()) == ["x"]
