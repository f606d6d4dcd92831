"""Since when records of a router's requests may be missing: its own that are being written, and those of routers that give way to it.

A router that another one replaces ends what runs through it, and then writes its last records. Meanwhile the new one answers `/health`, and must not say
that everything is written. So each router has a mark beside the folder of records which says up to when nothing of it is missing, and takes the mark away
when nothing more will come. A new one looks at the marks that it finds, until they are gone or nobody renews them.
"""

import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from components.serving.records import LiveRecord, RecordWriter
from components.storage import Location

log = logging.getLogger("ray.serve")

MARKS = "-routers"
"""Behind the name of the folder of records."""
RENEW_S = 15.0
LOOK_S = 1.0
DEAD_S = 60.0
"""A mark that is so old is one of a router that was killed: what it did not write will never come."""
AT, COMPLETE_UNTIL = "at", "complete_until"
"""Keys of a mark, Unix times in seconds: when it was written, and what it said then."""
UNKNOWN = 0.0
"""Time before which nothing is missing, as long as the marks of others were not read."""


class Recording:
    """A router's records: the writer of now, and earlier ones that still write what they were given.

    Args:
        oldest_running_at: Start (Unix time in seconds) of the oldest request that runs in this router; infinite without one. Any thread asks.
        on_lost: Is told how many records were lost.
        look_s: See `Mark`.
    """

    def __init__(
        self, oldest_running_at: Callable[[], float], on_lost: Callable[[int], None], look_s: float = LOOK_S
    ) -> None:
        self._oldest_running_at, self._on_lost, self._look_s = oldest_running_at, on_lost, look_s
        self._now: RecordWriter | None = None
        self._writers: list[RecordWriter] = []
        self._marks: dict[str, Mark] = {}
        """By folder."""

    def open(self, where: str | None, retention_days: int | None) -> None:
        """From now on records go to `where`, or nowhere. Nothing is waited for: requests run in the caller's loop."""
        if self._now is not None:
            self._now.end()
        self._now = RecordWriter(Location(where), retention_days, on_lost=self._on_lost) if where else None
        self._writers = [writer for writer in (*self._writers, self._now) if writer is not None and not writer.is_over]
        if where and where not in self._marks:
            self._marks[where] = Mark(Location(f"{where.rstrip('/')}{MARKS}"), self._own_oldest, self._look_s)

    def add(self, record: LiveRecord) -> None:
        if self._now is not None:
            self._now.add(record)

    @property
    def waiting_since(self) -> float:
        """Start (Unix time in seconds) of the oldest request that has ended and is not written, here or in a router that gives way; infinite
        without one."""
        return min([self._unwritten_since(), *(mark.others_until for mark in self._marks.values())])

    def close(self) -> None:
        """Writes what is left, and then takes the marks away."""
        for writer in self._writers:
            writer.close()
        for mark in self._marks.values():
            mark.close()

    def _own_oldest(self) -> float:
        running = self._oldest_running_at()  # first: a request that ends goes to a writer before it stops to count here
        return min(running, self._unwritten_since())

    def _unwritten_since(self) -> float:
        return min((writer.waiting_since for writer in list(self._writers)), default=math.inf)


class Mark:
    """This router's mark, and what it has found of others.

    Args:
        location: Folder of the marks.
        oldest: Start of the oldest request of this router whose record is not written; infinite without one.
        look_s: Seconds between two looks at the marks of others.
        renew_s: Seconds after which its own is written again.
        dead_s: Seconds after which one that was not written again is taken for a killed router's.
    """

    def __init__(
        self,
        location: Location,
        oldest: Callable[[], float],
        look_s: float = LOOK_S,
        renew_s: float = RENEW_S,
        dead_s: float = DEAD_S,
    ) -> None:
        self._location, self._oldest = location, oldest
        self._look_s, self._renew_s, self._dead_s = look_s, renew_s, dead_s
        self.others_until = UNKNOWN
        """Of what began before (Unix time in seconds) nothing of another router is missing; infinite once none is left."""
        self._own = location.join(f"{uuid.uuid4().hex}.json")
        self._renewed_at = -math.inf
        self._others: list[str] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-mark", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes the mark away: nothing more will come."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._outages_logged():
                self._renew()
                self.others_until = self._look()
            self._stop.wait(self._look_s)
        with self._outages_logged():
            self._own.delete()

    def _renew(self) -> None:
        now = time.time()
        if now - self._renewed_at >= self._renew_s:
            self._own.write_bytes(json.dumps({AT: now, COMPLETE_UNTIL: min(now, self._oldest())}).encode())
            self._renewed_at = now

    def _look(self) -> float:
        """At the others that were there first; those that come later know of this one."""
        if self._others is None:
            self._others = [name for name in self._location.files() if name != self._own.name]
        found = {name: self._read(self._location.join(name)) for name in self._others}
        self._others = [name for name, until in found.items() if until != math.inf]
        return min(found.values(), default=math.inf)

    def _read(self, mark: Location) -> float:
        """Infinite for one that is gone, or whose router is."""
        try:
            told = json.loads(mark.read_bytes())
        except FileNotFoundError:
            return math.inf
        if time.time() - told[AT] <= self._dead_s:
            return float(told[COMPLETE_UNTIL])
        mark.delete()
        return math.inf

    @contextmanager
    def _outages_logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a file system or a cloud; traffic goes on
            log.warning("the routers' marks in %s cannot be read or written now: %s", self._location.uri, error)
