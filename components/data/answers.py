"""Recorded answers: one row an answered turn, with the checksum of all that it holds."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from components.data.parts import CRC, CorruptPart, PartAccount, checksum, damage_named, part_writer, read_columns
from components.storage import Location

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("prompt_key", pa.string()),
        ("family", pa.string()),
        ("split", pa.string()),
        ("turn", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        (CRC, pa.uint32()),
    ]
)
IDS = ("prompt_ids", "output_ids")
FINISHED, CUT_OFF = "stop", "length"


def write_answers(part: Location, rows: Iterable[Mapping[str, Any]], account: PartAccount) -> None:
    """Write answered turns as one part, whole or not at all."""
    with part_writer(part, SCHEMA, account) as writer:
        sealed = [{**row, CRC: _checksum(row)} for row in rows]
        writer.write_table(pa.Table.from_pylist(sealed, schema=SCHEMA))


def read_answers(part: Location) -> list[dict[str, Any]]:
    """All answered turns of a part, in their order.

    Raises:
        CorruptPart: it is no whole part, or a row does not hold what was written.
    """
    table = read_columns(part, SCHEMA.names)
    with damage_named(part, None, "cannot be read"):
        rows = table.to_pylist()
    for number, row in enumerate(rows):
        if not is_intact(row):
            raise CorruptPart(part, number, "its checksum is not the one that was written with it")
    return rows


def is_intact(row: Mapping[str, Any]) -> bool:
    """Whether a row, with every column of it, is what was written."""
    if any(row[name] is None or None in row[name] for name in IDS):
        return False
    return row[CRC] == _checksum(row)


def _checksum(row: Mapping[str, Any]) -> int:
    names = [name for name in SCHEMA.names if name not in (*IDS, CRC)]
    ids = [np.asarray(row[name], dtype=np.int32).tobytes() for name in IDS]
    return checksum([*(str(row.get(name)).encode() for name in names), *ids])
