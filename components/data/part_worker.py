"""Workers: what makes parts of rows, and the actor around it that survives whatever happens to it."""

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import ray
from ray.exceptions import RayError

from components.data.blame import Life, Unheard, innocent_cause, node_answers
from components.data.parts import part_name
from components.data.pieces import Pieces
from components.data.progress import Failure
from components.data.verdict import ERROR, STALLED, Verdict
from components.data.watchdog import LAST_WORDS_TIMEOUT_S, Watchdog
from components.lease import Hold
from components.storage import Location

REPORT_INTERVAL_S = 1.0
LOOK_INTERVAL_S = 10.0
"""Between a worker's looks at the lease: whoever takes it over has no engine up sooner."""


@dataclass(frozen=True)
class PartTask:
    """A part to make: its number, and what the worker needs to find its rows."""

    number: int
    start: int = 0
    num_bytes: int = 0
    in_pieces: bool = False
    """A worker died with it: make it piece by piece."""


@dataclass(frozen=True)
class Piece:
    """Rows of a part, and the file to make of them."""

    task: PartTask
    file: Location
    rows: range | None = None
    """None: all of them."""
    draft: Location | None = None
    """Where a worker may keep what there is of a single row, in case that the rest of it ends the process."""

    def of(self, rows: list[Any]) -> list[Any]:
        """These rows of all of the part's."""
        return rows if self.rows is None else rows[self.rows.start : self.rows.stop]


class PartWorker:
    """Base of the workers: knows what to make of the rows, and leaves failures to the actor around it."""

    schema: ClassVar[pa.Schema]
    """Of the parts."""

    def __init__(self, output: Location, report: Callable[[Mapping[str, int]], None]) -> None:
        self.output = output
        self._report = report
        self._unreported: Counter[str] = Counter()
        self._reported_at_s = time.monotonic()
        self.seen_at_s = time.monotonic()
        """When it last gave a sign of life."""

    def make(self, pieces: list[Piece]) -> None:
        """Write the file of every piece, each the moment it is complete."""
        raise NotImplementedError

    def num_rows(self, task: PartTask) -> int:
        """How many rows the part has, for its cut into pieces."""
        raise NotImplementedError

    def lose(self, piece: Piece, reason: str, detail: str) -> None:
        """Write the file of a piece that cannot be made: an account of its rows, and what its draft has."""
        raise NotImplementedError

    def alive(self) -> None:
        """Give a sign of life: called wherever a hung engine would not come back to."""
        self.seen_at_s = time.monotonic()

    def count(self, **done: int) -> None:
        """Add to the figures of the progress lines."""
        self.alive()
        self._unreported.update(done)
        if time.monotonic() - self._reported_at_s >= REPORT_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Report what is done."""
        self._report(dict(self._unreported))
        self._unreported.clear()
        self._reported_at_s = time.monotonic()


class PartRunner:
    """Runs a worker in an actor of Ray Data, and ends the process with whatever goes wrong in it.

    An engine that failed once may hold requests or memory of what it was doing, so the next part gets a fresh process.
    The worker is started in the first call: an actor that is restarted and whose constructor then raises is neither
    replaced by Ray Data nor reported, and calls for it wait for ever.
    """

    def __init__(
        self,
        worker: type[PartWorker],
        output: Location,
        progress: Any,
        hold: Hold,
        worker_args: tuple[Any, ...],
        max_attempts: int,
        stall_timeout_s: float,
    ) -> None:
        self._start = lambda: worker(output, self._report, *worker_args)
        self._output, self._progress, self._max_attempts = output, progress, max_attempts
        self._hold, self._looked_at_s = hold, 0.0
        self._worker: PartWorker | None = None
        self._watchdog = Watchdog(stall_timeout_s, self._seen_at_s, self._on_stall)
        self._called_at_s = time.monotonic()
        self._life = Life.here()
        self._failure: Failure = "start"
        self._note: Callable[[Verdict], None] = lambda verdict: None
        """Leaves word of why the piece that is being made failed."""

    def __call__(self, call: dict[str, Any]) -> dict[str, Any]:
        if not ray.get(self._progress.begin.remote()):
            return {"parts": 0}
        tasks = [PartTask(**task) for task in call["tasks"]]
        self._called_at_s, self._failure = time.monotonic(), "start"
        with self._watchdog.watching():
            try:
                self._worker = self._worker or self._start()
                self._failure = "rows"
                self._make(self._worker, tasks)
            except Exception as error:
                self._end(innocent_cause(error) or self._failure)
        return {"parts": len(tasks)}

    def _make(self, worker: PartWorker, tasks: list[PartTask]) -> None:
        whole = [Piece(task, self._part(task)) for task in tasks if not task.in_pieces]
        if whole:
            worker.make(whole)
        for task in tasks:
            if task.in_pieces:
                self._make_in_pieces(worker, task)
        worker.flush()

    def _make_in_pieces(self, worker: PartWorker, task: PartTask) -> None:
        num_rows = worker.num_rows(task)
        pieces = Pieces(self._output, task.number, num_rows, self._max_attempts, self._life, self._died)
        for rows in pieces.left():
            piece = Piece(task, pieces.file(rows), rows, pieces.draft(rows))
            if pieces.is_lost(rows):
                worker.lose(piece, *pieces.verdict(rows))
            else:
                self._try(worker, pieces, piece, rows)
            pieces.end(rows)
            worker.alive()
        pieces.join(self._part(task), worker.schema)

    def _try(self, worker: PartWorker, pieces: Pieces, piece: Piece, rows: range) -> None:
        pieces.begin(rows)
        self._note = partial(pieces.fail, rows)
        try:
            worker.make([piece])
        except Exception as error:
            if innocent_cause(error) is None:
                with suppress(OSError):
                    self._note(Verdict(ERROR, traceback.format_exc()))
            raise
        finally:
            self._note = lambda verdict: None
        worker.flush()

    def _part(self, task: PartTask) -> Location:
        return self._output.join(part_name(task.number))

    def _seen_at_s(self) -> float:
        return max(self._called_at_s, self._worker.seen_at_s if self._worker else 0.0)

    def _on_stall(self, words: str) -> None:
        with suppress(OSError):
            self._note(Verdict(STALLED, words))
        ray.get(self._progress.fail.remote(self._failure, words, self._life.process), timeout=LAST_WORDS_TIMEOUT_S)

    def _died(self, life: Life) -> bool:
        """Whether a process of this run ended alone."""
        if life.run != self._life.run or not node_answers(life.node):
            return False
        return not ray.get(self._progress.is_excused.remote(life.process))

    def _report(self, done: Mapping[str, int]) -> None:
        self._look()
        try:
            ray.get(self._progress.add.remote(done))
        except RayError as error:
            raise Unheard from error

    def _look(self) -> None:
        """Raises LeaseLost when another run writes the output by now, before a part of it is replaced."""
        now_s = time.time()  # the other clock stands still while a machine is suspended
        if now_s - self._looked_at_s < LOOK_INTERVAL_S:
            return
        self._looked_at_s = now_s
        with suppress(OSError):  # a storage that is away is nobody else's either
            self._hold.check()

    def _end(self, failure: Failure) -> None:
        try:
            ray.get(self._progress.fail.remote(failure, traceback.format_exc(), self._life.process))
        finally:
            os._exit(1)
