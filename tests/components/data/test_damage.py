"""Damaged parts: whatever bit of one flips, no reader takes it for data, and `--verify` names it and goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.answers import SCHEMA as ANSWERS
from components.data.answers import read_answers, write_answers
from components.data.documents import merge_turns
from components.data.parts import (
    CorruptPart,
    PartAccount,
    open_part,
    part_name,
    part_writer,
    read_account,
    read_columns,
)
from components.data.shards import SCHEMA as FEATURES
from components.data.shards import (
    document_index,
    feature_row,
    read_documents,
    read_row,
    read_shard,
    write_shard,
)
from components.data.verify import Verification
from components.storage import Location
from tests.components.data.test_verify import answers, findings, make_set, recorded

PART = part_name(0)


def write_answered(folder: Location) -> None:
    account = PartAccount(kept=4)
    account.drop("too_long", {"key": "p9:0"}, "9 tokens")
    write_answers(folder.join(PART), answers(), account)


def write_recorded(folder: Location) -> None:
    account = PartAccount(kept=4)
    account.figures.update(documents=4)
    rows = [feature_row(recorded(turns), turns.prompt_key, turns.split) for turns in merge_turns(answers())]
    write_shard(folder.join(PART), rows, account)


def document_values(folder: Location) -> list[Any]:
    return [
        (d.key, d.family, *(t.tolist() for t in (d.input_ids, d.loss_mask, d.aux_hidden, d.last_hidden)))
        for d in read_shard(folder, PART)
    ]


READERS: dict[Callable[[Location], None], list[Callable[[Location], Any]]] = {
    write_answered: [
        lambda folder: vars(read_account(folder.join(PART))),
        lambda folder: read_answers(folder.join(PART)),
        lambda folder: read_columns(folder.join(PART), ["split", "family"]).to_pylist(),
    ],
    write_recorded: [
        lambda folder: vars(read_account(folder.join(PART))),
        document_index,
        document_values,
        lambda folder: [document.key for document in read_documents(folder, "train")],
    ],
}


@pytest.mark.parametrize("write", READERS)
def test_a_flipped_bit_is_seen_by_whoever_reads_it(tmp_path_factory: pytest.TempPathFactory, write):
    folder = Location(str(tmp_path_factory.mktemp("set")))
    write(folder)
    file = folder.join(PART).path
    whole = file.read_bytes()
    intact = [read(folder) for read in READERS[write]]

    @settings(max_examples=60)
    @given(st.integers(0, 8 * len(whole) - 1))
    def flip(bit: int) -> None:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        is_noticed = False
        for read, expected in zip(READERS[write], intact, strict=True):
            try:
                assert read(folder) == expected
            except CorruptPart:
                is_noticed = True
        found: list[Any] = []
        Verification(found.append).check(folder)
        assert {finding.file for finding in found} <= {str(file)}
        assert found or not is_noticed

    flip()


@pytest.mark.parametrize(
    ("kind", "column"),
    [(kind, name) for kind, schema in (("responses", ANSWERS), ("features", FEATURES)) for name in schema.names],
)
def test_a_changed_value_of_any_column_is_named_by_its_row(tmp_path: Path, kind: str, column: str):
    """The file itself is whole, as after a fault of memory: only the row's own checksum can tell."""
    storage = Location(str(tmp_path))
    features = make_set(storage)
    folder = features if kind == "features" else storage.join("responses", storage.join("responses").folders()[0])
    part = folder.join(PART)
    rows, account = read_columns(part, None).to_pylist(), read_account(part)
    rows[2][column] = changed(rows[2][column])
    schema = FEATURES if kind == "features" else ANSWERS
    with part_writer(part, schema, account) as writer:
        for row in rows:
            writer.write_batch(row_batch(row, schema))
    problems = [finding for finding in findings(folder) if finding.row is not None]
    assert {finding.row for finding in problems} >= {2}
    assert any("checksum" in finding.problem for finding in problems if finding.row == 2)
    with pytest.raises(CorruptPart, match="row 2: its checksum"), open_part(part) as file:
        read_row(part, file, 2) if kind == "features" else read_answers(part)


def test_a_split_that_is_not_that_of_the_responses_is_named(tmp_path: Path):
    storage = Location(str(tmp_path))
    folder = make_set(storage)
    account = read_account(folder.join(PART))
    documents = [recorded(turns) for turns in merge_turns(answers())]
    names = [("p0", "train"), ("p1", "held_out"), ("p8", "train"), ("p3", "train")]
    rows = [feature_row(document, *of) for document, of in zip(documents, names, strict=True)]
    write_shard(folder.join(PART), rows, account)
    assert [(f.row, f.problem) for f in findings(folder) if f.row is not None] == [
        (1, "its split is held_out, the responses say train"),
        (2, "its prompt key is p8, the responses say p2"),
    ]


def test_damaged_responses_are_named_once_and_the_features_made_of_them_are_checked(tmp_path: Path):
    storage = Location(str(tmp_path))
    features = make_set(storage)
    (responses,) = (storage.join("responses", name) for name in storage.join("responses").folders())
    content = bytearray(responses.join(PART).read_bytes())
    content[content.find(np.asarray([12, 20, 30], np.int32).tobytes())] ^= 1
    responses.join(PART).path.write_bytes(content)
    verification_found = findings(features)
    assert [(f.file, "not compared" in f.problem) for f in verification_found] == [(responses.join(PART).uri, True)]
    by_file, by_row = findings(responses)
    assert (by_file.row, by_row.row, by_row.key) == (None, 2, "p2:0")


def test_a_manifest_that_is_no_json_is_named_and_the_rows_are_checked(tmp_path: Path):
    folder = make_set(Location(str(tmp_path)))
    folder.join("_manifest.json").path.write_bytes(b'{"files": {')
    found: list[Any] = []
    verification = Verification(found.append)
    verification.check(folder)
    assert [(f.file, f.problem.split(" (")[0]) for f in found] == [(folder.join("_manifest.json").uri, "it is no JSON")]
    assert verification.rows == 4


def test_a_storage_that_cannot_be_reached_is_no_damage(s3_bucket: str, monkeypatch: pytest.MonkeyPatch):
    folder = Location(f"{s3_bucket}/set")
    write_recorded(folder)
    with open_part(folder.join(PART)) as file:
        monkeypatch.setattr(file, "read_row_group", lambda row: folder.join("absent").open())
        with pytest.raises(FileNotFoundError):
            read_row(folder.join(PART), file, 0)
    with pytest.raises(FileNotFoundError):
        read_account(folder.join(part_name(1)))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(OSError, match="AWS Error"):
        read_account(folder.join(PART))


def changed(value: Any) -> Any:
    if isinstance(value, str):
        return value[:1] + chr(ord(value[1]) ^ 1) + value[2:]
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:]
    return [value[0] ^ 1, *value[1:]] if isinstance(value, list) else value ^ 1


def row_batch(row: dict[str, Any], schema: Any) -> Any:
    return pa.RecordBatch.from_pylist([row], schema=schema)
