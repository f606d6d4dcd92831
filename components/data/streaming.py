"""Workers that capture features on demand and keep nothing on disk: `data.mode: stream`.

The features stage has written an outline of every training document (ids and mask, no states). Training asks for documents
in its own order and gets each one's features from the worker that its number names, so a worker that keeps features for
further epochs is asked for the same documents again.
"""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from components.data.capturing import features_problem
from components.data.extractors.interface import ExtractorSpec
from components.data.shards import StoredDocument, read_shard
from components.draft.batch import Document
from components.storage import Location

OUTLINE_SHARDS_KEPT = 32
UNUSABLE = "_unusable"


class Place(NamedTuple):
    """Where a document's outline lies."""

    shard: str
    row: int


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


class StreamWorker:
    """Holds the target and answers one call after another (a Ray actor)."""

    def __init__(self, extractor: ExtractorSpec, outlines: Location, unusable: Location, cache_bytes: float) -> None:
        self._extractor = extractor.start()
        self._shard = lru_cache(maxsize=OUTLINE_SHARDS_KEPT)(partial(read_shard, outlines))
        self._unusable = unusable
        self._cache: dict[Place, Features] = {}
        self._cache_room = cache_bytes
        self._captured_tokens = self._replayed_tokens = 0

    def capture(self, places: Sequence[Place]) -> Any:
        """Features of each document, None for one that cannot be used; one value, not a list, for one place.

        Ray makes an object of each, so that a reader frees every document as soon as it has it.
        """
        cached = {place: self._cache[place] for place in places if place in self._cache}
        self._replayed_tokens += sum(len(features.input_ids) for features in cached.values())
        found = cached | dict(self._capture([place for place in places if place not in cached]))
        features = [found[place] for place in places]
        return features if len(features) > 1 else features[0]

    def tokens(self) -> tuple[int, int]:
        """(captured, replayed from memory) since the start."""
        return self._captured_tokens, self._replayed_tokens

    def _capture(self, places: Sequence[Place]) -> Iterator[tuple[Place, Features | None]]:
        outlines = [self._outline(place) for place in places]
        captured = self._extractor.extract([outline.input_ids.tolist() for outline in outlines])
        for place, outline, states in zip(places, outlines, captured, strict=True):
            self._captured_tokens += len(outline.input_ids)
            problem = features_problem(outline.input_ids, outline.loss_mask, states)
            if problem is not None:
                self._set_apart(place, outline, *problem)
                yield place, None
                continue
            features = Features.of(outline, *states)
            self._keep(place, features)
            yield place, features

    def _outline(self, place: Place) -> StoredDocument:
        return self._shard(place.shard)[place.row]

    def _keep(self, place: Place, features: Features) -> None:
        """Hold on to what there is room for. Nothing ever makes room: every epoch asks for all, so any other would be as good."""
        if features.num_bytes <= self._cache_room:
            self._cache[place] = features
            self._cache_room -= features.num_bytes

    def _set_apart(self, place: Place, outline: StoredDocument, reason: str, detail: str) -> None:
        note = {"key": outline.key, "reason": reason, "detail": detail}
        self._unusable.join(f"{place.shard}-{place.row}.json").write_bytes(json.dumps(note).encode())
