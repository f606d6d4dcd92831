"""Parts: the Parquet files that data stages are written in, each whole or not there, with its account in its footer.

The account travels inside the part, so a resumed run knows what became of every row of a finished part without
doing it again.
"""

import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.data.prompt_list import Place, prompt_key, read_places, with_places
from components.rows import RowAccount, check_rows
from components.stage import QUARANTINE, Outcome
from components.storage import Location, is_unreachable

log = logging.getLogger("aerie")

ACCOUNT_KEY = b"aerie.account"
ACCOUNT_CRC_KEY = b"aerie.account_crc32"
SCHEMA_CRC_KEY = b"aerie.schema_crc32"
FORMAT_KEY = b"aerie.format"
FORMAT = 2
"""Raise it when the columns of a part, or what they mean, change; parts from before it was recorded are of format 1."""
CRC = "crc32"
"""Column of the `checksum` of all other columns of its row."""


LAYOUT = {"use_dictionary": False, "compression": "NONE", "write_statistics": False, "write_page_checksum": True}
"""Plain and uncompressed: hidden states do not compress, and a dictionary of them would only be built to be dropped."""


class CorruptPart(Exception):
    """A part, or one of its rows, does not hold what was written; names the file and the row."""

    fix = "delete the stage's _manifest.json and this file, and run again"

    def __init__(self, part: Location, row: int | None, problem: str) -> None:
        super().__init__(part, row, problem)  # what pickle makes it of again: workers raise it for the driver
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
    with part.writer() as stream, pq.ParquetWriter(stream, schema, **LAYOUT) as writer:
        yield writer
        text = json.dumps(vars(account)).encode()
        footer = {ACCOUNT_KEY: text, ACCOUNT_CRC_KEY: _crc(text), SCHEMA_CRC_KEY: _schema_crc(schema)}
        writer.add_key_value_metadata({**footer, FORMAT_KEY: str(FORMAT).encode()})


@contextmanager
def open_part(part: Location, check_pages: bool = False) -> Iterator[pq.ParquetFile]:
    """The part's Parquet file, for reading any row group of it.

    Args:
        part: Where it lies.
        check_pages: Compare Parquet's own checksums: for readers of single columns, which cannot compare those of rows.

    Raises:
        CorruptPart: it is no whole Parquet file.
        UnknownFormat: its columns are those of another version of the code.
    """
    with part.open() as stream:
        with damage_named(part, None, "not a whole Parquet file"):
            # on S3 a request a column chunk is slow
            file = pq.ParquetFile(stream, pre_buffer=not part.is_local, page_checksum_verification=check_pages)
            num_rows = sum(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
            found = _footer(file).get(FORMAT_KEY, b"1").decode(errors="replace")
            schema_crc = _schema_crc(file.schema_arrow)
        if found != str(FORMAT):
            raise UnknownFormat(part, None, f"it has format {found}, this version reads format {FORMAT}")
        if _footer(file).get(SCHEMA_CRC_KEY) != schema_crc:
            raise CorruptPart(part, None, "its columns are not those that were written")
        if num_rows != file.metadata.num_rows:
            raise CorruptPart(
                part, None, f"its row groups have {num_rows} rows, its footer says {file.metadata.num_rows}"
            )
        yield file


@contextmanager
def damage_named(part: Location, row: int | None, problem: str) -> Iterator[None]:
    """Whatever Arrow and Python raise over damaged content becomes a `CorruptPart`; a storage out of reach does not."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if is_unreachable(error):
            raise
        raise CorruptPart(part, row, f"{problem} ({_in_a_line(error)})") from error


def checksum(contents: Iterable[Any]) -> int:
    """crc32 over bytes-like contents and where each of them ends."""
    found = 0
    for content in contents:
        found = zlib.crc32(content, zlib.crc32(b"%d:" % len(content), found))
    return found


def read_account(part: Location) -> PartAccount:
    """What the part's footer says of its rows.

    Raises:
        CorruptPart: it is no Parquet file of ours.
    """
    with open_part(part) as file:
        return account_in(part, file)


def account_in(part: Location, file: pq.ParquetFile) -> PartAccount:
    """The account of an opened part.

    Raises:
        CorruptPart: it is not there, or not what was written.
    """
    footer = _footer(file)
    if ACCOUNT_KEY not in footer:
        raise CorruptPart(part, None, "its footer has no account of its rows: no data stage wrote it")
    text = footer[ACCOUNT_KEY]
    if _crc(text) != footer.get(ACCOUNT_CRC_KEY):
        raise CorruptPart(part, None, "the checksum of its account is not the one that was written with it")
    stored = json.loads(text)
    for name in ("dropped", "failed", "figures"):
        stored[name] = Counter(stored[name])
    return PartAccount(**stored)


def read_columns(part: Location, columns: list[str] | None) -> pa.Table:
    """Whole columns of a part; None: all of them.

    Raises:
        CorruptPart: it is no whole part, or of another version's format, or does not hold what was written.
    """
    with open_part(part, check_pages=True) as file, damage_named(part, None, "cannot be read"):
        table = file.read(columns=columns)
        table.validate(full=True)
        if len(table) != file.metadata.num_rows:
            raise CorruptPart(part, None, f"{len(table)} of its {file.metadata.num_rows} rows can be read")
        return table


def conclude(stage: str, output: Location, max_dropped_fraction: float, prompts: Location | None = None) -> Outcome:
    """Add up the accounts of all parts, write the quarantine, log the table and hand back rows and figures.

    Args:
        stage: Its name.
        output: Folder of the parts.
        max_dropped_fraction: Share of the rows that may be lost.
        prompts: Output folder of the prompts stage, which knows the file and line of each lost row.

    Raises:
        TooManyRowsLost: more rows were lost than allowed.
    """
    total = PartAccount()
    places = _places(output, prompts) if prompts else {}
    with output.join(QUARANTINE).writer() as stream:
        for name in part_names(output):
            account = read_account(output.join(name))
            stream.write(_quarantine_lines(with_places(account.quarantine, places)))
            account.quarantine.clear()  # the lost rows of one part are in memory at a time
            total.add(account)
    rows = total.rows()
    log.info("%s: %s", stage, rows.table())
    check_rows(rows, max_dropped_fraction, stage, output.join(QUARANTINE).uri)
    return Outcome(facts=dict(total.figures), rows=rows)


def _places(output: Location, prompts: Location) -> dict[str, Place]:
    accounts = (read_account(output.join(name)) for name in part_names(output))
    return read_places(prompts, {prompt_key(row["key"]) for account in accounts for row in account.quarantine})


def write_quarantine(folder: Location, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON line for every row that was lost: its place, the reason and what was found."""
    folder.join(QUARANTINE).write_bytes(_quarantine_lines(rows))


def _quarantine_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows).encode()


def _footer(file: pq.ParquetFile) -> Mapping[bytes, bytes]:
    return file.metadata.metadata or {}


def _schema_crc(schema: pa.Schema) -> bytes:
    # Parquet has a name of its own for what is in a list.
    types = [column.type.value_type if pa.types.is_list(column.type) else column.type for column in schema]
    return _crc(" ".join(f"{name} {kind}" for name, kind in zip(schema.names, types, strict=True)).encode())


def _crc(content: bytes) -> bytes:
    return str(zlib.crc32(content)).encode()


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
