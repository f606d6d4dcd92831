"""What is tried next after each death of a worker, told from files alone."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.parts import PartAccount, part_writer, read_account, read_columns
from components.data.pieces import Pieces, parts_in_pieces
from components.storage import Location

SCHEMA = pa.schema([("row", pa.int64())])


@pytest.fixture
def output(tmp_path) -> Location:
    return Location(str(tmp_path / "output"))


def write(file: Location, rows: range, account: PartAccount) -> None:
    with part_writer(file, SCHEMA, account) as writer:
        for row in rows:  # a row group each, as shards of features have
            writer.write_table(pa.Table.from_pylist([{"row": row}], schema=SCHEMA))


def work(output: Location, num_rows: int, deadly: set[int], max_attempts: int) -> bool:
    """One life of a worker; whether it lived to make the part."""
    pieces = Pieces(output, 0, num_rows, max_attempts)
    for rows in pieces.left():
        if pieces.is_lost(rows):
            account = PartAccount()
            account.fail(pieces.verdict(rows).reason, {"key": rows.start})
            write(pieces.file(rows), range(0), account)
        else:
            pieces.begin(rows)
            if deadly & set(rows):
                return False
            write(pieces.file(rows), rows, PartAccount(kept=len(rows)))
        pieces.end(rows)
    pieces.join(output.join("part-00000.parquet"), SCHEMA)
    return True


@settings(deadline=None, max_examples=10)  # each writes files
@given(st.integers(0, 80), st.sets(st.integers(0, 79), max_size=4), st.integers(1, 3))
def test_only_deadly_rows_are_lost(tmp_path_factory, num_rows, deadly, max_attempts):
    output = Location(str(tmp_path_factory.mktemp("pieces")))
    deadly &= set(range(num_rows))
    deaths = 0
    while not work(output, num_rows, deadly, max_attempts):
        deaths += 1
        assert deaths <= len(deadly) * (3 + max_attempts)
    part = output.join("part-00000.parquet")
    kept = sorted(set(range(num_rows)) - deadly)
    assert read_columns(part, ["row"])["row"].to_pylist() == kept
    account = read_account(part)
    assert (account.kept, account.failed.total()) == (len(kept), len(deadly))
    assert [lost["key"] for lost in account.quarantine] == sorted(deadly)
    assert output.files() == ["part-00000.parquet"]


def test_innocent_rows_come_before_suspects(output):
    assert not work(output, 64, {0}, 3)
    assert not work(output, 64, {0}, 3)
    eights = [range(start, start + 8) for start in range(8, 64, 8)]
    assert Pieces(output, 0, 64, 3).left() == eights + [range(row, row + 1) for row in range(8)]


def test_what_is_done_is_not_tried_again(output):
    assert not work(output, 16, {9}, 3)
    assert not work(output, 16, {9}, 3)
    done = [name for name in output.files() if name.endswith(".parquet")]
    assert len(done) == 4
    assert not {(0, 2), (2, 4), (4, 6), (6, 8)} & {(rows.start, rows.stop) for rows in Pieces(output, 0, 16, 3).left()}


def test_only_a_row_alone_has_a_draft(output):
    pieces = Pieces(output, 0, 4, 3)
    assert pieces.draft(range(2)) is None
    assert pieces.draft(range(1)) is not None


def test_parts_in_pieces_are_found_by_name():
    assert parts_in_pieces(["_pieces/7/00000-00008.try-0", "_cut.json", "part-00003.parquet"]) == {7}
