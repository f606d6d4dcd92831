"""Where training documents come from: a features output (`data.mode: store`), or workers that capture them (`stream`).

Both are asked for documents in training's order and hand them out in that order, so the same head comes out.
"""

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from components.beside import start_beside_driver
from components.cluster_room import are_up, check_room, stage_needs, waiting_lines
from components.config import Settings
from components.data.extractors.interface import ExtractorSpec
from components.data.open_shards import Kept, OpenShards
from components.data.streaming import StreamJob, StreamWorker
from components.data.trials import Place, Trials
from components.draft.batch import Document
from components.storage import Location
from components.training.host_memory import KEPT_BYTES
from components.training.order import SHARDS_SHUFFLED_TOGETHER, Entry

log = logging.getLogger("aerie")

GB = 1e9
TOKENS_TIMEOUT_S = 30.0  # of a worker whose node is gone; one that captures ahead is done by then
OPEN_SHARDS = SHARDS_SHUFFLED_TOGETHER + 1  # of an epoch's group, and the first of the next one


class DocumentSource(Protocol):
    """Plain values and actors' handles, so that every training worker can have it."""

    def documents(self, entries: Iterable[Entry]) -> Iterator[Document | None]:
        """The document of each entry, in the order of the entries; None for one whose features are unusable."""
        ...


@dataclass
class StoredDocuments:
    """Documents of a features output, read one by one as they are asked for."""

    location: Location
    kept_bytes: float = KEPT_BYTES
    """Memory for documents that are asked for again."""

    def documents(self, entries: Iterable[Entry]) -> Iterator[Document]:
        return map(self._read, entries)

    def _read(self, entry: Entry) -> Document:
        document = self._kept.get(entry)
        if document is None:
            document = self._shards.read(entry.shard, entry.row)
            self._kept.offer(entry, document, document.num_bytes)
        return document

    @cached_property
    def _shards(self) -> OpenShards:
        return OpenShards(self.location, OPEN_SHARDS)

    @cached_property
    def _kept(self) -> Kept[Entry, Document]:
        return Kept(self.kept_bytes)


@dataclass(frozen=True)
class StreamedDocuments:
    """Documents from `StreamWorker` actors."""

    workers: Sequence[Any]
    documents_in_flight: int

    def documents(self, entries: Iterable[Entry]) -> Iterator[Document | None]:
        """At most `documents_in_flight` are asked for and not handed out; half of them are asked for at a time, to be captured together."""
        upcoming = iter(entries)
        waiting: deque[ObjectRef] = deque()
        while True:
            if len(waiting) <= self.documents_in_flight // 2:
                waiting += self._ask(list(islice(upcoming, self.documents_in_flight - len(waiting))))
            if not waiting:
                return
            features = ray.get(waiting.popleft())
            yield None if features is None else features.document()

    def _ask(self, entries: Sequence[Entry]) -> list[ObjectRef]:
        """A promise for each entry; one call for each worker."""
        promises: dict[int, ObjectRef] = {}
        for number, worker in enumerate(self.workers):
            own = [entry for entry in entries if entry.number % len(self.workers) == number]
            if own:
                call = worker.capture.options(num_returns=len(own))
                refs = call.remote([Place(entry.shard, entry.row) for entry in own])
                promises |= zip([entry.number for entry in own], refs if len(own) > 1 else [refs], strict=True)
        return [promises[entry.number] for entry in entries]


@contextmanager
def open_stream(
    settings: Settings, extractor: ExtractorSpec, features: Location, unusable: Location
) -> Iterator[StreamedDocuments]:
    """Capture workers on `resources.features`, ended with the block.

    Args:
        settings: The run's.
        extractor: What they capture with.
        features: The features output, with an outline of every training document.
        unusable: Folder that gets a note for each document whose features are unusable.

    Raises:
        ConfigError: the cluster has not the resources of capture and training together.
    """
    resources, stream = settings.resources.features, settings.data.stream
    needs = stage_needs("head", settings)
    check_room(needs)
    options = {
        "num_cpus": resources.num_cpus,
        "num_gpus": resources.num_gpus,
        "runtime_env": {"env_vars": dict(extractor.env)},
        "max_restarts": -1,  # a worker that died gets the call that it had again; `Trials` finds what it died of
        "max_task_retries": -1,
    }
    job = StreamJob(extractor, features, unusable, stream.cache_gb * GB, settings.data.stall_timeout_s)
    trials = start_beside_driver(Trials, settings.data.max_attempts, resources.replicas)
    worker = ray.remote(StreamWorker).options(**options)
    workers = [worker.remote(job, number, trials) for number in range(resources.replicas)]
    try:
        with waiting_lines("capture", needs, are_up(workers)):
            yield StreamedDocuments(workers, stream.documents_in_flight)
        with suppress(RayError):  # a courtesy: what was to be captured is
            tokens = ray.get([worker.tokens.remote() for worker in workers], timeout=TOKENS_TIMEOUT_S)
            log.info("head: %d tokens captured, %d replayed from memory", *map(sum, zip(*tokens, strict=True)))
    finally:
        for handle in workers:
            ray.kill(handle)


def unusable_documents(folder: Location) -> list[dict[str, str]]:
    """What capture workers noted of documents that they could not hand out: key, reason and detail."""
    return [json.loads(folder.join(name).read_bytes()) for name in folder.files()]
