"""An experiment as its records tell it: sessions go in as they end, findings come out at every look.

Everything is rebuilt from the records, so whoever reads them again finds the same. A request counts if the journal knows by what weights it
was dealt and they left a choice (0 < share < 1): what one arm answered alone, before the other was up or while it was paused, compares nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from components.config import ExperimentConfig
from components.experiment.difference import Bounds, Difference
from components.experiment.guardrails import (
    ERRORS,
    FIRST_ERRORS,
    GUARDRAILS,
    LATENCY,
    MAY_BE_UNKNOWN,
    TPOT,
    excess_limits,
    guardrail_plan,
    is_dealt_as_weighted,
)
from components.experiment.intake import Intake
from components.experiment.parts import (
    al_part,
    decoding_part,
    error_part,
    left_in_vain,
    part,
    slow_part,
)
from components.experiment.policy import Findings, Guardrail
from components.experiment.sequential import Plan, SequentialDifference
from components.experiment.sessions import Ledger, Session, by_task
from components.experiment.tally import Tally
from components.serving.records import LiveRecord


@dataclass(frozen=True)
class Arms:
    challenger: str
    control: str


class Monitor:
    """One experiment's running sums.

    Args:
        arms: Their names.
        shares: Chance of the challenger (against the control) by weight epoch, as far as the journal knows; it may grow meanwhile.
        policy: The plan and the margins.
    """

    def __init__(self, arms: Arms, shares: Mapping[int, float], policy: ExperimentConfig) -> None:
        self.arms, self.policy = arms, policy
        self._shares = shares
        self.ledger = Ledger((arms.challenger, arms.control), policy)
        self.tallies = {arms.challenger: Tally(), arms.control: Tally()}
        self._intake = Intake(shares)
        self._met: set[str] = set()
        """Sessions whose first request has ended."""
        self._tasks: dict[str, int] = {}
        self._al = SequentialDifference(Plan(policy.alpha, policy.min_sessions, policy.max_requests), num_tasks=0)
        guard = guardrail_plan(policy, policy.max_requests)
        self._guards = {name: SequentialDifference(guard) for name in GUARDRAILS}
        self._assignment = Difference()
        self._expected = 0.0
        self.ended = False

    def add(self, records: Iterable[LiveRecord]) -> None:
        """Takes records; they count from `wait_until` on."""
        self._intake.add(record for record in records if self.ledger.takes(record))

    def wait_until(self, complete_until: float) -> None:
        """Enters what began before this time (Unix, seconds), of which nothing is missing, and lets the sessions end that are silent then.

        After the planned number of requests all sessions are over and the rest is ignored.
        """
        if self.ended:
            return
        due, early = self._intake.take(complete_until)
        for record in due:
            self._enter_all(self.ledger.silent(record.started_at))
            self._meet(record, self.ledger.requests)
            if self.ledger.begins(record):
                self._begin(record)
            self._enter_all(self.ledger.add(record))
            if self.ledger.requests >= self.policy.max_requests:
                return self._finish()
        for num, record in enumerate(early, start=1):
            self._meet(record, self.ledger.requests + num)
        self._enter_all(self.ledger.silent(complete_until))

    def findings(self) -> Findings:
        tallies, last = self.tallies, self.ended
        mine = tallies[self.arms.challenger]
        return Findings(
            requests=self.ledger.requests,
            left_out=self._intake.left_out,
            sessions={name: tally.sessions for name, tally in tallies.items()},
            begun={name: tally.begun for name, tally in tallies.items()},
            expected=self._expected,
            al={name: tally.al for name, tally in tallies.items()},
            difference=_floats(self._al.bounds(last)),
            guardrails=tuple(
                self._guardrail(name, figure, last)
                for name, figure in (
                    (FIRST_ERRORS, "first_error_rate"),
                    (ERRORS, "error_rate"),
                    (LATENCY, "slow_s"),
                    (TPOT, "tpot_s"),
                )
            ),
            dealt_as_weighted=bool(is_dealt_as_weighted(self._assignment, self.policy)),
            own_answers=mine.own_share,
            last=last,
        )

    def _finish(self) -> None:
        self._enter_all(self.ledger.close())
        self.ended = True

    def _meet(self, record: LiveRecord, requests: int) -> None:
        """A session's first request that has ended: an arm that fails is seen before its sessions are over."""
        if record.session in self._met:
            return
        self._met.add(record.session)
        treated, share = self._dealt(record.assigned_arm, record.weight_epoch)
        failed = record.failed or left_in_vain(record, self._usual_wait_s, self._slower(treated))
        self._guards[FIRST_ERRORS].add(treated, share, [part(failed, 1, 1)], np.asarray(requests + 1))
        self.tallies[record.assigned_arm].meet(record, failed)

    def _begin(self, record: LiveRecord) -> None:
        """A session's first request: its arm is the draw that the weights are checked by."""
        treated, share = self._dealt(record.assigned_arm, record.weight_epoch)
        self._assignment.add(treated, share, (np.asarray(1.0), np.asarray(0.0)))
        self._expected += share
        self.tallies[record.assigned_arm].begun += 1

    def _enter_all(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            self._enter(session)

    def _enter(self, session: Session) -> None:
        """A session that is over."""
        treated, share = self._dealt(session.arm, session.epoch)
        self._al.add(
            treated, share, [al_part(records, self._task(task)) for task, records in by_task(session)], self._requests()
        )
        slower, limit_s = self._slower(treated), self.tallies[self.arms.control].slow_s
        errors = error_part(session, self._usual_wait_s, slower)
        parts = {
            ERRORS: errors,
            LATENCY: slow_part(session, limit_s, slower),
            TPOT: decoding_part(session, 1 + self.policy.max_tpot_increase * treated),
        }
        for name, mine in parts.items():
            if mine is not None:
                self._guards[name].add(treated, share, [mine], self._requests())
        self.tallies[session.arm].add(session, int(errors.numerator))

    @property
    def _usual_wait_s(self) -> float | None:
        """The control's: after it nobody should have nothing to read."""
        return self.tallies[self.arms.control].usual_wait_s

    def _slower(self, treated: bool) -> float:
        """What an arm's times are relieved of."""
        return 1 + self.policy.max_latency_increase * treated

    def _dealt(self, arm: str, epoch: int) -> tuple[bool, float]:
        """Whether it was dealt to the challenger, and the chance of that."""
        return arm == self.arms.challenger, self._shares[epoch]

    def _requests(self) -> np.ndarray:
        return np.asarray(self.ledger.requests)

    def _task(self, task: str) -> int:
        if task not in self._tasks:
            self._tasks[task] = self._al.centre.grow()
        return self._tasks[task]

    def _guardrail(self, name: str, figure: str, last: bool) -> Guardrail:
        challenger, control = (getattr(self.tallies[arm], figure) for arm in (self.arms.challenger, self.arms.control))
        guard = self._guards[name]
        measured = None not in (challenger, control) and guard.difference.sessions >= self.policy.guardrail_sessions
        limit = excess_limits(self.policy)[name]
        return Guardrail(
            name, challenger, control, _floats(guard.bounds(last)), limit, bool(measured), name not in MAY_BE_UNKNOWN
        )


def _floats(bounds: Bounds) -> Bounds:
    return Bounds(float(bounds.estimate), float(bounds.low), float(bounds.high))
