"""Is a champion still what it was?

Sessions that are over fill windows of a fixed size; each window is tested once. AL is compared with the reference: with what the head had in an
experiment or in its first window task by task, so a change in what people ask is no alarm (a task that it did not have then is compared with
all of them together); with what was recorded of its version as a whole.
A request's time is compared with the 95th percentile of the first window: a time depends on the load, which
is another one when a head has all of the traffic. A client that left with nothing to read, after the 95th percentile of the time in which the
first window's clients had something, counts as a slow request. A test is on the window's sum of one score a session over the root of the sum of its
squares (a session is what is independent), at a level so small that false alarms are rare: at 0.001, one in a thousand windows for each figure.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from components.config import ExperimentConfig, WatchConfig
from components.experiment.acceptance import Acceptance, Recorded, Reference
from components.experiment.parts import left_in_vain, wait_s
from components.experiment.sessions import Ledger, Session, by_task, ended_at
from components.experiment.tally import MIN_TIMES, QUANTILE
from components.serving.records import LiveRecord

log = logging.getLogger("aerie")

FIRST_WINDOW = "the first window"


@dataclass(frozen=True)
class Alarm:
    figure: str
    measured: str
    reference: str
    last_at: float
    """Unix time in seconds at which the window's last request ended."""


@dataclass(frozen=True)
class Figure:
    """Of a window that was tested."""

    name: str
    measured: str
    reference: str
    source: str
    """Of the reference."""
    alarm: bool


class Watch:
    """Takes the records of one arm and raises an alarm when a window of its sessions is worse than the reference beyond doubt.

    Args:
        arm: Its name in the records.
        policy: When a session is over.
        config: Margins, the window's size and the level.
        reference: Its AL so far; None, or one of another K than the arm drafts with: the first window becomes it.
    """

    def __init__(
        self, arm: str, policy: ExperimentConfig, config: WatchConfig, reference: Reference | None = None
    ) -> None:
        self.reference = reference
        self.tested: tuple[Figure, ...] = ()
        """The newest window's."""
        self.ledger = Ledger([arm], policy)
        self._config = config
        self._slow_s: float | None = None
        """Usual 95th percentile of a request's time."""
        self._wait_s: float | None = None
        """Of the time until a client has something to read."""
        self._window: list[Session] = []

    def add(self, records: Iterable[LiveRecord], now: float) -> list[Alarm]:
        """The alarms of the windows that these records fill; `now` is Unix time in seconds."""
        alarms = []
        for record in sorted(records, key=ended_at):
            alarms += self._enter_all(self.ledger.silent(ended_at(record)))
            alarms += self._enter_all(self.ledger.add(record))
        return alarms + self._enter_all(self.ledger.silent(now))

    def _enter_all(self, sessions: Iterable[Session]) -> list[Alarm]:
        return [alarm for session in sessions for alarm in self._enter(session)]

    def _enter(self, session: Session) -> list[Alarm]:
        self._window.append(session)
        if len(self._window) < self._config.sessions:
            return []
        window, self._window = self._window, []
        # A session counts once so that no client decides a window alone. A window that was tested is tested no more, and a watch has no end:
        # whoever comes again counts once in the next one.
        self.ledger.forget_over()
        self.tested = (self._al_figure(window), self._time_figure(window))
        last_at = max(session.last_at for session in window)
        return [
            Alarm(figure.name, figure.measured, figure.reference, last_at) for figure in self.tested if figure.alarm
        ]

    def _al_figure(self, window: list[Session]) -> Figure:
        """By how much fewer tokens were accepted than at the lowest AL allowed."""
        mine = Acceptance.of(window, FIRST_WINDOW)
        if isinstance(self.reference, Recorded) and not is_drafted_with(self.reference.num_speculative_tokens, window):
            log.warning(
                "watch: %s is of K=%d and not of this arm's",
                self.reference.source,
                self.reference.num_speculative_tokens,
            )
            self.reference = None
        if self.reference is None:
            self.reference = mine if mine.pooled is not None else None
            log.info("watch: the first %d sessions are the reference: AL %s", len(window), mine)
            return Figure("acceptance length", str(mine), str(mine), mine.source, alarm=False)
        lacking = np.zeros(len(window))
        for i, session in enumerate(window):
            for task, records in by_task(session):
                usual = self.reference.al(task)
                assert usual is not None, "a reference has rounds"
                floor = usual * (1 - self._config.al_drop) - 1
                lacking[i] += sum(floor * r.rounds - r.accepted for r in records)
        alarm = self._is_positive(lacking)
        return Figure("acceptance length", str(mine), str(self.reference), self.reference.source, alarm)

    def _time_figure(self, window: list[Session]) -> Figure:
        """How many more requests than 1 in 20 were slower than allowed, or left in vain."""
        sound = [r for session in window for r in session.records if r.error is None]
        mine_s = _slow_s([r.duration_s for r in sound])
        if self._slow_s is None:
            self._slow_s, self._wait_s = mine_s, _slow_s([wait_s(r) for r in sound])
        # The first window is tested too: what its clients left is slow by the times of those who stayed. Where hardly anybody was answered
        # nothing is usual, and whoever left with nothing to read counts.
        slow_s, usual_s = (np.inf, 0.0) if self._slow_s is None else (self._slow_s, self._wait_s)
        slower = 1 + self._config.latency_increase
        excess, left = np.zeros(len(window)), 0
        for i, session in enumerate(window):
            times = [r.duration_s / slower for r in session.records if r.error is None]
            in_vain = sum(left_in_vain(r, usual_s, slower) for r in session.records)
            slow = sum(time > slow_s for time in times) + in_vain
            excess[i] = slow - (1 - QUANTILE) * (len(times) + in_vain)
            left += in_vain
        measured = _seconds(mine_s) + (f", and {left} clients left in vain" if left else "")
        return Figure("p95 latency", measured, _seconds(self._slow_s), FIRST_WINDOW, self._is_positive(excess))

    def _is_positive(self, scores: np.ndarray) -> bool:
        return bool(scores.sum() > -ndtri(self._config.level) * np.sqrt((scores**2).sum()) > 0)


def _slow_s(times_s: Sequence[float]) -> float | None:
    return float(np.quantile(times_s, QUANTILE)) if len(times_s) >= MIN_TIMES else None


def is_drafted_with(num_speculative_tokens: int, sessions: Iterable[Session]) -> bool:
    """Whether all that was drafted in these sessions was drafted so many tokens at a time; False where nothing was."""
    lengths = {len(record.histogram) for session in sessions for record in session.records if record.histogram}
    return lengths == {num_speculative_tokens + 1}


def _seconds(value_s: float | None) -> str:
    return "none" if value_s is None else f"{value_s:.2f} s"
