"""After a promotion: is the new champion still what it was when it was promoted?

Sessions that are over fill windows of a fixed size; each window is tested once. AL is compared with the reference task by task, so a
change in what people ask is no alarm, and a request's time with the reference's 95th percentile. A test is on the window's sum of one score
a session over the root of the sum of its squares (a session is what is independent), at a level so small that false alarms are rare: at
0.001, one in a thousand windows for each figure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtri

from components.config import ExperimentConfig, WatchConfig
from components.experiment.monitor import MIN_TIMES, QUANTILE, by_task
from components.experiment.sessions import Ledger, Session, ended_at
from components.serving.records import LiveRecord


@dataclass
class Reference:
    """What the champion was like: sums by task, and times of whole requests."""

    accepted: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)

    def add(self, session: Session) -> None:
        for task, records in by_task(session):
            self.accepted[task] = self.accepted.get(task, 0) + sum(r.accepted for r in records)
            self.rounds[task] = self.rounds.get(task, 0) + sum(r.rounds for r in records)
        self.times_s += [r.duration_s for r in session.records if r.error is None]

    def al(self, task: str) -> float | None:
        """None for a task without a round."""
        return 1 + self.accepted[task] / self.rounds[task] if self.rounds.get(task) else None

    def slow_s(self) -> float | None:
        return float(np.quantile(self.times_s, QUANTILE)) if len(self.times_s) >= MIN_TIMES else None


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
        reference: From the experiment; None: the first window becomes it.
    """

    def __init__(
        self, arm: str, policy: ExperimentConfig, config: WatchConfig, reference: Reference | None = None
    ) -> None:
        self._ledger = Ledger([arm], policy)
        self._config = config
        self._reference = reference
        self._window: list[Session] = []

    def add(self, records: Iterable[LiveRecord], now: float) -> list[Alarm]:
        """The alarms of the windows that these records fill; `now` is Unix time in seconds."""
        over: list[Session] = []
        for record in sorted(records, key=ended_at):
            over += self._ledger.silent(ended_at(record))
            over += self._ledger.add(record)
        over += self._ledger.silent(now)
        return [alarm for session in over for alarm in self._enter(session)]

    def _enter(self, session: Session) -> list[Alarm]:
        self._window.append(session)
        if len(self._window) < self._config.sessions:
            return []
        window, self._window = self._window, []
        if self._reference is None:
            self._reference = Reference()
            for session in window:
                self._reference.add(session)
            return []
        return [*self._al_alarm(window, self._reference), *self._time_alarm(window, self._reference)]

    def _al_alarm(self, window: list[Session], reference: Reference) -> list[Alarm]:
        """By how much fewer tokens were accepted than at the lowest AL allowed."""
        floors = {task: (reference.al(task) or 1.0) * (1 - self._config.al_drop) - 1 for task in reference.rounds}
        lacking = np.zeros(len(window))
        seen = Reference()
        for i, session in enumerate(window):
            seen.add(session)
            for task, records in by_task(session):
                if task in floors:  # of a task that is new nothing is expected
                    lacking[i] += sum(floors[task] * r.rounds - r.accepted for r in records)
        if not self._is_positive(lacking):
            return []
        tasks = [task for task in seen.rounds if seen.al(task) and reference.al(task)]
        measured = ", ".join(f"{task or 'all'} {seen.al(task):.3f}" for task in tasks)
        expected = ", ".join(f"{task or 'all'} {reference.al(task):.3f}" for task in tasks)
        return [Alarm("acceptance length", measured, expected)]

    def _time_alarm(self, window: list[Session], reference: Reference) -> list[Alarm]:
        """How many more requests than 1 in 20 were slower than allowed."""
        usual = reference.slow_s()
        if usual is None:
            return []
        limit = usual * (1 + self._config.latency_increase)
        times = [np.array([r.duration_s for r in session.records if r.error is None]) for session in window]
        excess = np.array([np.sum(mine > limit) - (1 - QUANTILE) * len(mine) for mine in times])
        if not self._is_positive(excess):
            return []
        return [Alarm("p95 latency", f"{np.quantile(np.concatenate(times), QUANTILE):.2f} s", f"{usual:.2f} s")]

    def _is_positive(self, scores: np.ndarray) -> bool:
        return bool(scores.sum() > -ndtri(self._config.level) * np.sqrt((scores**2).sum()) > 0)
