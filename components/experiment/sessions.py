"""From live records to the sessions of an experiment: each counts once, when it is over, with the arm that the weights gave it.

A session belongs to the weight epoch in which it began. It is over when it has been silent for `session_idle_s`, has made
`session_requests`, or comes again under other weights; what it does later does not count. Copies (`shadow`) and requests whose client named the
arm (`forced`) were not randomised and are no part of it.

A record is written when its request ends, so those of a fast arm come first. Records are therefore taken in the order in which requests
began, up to the start of the oldest one that still runs (`complete_until`): of what began before it nothing is missing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from components.config import ExperimentConfig
from components.serving.records import LiveRecord

NO_TASK = ""


@dataclass
class Session:
    """One session so far."""

    key: str
    arm: str
    """Assigned, whoever answered."""
    epoch: int
    records: list[LiveRecord] = field(default_factory=list)
    last_at: float = 0.0
    """Unix time in seconds at which its last request ended."""


class Ledger:
    """Sorts records into sessions and says when one is over.

    Args:
        arms: Of the experiment; sessions of others are left out.
        policy: When a session is over.
    """

    def __init__(self, arms: Iterable[str], policy: ExperimentConfig) -> None:
        self._arms = frozenset(arms)
        self._policy = policy
        self._open: dict[str, Session] = {}
        self._over: set[str] = set()
        self.requests = 0
        """Randomised requests to the arms that count."""
        self.uncounted = 0
        """Further ones, that came after their session was over."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_over(self) -> int:
        """Keys of sessions that shall not count again."""
        return len(self._over)

    def forget_over(self) -> None:
        """From now on the sessions that are over may count again, each as a new one; those that are open stay."""
        self._over.clear()

    def takes(self, record: LiveRecord) -> bool:
        """Whether the request is part of the experiment."""
        return not record.shadow and not record.forced and record.assigned_arm in self._arms

    def begins(self, record: LiveRecord) -> bool:
        """Whether it is the first one of its session."""
        return self.takes(record) and record.session not in self._open and record.session not in self._over

    def add(self, record: LiveRecord) -> Iterator[Session]:
        """Takes one record; yields the session if this ends it."""
        if not self.takes(record):
            return
        session = self._open.get(record.session)
        if session is not None and record.weight_epoch != session.epoch:
            yield self._end(session)
        if record.session in self._over:
            self.uncounted += 1
            return
        session = self._open.setdefault(
            record.session, Session(record.session, record.assigned_arm, record.weight_epoch)
        )
        self.requests += 1
        session.records.append(record)
        session.last_at = max(session.last_at, ended_at(record))
        if len(session.records) >= self._policy.session_requests:
            yield self._end(session)

    def silent(self, now: float) -> list[Session]:
        """Ends the sessions that have been silent for too long at `now` (Unix time in seconds), those first that were silent first."""
        limit = now - self._policy.session_idle_s
        return self._end_all(session for session in self._open.values() if session.last_at < limit)

    def close(self) -> list[Session]:
        """Ends all that are open."""
        return self._end_all(self._open.values())

    def _end_all(self, sessions: Iterable[Session]) -> list[Session]:
        return [self._end(session) for session in sorted(sessions, key=lambda session: session.last_at)]

    def _end(self, session: Session) -> Session:
        del self._open[session.key]
        self._over.add(session.key)
        return session


def by_task(session: Session) -> list[tuple[str, list[LiveRecord]]]:
    """The session's records, task by task."""
    tasks: dict[str, list[LiveRecord]] = {}
    for record in session.records:
        tasks.setdefault(record.task or NO_TASK, []).append(record)
    return list(tasks.items())


def complete_until(oldest_running_at: float | None, now: float, policy: ExperimentConfig) -> float:
    """Every request that began before this time (Unix, seconds) has ended.

    A request that runs for longer than `session_idle_s` is not waited for: it enters when it ends.

    Args:
        oldest_running_at: Start of the oldest request that runs at `now`; None without one.
    """
    oldest = now if oldest_running_at is None else oldest_running_at
    return max(min(oldest, now), now - policy.session_idle_s)


def ended_at(record: LiveRecord) -> float:
    return record.started_at + record.duration_s
