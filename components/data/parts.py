"""Parts: the Parquet files that data stages are written in, each whole or not there, with its account in its footer.

The account travels inside the part, so a resumed run knows what became of every row of a finished part without
doing it again.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.rows import RowAccount, check_rows
from components.stage import Outcome
from components.storage import Location

log = logging.getLogger("aerie")

ACCOUNT_KEY = b"aerie.account"
FORMAT_KEY = b"aerie.format"
FORMAT = 1
"""Raise it when the columns of a part, or what they mean, change; parts from before it was recorded are of format 1."""
QUARANTINE = "quarantine.jsonl"


class CorruptPart(Exception):
    """A part, or one of its rows, does not hold what was written; names the file and the row."""

    fix = "delete the stage's _manifest.json and this file, and run again"

    def __init__(self, part: Location, row: int | None, problem: str) -> None:
        super().__init__(part.uri, row, problem)
        self.part, self.row, self.problem = part, row, problem

    def __str__(self) -> str:
        place = self.part.uri if self.row is None else f"{self.part.uri}, row {self.row}"
        return f"{place}: {self.problem}. Fix: {self.fix}"


class UnknownFormat(CorruptPart):
    """A part in a format that this version of the code does not read."""

    fix = "use the version that wrote it, or make the stage again with --force"


@dataclass
class PartAccount:
    """What became of the rows that one part stands for."""

    kept: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)
    """Sums that the stage's facts are made of, tokens for example."""
    quarantine: list[dict[str, Any]] = field(default_factory=list)

    def drop(self, reason: str, place: Mapping[str, Any], detail: str = "") -> None:
        self.dropped[reason] += 1
        self.quarantine.append({**place, "reason": reason, "detail": detail})

    def fail(self, reason: str, place: Mapping[str, Any], detail: str = "") -> None:
        self.failed[reason] += 1
        self.quarantine.append({**place, "reason": reason, "detail": detail})

    def add(self, other: "PartAccount") -> None:
        self.kept += other.kept
        self.truncated += other.truncated
        for mine, theirs in ((self.dropped, other.dropped), (self.failed, other.failed), (self.figures, other.figures)):
            mine.update(theirs)
        self.quarantine += other.quarantine

    def rows(self) -> RowAccount:
        rows_in = self.kept + self.truncated + self.dropped.total() + self.failed.total()
        return RowAccount(rows_in, self.kept, self.truncated, dict(self.dropped), dict(self.failed))


def part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def part_names(folder: Location) -> list[str]:
    return [name for name in folder.files() if name.startswith("part-")]


@contextmanager
def part_writer(part: Location, schema: pa.Schema, account: PartAccount) -> Iterator[pq.ParquetWriter]:
    """Writes a part table by table, each a Parquet row group; the part appears, whole, when the block ends."""
    # Plain and uncompressed: hidden states do not compress, and a dictionary of them would only be built to be dropped.
    with (
        part.writer() as stream,
        pq.ParquetWriter(stream, schema, use_dictionary=False, compression="NONE", write_statistics=False) as writer,
    ):
        yield writer
        footer = {ACCOUNT_KEY: json.dumps(vars(account)).encode(), FORMAT_KEY: str(FORMAT).encode()}
        writer.add_key_value_metadata(footer)


@contextmanager
def open_part(part: Location) -> Iterator[pq.ParquetFile]:
    """The part's Parquet file, for reading any row group of it.

    Raises:
        CorruptPart: it is no whole Parquet file.
        UnknownFormat: its columns are those of another version of the code.
    """
    with part.open() as stream:
        try:
            file = pq.ParquetFile(stream, pre_buffer=not part.is_local)  # on S3 a request a column chunk is slow
        except pa.ArrowException as error:
            raise CorruptPart(part, None, f"not a whole Parquet file ({error})") from error
        found = _footer(file).get(FORMAT_KEY, b"1").decode()
        if found != str(FORMAT):
            raise UnknownFormat(part, None, f"it has format {found}, this version reads format {FORMAT}")
        yield file


def read_account(part: Location) -> PartAccount:
    """What the part's footer says of its rows.

    Raises:
        CorruptPart: it is no Parquet file of ours.
    """
    with open_part(part) as file:
        footer = _footer(file)
    if ACCOUNT_KEY not in footer:
        raise CorruptPart(part, None, "its footer has no account of its rows: no data stage wrote it")
    stored = json.loads(footer[ACCOUNT_KEY])
    for name in ("dropped", "failed", "figures"):
        stored[name] = Counter(stored[name])
    return PartAccount(**stored)


def read_columns(part: Location, columns: list[str] | None) -> pa.Table:
    """Whole columns of a part; None: all of them.

    Raises:
        CorruptPart: it is no whole part, or of another version's format.
    """
    with open_part(part) as file:
        return file.read(columns=columns)


def conclude(stage: str, output: Location, max_dropped_fraction: float) -> Outcome:
    """Add up the accounts of all parts, write the quarantine, log the table and hand back rows and figures.

    Raises:
        TooManyRowsLost: more rows were lost than allowed.
    """
    total = PartAccount()
    with output.join(QUARANTINE).writer() as stream:
        for name in part_names(output):
            account = read_account(output.join(name))
            stream.write(_quarantine_lines(account.quarantine))
            account.quarantine.clear()  # the lost rows of one part are in memory at a time
            total.add(account)
    rows = total.rows()
    log.info("%s: %s", stage, rows.table())
    check_rows(rows, max_dropped_fraction, stage, output.join(QUARANTINE).uri)
    return Outcome(facts=dict(total.figures), rows=rows)


def write_quarantine(folder: Location, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON line for every row that was lost: its place, the reason and what was found."""
    folder.join(QUARANTINE).write_bytes(_quarantine_lines(rows))


def _quarantine_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows).encode()


def _footer(file: pq.ParquetFile) -> Mapping[bytes, bytes]:
    return file.metadata.metadata or {}
