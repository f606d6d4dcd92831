"""Recorded features are the target's own states for each document alone; broken ones are set apart, not stored."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from components.config import ConfigError, Settings
from components.data.answering import SCHEMA
from components.data.capturing import CaptureWorker, pack, stored_document
from components.data.documents import Turns, merge_turns
from components.data.features import record_features
from components.data.part_worker import PartTask, Piece
from components.data.parts import QUARANTINE, PartAccount, part_name, part_names, part_writer, read_account
from components.data.pieces import Pieces
from components.data.shards import document_index, read_documents, read_shard
from components.storage import Location
from components.target.aux_layers import bytes_per_token
from components.target.layers import Captured, capture, load_target
from tests.tiny import make_tiny_llama

HIDDEN, LAYERS, AUX_LAYERS = 64, 6, [1, 4]
POISON = 300
"""Token whose embedding is NaN."""
TARGET = {"num_layers": LAYERS, "hidden_size": HIDDEN}


@pytest.fixture(scope="module")
def poisoned_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_llama(tmp_path_factory.mktemp("poisoned") / "target")
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


def answered(number: int, ids: list[int], num_prompt: int) -> dict:
    return {
        "key": f"p{number}:0",
        "prompt_key": f"p{number}",
        "family": "maths",
        "split": "held_out" if number % 3 == 0 else "train",
        "turn": 0,
        "prompt_ids": ids[:num_prompt],
        "output_ids": ids[num_prompt:],
        "finish_reason": "stop",
    }


def make_responses(folder: Location) -> list[dict]:
    """Eight answers of 10 to 24 tokens in two parts, one with the poisoned token, and a second turn that continues."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(8):
        ids = torch.randint(8, POISON, (10 + 2 * i,), generator=generator).tolist()
        rows.append(answered(i, ids if i != 5 else [*ids[:-1], POISON], 4 + i % 3))
    follow_up = answered(
        7, rows[7]["prompt_ids"] + rows[7]["output_ids"] + [20, 21, 22, 23], len(rows[7]["prompt_ids"])
    )
    start = len(rows[7]["prompt_ids"] + rows[7]["output_ids"]) + 2
    whole = follow_up["prompt_ids"] + follow_up["output_ids"]
    rows.append(follow_up | {"key": "p7:1", "turn": 1, "prompt_ids": whole[:start], "output_ids": whole[start:]})
    for number, part in enumerate((rows[:4], rows[4:])):
        with part_writer(folder.join(part_name(number)), SCHEMA, PartAccount()) as writer:
            writer.write_table(pa.Table.from_pylist(part, schema=SCHEMA))
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


def test_a_part_made_in_pieces_lacks_only_the_lost_documents(tiny_target, tmp_path):
    responses, output = Location(str(tmp_path / "responses")), Location(str(tmp_path / "features"))
    make_responses(responses)
    worker = CaptureWorker(output, lambda done: None, responses, str(tiny_target), AUX_LAYERS, "float32", 64, 1)
    whole, joined, task = output.join(part_name(0)), output.join(part_name(1)), PartTask(1)
    worker.make([Piece(task, whole)])

    pieces = Pieces(output, 1, worker.num_rows(task), max_attempts=1)
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


def test_a_disk_too_small_is_refused_before_anything_starts(settings, tmp_path):
    folder = Location(str(tmp_path))
    with pytest.raises(ConfigError, match=r"storage\.uri"):
        record_features(settings, folder, 10**15, TARGET, "nowhere", folder)


def test_a_layer_that_the_target_lacks_is_refused(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"draft\.aux_layers"):
        record_features(
            settings, Location(str(tmp_path)), 1, TARGET | {"num_layers": 4}, "nowhere", Location(str(tmp_path))
        )


def test_size_of_a_token():
    assert bytes_per_token(3, 576) == 4 * 576 * 2 + 5


def turns(num_tokens: int, key: str = "p:0") -> Turns:
    return Turns(key, "p", "maths", "train", (key,), [9] * num_tokens, [0, *[1] * (num_tokens - 1)])


def test_batches_hold_at_most_so_many_tokens():
    batches = list(pack([turns(n) for n in (3, 4, 3, 20, 1, 2)], 10))
    assert [[len(t.input_ids) for t in batch] for batch in batches] == [[3, 4, 3], [20], [1, 2]]


@pytest.mark.parametrize("num_states", [4, 6])
def test_states_fewer_or_more_than_tokens_are_set_apart(num_states):
    account = PartAccount()
    captured = Captured(torch.zeros(num_states, 2 * HIDDEN), torch.zeros(5, HIDDEN))
    assert stored_document(turns(5), captured, account) is None
    assert account.failed == {"lengths_differ": 1}
    assert account.kept == 0
