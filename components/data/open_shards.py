"""Single rows of recorded features, read from shards that stay open, and kept where there is room.

A shard may hold tens of gigabytes; a row of it is all that is ever read at once.
"""

from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import pyarrow.parquet as pq

from components.data.parts import open_part
from components.data.shards import StoredDocument, read_row
from components.storage import Location

Key = TypeVar("Key")
Value = TypeVar("Value")


class OpenShards:
    """Reads rows in any order; the shards that were read last stay open: a shard's footer tells of all its rows, and is read once."""

    def __init__(self, folder: Location, max_open: int) -> None:
        self._folder, self._max_open = folder, max_open
        self._files: OrderedDict[str, tuple[pq.ParquetFile, ExitStack]] = OrderedDict()

    def read(self, shard: str, row: int) -> StoredDocument:
        """One document; reads no other.

        Raises:
            CorruptPart: the row does not hold what was written.
        """
        return read_row(self._folder.join(shard), self._file(shard), row)

    def _file(self, shard: str) -> pq.ParquetFile:
        if shard not in self._files:
            while len(self._files) >= self._max_open:
                _, (_, opened) = self._files.popitem(last=False)
                opened.close()
            opened = ExitStack()
            self._files[shard] = opened.enter_context(open_part(self._folder.join(shard))), opened
        self._files.move_to_end(shard)
        return self._files[shard][0]


@dataclass
class Kept(Generic[Key, Value]):
    """Values that there was room for.

    Nothing ever makes room: whoever asks for all of them again and again finds any others as good.
    """

    room_bytes: float
    _values: dict[Key, Value] = field(default_factory=dict, init=False)

    def get(self, key: Key) -> Value | None:
        return self._values.get(key)

    def offer(self, key: Key, value: Value, num_bytes: int) -> None:
        """Keep the value if it fits beside the others."""
        if key not in self._values and num_bytes <= self.room_bytes:
            self._values[key] = value
            self.room_bytes -= num_bytes
