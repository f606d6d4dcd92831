"""Workers that record features: the target in transformers, over packed batches of documents."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from components.data.ahead import map_ahead
from components.data.documents import Turns, merge_turns
from components.data.part_worker import PartTask, PartWorker, Piece
from components.data.parts import PartAccount, part_name, read_columns
from components.data.shards import SCHEMA, StoredDocument, feature_row, write_shard
from components.storage import Location
from components.target.layers import Captured, capture, load_target

RESPONSE_COLUMNS = ["key", "prompt_key", "family", "split", "prompt_ids", "output_ids"]
MIN_TOKENS = 2  # a shorter document predicts nothing


class CaptureWorker(PartWorker):
    """Holds the target and turns each part of answers into the part of features with the same number."""

    schema = SCHEMA

    def __init__(
        self,
        output: Location,
        report: Callable[[Mapping[str, int]], Any],
        responses: Location,
        target_path: str,
        aux_layers: list[int],
        dtype: str,
        batch_tokens: int,
        num_threads: int,
    ) -> None:
        super().__init__(output, report)
        self._responses = responses
        self._aux_layers = aux_layers
        self._batch_tokens = batch_tokens
        self._num_threads = num_threads
        torch.set_num_threads(num_threads)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = load_target(target_path, getattr(torch, dtype), self._device)

    def make(self, pieces: list[Piece]) -> None:
        """Record one piece after another; only a batch's features are in memory at a time."""
        for piece in pieces:
            account = PartAccount()
            write_shard(piece.file, self._rows(piece.of(self._documents(piece.task)), account), account)

    def num_rows(self, task: PartTask) -> int:
        return len(self._documents(task))

    def lose(self, piece: Piece, reason: str, detail: str) -> None:
        account = PartAccount()
        for turns in piece.of(self._documents(piece.task)):
            _lose(turns, account, reason, detail)
        write_shard(piece.file, [], account)

    def _documents(self, task: PartTask) -> list[Turns]:
        stored = read_columns(self._responses.join(part_name(task.number)), RESPONSE_COLUMNS)
        return list(merge_turns(stored.to_pylist()))

    def _rows(self, documents: Sequence[Turns], account: PartAccount) -> Iterator[dict]:
        """Rows while the next ones are made of their states and the next batch is computed; the caller writes them."""
        captured = self._states(list(_long_enough(documents, account)))
        for row, accounted in map_ahead(_row, captured, self._num_threads, depth=2 * self._num_threads):
            account.add(accounted)
            if row is not None:
                yield row
            self.count(documents=1, tokens=accounted.figures["tokens"])

    def _states(self, documents: Sequence[Turns]) -> Iterator[tuple[Turns, Captured]]:
        batches = list(pack(documents, self._batch_tokens))
        for batch, captured in zip(batches, map_ahead(self._capture, batches, num_threads=1, depth=1), strict=True):
            yield from zip(batch, captured, strict=True)

    def _capture(self, batch: Sequence[Turns]) -> list[Captured]:
        """Features of each document; NaN stays with the document that has it (a masked 0 * NaN is NaN, too)."""
        captured = self._capture_packed(batch)
        if len(batch) > 1 and not all(states.isfinite().all() for document in captured for states in document):
            return [self._capture_packed([turns])[0] for turns in batch]
        return captured

    def _capture_packed(self, batch: Sequence[Turns]) -> list[Captured]:
        lengths = [len(turns.input_ids) for turns in batch]
        ids = torch.tensor([[i for turns in batch for i in turns.input_ids]], device=self._device)
        captured = capture(self._model, ids, self._aux_layers, lengths)
        pieces = [states.to("cpu", torch.bfloat16).split(lengths) for states in captured]
        return [Captured(*states) for states in zip(*pieces, strict=True)]


def _row(captured: tuple[Turns, Captured]) -> tuple[dict | None, PartAccount]:
    turns, states = captured
    account = PartAccount()
    document = stored_document(turns, states, account)
    row = None if document is None else feature_row(document, turns.prompt_key, turns.split)
    return row, account


def pack(documents: Sequence[Turns], batch_tokens: int) -> Iterator[list[Turns]]:
    """Consecutive documents of together at most `batch_tokens` tokens; a longer one comes alone."""
    batch: list[Turns] = []
    for document in documents:
        if batch and sum(len(d.input_ids) for d in [*batch, document]) > batch_tokens:
            yield batch
            batch = []
        batch.append(document)
    if batch:
        yield batch


def stored_document(turns: Turns, captured: Captured, account: PartAccount) -> StoredDocument | None:
    """The document with its features, counted in `account`; None (and quarantined) when they are not whole."""
    lengths = {len(turns.input_ids), len(turns.loss_mask), len(captured.aux_hidden), len(captured.last_hidden)}
    if len(lengths) > 1:
        _lose(turns, account, "lengths_differ", f"ids, mask and states have lengths {sorted(lengths)}")
        return None
    if not all(states.isfinite().all() for states in captured):
        _lose(turns, account, "not_finite", "NaN or infinity in the hidden states")
        return None
    account.kept += len(turns.turn_keys)
    account.figures.update(documents=1, tokens=len(turns.input_ids), supervised_tokens=sum(turns.loss_mask))
    return StoredDocument(
        input_ids=torch.tensor(turns.input_ids),
        loss_mask=torch.tensor(turns.loss_mask, dtype=torch.bool),
        aux_hidden=captured.aux_hidden,
        last_hidden=captured.last_hidden,
        key=turns.key,
        family=turns.family,
    )


def _long_enough(documents: Sequence[Turns], account: PartAccount) -> list[Turns]:
    for turns in documents:
        if len(turns.input_ids) < MIN_TOKENS:
            account.drop("too_short", {"key": turns.key}, f"{len(turns.input_ids)} tokens")
    return [turns for turns in documents if len(turns.input_ids) >= MIN_TOKENS]


def _lose(turns: Turns, account: PartAccount, reason: str, detail: str) -> None:
    for key in turns.turn_keys:
        account.fail(reason, {"key": key}, detail)
