"""Errors that rows cannot be behind, told from those that they may be."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from components import s3
from components.data.answers import SCHEMA as RESPONSES
from components.data.answers import read_answers, write_answers
from components.data.blame import Unheard, innocent_cause
from components.data.part_worker import PartTask, Piece
from components.data.parts import CorruptPart, PartAccount, part_writer, read_columns
from components.data.shards import write_shard
from components.lease import Hold, LeaseLost
from components.storage import Location
from tests.components.data.counting import CountingWorker
from tests.conftest import free_port, s3_environment


def caused_by(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Exception as error:
        return innocent_cause(error)
    pytest.fail("nothing was raised")


def write_part(part: Location) -> None:
    with part_writer(part, RESPONSES, PartAccount()) as writer:
        writer.write_table(pa.Table.from_pylist([], schema=RESPONSES))


def test_a_folder_that_cannot_be_used_is_the_storages_doing(tmp_path: Path) -> None:
    file = Location(str(tmp_path / "file"))
    file.write_bytes(b"")
    for work in (
        lambda: file.join("below").write_bytes(b""),
        lambda: file.join("below").read_bytes(),
        lambda: read_columns(file.join("below"), None),
        lambda: write_part(file.join("below")),
        lambda: write_shard(file.join("below"), [], PartAccount()),
    ):
        assert caused_by(work) == "storage"


@pytest.mark.parametrize("column", ["output_ids", "crc32"])
def test_a_damaged_part_is_neither_the_storages_nor_its_rows_doing(tmp_path: Path, column: str) -> None:
    """pyarrow finds one of them, by the checksum of a page and as an OSError; the row's own checksum the other."""
    part = Location(str(tmp_path / "part-00000.parquet"))
    row = dict.fromkeys(RESPONSES.names, "x") | {"turn": 0, "prompt_ids": [7], "output_ids": [123456789]}
    if column == "output_ids":
        write_answers(part, [row], PartAccount(kept=1))
        part.path.write_bytes(part.path.read_bytes().replace(int.to_bytes(123456789, 4, "little"), b"\0\0\0\0"))
    else:
        with part_writer(part, RESPONSES, PartAccount(kept=1)) as writer:
            writer.write_table(pa.Table.from_pylist([row | {"crc32": 1}], schema=RESPONSES))
    assert caused_by(lambda: read_answers(part)) == "damaged"
    with pytest.raises(CorruptPart) as found:
        read_answers(part)
    assert isinstance(found.value.__cause__, OSError) == (column == "output_ids")
    sent = pickle.loads(pickle.dumps(found.value))
    assert (type(sent), str(sent)) == (CorruptPart, str(found.value))


@pytest.fixture
def silent_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    """Where nobody listens."""
    for name, value in s3_environment(f"http://127.0.0.1:{free_port()}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3.client.cache_clear()
    yield Location("s3://bucket/part")
    s3.client.cache_clear()


def test_an_s3_that_does_not_answer_is_the_storages_doing(silent_s3: Location) -> None:
    for work in (silent_s3.read_bytes, lambda: write_part(silent_s3), lambda: read_columns(silent_s3, None)):
        assert caused_by(work) == "storage"


def test_what_an_engine_raises_may_be_the_rows_doing(tmp_path: Path) -> None:
    """Also while a part is being written, whose writer the error passes."""

    def rows() -> Iterator[dict]:
        raise BrokenPipeError("a worker of the engine has gone")
        yield {}

    assert caused_by(lambda: write_shard(Location(str(tmp_path / "part")), rows(), PartAccount())) is None
    worker = CountingWorker(Location(str(tmp_path)), lambda done: None, 1, (), {0})
    assert caused_by(lambda: worker.make([Piece(PartTask(0), Location(str(tmp_path / "part")))])) is None
    assert caused_by(lambda: (tmp_path / "states").read_bytes()) is None


def test_causes_are_found_below_what_was_made_of_them() -> None:
    def full() -> None:
        try:
            with open("/dev/full", "wb", buffering=0) as device:
                device.write(b".")
        except OSError as error:
            raise RuntimeError("spilling failed") from error

    def lost() -> None:
        try:
            Hold(Location("/nowhere/_lease.json"), "ours").check()
        except LeaseLost as error:
            raise RuntimeError("in a callback") from error

    def unheard() -> None:
        try:
            raise Unheard
        except Unheard:
            raise ValueError("in a callback") from None

    assert caused_by(full) == "full"
    assert caused_by(lost) == "lost"
    assert caused_by(unheard) == "driver"
