"""Recorded features: one row a document, one Parquet row group a row, so that a reader fetches any row alone.

Names: n tokens, A aux layers, H the target's hidden size. Hidden states are stored as the bytes of their bf16 values. A document
whose features training captures itself is stored as its outline: states of no width.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from components.data.parts import (
    CRC,
    CorruptPart,
    PartAccount,
    checksum,
    damage_named,
    open_part,
    part_names,
    part_writer,
    read_columns,
)
from components.draft.batch import Document
from components.storage import Location

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("prompt_key", pa.string()),
        ("family", pa.string()),
        ("split", pa.string()),
        ("num_tokens", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("aux_hidden", pa.large_binary()),
        ("last_hidden", pa.large_binary()),
        (CRC, pa.uint32()),
    ]
)
INDEX_COLUMNS = ["key", "split", "num_tokens"]


@dataclass(frozen=True)
class StoredDocument(Document):
    """A document with the names it is stored under."""

    key: str
    family: str


class StoredRow(NamedTuple):
    """All that a row holds."""

    document: StoredDocument
    prompt_key: str
    split: str


class IndexRow(NamedTuple):
    """Where a document lies."""

    key: str
    split: str
    num_tokens: int
    shard: str
    """The file's name."""
    row: int


def feature_row(document: StoredDocument, prompt_key: str, split: str) -> dict[str, Any]:
    """The document as a row of `SCHEMA`, with the checksum of all that it holds."""
    names = {"key": document.key, "prompt_key": prompt_key, "family": document.family, "split": split}
    input_ids = document.input_ids.to(torch.int32).numpy()
    loss_mask = document.loss_mask.to(torch.uint8).numpy()
    aux_hidden, last_hidden = _to_bytes(document.aux_hidden), _to_bytes(document.last_hidden)
    return {
        **names,
        "num_tokens": len(input_ids),
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "aux_hidden": aux_hidden,
        "last_hidden": last_hidden,
        CRC: _checksum(names.values(), len(input_ids), input_ids, loss_mask, aux_hidden, last_hidden),
    }


def write_shard(shard: Location, rows: Iterable[dict[str, Any]], account: PartAccount) -> None:
    """Write rows of `feature_row` as one shard, whole or not at all; only one row is in memory at a time.

    The account may still change while the rows come.
    """
    with part_writer(shard, SCHEMA, account) as writer:
        for row in rows:
            writer.write_table(pa.Table.from_pylist([row], schema=SCHEMA))


def document_index(folder: Location) -> list[IndexRow]:
    """Every document of a features output, by shard and row; reads no features."""
    index: list[IndexRow] = []
    for name in part_names(folder):
        stored = read_columns(folder.join(name), INDEX_COLUMNS).to_pylist()
        index += [IndexRow(**values, shard=name, row=row) for row, values in enumerate(stored)]
    return index


def read_documents(folder: Location, split: str) -> Iterator[StoredDocument]:
    """The documents of one split, one in memory at a time.

    Raises:
        CorruptPart: a row does not hold what was written.
    """
    for name in part_names(folder):
        splits = read_columns(folder.join(name), ["split"]).column("split").to_pylist()
        yield from _read_rows(folder.join(name), [row for row, found in enumerate(splits) if found == split])


def read_shard(folder: Location, shard: str) -> list[StoredDocument]:
    """All documents of one shard, in the order of their rows.

    Raises:
        CorruptPart: a row does not hold what was written.
    """
    return list(_read_rows(folder.join(shard), None))


def read_document(folder: Location, shard: str, row: int) -> StoredDocument:
    """One document; reads no other.

    Raises:
        CorruptPart: the row does not hold what was written.
    """
    return next(_read_rows(folder.join(shard), [row]))


def read_input_ids(folder: Location) -> Tensor:
    """Every token id that occurs in the documents of any split, ascending and without repeats."""
    found: Tensor = torch.empty(0, dtype=torch.int64)
    for name in part_names(folder):
        ids = read_columns(folder.join(name), ["input_ids"]).column("input_ids").combine_chunks().flatten()
        found = torch.cat([found, torch.from_numpy(ids.to_numpy().astype(np.int64))]).unique()
    return found


def read_row(shard: Location, file: pq.ParquetFile, row: int) -> StoredDocument:
    """One row of an opened shard.

    Raises:
        CorruptPart: it does not hold what was written.
    """
    return read_stored_row(shard, file, row).document


def read_stored_row(shard: Location, file: pq.ParquetFile, row: int) -> StoredRow:
    """One row of an opened shard, with all its names.

    Raises:
        CorruptPart: it does not hold what was written.
    """
    with damage_named(shard, row, "cannot be read"):
        table = file.read_row_group(row)
        stored: dict[str, pa.Scalar] = {name: table.column(name)[0] for name in SCHEMA.names}
        key, prompt_key, family, split = (stored[name].as_py() for name in ("key", "prompt_key", "family", "split"))
        input_ids, loss_mask = (stored[name].values.to_numpy() for name in ("input_ids", "loss_mask"))
        aux_hidden, last_hidden = stored["aux_hidden"].as_buffer(), stored["last_hidden"].as_buffer()
        names, num_tokens = (key, prompt_key, family, split), stored["num_tokens"].as_py()
        found = _checksum(names, num_tokens, input_ids, loss_mask, aux_hidden, last_hidden)
        if found != stored[CRC].as_py():
            raise CorruptPart(shard, row, "its checksum is not the one that was written with it")
        document = StoredDocument(
            input_ids=torch.from_numpy(input_ids.astype(np.int64)),
            loss_mask=torch.from_numpy(loss_mask.astype(bool)),
            aux_hidden=_from_bytes(aux_hidden, len(input_ids)),
            last_hidden=_from_bytes(last_hidden, len(input_ids)),
            key=key,
            family=family,
        )
    return StoredRow(document, prompt_key, split)


def _read_rows(shard: Location, rows: Sequence[int] | None) -> Iterator[StoredDocument]:
    with open_part(shard) as file:
        for row in range(file.num_row_groups) if rows is None else rows:
            yield read_row(shard, file, row)


def _checksum(
    names: Iterable[str],
    num_tokens: int,
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
    aux_hidden: bytes | pa.Buffer,
    last_hidden: bytes | pa.Buffer,
) -> int:
    texts = (str(name).encode() for name in (*names, num_tokens))
    return checksum([*texts, input_ids.tobytes(), loss_mask.tobytes(), aux_hidden, last_hidden])


def _to_bytes(states: Tensor) -> bytes:
    return states.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def _from_bytes(stored: pa.Buffer, num_tokens: int) -> Tensor:
    if not stored.size:
        return torch.empty(num_tokens, 0, dtype=torch.bfloat16)
    # A copy: the buffer is read-only, and its table is gone once the document is all that is kept of it.
    return torch.frombuffer(bytearray(stored), dtype=torch.bfloat16).view(num_tokens, -1)
