"""Rows are read one by one, from few open files, and kept within a bound."""

import gc
import random
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.data.open_shards import Kept, OpenShards
from components.data.parts import CorruptPart, PartAccount
from components.data.shards import document_index, feature_row, read_document, write_shard
from components.storage import Location
from components.training.order import Entry
from components.training.sources import StoredDocuments
from tests.components.data.test_shards import assert_same, document, folder

__all__ = ["folder"]


@pytest.mark.parametrize("max_open", [1, 2])
def test_any_order_gives_every_row(folder: Location, max_open: int) -> None:
    index = document_index(folder) * 3
    random.Random(0).shuffle(index)
    shards = OpenShards(folder, max_open)
    for row in index:
        assert_same(shards.read(row.shard, row.row), read_document(folder, row.shard, row.row))


def test_a_row_is_read_without_its_neighbours(folder: Location) -> None:
    """Their bytes are damaged."""
    shard = folder.join("part-00001.parquet")
    neighbour = read_document(folder, shard.name, 2).aux_hidden.view(torch.uint8).numpy().tobytes()
    content = shard.path.read_bytes()
    shard.path.write_bytes(content.replace(neighbour, bytes(len(neighbour))))
    source = StoredDocuments(folder, kept_bytes=0)
    entries = [Entry(shard.name, row, row) for row in range(3)]
    documents = source.documents(entries)
    for entry in entries[:2]:
        assert_same(next(documents), read_document(folder, shard.name, entry.row))
    with pytest.raises(CorruptPart):
        next(documents)


def test_of_what_was_read_nothing_stays(tmp_path: Path) -> None:
    """Arrow's counter is the process's, so the documents are far larger than whatever else may come and go."""
    folder = Location(str(tmp_path))
    documents = [document(f"p{i}:0", 100_000, seed=i) for i in range(4)]
    write_shard(
        folder.join("part-00000.parquet"), [feature_row(d, d.key, "train") for d in documents], PartAccount(kept=4)
    )
    gc.collect()
    before = pa.total_allocated_bytes()
    entries = [Entry("part-00000.parquet", row, row) for row in range(4)]
    found = StoredDocuments(folder, kept_bytes=0).documents(entries)
    for written in documents:
        assert_same(next(found), written)
        gc.collect()
        assert pa.total_allocated_bytes() < before + written.num_bytes / 2


def test_documents_that_are_kept_are_not_read_again(folder: Location) -> None:
    entries = [Entry(row.shard, row.row, number) for number, row in enumerate(document_index(folder))]
    first_two = sum(read_document(folder, entry.shard, entry.row).num_bytes for entry in entries[:2])
    source = StoredDocuments(folder, kept_bytes=first_two)
    once, again = list(source.documents(entries)), list(source.documents(entries))
    assert [one is other for one, other in zip(once, again, strict=True)] == [True, True] + [False] * 4


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9))), st.integers(0, 20))
def test_no_more_is_kept_than_there_is_room_for(offers: list[tuple[int, int]], room: int) -> None:
    kept: Kept[int, int] = Kept(room)
    for key, size in offers:
        had, room_before = kept.get(key), kept.room_bytes
        kept.offer(key, size, size)
        taken = had is None and size <= room_before
        assert kept.get(key) == (size if taken else had)
    held = [size for key in range(6) if (size := kept.get(key)) is not None]
    assert sum(held) + kept.room_bytes == room
    assert kept.room_bytes >= 0
