"""An experiment as its records tell it: sessions go in as they end, findings come out at every look.

Everything is rebuilt from the records, so whoever reads them again finds the same.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from components.config import ExperimentConfig
from components.experiment.difference import Bounds, Difference, Part, early_quantile, mixing_scale
from components.experiment.policy import Findings, Guardrail
from components.experiment.sequential import Plan, SequentialDifference
from components.experiment.sessions import Ledger, Session, ended_at
from components.serving.records import LiveRecord

FIRST_ERRORS, ERRORS, LATENCY, TPOT = "errors at once", "errors", "p95 latency", "time per output token"
"""Guardrails. The first one looks at a session's first request when it ends, the others at whole sessions when they are over."""
GUARDRAILS = (FIRST_ERRORS, ERRORS, LATENCY, TPOT)
QUANTILE = 0.95
MIN_TIMES = 20
"""Times of the control before its quantile is one."""
GUARDRAIL_EARLY = 0.8
GUARDRAIL_SHARPEST_AT = 0.05
"""A bad arm should be stopped early: shares of the error rate and of the planned information."""
MISDEALT_LEVEL = 0.001
"""Chance that sessions dealt as weighted are taken for misdealt, over all looks."""
NO_TASK = ""


@dataclass(frozen=True)
class Arms:
    challenger: str
    control: str


@dataclass
class Tally:
    """Plain sums of one arm's sessions, to be shown."""

    sessions: int = 0
    requests: int = 0
    errors: int = 0
    accepted: int = 0
    rounds: int = 0
    decode_s: float = 0.0
    decoded: int = 0
    begun: int = 0
    first_errors: int = 0
    """Sessions whose first request ended, and whose first request failed."""
    times_s: list[float] = field(default_factory=list)
    """Whole requests without an error, sorted."""

    def add(self, session: Session) -> None:
        self.sessions += 1
        for record in session.records:
            self.requests += 1
            self.errors += record.failed
            self.accepted += record.accepted
            self.rounds += record.rounds
            if record.error is None:
                bisect.insort(self.times_s, record.duration_s)
        spent, decoded = decoding(session.records)
        self.decode_s, self.decoded = self.decode_s + spent, self.decoded + decoded

    @property
    def al(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def error_rate(self) -> float | None:
        return self.errors / self.requests if self.requests else None

    @property
    def first_error_rate(self) -> float | None:
        return self.first_errors / self.begun if self.begun else None

    @property
    def tpot_s(self) -> float | None:
        return self.decode_s / self.decoded if self.decoded else None

    @property
    def slow_s(self) -> float | None:
        """The `QUANTILE` of the times; None with too few."""
        return self.times_s[int(QUANTILE * len(self.times_s))] if len(self.times_s) >= MIN_TIMES else None


class Monitor:
    """One experiment's running sums.

    Args:
        arms: Their names.
        shares: Chance of the challenger (against the control) by weight epoch; where it is unknown, the share of the epoch's sessions so far.
        policy: The plan and the margins.
    """

    def __init__(self, arms: Arms, shares: Mapping[int, float], policy: ExperimentConfig) -> None:
        self.arms, self.policy = arms, policy
        self._shares = shares
        self.ledger = Ledger((arms.challenger, arms.control), policy)
        self.tallies = {arms.challenger: Tally(), arms.control: Tally()}
        self._tasks: dict[str, int] = {}
        self._dealt: dict[int, list[int]] = {}
        guard = Plan(
            policy.alpha / len(GUARDRAILS),
            policy.guardrail_sessions,
            policy.max_requests,
            early_share=GUARDRAIL_EARLY,
            sharpest_at=GUARDRAIL_SHARPEST_AT,
        )
        self._al = SequentialDifference(Plan(policy.alpha, policy.min_sessions, policy.max_requests), num_tasks=0)
        self._guards = {name: SequentialDifference(guard) for name in GUARDRAILS}
        self._assignment = Difference()
        self.ended = False

    def add(self, records: Iterable[LiveRecord]) -> None:
        """Takes records; after the planned number of requests all sessions are over and the rest is ignored."""
        for record in sorted(records, key=ended_at):
            if self.ended:
                return
            for session in self.ledger.silent(ended_at(record)):
                self._enter(session)
            if self.ledger.begins(record):
                self._begin(record)
            for session in self.ledger.add(record):
                self._enter(session)
            if self.ledger.requests >= self.policy.max_requests:
                self._finish()

    def wait_until(self, now: float) -> None:
        """Lets the sessions end that are silent at `now` (Unix time in seconds)."""
        for session in self.ledger.silent(now) if not self.ended else []:
            self._enter(session)

    def findings(self) -> Findings:
        last = self.ended
        tallies = self.tallies
        return Findings(
            requests=self.ledger.requests,
            sessions={name: tally.sessions for name, tally in tallies.items()},
            al={name: tally.al for name, tally in tallies.items()},
            difference=_floats(self._al.bounds(last)),
            guardrails=tuple(
                self._guardrail(name, figure, limit, last)
                for name, figure, limit in (
                    (FIRST_ERRORS, "first_error_rate", self.policy.max_error_increase),
                    (ERRORS, "error_rate", self.policy.max_error_increase),
                    (LATENCY, "slow_s", 0.0),
                    (TPOT, "tpot_s", 0.0),
                )
            ),
            dealt_as_weighted=self._dealt_as_weighted(),
            last=last,
        )

    def _finish(self) -> None:
        for session in self.ledger.close():
            self._enter(session)
        self.ended = True

    def _begin(self, record: LiveRecord) -> None:
        """A session's first request: its arm is the draw that the weights are checked by."""
        treated, share = self._is_treated(record.assigned_arm), self._share(record.weight_epoch)
        self._dealt.setdefault(record.weight_epoch, [0, 0])[treated] += 1
        self._assignment.add(treated, share, (np.asarray(1.0), np.asarray(0.0)))
        self._guards[FIRST_ERRORS].add(treated, share, [_part(record.failed, 1, 1)], self._requests())
        tally = self.tallies[record.assigned_arm]
        tally.begun, tally.first_errors = tally.begun + 1, tally.first_errors + record.failed

    def _enter(self, session: Session) -> None:
        """A session that is over."""
        treated, share = self._is_treated(session.arm), self._share(session.epoch)
        self._al.add(treated, share, [self._al_part(task, part) for task, part in by_task(session)], self._requests())
        parts = {
            ERRORS: _errors(session),
            LATENCY: self._slow(session, treated),
            TPOT: self._decoding(session, treated),
        }
        for name, part in parts.items():
            if part is not None:
                self._guards[name].add(treated, share, [part], self._requests())
        self.tallies[session.arm].add(session)

    def _is_treated(self, arm: str) -> bool:
        return arm == self.arms.challenger

    def _requests(self) -> np.ndarray:
        return np.asarray(self.ledger.requests)

    def _share(self, epoch: int) -> float:
        known = self._shares.get(epoch)
        if known is not None:
            return known
        control, challenger = self._dealt.get(epoch, (0, 0))
        return (challenger + 1) / (control + challenger + 2)

    def _al_part(self, task: str, records: Sequence[LiveRecord]) -> Part:
        if task not in self._tasks:
            self._tasks[task] = self._al.centre.grow()
        accepted, rounds = sum(r.accepted for r in records), sum(r.rounds for r in records)
        return _part(accepted, rounds, accepted + rounds, self._tasks[task])

    def _slow(self, session: Session, treated: bool) -> Part | None:
        """Requests beyond the control's quantile so far, the challenger's times relieved of what it may be slower."""
        limit = self.tallies[self.arms.control].slow_s
        times = [r.duration_s for r in session.records if r.error is None]
        if limit is None or not times:
            return None
        relief = 1 + self.policy.max_latency_increase if treated else 1.0
        return _part(sum(time / relief > limit for time in times), len(times), len(times))

    def _decoding(self, session: Session, treated: bool) -> Part | None:
        spent, decoded = decoding(session.records)
        relief = 1 + self.policy.max_tpot_increase if treated else 1.0
        return _part(spent / relief, decoded, decoded) if decoded else None

    def _guardrail(self, name: str, figure: str, limit: float, last: bool) -> Guardrail:
        challenger, control = (getattr(self.tallies[arm], figure) for arm in (self.arms.challenger, self.arms.control))
        return Guardrail(name, challenger, control, _floats(self._guards[name].bounds(last)), limit)

    def _dealt_as_weighted(self) -> bool:
        variance = self._assignment.information()
        if variance == 0:
            return True
        mixing = mixing_scale(np.asarray(self.policy.max_requests / 8.0), MISDEALT_LEVEL / 2)
        limit = early_quantile(variance, mixing, MISDEALT_LEVEL / 2) * np.sqrt(variance + mixing)
        return bool(abs(self._assignment.score[0]) <= limit)


def by_task(session: Session) -> list[tuple[str, list[LiveRecord]]]:
    """The session's records, task by task."""
    tasks: dict[str, list[LiveRecord]] = {}
    for record in session.records:
        tasks.setdefault(record.task or NO_TASK, []).append(record)
    return list(tasks.items())


def decoding(records: Sequence[LiveRecord]) -> tuple[float, int]:
    """Seconds, and tokens after the first, of the requests whose time per token is known."""
    known = [(r.tpot_s, r.output_tokens - 1) for r in records if r.tpot_s is not None and r.output_tokens > 1]
    return sum(tpot * tokens for tpot, tokens in known), sum(tokens for _, tokens in known)


def _errors(session: Session) -> Part:
    return _part(sum(r.failed for r in session.records), len(session.records), len(session.records))


def _part(numerator: float, denominator: float, size: float, task: int = 0) -> Part:
    return Part(np.asarray(task), *(np.asarray(value, dtype=float) for value in (numerator, denominator, size)))


def _floats(bounds: Bounds) -> Bounds:
    return Bounds(float(bounds.estimate), float(bounds.low), float(bounds.high))
