"""Ends a worker's process that stands still: an engine that hangs raises nothing, and would keep its rows for ever."""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psutil

from components.beside import thread_beside

LOOKS = 10  # in the time that a worker may be silent
LAST_WORDS_TIMEOUT_S = 30.0
"""For whoever is told; a process that cannot get rid of them is ended all the same."""


class Watchdog:
    """Watches one call after another, from a thread of its own.

    The thread needs Python's lock. Native code that hangs and holds the lock is ended without a word, by a timer of faulthandler's
    that the thread sets anew with every look.
    """

    def __init__(self, timeout_s: float, seen_at_s: Callable[[], float], say: Callable[[str], None]) -> None:
        """The process may be silent for `timeout_s`.

        Args:
            timeout_s: Longest time without a sign of life, whatever the process does.
            seen_at_s: When the last one was, on `time.monotonic`'s clock.
            say: Gets what the process was doing before it is ended with all its children.
        """
        self._timeout_s, self._seen_at_s, self._say = timeout_s, seen_at_s, say

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calling thread while the block runs."""
        _exit_in(self._timeout_s)
        try:
            with thread_beside("watchdog", partial(self._watch, threading.get_ident())):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, watched: int, over: threading.Event) -> None:
        while not over.wait(self._timeout_s / LOOKS):
            if time.monotonic() - self._seen_at_s() > self._timeout_s:
                self._end(watched)
            _exit_in(self._timeout_s)

    def _end(self, watched: int) -> None:
        _exit_in(2 * LAST_WORDS_TIMEOUT_S)
        try:
            stack = "".join(traceback.format_stack(sys._current_frames()[watched]))
            self._say(f"{stack}no sign of life for {self._timeout_s:g} s (data.stall_timeout_s)")
        finally:
            for child in psutil.Process().children(recursive=True):  # they may hang as well, and hold a GPU
                child.kill()
            os._exit(1)


def _exit_in(seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
