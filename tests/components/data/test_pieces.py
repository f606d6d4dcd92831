"""What is tried next after each death of a worker, told from files alone."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.blame import Life
from components.data.parts import PartAccount, part_writer, read_account, read_columns
from components.data.pieces import Pieces, parts_in_pieces
from components.data.verdict import ERROR, SILENT_DEATH, Verdict
from components.storage import Location

SCHEMA = pa.schema([("row", pa.int64())])
LIFE, LATER = Life("run", "node", "1"), Life("later run", "node", "2")


def pieces_of(output: Location, num_rows: int, max_attempts: int, life: Life = LIFE, *excused: Life) -> Pieces:
    return Pieces(output, 0, num_rows, max_attempts, life, lambda other: other.run == life.run and other not in excused)


@pytest.fixture
def output(tmp_path) -> Location:
    return Location(str(tmp_path / "output"))


def write(file: Location, rows: range, account: PartAccount) -> None:
    with part_writer(file, SCHEMA, account) as writer:
        for row in rows:  # a row group each, as shards of features have
            writer.write_table(pa.Table.from_pylist([{"row": row}], schema=SCHEMA))


def work(output: Location, num_rows: int, deadly: set[int], max_attempts: int) -> bool:
    """One life of a worker; whether it lived to make the part."""
    pieces = pieces_of(output, num_rows, max_attempts)
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


@settings(max_examples=10)  # each writes files
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
    assert pieces_of(output, 64, 3).left() == eights + [range(row, row + 1) for row in range(8)]


def test_what_is_done_is_not_tried_again(output):
    assert not work(output, 16, {9}, 3)
    assert not work(output, 16, {9}, 3)
    done = [name for name in output.files() if name.endswith(".parquet")]
    assert len(done) == 4
    assert not {(0, 2), (2, 4), (4, 6), (6, 8)} & {(rows.start, rows.stop) for rows in pieces_of(output, 16, 3).left()}


def test_a_run_that_was_killed_accuses_no_row(output):
    """A row that was tried alone is tried as often as ever; what the run itself had seen of deaths stays known."""
    assert not work(output, 9, {4}, 9)  # all nine
    assert not work(output, 9, {4}, 9)  # pairs; the next process finds that rows 4 and 5 ended this one
    pieces = pieces_of(output, 9, 1)
    for number in range(3):
        pieces.begin(range(4, 5))
        pieces = pieces_of(output, 9, 1, LATER._replace(run=f"run {number}"))
        assert not pieces.is_lost(range(4, 5))
        assert {range(4, 5), range(5, 6)} <= set(pieces.left()), "the cut is forgotten"


def test_a_try_that_ended_for_want_of_storage_is_forgotten(output):
    pieces_of(output, 1, 1).begin(range(1))
    assert not pieces_of(output, 1, 1, LIFE, LIFE).is_lost(range(1))
    assert output.files() == []


def test_what_a_row_was_blamed_for_stays_known_to_later_runs(output):
    verdict = Verdict(ERROR, "Traceback:\nno memory")
    for number, blame in enumerate((verdict, None)):
        pieces = pieces_of(output, 2, 1)
        pieces.begin(range(number, number + 1))
        if blame:
            pieces.fail(range(number, number + 1), blame)
    pieces_of(output, 2, 1)  # the same run meets its own dead
    later = pieces_of(output, 2, 1, LATER)
    assert [later.is_lost(range(row, row + 1)) for row in range(2)] == [True, True]
    assert [later.verdict(range(row, row + 1)) for row in range(2)] == [verdict, SILENT_DEATH]


def test_only_a_row_alone_has_a_draft(output):
    pieces = pieces_of(output, 4, 3)
    assert pieces.draft(range(2)) is None
    assert pieces.draft(range(1)) is not None


def test_parts_in_pieces_are_found_by_name():
    assert parts_in_pieces(["_pieces/7/00000-00008.try-0", "_cut.json", "part-00003.parquet"]) == {7}
