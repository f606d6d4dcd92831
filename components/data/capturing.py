"""Workers that record features: every part of answers becomes the part of features with the same number."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch

from components.data.ahead import map_ahead
from components.data.answers import read_answers
from components.data.documents import Turns, merge_turns
from components.data.extractors.interface import ExtractorSpec
from components.data.part_worker import PartTask, PartWorker, Piece
from components.data.parts import PartAccount, part_name
from components.data.shards import SCHEMA, StoredDocument, feature_row, write_shard
from components.storage import Location
from components.target.layers import Captured

MIN_TOKENS = 2  # a shorter document predicts nothing


class CaptureWorker(PartWorker):
    """Holds the target and turns each part of answers into the part of features with the same number."""

    schema = SCHEMA

    def __init__(
        self,
        output: Location,
        report: Callable[[Mapping[str, int]], Any],
        responses: Location,
        extractor: ExtractorSpec,
        outlined_splits: tuple[str, ...] = (),
    ) -> None:
        """Loads the target. Documents of `outlined_splits` are recorded without states: training captures them itself."""
        super().__init__(output, report)
        self._responses = responses
        self._extractor = extractor.start()
        self._outlined_splits = outlined_splits
        self._num_threads = extractor.num_threads

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
        return list(merge_turns(read_answers(self._responses.join(part_name(task.number)))))

    def _rows(self, documents: Sequence[Turns], account: PartAccount) -> Iterator[dict]:
        """Rows while the next ones are made of their states and the next batch is computed; the caller writes them."""
        captured = self._states(_long_enough(documents, account))
        for row, accounted in map_ahead(_row, captured, self._num_threads, depth=2 * self._num_threads):
            account.add(accounted)
            if row is not None:
                yield row
            self.count(documents=1, tokens=accounted.figures["tokens"])

    def _states(self, documents: Sequence[Turns]) -> Iterator[tuple[Turns, Captured | None]]:
        """Each document with its states; None for one that is only outlined."""
        wanted = [turns.input_ids for turns in documents if turns.split not in self._outlined_splits]
        captured = self._extractor.extract(wanted)
        for turns in documents:
            yield turns, None if turns.split in self._outlined_splits else next(captured)


def _row(captured: tuple[Turns, Captured | None]) -> tuple[dict | None, PartAccount]:
    turns, states = captured
    account = PartAccount()
    document = outlined_document(turns, account) if states is None else stored_document(turns, states, account)
    row = None if document is None else feature_row(document, turns.prompt_key, turns.split)
    return row, account


def stored_document(turns: Turns, captured: Captured, account: PartAccount) -> StoredDocument | None:
    """The document with its features, counted in `account`; None (and quarantined) when they are not whole."""
    problem = features_problem(turns.input_ids, turns.loss_mask, captured)
    if problem is not None:
        _lose(turns, account, *problem)
        return None
    account.kept += len(turns.turn_keys)
    account.figures.update(documents=1, tokens=len(turns.input_ids), supervised_tokens=sum(turns.loss_mask))
    return StoredDocument(
        input_ids=torch.tensor(turns.input_ids),
        loss_mask=torch.tensor(turns.loss_mask, dtype=torch.bool),
        aux_hidden=captured.aux_hidden.to(torch.bfloat16),
        last_hidden=captured.last_hidden.to(torch.bfloat16),
        key=turns.key,
        family=turns.family,
    )


def outlined_document(turns: Turns, account: PartAccount) -> StoredDocument | None:
    """The document with states of no width: whoever needs them captures them."""
    num_tokens = len(turns.input_ids)
    account.figures.update(streamed_documents=1, streamed_tokens=num_tokens)
    return stored_document(turns, Captured(torch.empty(num_tokens, 0), torch.empty(num_tokens, 0)), account)


def features_problem(input_ids: Sized, loss_mask: Sized, captured: Captured) -> tuple[str, str] | None:
    """Why a document cannot be trained on: (name of the reason, what was found)."""
    lengths = {len(input_ids), len(loss_mask), len(captured.aux_hidden), len(captured.last_hidden)}
    if len(lengths) > 1:
        return "lengths_differ", f"ids, mask and states have lengths {sorted(lengths)}"
    if not all(states.isfinite().all() for states in captured):
        return "not_finite", "NaN or infinity in the hidden states"
    return None


def _long_enough(documents: Sequence[Turns], account: PartAccount) -> list[Turns]:
    for turns in documents:
        if len(turns.input_ids) < MIN_TOKENS:
            account.drop("too_short", {"key": turns.key}, f"{len(turns.input_ids)} tokens")
    return [turns for turns in documents if len(turns.input_ids) >= MIN_TOKENS]


def _lose(turns: Turns, account: PartAccount, reason: str, detail: str) -> None:
    for key in turns.turn_keys:
        account.fail(reason, {"key": key}, detail)
