"""Recorded features are the target's own states for each document alone; broken ones are set apart, not stored."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.config import Settings
from components.data.blame import Life
from components.data.capturing import CaptureWorker, _long_enough, stored_document
from components.data.documents import Turns, merge_turns
from components.data.extractors.interface import extractor_spec
from components.data.extractors.with_transformers import pack
from components.data.features import record_features
from components.data.part_worker import PartTask, Piece
from components.data.parts import QUARANTINE, PartAccount, part_name, part_names, read_account
from components.data.pieces import Pieces
from components.data.shards import document_index, read_documents, read_shard
from components.pipeline import check_scratch
from components.rows import RowAccount
from components.section import ConfigError
from components.storage import Location
from components.target.aux_layers import bytes_per_token
from components.target.layers import Captured, capture, load_target
from tests.components.data.answers import END_ID, answered, random_ids, write_responses
from tests.tiny import make_tiny_llama

HIDDEN, LAYERS, AUX_LAYERS = 64, 6, [1, 4]
POISON = END_ID
"""Token whose embedding is NaN."""
BF16_TOLERANCE = 2e-2
"""Of a document's states, relative to their norm: an error of 2^-9 at every rounding, some thirty in a row of layers."""
TARGET = {"num_layers": LAYERS, "hidden_size": HIDDEN}


@pytest.fixture(scope="module")
def poisoned_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_poisoned(tmp_path_factory.mktemp("poisoned") / "target", torch.float32)


@pytest.fixture(scope="module")
def bf16_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_poisoned(tmp_path_factory.mktemp("bf16") / "target", torch.bfloat16)


def make_poisoned(path: Path, dtype: torch.dtype) -> Path:
    make_tiny_llama(path, dtype=dtype)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture
def settings() -> Settings:
    return Settings.model_validate(
        {
            "target": {"dtype": "float32", "max_model_len": 256},
            "data": {"batch_tokens": 64, "max_dropped_fraction": 0.3},
            "draft": {"aux_layers": AUX_LAYERS},
        }
    )


def make_responses(folder: Location) -> list[dict]:
    """Eight answers of 10 to 24 tokens in two parts, one with the poisoned token, and a second turn that continues."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(8):
        ids = random_ids(10 + 2 * i, generator)
        split = "held_out" if i % 3 == 0 else "train"
        rows.append(answered(i, ids if i != 5 else [*ids[:-1], POISON], 4 + i % 3, split))
    whole = rows[7]["prompt_ids"] + rows[7]["output_ids"] + [20, 21, 22, 23]
    follow_up = answered(7, whole, len(whole) - 2, rows[7]["split"])
    rows.append(follow_up | {"key": "p7:1", "turn": 1})
    write_responses(folder, rows[:4], rows[4:])
    return rows


def test_features_are_those_of_each_document_alone(ray_cluster, poisoned_target, settings, tmp_path):
    responses, output = Location(str(tmp_path / "responses")), Location(str(tmp_path / "features"))
    rows = make_responses(responses)
    documents = list(merge_turns(rows))
    num_tokens = sum(len(d.input_ids) for d in documents)
    outcome = record_features(settings, responses, num_tokens, TARGET, str(poisoned_target), output)

    model = load_target(poisoned_target, torch.float32)
    found = {d.key: d for split in ("train", "held_out") for d in read_documents(output, split)}
    assert found.keys() == {f"p{i}:0" for i in range(8)} - {"p5:0"}
    for turns in documents:
        if turns.key in found:
            alone = capture(model, torch.tensor([turns.input_ids]), AUX_LAYERS)
            document = found[turns.key]
            assert document.input_ids.tolist() == turns.input_ids
            assert document.loss_mask.tolist() == [bool(m) for m in turns.loss_mask]
            # bf16 keeps 8 bits; packed and alone differ in the last bits of float32 only
            torch.testing.assert_close(document.aux_hidden.float(), alone.aux_hidden, rtol=2**-8, atol=1e-3)
            torch.testing.assert_close(document.last_hidden.float(), alone.last_hidden, rtol=2**-8, atol=1e-3)

    assert outcome.rows.table() == "in 9, kept 8, truncated 0, failed[not_finite] 1"
    assert [json.loads(line)["key"] for line in output.join(QUARANTINE).read_bytes().splitlines()] == ["p5:0"]
    assert outcome.facts["documents"] == 7
    assert outcome.facts["tokens"] == sum(row.num_tokens for row in document_index(output))
    assert outcome.facts["supervised_tokens"] == sum(int(d.loss_mask.sum()) for d in found.values())

    stamps = {name: output.join(name).path.stat().st_mtime_ns for name in part_names(output)}
    output.join(part_name(0)).delete()
    assert record_features(settings, responses, num_tokens, TARGET, str(poisoned_target), output) == outcome
    again = {name: output.join(name).path.stat().st_mtime_ns for name in part_names(output)}
    assert [name for name in stamps if again[name] != stamps[name]] == [part_name(0)]


def test_a_part_made_in_pieces_lacks_only_the_lost_documents(settings, tiny_target, tmp_path):
    responses, output = Location(str(tmp_path / "responses")), Location(str(tmp_path / "features"))
    make_responses(responses)
    worker = CaptureWorker(output, lambda done: None, responses, extractor_spec(settings, TARGET, str(tiny_target)))
    whole, joined, task = output.join(part_name(0)), output.join(part_name(1)), PartTask(1)
    worker.make([Piece(task, whole)])

    life = Life("run", "node", "process")
    pieces = Pieces(output, 1, worker.num_rows(task), 1, life, lambda life: True)
    assert worker.num_rows(task) == 4  # the last of five turns continues the one before it
    pieces.begin(range(4))  # a worker died with all of them
    for rows in pieces.left():
        piece = Piece(task, pieces.file(rows), rows)
        if rows.start == 3:
            worker.lose(piece, "worker_died", "")
        else:
            worker.make([piece])
        pieces.end(rows)
    pieces.join(joined, worker.schema)

    account = read_account(joined)
    assert (account.kept, account.failed) == (3, {"worker_died": 2})
    assert [lost["key"] for lost in account.quarantine] == ["p7:0", "p7:1"]
    expected = {document.key: document for document in read_shard(output, whole.name)}
    found = read_shard(output, joined.name)
    assert [document.key for document in found] == ["p4:0", "p5:0", "p6:0"]
    for document in found:
        torch.testing.assert_close(document.aux_hidden, expected[document.key].aux_hidden, rtol=2**-7, atol=1e-3)


def test_vllm_records_what_transformers_does(ray_cluster, bf16_target, settings, tmp_path):
    """Both in bf16, against the exact states in float32."""
    responses, output = Location(str(tmp_path / "responses")), Location(str(tmp_path / "features"))
    documents = [turns for turns in merge_turns(make_responses(responses)) if turns.key != "p5:0"]
    engine = {"max_num_batched_tokens": 512, "enable_chunked_prefill": False}
    settings = Settings.model_validate(
        settings.model_dump()
        | {"target": {"dtype": "bfloat16", "max_model_len": 256}, "resources": {"features": {"engine": engine}}}
        | {"data": settings.data.model_dump() | {"extractor": "vllm"}}
    )
    outcome = record_features(settings, responses, 200, TARGET, str(bf16_target), output)
    assert outcome.rows.table() == "in 9, kept 8, truncated 0, failed[not_finite] 1"
    found = {d.key: d for split in ("train", "held_out") for d in read_documents(output, split)}
    in_transformers = replace(extractor_spec(settings, TARGET, str(bf16_target)), name="transformers").start()
    exact_model = load_target(bf16_target, torch.float32)
    for turns, other in zip(documents, in_transformers.extract([d.input_ids for d in documents]), strict=True):
        exact = capture(exact_model, torch.tensor([turns.input_ids]), AUX_LAYERS)
        for name in ("aux_hidden", "last_hidden"):
            for states in (getattr(found[turns.key], name), getattr(other, name)):
                error = states.float() - getattr(exact, name)
                assert error.norm() / getattr(exact, name).norm() < BF16_TOLERANCE


def test_a_disk_too_small_is_refused_before_anything_starts(settings, tmp_path):
    folder = Location(str(tmp_path))
    with pytest.raises(ConfigError, match=r"storage\.uri"):
        record_features(settings, folder, 10**15, TARGET, "nowhere", folder)


def test_a_shard_on_its_way_to_s3_must_fit_among_scratch_files(settings, tmp_path, s3_bucket):
    output = Location(f"{s3_bucket}/features")
    for name in map(part_name, range(2)):
        Location(str(tmp_path)).join(name).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"TMPDIR: /.* GB free; .*, and one takes about 194500\.0 TB"):
        record_features(settings, Location(str(tmp_path)), 10**15, TARGET, "nowhere", output)
    check_scratch(output, 1000)


def test_a_layer_that_the_target_lacks_is_refused(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"draft\.aux_layers"):
        record_features(
            settings, Location(str(tmp_path)), 1, TARGET | {"num_layers": 4}, "nowhere", Location(str(tmp_path))
        )


def test_size_of_a_token():
    assert bytes_per_token(3, 576) == 4 * 576 * 2 + 5


def turns(num_tokens: int, key: str = "p:0") -> Turns:
    return Turns(key, "p", "maths", "train", (key,), [9] * num_tokens, [0, *[1] * (num_tokens - 1)])


def test_a_document_that_predicts_nothing_is_dropped_with_its_reason():
    account, two = PartAccount(), turns(2)
    assert _long_enough([turns(1, "p1:0"), two], account) == [two]
    assert account.rows() == RowAccount(1, 0, 0, {"too_short": 1}, {})
    assert account.quarantine == [{"key": "p1:0", "reason": "too_short", "detail": "1 tokens"}]


def test_batches_hold_at_most_so_many_tokens():
    batches = list(pack([[9] * n for n in (3, 4, 3, 20, 1, 2)], 10))
    assert [[len(ids) for ids in batch] for batch in batches] == [[3, 4, 3], [20], [1, 2]]


@pytest.mark.parametrize("num_states", [4, 6])
def test_states_fewer_or_more_than_tokens_are_set_apart(num_states):
    account = PartAccount()
    captured = Captured(torch.zeros(num_states, 2 * HIDDEN), torch.zeros(5, HIDDEN))
    assert stored_document(turns(5), captured, account) is None
    assert account.failed == {"lengths_differ": 1}
    assert account.kept == 0
