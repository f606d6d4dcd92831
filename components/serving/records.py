"""What live requests leave behind: one line each, counts and times, never a text.

A router replica writes parts of its own, `<day>/<time>-<writer>-<number>.jsonl` below the service's folder of records. The newest part is
written whole again as it grows, and each time appears at once: a reader never sees half a line, in a folder or on S3.
"""

import json
import logging
import threading
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from components.config import Settings
from components.storage import Location

log = logging.getLogger("ray.serve")

FOLDER = "live"
"""Of a storage, for the records of live traffic."""
CLIENT_CLOSED = "client_closed"
"""The `error` of a request whose client left before the end."""
FLUSH_S = 1.0
"""What a killed router loses at most."""
ROWS_PER_PART = 2000
"""About 700 kB: cheap to write again every second, and few files."""


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


def encode_records(records: Iterable[LiveRecord]) -> bytes:
    """One JSON line a record."""
    return "".join(json.dumps(asdict(record)) + "\n" for record in records).encode()


def decode_records(data: bytes) -> list[LiveRecord]:
    """The records of one part."""
    return [LiveRecord(**json.loads(line)) for line in data.splitlines()]


class RecordWriter:
    """Takes records at once and writes them in a thread of its own, every `flush_s` seconds.

    Days older than `retention_days` are removed, whoever wrote them, when a new part begins; None keeps everything. Records that
    cannot be written (a full disk, no network) stay in memory up to one part and are tried again; older ones are lost and counted in the log.
    """

    def __init__(self, location: Location, retention_days: int | None, flush_s: float = FLUSH_S) -> None:
        self._location = location
        self._retention_days = retention_days
        self._flush_s = flush_s
        self._writer = uuid.uuid4().hex[:12]
        self._number = 0
        self._new: list[LiveRecord] = []
        self._part = bytearray()
        self._rows = 0
        self._unwritten = False
        self._place = location
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-records", daemon=True)
        self._thread.start()

    def add(self, record: LiveRecord) -> None:
        with self._lock:
            self._new.append(record)

    def close(self) -> None:
        """Writes what is left."""
        self._stop.set()
        self._thread.join()
        self._flush()

    def _run(self) -> None:
        while not self._stop.wait(self._flush_s):
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        if self._unwritten:
            self._write()
        while new:
            if self._rows in (0, ROWS_PER_PART):
                self._begin_part()
            mine, new = new[: ROWS_PER_PART - self._rows], new[ROWS_PER_PART - self._rows :]
            self._part += encode_records(mine)
            self._rows += len(mine)
            self._write()

    def _begin_part(self) -> None:
        now = datetime.now(UTC)
        self._part, self._rows = bytearray(), 0
        name = f"{now:%H%M%S}-{self._writer}-{self._number:05d}.jsonl"
        self._place, self._number = self._location.join(f"{now:%Y-%m-%d}", name), self._number + 1
        self._remove_old(now)

    def _write(self) -> None:
        self._unwritten = True
        try:
            self._place.write_bytes(bytes(self._part))
            self._unwritten = False
        except Exception as error:  # of a file system or a cloud; traffic goes on
            log.warning("%d live records are not written yet: %s", self._rows, error)

    def _remove_old(self, now: datetime) -> None:
        if self._retention_days is None:
            return
        oldest = f"{now - timedelta(days=self._retention_days):%Y-%m-%d}"
        try:
            days = {name.split("/")[0] for name in self._location.files()}
            for day in sorted(day for day in days if day < oldest):
                self._location.join(day).delete()
                log.info("removed the live records of %s", day)
        except Exception as error:
            log.warning("old live records were not removed: %s", error)
