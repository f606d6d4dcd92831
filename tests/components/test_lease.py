"""One writer at a time; what a dead one left behind is taken over, at once on the same machine, else after its time to live."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from components.lease import Lease, LeaseHeld, LeaseLost
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
    with Lease(place, ttl_s=0.4):
        time.sleep(1.0)
        assert time.time() - json.loads(place.read_bytes())["heartbeat_at"] < 0.4
        with pytest.raises(LeaseHeld), Lease(place, ttl_s=0.4):
            pass


def test_a_holder_that_slept_too_long_learns_that_it_lost(place: Location) -> None:
    holder = hold_in_subprocess(place, ttl_s=0.5)
    holder.send_signal(signal.SIGSTOP)
    time.sleep(0.7)
    with Lease(place, ttl_s=0.5) as lease:
        holder.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        lease.check()  # the old holder's heartbeat did not write over ours
    holder.kill()
    holder.wait()


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
    assert entered.wait(10)


def test_of_many_who_see_a_dead_holder_one_gets_in(place: Location) -> None:
    place.write_bytes(foreign_record(age_s=100.0))
    start, release, inside, refused = threading.Barrier(6), threading.Event(), [], []

    def contend(number: int) -> None:
        start.wait()
        try:
            with Lease(place, ttl_s=5.0) as lease:
                inside.append(number)
                release.wait(10)
                lease.check()
        except LeaseHeld:
            refused.append(number)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while len(refused) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    release.set()
    for thread in threads:
        thread.join()
    assert (len(inside), len(refused)) == (1, 5)


def hold_in_subprocess(place: Location, ttl_s: float = LONG_S) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD_FOREVER, place.uri, str(ttl_s)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=project_environment())
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def foreign_record(age_s: float) -> bytes:
    record = {"owner": "foreign", "host": "elsewhere", "pid": 1, "process_started_at": 0.0}
    return json.dumps(record | {"heartbeat_at": time.time() - age_s}).encode()
