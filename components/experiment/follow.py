"""Reading live records while they are being written."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from components.experiment.sessions import ended_at
from components.serving.records import LiveRecord, decode_records
from components.storage import Location

log = logging.getLogger("aerie")

PART = ".jsonl"
"""Of finished parts; one that is being written has another end."""


class Follower:
    """Gives every record once, from parts that appear, grow and are read again only when they have grown.

    Args:
        location: Folder of the records.
        since: Unix time in seconds; requests that began before are left out.
        heads: {what the reader calls an arm: its head, as responses name it}. A request that the weights gave to another head is left out,
            and arms get the reader's names: what the router calls an arm may have stood for another head before. None: all, as written.
    """

    def __init__(self, location: Location, since: float, heads: Mapping[str, str] | None = None) -> None:
        self._location = location
        self._since = since
        self._arms = None if heads is None else {head: arm for arm, head in heads.items()}
        self._first_day = f"{datetime.fromtimestamp(since, UTC):%Y-%m-%d}"
        self._sizes: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        """Records of each part that were given."""

    def new(self) -> list[LiveRecord]:
        """What has come since the last call, in the order in which the requests ended; what the storage does not give now comes later."""
        found: list[LiveRecord] = []
        try:
            for name, size in self._grown().items():
                found += self._rest(name)
                self._sizes[name] = size  # after it was read, or it would not be read again
        except OSError as error:
            log.warning("live records in %s cannot be read now, and are tried again: %s", self._location.uri, error)
        return sorted((self._named(record) for record in found if self._wants(record)), key=ended_at)

    def _wants(self, record: LiveRecord) -> bool:
        return record.started_at >= self._since and (self._arms is None or record.assigned_head in self._arms)

    def _named(self, record: LiveRecord) -> LiveRecord:
        if self._arms is None:
            return record
        arm = self._arms.get(record.head, record.arm)
        return replace(record, arm=arm, assigned_arm=self._arms[record.assigned_head])

    def _grown(self) -> dict[str, int]:
        """Sizes of the parts that are to be read."""
        return {
            name: size
            for name, size in sorted(self._location.sizes_bytes().items())
            if name.endswith(PART) and name.split("/")[0] >= self._first_day and self._sizes.get(name) != size
        }

    def _rest(self, name: str) -> list[LiveRecord]:
        records = decode_records(self._location.join(name).read_bytes())
        seen, self._seen[name] = self._seen.get(name, 0), len(records)
        return records[seen:]
