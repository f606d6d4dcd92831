"""A lease on an output: one writer at a time, with a heartbeat, a time to live and a takeover rule.

A holder writes its heartbeat into the lease file. Somebody else may take the lease over when the heartbeat is older than the time
to live, or at once when the holder was a process of this very machine that no longer runs (the same command right after a kill).
A holder that was suspended or cut off for so long is interrupted as soon as it sees that; its workers look for themselves (`Hold`).
"""

import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import psutil

from components.storage import Location

log = logging.getLogger("aerie")

BEAT = 0.25
"""Of the time to live, between two heartbeats."""
INTERRUPT = signal.SIGUSR1
"""Of the holder's main thread. Not Ctrl-C's signal: a shell may have told its background jobs to ignore it, and Ray Train answers it itself."""


class LeaseHeld(Exception):
    """Another live run holds the lease."""


class LeaseLost(Exception):
    """Another run took this lease over: what was being written must not be published."""


@dataclass(frozen=True)
class Hold:
    """Who holds a lease: what workers of the holder in other processes go by, which live on when it is suspended or cut off."""

    location: Location
    owner: str | None
    """None: nobody did, so nobody should."""

    def check(self) -> None:
        """Raises LeaseLost when somebody else holds it, or nobody any more."""
        holder = _read(self.location)
        if holder.get("owner") != self.owner:
            raise _lost(self.location, holder)


class Lease:
    """`with Lease(location, ttl_s) as lease: ...; lease.check()` before publishing.

    Raises:
        LeaseHeld: on entry, while another live run holds it.
        LeaseLost: from `check`, when it was taken over meanwhile; and in place of the block's end when it was interrupted for that:
            a main thread is, whatever it waits for.
    """

    def __init__(self, location: Location, ttl_s: float, note: Mapping[str, Any] | None = None) -> None:
        self._location = location
        self._ttl_s = ttl_s
        self._note = dict(note or {})
        """What others may read of the holder's work, see `live_holder`."""
        self._hold = Hold(location, uuid.uuid4().hex)
        self._is_lost = False
        self._restore: Callable[[], object] | None = None
        """Of a main thread: gives the signal back to whoever had it."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)

    def __enter__(self) -> "Lease":
        while not self._location.create(self._record()):
            self._take_over_or_raise()
        if threading.current_thread() is threading.main_thread():
            self._restore = partial(signal.signal, INTERRUPT, signal.signal(INTERRUPT, _interrupted) or signal.SIG_DFL)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._restore is not None:
            self._restore()
        holder = _read(self._location)
        if holder.get("owner") == self._hold.owner:
            self._location.delete()
        if self._is_lost and isinstance(error, KeyboardInterrupt):
            raise _lost(self._location, holder) from None

    def check(self) -> None:
        """Raises LeaseLost unless this lease is still ours."""
        self._hold.check()

    def _take_over_or_raise(self) -> None:
        holder = _read(self._location)
        if not holder:
            return  # released between our two looks
        if not _is_dead(holder, self._ttl_s):
            raise LeaseHeld(
                f"{self._location.uri} is held by {_describe(holder)}. Wait for it, or end it; "
                f"its lease runs out {self._ttl_s:.0f} s after its last sign of life"
            )
        log.warning("taking over %s from %s, which is gone", self._location.uri, _describe(holder))
        self._discard(holder)

    def _discard(self, holder: dict[str, Any]) -> None:
        # Of several runs that see the same dead lease only one may remove it, and never a fresh one: the right
        # to remove is itself created exclusively, under the dead owner's name.
        right = Location(f"{self._location.uri}.taken-{holder['owner']}")
        if right.create(self._record()):
            if _read(self._location).get("owner") == holder["owner"]:
                self._location.delete()
            right.delete()
            return
        rival = _read(right)
        if rival and _is_dead(rival, self._ttl_s):
            right.delete()  # it was killed in the middle of its takeover
        time.sleep(0.05)

    def _beat(self) -> None:
        while not self._stop.wait(self._ttl_s * BEAT):
            looked_at_s = time.time()
            try:
                self.check()
                self._location.write_bytes(self._record())
                # it slept in between: a new holder's record may have been written over
                if time.time() - looked_at_s > self._ttl_s * (1 - BEAT):
                    raise _lost(self._location, {})
            except LeaseLost:
                return self._interrupt()
            except OSError as error:
                log.warning("the heartbeat of %s failed: %s", self._location.uri, error)

    def _interrupt(self) -> None:
        self._is_lost = True
        main = threading.main_thread().ident
        if self._restore is not None and main is not None and not self._stop.is_set():
            signal.pthread_kill(main, INTERRUPT)

    def _record(self) -> bytes:
        process = psutil.Process()
        record = {
            "owner": self._hold.owner,
            "host": socket.gethostname(),
            "pid": process.pid,
            "process_started_at": process.create_time(),
            "heartbeat_at": time.time(),
            "note": self._note,
        }
        return json.dumps(record).encode()


def hold_of_this_process(location: Location) -> Hold:
    """What this process holds, for its workers to look at; of a place that has no lease, that there is none.

    Raises:
        LeaseLost: another process holds it.
    """
    holder = _read(location)
    if holder and (holder["host"], holder["pid"]) != (socket.gethostname(), os.getpid()):
        raise _lost(location, holder)
    return Hold(location, holder.get("owner"))


def live_holder(location: Location, ttl_s: float) -> Mapping[str, Any] | None:
    """The record of the run that holds a lease (its `note` among others); None when nobody alive does."""
    holder = _read(location)
    return holder if holder and not _is_dead(holder, ttl_s) else None


def describe_holder(holder: Mapping[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}"


def _read(location: Location) -> dict[str, Any]:
    try:
        return json.loads(location.read_bytes())
    except FileNotFoundError:
        return {}


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # what Ray's waits let through, and nobody takes for a failure that can be repeated


def _is_dead(holder: dict[str, Any], ttl_s: float) -> bool:
    if time.time() - holder["heartbeat_at"] > ttl_s:
        return True
    if holder["host"] != socket.gethostname():
        return False
    try:
        process = psutil.Process(holder["pid"])
        return process.create_time() != holder["process_started_at"] or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _lost(location: Location, holder: dict[str, Any]) -> LeaseLost:
    return LeaseLost(f"{location.uri} was taken over by {_describe(holder)}; this run's output is discarded")


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "nobody"
    age_s = time.time() - holder["heartbeat_at"]
    return f"{describe_holder(holder)} (last sign of life {age_s:.0f} s ago)"
