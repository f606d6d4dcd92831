"""Verification finds every damaged, missing, doubled or foreign row of a set, by file, row and key, on a folder and on S3."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from components.data.answers import read_answers, write_answers
from components.data.documents import Turns, merge_turns
from components.data.parts import FORMAT_KEY, PartAccount, UnknownFormat, part_name, read_columns
from components.data.row_checks import FeatureWidths
from components.data.shards import StoredDocument, feature_row, write_shard
from components.data.verify import Finding, Verification
from components.stage import Artifact, Outcome, Output, Stage, run_stage
from components.storage import Location
from pipelines.data import app

HIDDEN, NUM_AUX = 8, 2
PART = part_name(0)


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return Location(str(tmp_path) if request.param == "folder" else f"{request.getfixturevalue('s3_bucket')}/prefix")


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return Location(str(tmp_path))


def answers() -> list[dict]:
    return [
        {
            "key": f"p{number}:0",
            "prompt_key": f"p{number}",
            "family": "maths",
            "split": "train",
            "turn": 0,
            "prompt_ids": [10 + number, 20, 30],
            "output_ids": [40, 50 + number],
            "finish_reason": "stop",
        }
        for number in range(4)
    ]


def recorded(turns: Turns) -> StoredDocument:
    num_tokens = len(turns.input_ids)
    generator = torch.Generator().manual_seed(turns.input_ids[0])
    return StoredDocument(
        input_ids=torch.tensor(turns.input_ids),
        loss_mask=torch.tensor(turns.loss_mask, dtype=torch.bool),
        aux_hidden=torch.randn(num_tokens, NUM_AUX * HIDDEN, generator=generator),
        last_hidden=torch.randn(num_tokens, HIDDEN, generator=generator),
        key=turns.key,
        family=turns.family,
    )


def write_features(part: Location, documents: Sequence[StoredDocument]) -> None:
    account = PartAccount(kept=len(documents))
    account.figures.update(documents=len(documents))
    write_shard(part, [feature_row(d, d.key[:2], "train") for d in documents], account)


def make_set(storage: Location, documents: Sequence[StoredDocument] | None = None) -> Location:
    """A finished set of responses and the features of them (or the given ones instead); the features' folder."""

    def answer(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        write_answers(output.join(PART), answers(), PartAccount(kept=4))
        return Outcome()

    def record(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        turns = merge_turns(read_answers(inputs["responses"].join(PART)))
        write_features(output.join(PART), [recorded(t) for t in turns] if documents is None else documents)
        return Outcome({"num_aux_layers": NUM_AUX, "hidden_size": HIDDEN})

    responses, _ = run_stage(Stage("responses", answer, {}), {}, storage, 60)
    features, _ = run_stage(Stage("features", record, {}, ("responses",)), {"responses": responses}, storage, 60)
    return features.location


def findings(root: Location) -> list[Finding]:
    found: list[Finding] = []
    Verification(found.append).check(root)
    return found


def documents() -> list[StoredDocument]:
    return [recorded(turns) for turns in merge_turns(answers())]


def test_a_whole_storage_without_a_fault_has_no_finding(storage: Location):
    make_set(storage)
    verification = Verification(pytest.fail)
    verification.check(storage)
    assert (verification.sets, verification.files, verification.rows) == (2, 2, 8)


def test_a_flipped_byte_is_named_by_file_row_and_key(storage: Location):
    shard = make_set(storage).join(PART)
    content = bytearray(shard.read_bytes())
    place = content.find(documents()[2].aux_hidden.bfloat16().view(torch.uint8).numpy().tobytes())
    content[place + 3] ^= 1
    shard.write_bytes(content)
    by_file, by_row = findings(storage)
    assert (by_file.file, by_file.row, by_file.problem) == (shard.uri, None, "its sha256 is not the manifest's")
    assert (by_row.file, by_row.row, by_row.key) == (shard.uri, 2, "p2:0")
    assert "checksum" in by_row.problem


def test_files_that_are_missing_cut_off_or_foreign_are_named(storage: Location):
    features = make_set(storage)
    whole = features.join(PART).read_bytes()
    features.join(PART).write_bytes(whole[:-20])
    assert [f.problem.split(" (")[0] for f in findings(features)] == [
        f"it has {len(whole) - 20} bytes, the manifest says {len(whole)}",
        "not a whole Parquet file",
    ]
    features.join(PART).delete()
    assert [f.problem for f in findings(features)] == ["the manifest lists it, and it is not there"]
    features.join(PART).write_bytes(whole)
    write_features(features.join(part_name(1)), documents()[:1])
    assert {f.problem for f in findings(features)} == {"the manifest does not list it", "the set has this key already"}


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lambda d: replace(d, last_hidden=d.last_hidden * float("nan")), "last_hidden holds NaN or infinity"),
        (lambda d: replace(d, aux_hidden=d.aux_hidden / 0), "aux_hidden holds NaN or infinity"),
        (lambda d: replace(d, aux_hidden=d.aux_hidden[:, :HIDDEN]), "aux_hidden has 8 values a token"),
        (lambda d: replace(d, input_ids=d.input_ids + 1), "its ids are not those of the responses"),
        (lambda d: replace(d, loss_mask=~d.loss_mask), "its loss mask does not mark the answers"),
        (lambda d: replace(d, loss_mask=d.loss_mask & False), "no token of it is supervised"),
        (lambda d: replace(d, family="chat"), "its family is chat"),
        (lambda d: replace(d, key="p9:0"), "no answered turn of the same part begins it"),
        (lambda d: replace(d, key="p0:0"), "the set has this key already"),
    ],
)
def test_a_wrong_row_with_a_right_checksum_is_named(folder: Location, broken, problem: str):
    whole = documents()
    features = make_set(folder, [*whole[:2], broken(whole[2]), whole[3]])
    first = findings(features)[0]
    assert (first.row, first.file) == (2, features.join(PART).uri)
    assert problem in first.problem


def test_a_document_without_states_is_whole_only_in_a_streamed_set():
    document = documents()[0]
    outline = replace(document, aux_hidden=document.aux_hidden[:, :0], last_hidden=document.last_hidden[:, :0])
    widths = FeatureWidths(document.aux_hidden.shape[1], document.last_hidden.shape[1])
    for streamed in (widths, replace(widths, outlines=True)):
        assert list(streamed.fit(document)) == []
    assert len(list(widths.fit(outline))) == 2
    assert list(replace(widths, outlines=True).fit(outline)) == []


def test_a_document_that_is_nowhere_is_named(folder: Location):
    features = make_set(folder, documents()[:3])
    (finding,) = findings(features)
    assert finding.key == "p3:0"
    assert "neither here nor in the quarantine" in finding.problem


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"output_ids": []}, "output_ids is empty"),
        ({"prompt_ids": [-1]}, "prompt_ids holds a negative id"),
        ({"finish_reason": "abort"}, "its finish reason is 'abort'"),
        ({"turn": 1}, "its key is not that of turn 1"),
    ],
)
def test_a_wrong_answer_is_named(folder: Location, change: dict, problem: str):
    rows = answers()
    rows[1] |= change
    write_answers(folder.join(PART), rows, PartAccount(kept=4))
    (finding,) = findings(folder)
    assert (finding.row, finding.key) == (1, "p1:0")
    assert problem in finding.problem


def test_rows_that_the_account_does_not_count_are_noticed(folder: Location):
    write_answers(folder.join(PART), answers(), PartAccount(kept=5))
    assert [f.problem for f in findings(folder)] == ["it has 4 rows, its account says 5"]


def test_an_unknown_format_is_refused_by_every_reader(folder: Location):
    part = folder.join(PART)
    write_answers(part, answers(), PartAccount())
    content = part.path.read_bytes()
    mark = content.rfind(FORMAT_KEY)
    part.path.write_bytes(content[:mark] + content[mark:].replace(b"2", b"7", 1))
    with pytest.raises(UnknownFormat, match=r"it has format 7, this version reads format 2\. Fix: use the version"):
        read_columns(part, ["key"])
    assert "format 7" in findings(folder)[0].problem


def test_the_command_names_bad_rows_and_exits_with_1(folder: Location):
    features = make_set(folder)
    intact = CliRunner().invoke(app, ["--verify", folder.uri])
    assert (intact.exit_code, intact.stdout.count("bad:")) == (0, 0)
    assert intact.stdout.startswith("verified 2 outputs, 2 files, 8 rows")
    manifest = json.loads(features.join("_manifest.json").read_bytes())
    manifest["files"][PART]["sha256"] = "0"
    features.join("_manifest.json").write_bytes(json.dumps(manifest).encode())
    damaged = CliRunner().invoke(app, ["--verify", folder.uri])
    assert damaged.exit_code == 1
    assert f"bad: {features.join(PART).uri}: its sha256 is not the manifest's" in damaged.stdout
