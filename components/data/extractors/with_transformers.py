"""Features from transformers: documents packed into forward passes of at most `data.batch_tokens` tokens."""

from collections.abc import Iterator, Sequence

import torch

from components.data.ahead import map_ahead
from components.data.extractors.interface import ExtractorSpec
from components.target.layers import Captured, capture, load_target


class TransformersExtractor:
    """The target in transformers, on the GPU where there is one."""

    def __init__(self, spec: ExtractorSpec) -> None:
        torch.set_num_threads(spec.num_threads)
        self._spec = spec
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = load_target(spec.target_path, getattr(torch, spec.dtype), self._device)

    def extract(self, documents: Sequence[Sequence[int]]) -> Iterator[Captured]:
        """The states of each document alone; the next batch is computed while the last one's are used."""
        for captured in map_ahead(self._capture, pack(documents, self._spec.batch_tokens), num_threads=1, depth=1):
            yield from captured

    def _capture(self, batch: Sequence[Sequence[int]]) -> list[Captured]:
        """Features of each document; NaN stays with the document that has it (a masked 0 * NaN is NaN, too)."""
        captured = self._capture_packed(batch)
        if len(batch) > 1 and not all(states.isfinite().all() for document in captured for states in document):
            return [self._capture_packed([ids])[0] for ids in batch]
        return captured

    def _capture_packed(self, batch: Sequence[Sequence[int]]) -> list[Captured]:
        lengths = [len(ids) for ids in batch]
        packed = torch.tensor([[i for ids in batch for i in ids]], device=self._device)
        captured = capture(self._model, packed, self._spec.aux_layers, lengths)
        return [Captured(*states) for states in zip(*(s.to("cpu").split(lengths) for s in captured), strict=True)]


def pack(documents: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Consecutive documents of together at most `batch_tokens` tokens; a longer one comes alone."""
    batch: list[Sequence[int]] = []
    for document in documents:
        if batch and sum(map(len, batch)) + len(document) > batch_tokens:
            yield batch
            batch = []
        batch.append(document)
    if batch:
        yield batch
