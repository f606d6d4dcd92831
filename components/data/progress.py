"""What the workers of a job have done and how they failed, gathered in one actor beside the driver."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple

from ray.exceptions import RayError

from components.beside import thread_beside

log = logging.getLogger("aerie")

Failure = Literal["rows", "start", "full", "storage", "damaged", "lost", "driver"]
"""While rows were made, while the worker started, because nothing more can be written, because the storage did not answer, because what
was read is damaged, because another run has the lease, or because nobody beside the driver answered."""
EXCUSES: tuple[Failure, ...] = ("full", "storage", "damaged", "lost", "driver")
"""Failures that are not the rows'."""
FINAL: tuple[Failure, ...] = ("full", "damaged", "lost")
"""Failures that no other worker and no later try would be spared."""

PROGRESS_INTERVAL_S = 10.0
STILL_S = 60.0
"""What is left is not guessed while nothing new was done for so long: workers are starting, or have nowhere to."""
MAX_FAILED_STARTS = 3
DEATHS_PER_ATTEMPT = 10
"""Deaths in a row, for each of `max_attempts`, that a job bears while nothing is done: a handful of deadly rows."""
LAST_WORDS = 2000
"""Characters that are kept of a traceback."""


class WorkersFailed(Exception):
    """Workers of a stage could not start, or died and died again with nothing done in between."""


class Stop(NamedTuple):
    """Why no worker should go on."""

    failure: Failure
    words: str


class Progress:
    """Counts what is done (an actor), and says stop when workers end and end again with nothing done in between.

    A few deadly rows are set apart, one by one; workers that die of every row, of a broken GPU for example, would
    otherwise be started again for each of them.
    """

    def __init__(self, max_calls_without_progress: int) -> None:
        self._done: Counter[str] = Counter()
        self._max_calls = max_calls_without_progress
        self._calls = 0
        self._failed_starts = 0
        self._has_begun = self._has_worked = False
        self._failure: Failure = "rows"
        self._excused: set[str] = set()
        self._words = ""
        self._stop: Stop | None = None

    def begin(self) -> bool:
        """A worker takes a call; False: it should leave it."""
        self._calls += 1
        self._has_begun = True
        if self._calls > self._max_calls:
            self.stop(self._failure, self._words or "the workers' processes ended without a word")
        return self._stop is None

    def has_begun(self) -> bool:
        """Whether any worker's process was there to take a call."""
        return self._has_begun

    def add(self, done: Mapping[str, int]) -> None:
        """Something was done; an empty sum counts as well."""
        self._done.update(done)
        self._calls = self._failed_starts = 0
        self._failure = "rows"
        self._has_worked = True

    def fail(self, failure: Failure, words: str, process: str) -> None:
        """A worker's process is about to end itself."""
        self._words, self._failure = words[-LAST_WORDS:], failure
        self._excused |= {process} if failure in EXCUSES else set()
        self._failed_starts += failure == "start"
        cannot_start = self._failed_starts and (not self._has_worked or self._failed_starts == MAX_FAILED_STARTS)
        if failure in FINAL or cannot_start:
            self.stop(failure, self._words)

    def is_excused(self, process: str) -> bool:
        """Whether a process said that it ended for a reason that is not its rows'."""
        return process in self._excused

    def stop(self, failure: Failure, words: str) -> None:
        self._stop = self._stop or Stop(failure, words)

    def stopped(self) -> Stop | None:
        return self._stop

    def last_words(self) -> str:
        return self._words

    def done(self) -> dict[str, int]:
        return dict(self._done)


@contextmanager
def progress_lines(title: str, unit: str, total: int, done: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Logs how far a job is, every `PROGRESS_INTERVAL_S` while the block runs."""
    started_at_s = time.monotonic()

    def speak(over: threading.Event) -> None:
        seen, seen_at_s = dict[str, int](), started_at_s
        while not over.wait(PROGRESS_INTERVAL_S):
            with suppress(RayError):  # the figures are a courtesy
                now, now_s = dict(done()), time.monotonic()
                seen, seen_at_s = (seen, seen_at_s) if now == seen else (now, now_s)
                log.info("%s: %s", title, _figures(unit, total, now, now_s - started_at_s, now_s - seen_at_s))

    with thread_beside(f"{title}-progress", speak):
        yield


def _figures(unit: str, total: int, done: Mapping[str, int], elapsed_s: float, still_s: float) -> str:
    number = done.get(unit, 0)
    figures = f"{number}/{total} {unit}, {done.get('tokens', 0) / elapsed_s:.0f} tokens/s"
    if not number:
        return f"{figures} (starting)"
    if still_s >= STILL_S:
        return f"{figures}, nothing new for {still_s:.0f} s"
    return f"{figures}, about {max(0, total - number) * elapsed_s / number:.0f} s left"
