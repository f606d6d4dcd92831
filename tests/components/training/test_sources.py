"""Streamed features make the head that stored ones make, in bounded memory, through a resume and over several workers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file, save, save_file

from components.cluster_room import check_room, stage_needs
from components.config import Settings
from components.data.capturing import CaptureWorker
from components.data.extractors.interface import ExtractorSpec, extractor_spec
from components.data.features import record_features
from components.data.part_worker import PartTask, Piece
from components.data.parts import part_name, part_names
from components.data.shards import document_index, read_documents, read_input_ids, read_shard
from components.data.streaming import StreamJob, StreamWorker
from components.data.trials import Place, Trials
from components.section import ConfigError
from components.storage import Location
from components.training.job import run_training
from components.training.setup import HeadSpec, build_trainer, feature_scale, split_entries
from components.training.sources import (
    DocumentSource,
    StoredDocuments,
    StreamedDocuments,
    open_stream,
    unusable_documents,
)
from components.training.state import load_weights, read_progress, save_state
from components.training.trainer import Trainer
from tests.components.data.answers import END_ID, FIRST_ID, answered, random_ids, write_responses
from tests.tiny import make_tiny_llama

MODES = ("store", "stream")
AUX_LAYERS = [1, 4]
TARGET = {"num_layers": 6, "hidden_size": 64}
NUM_DOCUMENTS, NUM_TRAINED = 13, 11
IN_FLIGHT = 4
RANKS_TOLERANCE = 1e-5  # fp32 sums over two ranks in another order, through eight Adam steps of 1e-3


def settings_for(mode: str, batch_tokens: int = 1, **resources) -> Settings:
    """Documents are captured one by one, so that the features' last bits do not depend on who shares a forward pass."""
    stream = {"documents_in_flight": IN_FLIGHT}
    train = {"epochs": 2, "num_depths": 3, "documents_per_step": 3, "dtype": "float32", "learning_rate": 1e-3}
    return Settings.model_validate(
        {
            "target": {"dtype": "float32", "max_model_len": 256},
            "data": {"batch_tokens": batch_tokens, "mode": mode, "stream": stream},
            "draft": {"aux_layers": AUX_LAYERS, "num_layers": 1},
            "train": train,
            "resources": resources or {"features": {"replicas": 2}},
        }
    )


STREAM = settings_for("stream")


@pytest.fixture(scope="module")
def features(ray_cluster, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Location]:
    """The features output of each mode, of the same answers: 11 to train on, one for validation, one held out."""
    folder = Location(str(tmp_path_factory.mktemp("sources")))
    generator = torch.Generator().manual_seed(0)
    splits = {3: "validation", 8: "held_out"}
    rows = [
        answered(i, random_ids(12 + 3 * (i % 4), generator), 4 + i % 3, splits.get(i, "train"))
        for i in range(NUM_DOCUMENTS)
    ]
    write_responses(folder.join("responses"), rows[:6], rows[6:])
    responses, streaming = folder.join("responses"), settings_for("stream")
    outcome = record_features(streaming, responses, 250, TARGET, str(tiny_target), folder.join("stream"))
    assert outcome.facts["streamed_documents"] == NUM_TRAINED
    spec = extractor_spec(settings_for("store"), TARGET, str(tiny_target))
    worker = CaptureWorker(folder.join("store"), lambda done: None, responses, spec)
    worker.make([Piece(PartTask(i), folder.join("store", part_name(i))) for i in range(2)])
    folder.join("vocabulary").write_bytes(save({"draft_token_ids": torch.arange(FIRST_ID, END_ID)}))
    return {mode: folder.join(mode) for mode in (*MODES, "vocabulary")}


@pytest.fixture(scope="module")
def streamed(features: dict[str, Location], tiny_target: Path) -> Iterator[StreamedDocuments]:
    extractor = extractor_spec(STREAM, TARGET, str(tiny_target))
    with open_stream(STREAM, extractor, features["stream"], features["stream"].join("_unusable")) as source:
        yield source


def test_a_worker_that_is_gone_once_all_is_captured_costs_a_line(
    features: dict[str, Location], tiny_target: Path
) -> None:
    extractor = extractor_spec(STREAM, TARGET, str(tiny_target))
    with open_stream(STREAM, extractor, features["stream"], features["stream"].join("_unusable")) as source:
        ray.kill(source.workers[0])


@pytest.fixture(scope="module")
def stream_worker(ray_cluster) -> Callable[[ExtractorSpec, Location, Location, float], StreamWorker]:
    """Makes a worker in this process."""
    trials = ray.remote(num_cpus=0)(Trials).remote(1, 1)

    def make(spec: ExtractorSpec, outlines: Location, notes: Location, cache_bytes: float) -> StreamWorker:
        return StreamWorker(StreamJob(spec, outlines, notes, cache_bytes, stall_timeout_s=600.0), 0, trials)

    return make


def make_spec(features: dict[str, Location], mode: str, target: Path, source: DocumentSource) -> HeadSpec:
    return HeadSpec(
        features_uri=features[mode].uri,
        vocabulary_uri=features["vocabulary"].uri,
        target_path=str(target),
        aux_layers=tuple(AUX_LAYERS),
        num_layers=1,
        mask_token_id=7,
        feature_rms=feature_scale(features[mode], source, len(AUX_LAYERS)),
    )


def make_trainer(spec: HeadSpec, source: DocumentSource, checkpoint: Path | None = None) -> Trainer:
    return build_trainer(spec, STREAM.train, source, 0, 1, torch.device("cpu"), checkpoint)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.flatten() for p in trainer.parameters]).detach()


@pytest.fixture(scope="module")
def stored_weights(features: dict[str, Location], tiny_target: Path) -> torch.Tensor:
    """Of the head that stored features make, after all steps."""
    source = StoredDocuments(features["store"])
    trainer = make_trainer(make_spec(features, "store", tiny_target, source), source)
    start = weights(trainer)
    for _ in range(trainer.total_steps):
        trainer.step()
    assert not torch.equal(weights(trainer), start)
    return weights(trainer)


def test_streamed_documents_are_outlined_and_the_others_recorded(features: dict[str, Location]) -> None:
    assert document_index(features["stream"]) == document_index(features["store"])
    assert torch.equal(read_input_ids(features["stream"]), read_input_ids(features["store"]))
    stored, streamed = (
        [features[mode].join(name).size_bytes() for name in part_names(features[mode])] for mode in MODES
    )
    assert sum(streamed) < sum(stored) / 2
    outlines = list(read_documents(features["stream"], "train"))
    assert len(outlines) == NUM_TRAINED
    assert all(d.aux_hidden.shape == d.last_hidden.shape == (len(d.input_ids), 0) for d in outlines)
    for split in ("validation", "held_out"):
        for one, other in zip(*(read_documents(features[mode], split) for mode in MODES), strict=True):
            assert torch.equal(one.aux_hidden, other.aux_hidden)
            assert torch.equal(one.last_hidden, other.last_hidden)


def test_streamed_features_make_the_same_head_also_through_a_resume(
    features: dict[str, Location],
    tiny_target: Path,
    streamed: StreamedDocuments,
    stored_weights: torch.Tensor,
    tmp_path: Path,
) -> None:
    spec = make_spec(features, "stream", tiny_target, streamed)
    first = make_trainer(spec, streamed)
    for _ in range(3):  # the fourth of the first epoch is the next
        first.step()
    save_state(tmp_path, first.head, first.optimizer, first.progress)
    straight, resumed = first, make_trainer(spec, streamed, tmp_path)
    for trainer in (straight, resumed):
        while trainer.progress.step < trainer.total_steps:
            trainer.step()
        assert torch.equal(weights(trainer), stored_weights)


def test_no_more_documents_are_asked_for_than_may_be_in_flight(
    features: dict[str, Location], streamed: StreamedDocuments
) -> None:
    entries = split_entries(features["stream"], "train") * 2
    asked = 0

    def ask() -> Iterator:
        nonlocal asked
        for entry in entries:
            asked += 1
            yield entry

    for used, (entry, document) in enumerate(zip(entries, streamed.documents(ask()), strict=True)):
        assert asked - used <= IN_FLIGHT
        assert document is not None
        outline = read_shard(features["stream"], entry.shard)[entry.row]
        assert torch.equal(document.input_ids, outline.input_ids)
        assert torch.equal(document.loss_mask, outline.loss_mask)


def test_two_ray_train_workers_make_it_from_a_stream(
    features: dict[str, Location],
    tiny_target: Path,
    streamed: StreamedDocuments,
    stored_weights: torch.Tensor,
    tmp_path: Path,
) -> None:
    """11 documents, three a step: no rank ever has as many as the other, and none is left out."""
    spec = make_spec(features, "stream", tiny_target, streamed)
    resources = settings_for("stream", train={"replicas": 2}).resources.train
    checkpoint, _ = run_training(spec, streamed, STREAM.train, resources, str(tmp_path), lambda figures, step: None)
    trainer = make_trainer(spec, streamed)
    with checkpoint.as_directory() as folder:
        load_weights(Path(folder), trainer.head)
        last = read_progress(Path(folder)).history[-1]
    torch.testing.assert_close(weights(trainer), stored_weights, atol=RANKS_TOLERANCE, rtol=0)
    assert last["step"] == 8
    assert {"validation/loss", "held_out/loss"} <= last.keys()


@pytest.mark.parametrize(("documents_kept", "captured_again"), [(0, 11), (4, 7), (100, 0)])
def test_what_fits_in_the_cache_is_not_captured_again(
    features: dict[str, Location],
    tiny_target: Path,
    stream_worker: Callable[..., StreamWorker],
    documents_kept: int,
    captured_again: int,
) -> None:
    entries = split_entries(features["stream"], "train")
    places = [Place(entry.shard, entry.row) for entry in entries]
    spec = extractor_spec(STREAM, TARGET, str(tiny_target))
    unlimited = stream_worker(spec, features["stream"], features["stream"].join("_unusable"), 1e9)
    sizes = [found.num_bytes for found in unlimited.capture(places)]
    worker = stream_worker(spec, features["stream"], features["stream"].join("_unusable"), sum(sizes[:documents_kept]))
    first, second = worker.capture(places), worker.capture(places)
    lengths = [len(found.input_ids) for found in first]
    captured, replayed = worker.tokens()
    assert captured + replayed == 2 * sum(lengths)
    assert replayed == sum(lengths[:documents_kept])
    assert captured - sum(lengths) == sum(lengths[NUM_TRAINED - captured_again :])
    for one, other in zip(first, second, strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))


def test_unusable_documents_are_set_apart_and_named(
    features: dict[str, Location], stream_worker: Callable[..., StreamWorker], tmp_path: Path
) -> None:
    """A target that is NaN at a token which only the second document has."""
    entries = split_entries(features["stream"], "train")[:3]
    outlines = [read_shard(features["stream"], entry.shard)[entry.row] for entry in entries]
    ids = [set(outline.input_ids.tolist()) for outline in outlines]
    target = make_tiny_llama(tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][min(ids[1] - ids[0] - ids[2])] = float("nan")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    notes = Location(str(tmp_path / "unusable"))
    packing = extractor_spec(settings_for("stream", batch_tokens=100), TARGET, str(target))
    worker = stream_worker(packing, features["stream"], notes, 1e9)
    found = worker.capture([Place(entry.shard, entry.row) for entry in entries])
    assert [one is None for one in found] == [False, True, False]
    (note,) = unusable_documents(notes)
    assert (note["key"], note["reason"]) == (outlines[1].key, "not_finite")
    later = stream_worker(packing, features["stream"], notes, 1e9)
    assert later.capture([Place(entries[1].shard, entries[1].row)]) is None
    assert later.tokens() == (0, 0), "it was captured again"


def test_capture_and_training_must_fit_side_by_side(ray_cluster) -> None:
    settings = settings_for("stream", features={"replicas": 8}, train={"replicas": 1})
    with pytest.raises(ConfigError, match=r"data\.mode: stream needs 9 CPUs .* the cluster has 8"):
        check_room(stage_needs("head", settings))
