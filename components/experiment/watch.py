"""Is a champion still what it was?

Sessions that are over fill windows of a fixed size; each window is tested once. AL is compared with the reference task by task, so a
change in what people ask is no alarm, and a request's time with the 95th percentile of the first window: a time depends on the load, which
is another one when a head has all of the traffic. A test is on the window's sum of one score a session over the root of the sum of its
squares (a session is what is independent), at a level so small that false alarms are rare: at 0.001, one in a thousand windows for each figure.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtri

from components.config import ExperimentConfig, WatchConfig
from components.experiment.monitor import MIN_TIMES, QUANTILE, by_task
from components.experiment.sessions import Ledger, Session, ended_at
from components.serving.records import LiveRecord

log = logging.getLogger("aerie")


@dataclass
class Acceptance:
    """Sums by task: what AL a head had."""

    accepted: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, sessions: Iterable[Session]) -> "Acceptance":
        made = cls()
        for session in sessions:
            made.add(session)
        return made

    def add(self, session: Session) -> None:
        for task, records in by_task(session):
            self.accepted[task] = self.accepted.get(task, 0) + sum(r.accepted for r in records)
            self.rounds[task] = self.rounds.get(task, 0) + sum(r.rounds for r in records)

    def al(self, task: str) -> float | None:
        """None for a task without a round."""
        return 1 + self.accepted[task] / self.rounds[task] if self.rounds.get(task) else None

    def __str__(self) -> str:
        return ", ".join(f"{task or 'all'} {self.al(task):.3f}" for task in self.rounds if self.rounds[task]) or "none"


@dataclass(frozen=True)
class Alarm:
    figure: str
    measured: str
    reference: str


class Watch:
    """Takes the records of one arm and raises an alarm when a window of its sessions is worse than the reference beyond doubt.

    Args:
        arm: Its name in the records.
        policy: When a session is over.
        config: Margins, the window's size and the level.
        reference: Its AL so far; None: the first window becomes it.
    """

    def __init__(
        self, arm: str, policy: ExperimentConfig, config: WatchConfig, reference: Acceptance | None = None
    ) -> None:
        self.reference = reference
        self.ledger = Ledger([arm], policy)
        self._config = config
        self._slow_s: float | None = None
        """Usual 95th percentile of a request's time."""
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
        times = [np.array([r.duration_s for r in session.records if r.error is None]) for session in window]
        alarms = []
        if self.reference is None:
            self.reference = Acceptance.of(window)
            log.info("watch: the first %d sessions are the reference: AL %s", len(window), self.reference)
        else:
            alarms += self._al_alarm(window, self.reference)
        if self._slow_s is None:
            self._slow_s = _slow_s(np.concatenate(times))
        else:
            alarms += self._time_alarm(times, self._slow_s)
        return alarms

    def _al_alarm(self, window: list[Session], reference: Acceptance) -> list[Alarm]:
        """By how much fewer tokens were accepted than at the lowest AL allowed."""
        floors = {task: (reference.al(task) or 1.0) * (1 - self._config.al_drop) - 1 for task in reference.rounds}
        lacking = np.zeros(len(window))
        for i, session in enumerate(window):
            for task, records in by_task(session):
                if task in floors:  # of a task that is new nothing is expected
                    lacking[i] += sum(floors[task] * r.rounds - r.accepted for r in records)
        if not self._is_positive(lacking):
            return []
        return [Alarm("acceptance length", str(Acceptance.of(window)), str(reference))]

    def _time_alarm(self, times: list[np.ndarray], usual_s: float) -> list[Alarm]:
        """How many more requests than 1 in 20 were slower than allowed; `times` in seconds, of each session's requests."""
        limit = usual_s * (1 + self._config.latency_increase)
        excess = np.array([np.sum(mine > limit) - (1 - QUANTILE) * len(mine) for mine in times])
        if not self._is_positive(excess):
            return []
        return [Alarm("p95 latency", f"{np.quantile(np.concatenate(times), QUANTILE):.2f} s", f"{usual_s:.2f} s")]

    def _is_positive(self, scores: np.ndarray) -> bool:
        return bool(scores.sum() > -ndtri(self._config.level) * np.sqrt((scores**2).sum()) > 0)


def _slow_s(times_s: np.ndarray) -> float | None:
    return float(np.quantile(times_s, QUANTILE)) if len(times_s) >= MIN_TIMES else None
