"""Workers that capture features on demand and keep nothing on disk: `data.mode: stream`.

The features stage has written an outline of every training document (ids and mask, no states). Training asks for documents
in its own order and gets each one's features from the worker that its number names, so a worker that keeps features for
further epochs is asked for the same documents again.
"""

import json
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from torch import Tensor

from components.data.capturing import features_problem
from components.data.extractors.interface import Extractor, ExtractorSpec
from components.data.open_shards import Kept, OpenShards
from components.data.progress import WorkersFailed
from components.data.shards import StoredDocument
from components.data.trials import Place
from components.data.verdict import ERROR, STALLED, Verdict
from components.data.watchdog import LAST_WORDS_TIMEOUT_S, Watchdog
from components.draft.batch import Document
from components.storage import Location
from components.target.layers import Captured

OPEN_SHARDS = 32  # every training worker mixes the documents of its own 16 or so
UNUSABLE = "_unusable"


class Features(NamedTuple):
    """A document on its way between two processes, as arrays that travel without a copy; bf16 as int16."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    aux_hidden: np.ndarray
    last_hidden: np.ndarray

    @classmethod
    def of(cls, outline: Document, aux_hidden: Tensor, last_hidden: Tensor) -> "Features":
        states = (s.to(torch.bfloat16).contiguous().view(torch.int16).numpy() for s in (aux_hidden, last_hidden))
        return cls(outline.input_ids.numpy(), outline.loss_mask.numpy(), *states)

    def document(self) -> Document:
        """The document, in memory of its own: the arrays may lie in Ray's store, which is free again once they are gone."""
        ids, mask, aux_hidden, last_hidden = (torch.from_numpy(array.copy()) for array in self)
        return Document(ids, mask, aux_hidden.view(torch.bfloat16), last_hidden.view(torch.bfloat16))

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self)


@dataclass(frozen=True)
class StreamJob:
    """What is captured and how, the same for all workers."""

    extractor: ExtractorSpec
    outlines: Location
    """Features output with the outline of every document."""
    unusable: Location
    """Folder of a note for each document that cannot be used."""
    cache_bytes: float
    """Memory of one worker for features of further epochs."""
    stall_timeout_s: float


class StreamWorker:
    """Holds the target and answers one call after another (a Ray actor); Ray starts it again, with the call it had, when its process ends."""

    def __init__(self, job: StreamJob, number: int, trials: Any) -> None:
        """Starts nothing yet: a constructor that raised after a restart would be the actor's end.

        Args:
            job: What is captured.
            number: The worker's own.
            trials: Handle of the `Trials` of all workers.
        """
        self._job, self._number, self._trials = job, number, trials
        self._extractor: Extractor | None = None
        self._outlines = OpenShards(job.outlines, OPEN_SHARDS)
        self._kept: Kept[Place, Features] = Kept(job.cache_bytes)
        self._captured_tokens = self._replayed_tokens = 0
        self._seen_at_s = time.monotonic()
        self._watchdog = Watchdog(job.stall_timeout_s, lambda: self._seen_at_s, self._on_stall)

    def capture(self, places: Sequence[Place]) -> Any:
        """Features of each document, None for one that cannot be used; one value, not a list, for one place.

        Ray makes an object of each, so that a reader frees every document as soon as it has it.
        """
        cached = {place: kept for place in places if (kept := self._kept.get(place)) is not None}
        self._replayed_tokens += sum(len(features.input_ids) for features in cached.values())
        wanted = [place for place in places if place not in cached and _note_name(place) not in self._set_apart]
        self._seen_at_s = time.monotonic()
        with self._watchdog.watching():
            found = cached | dict(self._capture(wanted) if wanted else [])
        features = [found.get(place) for place in places]
        return features if len(features) > 1 else features[0]

    def tokens(self) -> tuple[int, int]:
        """(captured, replayed from memory) since the start."""
        return self._captured_tokens, self._replayed_tokens

    @cached_property
    def _set_apart(self) -> set[str]:
        """Names of the notes, those of earlier runs too."""
        return set(self._job.unusable.files())

    def _capture(self, places: Sequence[Place]) -> Iterator[tuple[Place, Features]]:
        """Documents that are usable; suspects of an earlier death come one by one."""
        extractor = self._started()
        left = list(places)
        while left:
            together, lost = ray.get(self._trials.next.remote(self._number, left))
            if lost is None:
                yield from self._capture_together(extractor, together)
            else:
                self._note(together[0], lost)
            left = [place for place in left if place not in together]
        self._trials.next.remote(self._number, [])

    def _started(self) -> Extractor:
        """The extractor, started in the first call.

        Raises:
            WorkersFailed: too many processes died and did nothing.
        """
        if self._extractor is None:
            node = ray.get_runtime_context().get_node_id()
            last_words = ray.get(self._trials.start.remote(self._number, node))
            if last_words is not None:
                raise WorkersFailed(
                    f"capture: workers die of whatever they are given; the last one said:\n{last_words}"
                )
            self._extractor = self._job.extractor.start()
            self._seen_at_s = time.monotonic()
        return self._extractor

    def _capture_together(self, extractor: Extractor, places: Sequence[Place]) -> Iterator[tuple[Place, Features]]:
        outlines = [self._outline(place) for place in places]
        captured = self._extracted(extractor, [outline.input_ids.tolist() for outline in outlines])
        for place, outline, states in zip(places, outlines, captured, strict=True):
            self._captured_tokens += len(outline.input_ids)
            problem = features_problem(outline.input_ids, outline.loss_mask, states)
            if problem is not None:
                self._note(place, Verdict(*problem))
                continue
            features = Features.of(outline, *states)
            self._kept.offer(place, features, features.num_bytes)
            yield place, features

    def _extracted(self, extractor: Extractor, documents: Sequence[Sequence[int]]) -> Iterator[Captured]:
        """The states of each; whatever the extractor raises ends the process: it may hold what it was doing."""
        try:
            for states in extractor.extract(documents):
                self._seen_at_s = time.monotonic()
                yield states
        except Exception:
            try:
                self._say(Verdict(ERROR, traceback.format_exc()))
            finally:
                os._exit(1)

    def _outline(self, place: Place) -> StoredDocument:
        return self._outlines.read(*place)

    def _note(self, place: Place, problem: Verdict) -> None:
        """Set a document apart, for good."""
        note = {"key": self._outline(place).key, **problem._asdict()}
        self._job.unusable.join(_note_name(place)).write_bytes(json.dumps(note).encode())
        self._set_apart.add(_note_name(place))

    def _on_stall(self, words: str) -> None:
        self._say(Verdict(STALLED, words))

    def _say(self, verdict: Verdict) -> None:
        ray.get(self._trials.fail.remote(self._number, verdict), timeout=LAST_WORDS_TIMEOUT_S)


def _note_name(place: Place) -> str:
    return f"{place.shard}-{place.row}.json"
