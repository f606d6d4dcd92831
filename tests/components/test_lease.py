"""One writer at a time; what a dead one left behind is taken over, at once on the same machine, else after its time to live."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from components.lease import INTERRUPT, Lease, LeaseHeld, LeaseLost, hold_of_this_process
from components.storage import Location
from tests.conftest import project_environment

HOLD_FOREVER = """
import sys, time
from components.lease import Lease
from components.storage import Location
with Lease(Location(sys.argv[1]), ttl_s=float(sys.argv[2])):
    print("held", flush=True)
    time.sleep(600)
"""
LONG_S = 60.0


@pytest.fixture
def place(tmp_path: Path) -> Location:
    return Location(str(tmp_path / "output" / "_lease.json"))


def test_a_lease_is_released(place: Location) -> None:
    with Lease(place, LONG_S) as lease:
        lease.check()
        assert place.exists()
    assert place.join("..").path.resolve().exists()
    assert not place.exists()


def test_a_live_holder_keeps_others_out_and_is_named(place: Location) -> None:
    with Lease(place, LONG_S), pytest.raises(LeaseHeld, match=f"process {os.getpid()}"), Lease(place, LONG_S):
        pass
    with Lease(place, LONG_S):
        pass


def test_a_failing_holder_releases(place: Location) -> None:
    with pytest.raises(RuntimeError), Lease(place, LONG_S):
        raise RuntimeError
    assert not place.exists()


def test_the_same_command_right_after_kill_9_goes_on(place: Location) -> None:
    holder = hold_in_subprocess(place)
    with pytest.raises(LeaseHeld), Lease(place, LONG_S):
        pass
    holder.send_signal(signal.SIGKILL)
    started = time.monotonic()
    while psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with Lease(place, LONG_S) as lease:  # nobody has waited for the child yet: it is a zombie
        lease.check()
    assert time.monotonic() - started < LONG_S / 4
    holder.wait()


def test_a_holder_on_another_machine_is_gone_only_after_its_time_to_live(place: Location) -> None:
    place.write_bytes(foreign_record(age_s=1.0))
    with pytest.raises(LeaseHeld, match="elsewhere"), Lease(place, ttl_s=5.0):
        pass
    place.write_bytes(foreign_record(age_s=6.0))
    with Lease(place, ttl_s=5.0) as lease:
        lease.check()


def test_the_heartbeat_keeps_a_lease_alive(place: Location) -> None:
    with Lease(place, ttl_s=2.0):
        first, deadline = heartbeat(place), time.monotonic() + LONG_S
        while heartbeat(place) < first + 2.0:  # longer than it lives without one
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(LeaseHeld), Lease(place, ttl_s=2.0):
            pass


def test_a_holder_that_slept_too_long_learns_that_it_lost(place: Location) -> None:
    holder = hold_in_subprocess(place, ttl_s=4.0)
    holder.send_signal(signal.SIGSTOP)  # a second before its first heartbeat
    place.write_bytes(json.dumps(json.loads(place.read_bytes()) | {"heartbeat_at": time.time() - 100}).encode())
    with Lease(place, LONG_S) as lease:
        holder.send_signal(signal.SIGCONT)
        _, words = holder.communicate(timeout=LONG_S)  # it ended by itself, out of a sleep
        lease.check()  # its heartbeat did not write over ours
    assert holder.returncode == 1
    assert f"LeaseLost: {place.uri} was taken over by process {os.getpid()}" in words.splitlines()[-1]


def test_a_wait_ends_when_the_lease_is_lost(place: Location) -> None:
    def wait() -> None:
        place.write_bytes(foreign_record(age_s=0.0))
        time.sleep(60)

    before = signal.getsignal(INTERRUPT)
    with pytest.raises(LeaseLost, match="taken over by process 1 on elsewhere"), Lease(place, ttl_s=2.0):
        wait()
    assert signal.getsignal(INTERRUPT) == before
    with pytest.raises(KeyboardInterrupt), Lease(Location(f"{place.uri}-2"), LONG_S):
        raise KeyboardInterrupt  # the user's own stays one


class SlowPlace(Location):
    """Where half a second passes between a call and the write."""

    def write_bytes(self, data: bytes) -> None:
        time.sleep(0.5)
        super().write_bytes(data)


def test_a_heartbeat_that_may_have_written_over_a_new_holders_ends_the_holder(place: Location) -> None:
    """Between its look and its write it slept longer than the lease lives."""
    with pytest.raises(LeaseLost), Lease(SlowPlace(place.uri), ttl_s=0.2):
        time.sleep(60)
    assert not place.exists()


def test_workers_see_for_themselves_that_a_lease_is_lost(place: Location) -> None:
    hold_of_this_process(place).check()  # no lease at all: nothing to lose
    with Lease(place, LONG_S):
        hold = pickle.loads(pickle.dumps(hold_of_this_process(place)))
        hold.check()
        place.write_bytes(foreign_record(age_s=0.0))
        with pytest.raises(LeaseLost, match="taken over by process 1 on elsewhere"):
            hold.check()
        with pytest.raises(LeaseLost, match="taken over by process 1 on elsewhere"):
            hold_of_this_process(place)
    place.delete()
    with pytest.raises(LeaseLost, match="taken over by nobody"):
        hold.check()


def test_check_raises_after_a_takeover(place: Location) -> None:
    with Lease(place, LONG_S) as lease:
        place.write_bytes(foreign_record(age_s=0.0))
        with pytest.raises(LeaseLost, match="taken over by process 1 on elsewhere"):
            lease.check()
    assert json.loads(place.read_bytes())["host"] == "elsewhere"  # somebody else's lease is not released


def test_a_kill_in_the_middle_of_a_takeover_blocks_nobody(place: Location) -> None:
    place.write_bytes(foreign_record(age_s=100.0))
    Location(f"{place.uri}.taken-foreign").write_bytes(foreign_record(age_s=100.0))
    entered = threading.Event()

    def enter() -> None:
        with Lease(place, ttl_s=5.0):
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    assert entered.wait(LONG_S)


def test_of_many_who_see_a_dead_holder_one_gets_in(place: Location) -> None:
    place.write_bytes(foreign_record(age_s=100.0))
    start, release, inside, refused = threading.Barrier(6), threading.Event(), [], []

    def contend(number: int) -> None:
        start.wait()
        try:
            with Lease(place, LONG_S) as lease:
                inside.append(number)
                release.wait(LONG_S)
                lease.check()
        except LeaseHeld:
            refused.append(number)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LONG_S
    while len(refused) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    release.set()
    for thread in threads:
        thread.join()
    assert (len(inside), len(refused)) == (1, 5)


def hold_in_subprocess(place: Location, ttl_s: float = LONG_S) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD_FOREVER, place.uri, str(ttl_s)]
    holder = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=project_environment()
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def heartbeat(place: Location) -> float:
    return json.loads(place.read_bytes())["heartbeat_at"]


def foreign_record(age_s: float) -> bytes:
    record = {"owner": "foreign", "host": "elsewhere", "pid": 1, "process_started_at": 0.0}
    return json.dumps(record | {"heartbeat_at": time.time() - age_s}).encode()
