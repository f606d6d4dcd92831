"""Plain sums of an arm's sessions, to be shown; and how long its requests usually take."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from components.experiment.acceptance import Acceptance
from components.experiment.parts import decoding, wait_s
from components.experiment.sessions import Session
from components.serving.records import LiveRecord

QUANTILE = 0.95
MIN_TIMES = 20
"""Times of the control before its quantile is one."""


@dataclass
class Tally:
    """Plain sums of one arm's sessions, to be shown."""

    sessions: int = 0
    requests: int = 0
    own_answers: int = 0
    """Requests that the arm answered, or was to answer, itself."""
    errors: int = 0
    """Requests that failed, or whose client left in vain."""
    acceptance: Acceptance = field(default_factory=lambda: Acceptance("the experiment"))
    decode_s: float = 0.0
    decoded: int = 0
    begun: int = 0
    """Sessions dealt to it."""
    first_requests: int = 0
    first_errors: int = 0
    """Sessions whose first request ended, and whose first request failed or was left in vain."""
    times_s: list[float] = field(default_factory=list)
    """Whole requests without an error, sorted."""
    waits_s: list[float] = field(default_factory=list)
    """Of first requests without an error, until their clients had something to read; sorted."""

    def meet(self, record: LiveRecord, failed: bool) -> None:
        """A session's first request."""
        self.first_requests += 1
        self.first_errors += failed
        if record.error is None:
            bisect.insort(self.waits_s, wait_s(record))

    def add(self, session: Session, errors: int) -> None:
        """A session that is over, and how many of its requests are errors."""
        self.sessions += 1
        self.errors += errors
        self.acceptance.add(session)
        for record in session.records:
            self.requests += 1
            self.own_answers += record.arm == record.assigned_arm
            if record.error is None:
                bisect.insort(self.times_s, record.duration_s)
        spent, decoded = decoding(session.records)
        self.decode_s, self.decoded = self.decode_s + spent, self.decoded + decoded

    @property
    def al(self) -> float | None:
        return self.acceptance.pooled

    @property
    def error_rate(self) -> float | None:
        return self.errors / self.requests if self.requests else None

    @property
    def first_error_rate(self) -> float | None:
        return self.first_errors / self.first_requests if self.first_requests else None

    @property
    def own_share(self) -> float | None:
        return self.own_answers / self.requests if self.requests else None

    @property
    def tpot_s(self) -> float | None:
        return self.decode_s / self.decoded if self.decoded else None

    @property
    def slow_s(self) -> float | None:
        """The `QUANTILE` of the times; None with too few."""
        return _quantile(self.times_s)

    @property
    def usual_wait_s(self) -> float | None:
        """Of the waits."""
        return _quantile(self.waits_s)


def _quantile(times_s: Sequence[float]) -> float | None:
    """Of sorted times; None with too few."""
    return times_s[int(QUANTILE * len(times_s))] if len(times_s) >= MIN_TIMES else None
