"""Producing a head: what it is made from, the training run, and the export."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint
from transformers import AutoConfig, AutoTokenizer

from components.config import Settings
from components.data.extractors.interface import extractor_spec
from components.data.parts import QUARANTINE, write_quarantine
from components.data.prompt_list import prompt_key, read_places, with_places
from components.data.streaming import UNUSABLE
from components.data.vocabulary import read_used_ids
from components.draft.checkpoint import save_head
from components.rows import RowAccount, check_rows
from components.stage import Artifact, Outcome, Output
from components.storage import Location
from components.target.mask_token import choose_mask_token
from components.target.stages import target_path
from components.training.job import Best, run_training
from components.training.setup import HeadSpec, build_head, feature_scale
from components.training.sources import DocumentSource, StoredDocuments, open_stream, unusable_documents
from components.training.state import Progress, load_weights, read_progress

log = logging.getLogger("aerie")

STREAM = "stream"


def train_head(settings: Settings, inputs: Mapping[str, Artifact], output: Output) -> Outcome:
    """Train to the end, going on from the last checkpoint, and export the head, or the best ones, in vLLM's layout.

    Raises:
        ConfigError: a mask token that texts use, or too small a cluster for `data.mode: stream`.
        TooManyRowsLost: more streamed documents were unusable than `data.max_dropped_fraction` allows.
    """
    best = best_checkpoints(settings)
    with open_source(settings, inputs, output.join(UNUSABLE)) as source:
        spec = head_spec(settings, inputs, source)
        last, checkpoints = run_training(
            spec, source, settings.train, settings.resources.train, output.join("_train").uri, output.report, best
        )
    places = ["head", *(f"candidates/{number}" for number in range(2, len(checkpoints) + 1))]
    sizes = [
        ray.get(
            export_head.remote(spec, settings.train.seed, checkpoint, output.join(place), settings.target.dtype)
        )  # one after another: each builds a whole head in memory
        for place, checkpoint in zip(places, checkpoints, strict=True)
    ]
    with last.as_directory() as folder:
        progress = read_progress(Path(folder))
    lines = "".join(json.dumps(row) + "\n" for row in progress.history)
    output.join("curves.jsonl").write_bytes(lines.encode())
    facts = _facts(spec, settings, progress) | {"num_parameters": sizes[0]}
    rows = _streamed_rows(settings, inputs, output) if settings.data.mode == STREAM else None
    return Outcome(facts | ({"candidates": places} if best else {}), rows)


def best_checkpoints(settings: Settings) -> Best | None:
    """Those with the best walked AL at serving's K, or at the deepest that is trained; None: the last one."""
    k = min(settings.evaluate.num_speculative_tokens, settings.train.num_depths)
    count = settings.evaluate.candidates
    return Best(count, f"validation/walked_al_{k}") if count > 1 else None


@contextmanager
def open_source(settings: Settings, inputs: Mapping[str, Artifact], unusable: Location) -> Iterator[DocumentSource]:
    """Where the settings take training documents from; capture workers live as long as the block."""
    features = inputs["features"].location
    if settings.data.mode != STREAM:
        yield StoredDocuments(features)
        return
    target = inputs["target"]
    extractor = extractor_spec(settings, target.facts, str(target_path(target)))
    with open_stream(settings, extractor, features, unusable) as source:
        yield source


def head_spec(settings: Settings, inputs: Mapping[str, Artifact], source: DocumentSource) -> HeadSpec:
    """The head that these outputs and settings describe.

    Raises:
        ConfigError: `draft.mask_token_id` is a token that texts use.
    """
    path = target_path(inputs["target"])
    mask_token_id = choose_mask_token(
        AutoTokenizer.from_pretrained(path),
        AutoConfig.from_pretrained(path),
        read_used_ids(inputs["vocabulary"].location),
        settings.draft.mask_token_id,
        inputs["target"].facts["eos_token_ids"],
    )
    features, aux_layers = inputs["features"].location, tuple(inputs["features"].facts["aux_layers"])
    return HeadSpec(
        features_uri=features.uri,
        vocabulary_uri=inputs["vocabulary"].join("vocabulary.safetensors").uri,
        target_path=str(path),
        aux_layers=aux_layers,
        num_layers=settings.draft.num_layers,
        mask_token_id=mask_token_id,
        # by a worker: the driver holds no rows
        feature_rms=ray.get(ray.remote(num_cpus=0)(feature_scale).remote(features, source, len(aux_layers))),
    )


@ray.remote(num_cpus=0)  # seconds of work, which arms that hold every CPU should not keep waiting
def export_head(spec: HeadSpec, seed: int, checkpoint: Checkpoint, place: Location, dtype: str) -> int:
    """Write a checkpoint's head to `place` in vLLM's layout and the serving dtype; the number of its parameters."""
    head, _ = build_head(spec, seed)
    with checkpoint.as_directory() as source:
        load_weights(Path(source), head)
    with place.staged() as folder:
        shutil.rmtree(folder, ignore_errors=True)  # a run that was killed after its export left one
        save_head(head.eval(), folder, getattr(torch, dtype))
    return sum(p.numel() for p in head.parameters())


def _streamed_rows(settings: Settings, inputs: Mapping[str, Artifact], output: Output) -> RowAccount:
    """What became of the training documents that nobody had looked at before."""
    lost = unusable_documents(output.join(UNUSABLE))
    places = read_places(inputs["prompts"].location, {prompt_key(row["key"]) for row in lost})
    write_quarantine(output.location, with_places(lost, places))
    total = inputs["features"].facts["streamed_documents"]
    rows = RowAccount(total, total - len(lost), failed=dict(Counter(row["reason"] for row in lost)))
    log.info("head: documents %s", rows.table())
    check_rows(rows, settings.data.max_dropped_fraction, "head", output.join(QUARANTINE).uri)
    return rows


def _facts(spec: HeadSpec, settings: Settings, progress: Progress) -> dict[str, Any]:
    last = progress.history[-1]
    return {
        "mask_token_id": spec.mask_token_id,
        "aux_layers": list(spec.aux_layers),
        "num_layers": spec.num_layers,
        "num_depths": settings.train.num_depths,
        "steps": last["step"],
        "train_seconds": round(progress.train_seconds, 1),
        "tokens_per_s": last["train/tokens_per_s"],
        "validation": {k: v for k, v in last.items() if k.startswith("validation/")},
        "held_out": {k: v for k, v in last.items() if k.startswith("held_out/")},
    }
