"""Shards: what is written is what is read, row by row, and nothing damaged or half-written is taken for data."""

import multiprocessing
import os
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from components.data.parts import CorruptPart, PartAccount, part_names, part_writer, read_account
from components.data.shards import (
    StoredDocument,
    document_index,
    feature_row,
    read_document,
    read_documents,
    read_input_ids,
    read_shard,
    write_shard,
)
from components.storage import Location

HIDDEN, NUM_AUX = 8, 3


def document(key: str, num_tokens: int, seed: int = 0) -> StoredDocument:
    generator = torch.Generator().manual_seed(seed)
    return StoredDocument(
        input_ids=torch.randint(0, 500, (num_tokens,), generator=generator),
        loss_mask=torch.arange(num_tokens) % 3 == 1,
        aux_hidden=torch.randn(num_tokens, NUM_AUX * HIDDEN, generator=generator).bfloat16(),
        last_hidden=torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16(),
        key=key,
        family="maths",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    """Two shards of three documents; the middle one of each is held out."""
    location = Location(str(tmp_path))
    for shard in range(2):
        documents = [document(f"p{shard}{i}:0", 5 + i, seed=10 * shard + i) for i in range(3)]
        rows = [feature_row(d, d.key[:3], ("train", "held_out", "train")[i]) for i, d in enumerate(documents)]
        write_shard(location.join(f"part-0000{shard}.parquet"), rows, PartAccount(kept=3))
    return location


def assert_same(found: StoredDocument, expected: StoredDocument) -> None:
    assert (found.key, found.family) == (expected.key, expected.family)
    for name in ("input_ids", "loss_mask", "aux_hidden", "last_hidden"):
        left, right = getattr(found, name), getattr(expected, name)
        assert left.dtype == right.dtype
        assert torch.equal(left, right), name


def test_documents_come_back_as_written(folder: Location):
    expected = [document(f"p{shard}{i}:0", 5 + i, seed=10 * shard + i) for shard in range(2) for i in (0, 2)]
    for found, wanted in zip(read_documents(folder, "train"), expected, strict=True):
        assert_same(found, wanted)
    assert [d.key for d in read_documents(folder, "held_out")] == ["p01:0", "p11:0"]
    assert list(read_documents(folder, "validation")) == []


def test_index_leads_to_each_row(folder: Location):
    index = document_index(folder)
    assert [(row.key, row.split, row.num_tokens) for row in index][:2] == [
        ("p00:0", "train", 5),
        ("p01:0", "held_out", 6),
    ]
    for row in index:
        found = read_document(folder, row.shard, row.row)
        assert found.key == row.key
        assert len(found.input_ids) == row.num_tokens
        assert_same(read_shard(folder, row.shard)[row.row], found)


def test_input_ids_are_those_of_all_documents(folder: Location):
    every = {i for name in part_names(folder) for d in read_shard(folder, name) for i in d.input_ids.tolist()}
    assert read_input_ids(folder).tolist() == sorted(every)


def test_a_flipped_byte_names_file_and_row(folder: Location):
    shard = folder.join("part-00001.parquet")
    intact = read_document(folder, shard.name, 1)
    content = bytearray(shard.path.read_bytes())
    place = content.find(intact.aux_hidden.view(torch.uint8).numpy().tobytes())
    content[place + 40] ^= 1
    shard.path.write_bytes(content)
    assert_same(read_document(folder, shard.name, 0), document("p10:0", 5, seed=10))
    with pytest.raises(CorruptPart, match=r"part-00001\.parquet, row 1: its checksum"):
        read_document(folder, shard.name, 1)
    with pytest.raises(CorruptPart):
        list(read_documents(folder, "held_out"))


def test_a_cut_off_file_is_refused(folder: Location):
    shard = folder.join("part-00000.parquet")
    shard.path.write_bytes(shard.path.read_bytes()[:-20])
    with pytest.raises(CorruptPart, match="not a whole Parquet file"):
        read_document(folder, shard.name, 0)
    with pytest.raises(CorruptPart, match="not a whole Parquet file"):
        read_account(shard)


def test_a_document_with_a_short_mask_cannot_be_made():
    whole = document("p:0", 5)
    with pytest.raises(ValueError, match="different numbers of tokens"):
        StoredDocument(whole.input_ids, whole.loss_mask[:-1], whole.aux_hidden, whole.last_hidden, "p:0", "maths")


def test_a_killed_writer_leaves_no_part(tmp_path: Path):
    process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == 1
    assert list(tmp_path.iterdir()), "the writer had begun"
    assert part_names(Location(str(tmp_path))) == []


def _write_and_die(folder: str) -> None:
    schema = pa.schema([("x", pa.int64())])
    with part_writer(Location(folder).join("part-00000.parquet"), schema, PartAccount()) as writer:
        writer.write_table(pa.table({"x": [1]}, schema=schema))
        os._exit(1)


def test_an_account_travels_in_its_part(tmp_path: Path):
    part = Location(str(tmp_path)).join("part-00000.parquet")
    account = PartAccount(kept=1)
    account.figures.update(tokens=7)
    with part_writer(part, pa.schema([("x", pa.int64())]), account) as writer:
        account.drop("too_long", {"key": "a:0"}, "9 tokens")
        account.fail("no_answer", {"key": "b:0"})
        writer.write_table(pa.table({"x": [1]}))
    found = read_account(part)
    assert found == account
    assert found.rows().table() == "in 3, kept 1, truncated 0, dropped[too_long] 1, failed[no_answer] 1"
