"""What live requests leave behind: one line each, counts and times, never a text.

A router replica writes parts of its own, `<day>/<time>-<writer>-<number>.jsonl` below the service's folder of records. The newest part is
written whole again as it grows, and each time appears at once: a reader never sees half a line, in a folder or on S3. A part ends with its
day: requests that began on a day are in the folders of that day and of those that follow.
"""

import json
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta

from components.config import Settings
from components.serving.protocol import CLIENT_CLOSED
from components.storage import Location

log = logging.getLogger("ray.serve")

FOLDER = "live"
"""Of a storage, for the records of live traffic."""
FLUSH_S = 1.0
"""What a killed router loses at most."""
ROWS_PER_PART = 2000
"""About 700 kB: cheap to write again every second, and few files."""
MAX_PARTS = 2
"""In memory: the newest one, and one that waits for a storage that is away."""


@dataclass(frozen=True)
class LiveRecord:
    """One answered (or failed) live request."""

    arm: str
    """The arm that answered, or was to answer."""
    session: str
    """Salted hash of the session's key."""
    weight_epoch: int
    """Changes with every change of the arms, their states or weights; later ones are larger. Weights are constant within one."""
    task: str | None
    """What the client calls this kind of request (`x-aerie-task`)."""
    prompt_tokens: int
    output_tokens: int
    rounds: int
    """Verification steps that had a proposal."""
    drafted: int
    accepted: int
    histogram: list[int]
    """histogram[j]: rounds that accepted exactly j draft tokens; length K + 1, empty where nothing speculates."""
    started_at: float
    """Unix time in seconds at which the request was read."""
    ttft_s: float | None
    """Until the first token; None for an answer that was not streamed."""
    tpot_s: float | None
    """Mean time of a token after the first; None where it is not known."""
    error: str | None
    """Code of what went wrong, also of an empty answer; None for a sound answer. `failed` says whether it is the arm's fault."""
    assigned_arm: str
    """The arm that the weights gave, ejected or not (intention to treat)."""
    head: str = ""
    """Version and digest of the head of `arm`, as responses name it; an arm's name may stand for another head tomorrow."""
    assigned_head: str = ""
    """The same of `assigned_arm`."""
    duration_s: float = 0.0
    shadow: bool = False
    """A copy of a request, whose answer nobody saw."""
    forced: bool = False
    """Not dealt by this epoch's weights: the client named the arm, or the session stayed on one that drains."""

    @property
    def failed(self) -> bool:
        """Whether the arm did wrong; a request that it refused with 4xx and a client that left are no faults of it."""
        return self.error is not None and self.error != CLIENT_CLOSED and not self.error.startswith("4")


def live_records(settings: Settings, storage: Location) -> Location | None:
    """Where the records of live requests go; None when they are off."""
    return storage.join(FOLDER) if settings.ab.record_requests else None


def day_of(unix_s: float) -> str:
    """The day (UTC) in whose folder the requests are that end at this time."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d}"


def oldest_day(retention_days: int, now_s: float) -> str:
    """The first day whose records are kept."""
    return day_of(now_s - timedelta(days=retention_days).total_seconds())


def encode_records(records: Iterable[LiveRecord]) -> bytes:
    """One JSON line a record."""
    return "".join(json.dumps(asdict(record)) + "\n" for record in records).encode()


def decode_records(data: bytes) -> list[LiveRecord]:
    """The records of one part."""
    return [LiveRecord(**json.loads(line)) for line in data.splitlines()]


@dataclass
class _Part:
    """The rows of one file."""

    day: str
    place: Location
    data: bytearray = field(default_factory=bytearray)
    num_rows: int = 0
    num_written: int = 0
    """Rows that the file has by now."""
    waiting_since: float = math.inf
    """Start of the oldest request among the others."""

    @property
    def num_waiting(self) -> int:
        return self.num_rows - self.num_written

    def add(self, records: list[LiveRecord]) -> None:
        self.data += encode_records(records)
        self.num_rows += len(records)
        self.waiting_since = min([self.waiting_since, *(record.started_at for record in records)])

    def write(self) -> None:
        self.place.write_bytes(bytes(self.data))
        self.num_written = self.num_rows
        self.waiting_since = math.inf


class RecordWriter:
    """Takes records at once and writes them in a thread of its own, every `flush_s` seconds.

    Days older than `retention_days` are removed, whoever wrote them, when it starts and when a day begins; None keeps everything. Records that
    cannot be written (a full disk, no network) stay in memory up to one part and are tried again; older ones are lost, and counted.

    Args:
        location: Folder of the records.
        retention_days: Whole days that are kept.
        flush_s: Seconds between two writes.
        on_lost: Is told how many records were lost, in the writer's thread.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        location: Location,
        retention_days: int | None,
        flush_s: float = FLUSH_S,
        on_lost: Callable[[int], None] = lambda num: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._location = location
        self._retention_days = retention_days
        self._flush_s = flush_s
        self._on_lost = on_lost
        self._clock = clock
        self._writer = uuid.uuid4().hex[:12]
        self._number = 0
        self._day = ""
        self._new: list[LiveRecord] = []
        self._parts: deque[_Part] = deque()
        self._parts_since = math.inf
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-records", daemon=True)
        self._thread.start()

    def add(self, record: LiveRecord) -> None:
        with self._lock:
            self._new.append(record)

    @property
    def waiting_since(self) -> float:
        """Start (Unix time in seconds) of the oldest request whose record is not written yet; infinite without one."""
        with self._lock:
            return min([self._parts_since, *(record.started_at for record in self._new)])

    @property
    def is_over(self) -> bool:
        """Whether it has ended: what was given to it is written, or lost."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Lets the thread write what is left and end, without waiting for it."""
        self._stop.set()

    def close(self) -> None:
        """Writes what is left."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._flush_s):
            self._flush()
        self._flush()
        while self._parts:
            self._drop_oldest()
        with self._lock:
            self._parts_since = math.inf

    def _flush(self) -> None:
        with self._lock:
            new = taken = list(self._new)
        now = datetime.fromtimestamp(self._clock(), UTC)
        if f"{now:%Y-%m-%d}" != self._day:
            self._day = f"{now:%Y-%m-%d}"
            self._remove_old(now)
        reachable = self._write()
        while new:
            part = self._open_part(now)
            mine, new = new[: ROWS_PER_PART - part.num_rows], new[ROWS_PER_PART - part.num_rows :]
            part.add(mine)
            reachable = reachable and self._write()  # one failure is enough: each may take a minute
        with self._lock:
            del self._new[: len(taken)]
            self._parts_since = min((part.waiting_since for part in self._parts), default=math.inf)

    def _open_part(self, now: datetime) -> _Part:
        """The part that takes records now."""
        if not self._parts or self._parts[-1].day != self._day or self._parts[-1].num_rows == ROWS_PER_PART:
            name = f"{now:%H%M%S}-{self._writer}-{self._number:05d}.jsonl"
            self._number += 1
            self._parts.append(_Part(self._day, self._location.join(self._day, name)))
        while len(self._parts) > MAX_PARTS or (len(self._parts) > 1 and not self._parts[0].num_waiting):
            self._drop_oldest()
        return self._parts[-1]

    def _write(self) -> bool:
        """Whether nothing waits any more."""
        for part in self._parts:
            try:
                if part.num_waiting:
                    part.write()
            except Exception as error:  # of a file system or a cloud; traffic goes on
                log.warning("%d live records are not written yet: %s", part.num_waiting, error)
                return False
        return True

    def _drop_oldest(self) -> None:
        lost = self._parts.popleft().num_waiting
        if lost:
            log.error("%d live records are lost: %s could not be written", lost, self._location.uri)
            self._on_lost(lost)

    def _remove_old(self, now: datetime) -> None:
        if self._retention_days is None:
            return
        oldest = oldest_day(self._retention_days, now.timestamp())
        try:
            days = {name.split("/")[0] for name in self._location.files()}
            for day in sorted(day for day in days if day < oldest):
                self._location.join(day).delete()
                log.info("removed the live records of %s", day)
        except Exception as error:
            log.warning("old live records were not removed: %s", error)
