"""Parts made under a real Ray by workers that die, raise, do not start or find the disk full; and by many of them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from components import cluster_room
from components.beside import start_beside_driver, thread_beside
from components.cluster_room import Need, Started, waiting_lines
from components.data.part_map import _make, make_parts
from components.data.part_worker import PartTask
from components.data.parts import QUARANTINE, conclude, part_names
from components.data.pieces import PIECES
from components.data.progress import Progress, WorkersFailed
from components.lease import Hold, Lease, LeaseLost
from components.section import ConfigError
from components.stage import LEASE
from components.storage import Location
from tests.cluster import free_cpus
from tests.components.data.counting import (
    HELPERS,
    MADE,
    OUTAGE,
    OUTAGES,
    FullDiskWorker,
    LockingWorker,
    NoStartWorker,
    counting_job,
    numbers_in,
    times_made,
)
from tests.conftest import is_running
from tests.peak import forget_peak, peak_bytes

STALL_TIMEOUT_S = 5.0
OTHERS = b'{"owner": "others", "pid": 1, "host": "elsewhere", "heartbeat_at": 0}'
"""A lease of another run."""

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def output(tmp_path) -> Location:
    return Location(str(tmp_path / "output"))


def tasks(num_parts: int) -> list[PartTask]:
    return [PartTask(number) for number in range(num_parts)]


def test_only_the_row_that_ends_its_workers_is_lost(output):
    """24 rows in three parts; 15 ends the process of every worker, 20 raises in it, at 3 the storage is away for a while."""
    make_parts(counting_job(output, 8, {15}, {20}, (), "", 0.0, {3}, max_attempts=1), tasks(3))
    assert numbers_in(output) == [number for number in range(24) if number not in (15, 20)]
    rows = conclude("counting", output, 1.0).rows
    assert (rows.kept, rows.failed) == (22, {"worker_died": 1, "worker_error": 1})
    lost = [json.loads(line) for line in output.join(QUARANTINE).read_bytes().splitlines()]
    details = {row["key"]: row["detail"] for row in lost}
    assert details[15] == "the worker's process ended without a word"
    assert "ArithmeticError: 20 is impossible" in details[20]
    assert not [name for name in output.files() if name.startswith(PIECES)]
    assert len(output.join(OUTAGE).files()) == OUTAGES
    # each death narrows the search: nothing is made once for every try of a deadly row
    assert max(times_made(output).values()) <= 4


def test_a_row_that_hangs_its_workers_is_lost_and_nothing_else(output):
    """1 hangs every worker; 2 does as well, and holds Python's lock, so that no thread of its process can act."""
    endless = {1, 2}
    job = counting_job(
        output, 1, (), (), endless, worker=LockingWorker, max_attempts=1, stall_timeout_s=STALL_TIMEOUT_S
    )
    make_parts(job, tasks(4))
    assert numbers_in(output) == [0, 3]
    rows = conclude("counting", output, 1.0).rows
    assert (rows.kept, rows.failed) == (2, {"worker_stalled": 1, "worker_died": 1})
    lost = {row["key"]: row for row in map(json.loads, output.join(QUARANTINE).read_bytes().splitlines())}
    assert f"no sign of life for {STALL_TIMEOUT_S:g} s" in lost[1]["detail"]
    assert "in hang" in lost[1]["detail"], "it does not say where it hung"
    helpers = [int(name) for name in output.join(HELPERS).files()]
    assert helpers
    assert not [pid for pid in helpers if is_running(pid)]


def test_a_worker_that_does_not_start_ends_the_job_with_its_words(output):
    with pytest.raises(WorkersFailed, match=r"does not start(.|\n)*no such model"):
        make_parts(counting_job(output, 4, worker=NoStartWorker), tasks(2))


def test_a_full_disk_ends_the_job_and_keeps_what_is_done(output):
    with pytest.raises(OSError, match="No space left"):
        make_parts(counting_job(output, 4, worker=FullDiskWorker, replicas=1), tasks(4))
    assert numbers_in(output) == list(range(8))
    make_parts(counting_job(output, 4), tasks(4))
    assert numbers_in(output) == list(range(16))
    assert [times_made(output)[number] for number in range(8)] == [1] * 8


def test_workers_of_a_run_that_lost_its_lease_replace_nothing(output):
    """Its driver hangs, and another run has the lease: each worker sees it before it writes."""
    job, lost = counting_job(output, 2, (), (), (), "", 0.6), Hold(output.join(LEASE), "ours")
    output.join(LEASE).write_bytes(OTHERS)
    progress = start_beside_driver(Progress, 9)
    with pytest.raises(LeaseLost, match=r"_lease\.json was taken over by process 1 on elsewhere"):
        _make(job, tasks(2), tasks(2), progress, lost)
    assert part_names(output) == []


def test_a_cluster_that_is_too_small_is_refused_before_anything_starts(output):
    with pytest.raises(ConfigError, match=r"resources\.counting: 9 x 1 CPUs do not fit in .* 1 x 8 CPUs"):
        make_parts(counting_job(output, 4, replicas=9), tasks(2))
    assert output.files() == []


def test_whoever_waits_says_for_what_and_who_has_it(output, caplog, monkeypatch):
    monkeypatch.setattr(cluster_room, "PATIENCE_S", 1.0)
    monkeypatch.setattr(cluster_room, "REPEAT_S", 1.0)
    free = free_cpus()
    holder = ray.remote(num_cpus=free)(Started).remote()
    assert not ray.get(holder.is_set.remote(), timeout=60)
    with ThreadPoolExecutor(1) as pool, caplog.at_level("WARNING", logger="aerie"):
        done = pool.submit(make_parts, counting_job(output, 4), tasks(2))
        deadline_s = time.monotonic() + 60
        while not (lines := [line for line in caplog.messages if "Started" in line]) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        ray.kill(holder)
        done.result()
    assert lines
    assert lines[0].startswith("counting: nothing has started yet: needs 2 x 1 CPUs; free: 0 of 8 CPUs; held: ")
    assert f"Started ({free} CPUs)" in lines[0]
    assert numbers_in(output) == list(range(8))


def test_nodes_that_went_are_missed_by_whoever_had_begun(caplog, monkeypatch):
    monkeypatch.setattr(cluster_room, "PATIENCE_S", 0.1)
    monkeypatch.setattr(cluster_room, "REPEAT_S", 0.1)
    one, many = (Need("resources.counting", number, {"CPU": 1.0}) for number in (8, 9))
    with waiting_lines("fits", [one], lambda: True), waiting_lines("lacks", [many], lambda: True):
        deadline_s = time.monotonic() + 60
        while not [line for line in caplog.messages if line.startswith("lacks")] and time.monotonic() < deadline_s:
            time.sleep(0.1)
    said = [line for line in caplog.messages if line.startswith(("fits", "lacks"))]
    assert {line.partition(";")[0] for line in said} == {
        "lacks: a node has gone: 9 x 1 CPUs do not fit in the cluster, whose nodes have 1 x 8 CPUs"
    }


def test_the_driver_holds_no_rows(output):
    """40,000 rows of 4 KB pass by the driver, which may at no time hold a tenth of them."""
    rows_per_part, num_parts, text = 200, 200, "x" * 4096
    make_parts(counting_job(output.join("warm"), 1), tasks(2))
    forget_peak()
    before = peak_bytes()
    make_parts(counting_job(output, rows_per_part, (), (), (), text), tasks(num_parts))
    outcome = conclude("counting", output, 0.0)
    grown = peak_bytes() - before
    written = sum(output.join(name).size_bytes() for name in part_names(output))
    assert outcome.rows.kept == rows_per_part * num_parts
    assert written > 150e6
    assert grown < written / 10


def test_a_run_that_lost_its_lease_is_interrupted_while_it_waits_for_workers(output):
    """The last one here: its worker ends with its row, and holds its CPU until then."""

    def take_over(over):
        while not over.wait(0.1):
            if output.join(MADE).path.exists():  # a worker has begun
                output.join(LEASE).write_bytes(OTHERS)

    job = counting_job(output, 1, (), (), (), "", 15.0, replicas=1)
    with thread_beside("rival", take_over), pytest.raises(LeaseLost), Lease(output.join(LEASE), ttl_s=2.0):
        make_parts(job, tasks(1))
    assert part_names(output) == []
