"""Many experiments at once on simulated traffic, by the code that judges a live one."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from components.config import ExperimentConfig
from components.experiment.difference import Array, Difference, Part
from components.experiment.guardrails import (
    ERRORS,
    FIRST_ERRORS,
    GUARDRAILS,
    LATENCY,
    TPOT,
    excess_limits,
    guardrail_plan,
    is_dealt_as_weighted,
)
from components.experiment.policy import is_beyond, judge
from components.experiment.sequential import Plan, SequentialDifference
from components.experiment.tally import MIN_TIMES, QUANTILE
from components.experiment.traffic import Pool, Scenario, Sessions, Synthetic, make_sessions, treat

PACE = 0.002
"""Share of the experiment between two requests of a session."""
IDLE = 0.01
"""Share of the experiment after which a silent session is over."""
GUARD_EVERY = 10
"""Sessions between two looks at the guardrails and the dealing, to save time. AL is looked at after every session."""


class Kind(StrEnum):
    """What the challenger is."""

    SAME = "A/A"
    SHIFTED = "shifted"
    GAIN = "gain"


@dataclass(frozen=True)
class Case:
    scenario: Scenario
    kind: Kind
    effect: float
    requests: int


@dataclass(frozen=True)
class Ending:
    """How the replications of one case ended; arrays [replications]."""

    promoted: Array
    harmed: Array
    guarded: Array
    """Stopped for harm by a guardrail."""
    requests: Array
    """At the decision."""


@dataclass(frozen=True)
class _Made:
    """Sessions in one order; arrays [replications, sessions] or, of single requests, [replications, sessions, requests]."""

    counts: Array
    """Whether the session began before the planned end."""
    task: Array
    treated: Array
    share: Array
    tokens: Array
    rounds: Array
    times_s: Array
    failed: Array
    seen: Array
    """Requests of the experiment when it is looked at."""

    def reordered(self, order: Array) -> "_Made":
        flat, deep = order, order[..., None]
        taken = {
            name: np.take_along_axis(value, deep if value.ndim == 3 else flat, 1) for name, value in vars(self).items()
        }
        return _Made(**taken)

    def at(self, i: int) -> "_Made":
        return _Made(**{name: value[:, i] for name, value in vars(self).items()})


def rehearse(
    case: Case, source: Synthetic | Pool, policy: ExperimentConfig, n: int, rng: np.random.Generator
) -> Ending:
    """`n` experiments of one case."""
    sessions = make_sessions(rng, (n, _num_sessions(case)), case.scenario, source, policy.session_requests)
    starts = (np.cumsum(sessions.requests, axis=1) - sessions.requests) / case.requests
    begins, weights = np.array(case.scenario.weights).T
    share = weights[np.searchsorted(begins, starts, side="right") - 1]
    treated = rng.random(share.shape) < share
    rounds = np.where(treated, _treat(rng, sessions, case), sessions.rounds)
    ends = starts + PACE * sessions.requests * rng.exponential(size=share.shape) + IDLE
    slower = (rounds / sessions.rounds).astype(np.float32)[..., None]
    begun = _Made(
        starts < 1, sessions.task, treated, share, sessions.tokens, rounds, sessions.times_s * slower, sessions.failed,
        starts * case.requests + 1,
    )  # fmt: skip
    order = np.argsort(np.where(begun.counts, ends, np.inf), axis=1)
    over = begun.reordered(order)
    seen = np.minimum(np.take_along_axis(ends, order, 1), 1.0) * case.requests
    return _watch(begun, over, seen, sessions.num_tasks, case, policy)


def _watch(begun: _Made, over: _Made, seen: Array, num_tasks: int, case: Case, policy: ExperimentConfig) -> Ending:
    """A look after each session that is over, and one at the end."""
    n, num_sessions = over.counts.shape
    watched = SequentialDifference(Plan(policy.alpha, policy.min_sessions, case.requests), num_tasks, (n,))
    guards, assignment = _Guards(policy, case.requests, n), Difference((n,))
    sums = np.zeros((2, n))
    """Of the control: accepted, rounds."""
    promoted, harmed, guarded, open_ = (np.full(n, value) for value in (False, False, False, True))
    requests = np.full(n, float(case.requests))
    for i in range(num_sessions + 1):
        last = i == num_sessions
        if not last:
            first, done = begun.at(i), over.at(i)
            assignment.add(first.treated, first.share, (np.ones(n), np.zeros(n)), first.counts)
            guards.begin(first)
            accepted = done.tokens - done.rounds
            part = Part(done.task, accepted, done.rounds, done.tokens)
            watched.add(done.treated, done.share, [part], seen[:, i], done.counts)
            guards.end(done, seen[:, i])
            sums += np.where(done.counts & ~done.treated, np.stack([accepted, done.rounds]), 0.0)
        if i % GUARD_EVERY == 0 or last:
            guards.look(last)
            sound = guards.sound & ~guards.broken & is_dealt_as_weighted(assignment, policy)
        length = 1 + sums[0] / np.maximum(sums[1], 1)
        verdict = judge(watched.bounds(last), length, guards.broken, sound, last, policy)
        promoted |= open_ & verdict.promote
        harmed |= open_ & verdict.harm
        guarded |= open_ & verdict.harm & guards.broken
        ended = open_ & (verdict.promote | verdict.harm | verdict.futile)
        if not last:
            requests[ended] = seen[ended, i]
        open_ &= ~ended
        if not open_.any():
            break
    return Ending(promoted, harmed, guarded, requests)


class _Guards:
    """The guardrails of `n` experiments."""

    def __init__(self, policy: ExperimentConfig, requests: int, n: int) -> None:
        self._policy = policy
        plan = guardrail_plan(policy, requests)
        self._guards = {name: SequentialDifference(plan, 1, (n,)) for name in GUARDRAILS}
        self._task = np.zeros(n, int)
        self._times_s = np.full((n, requests + policy.session_requests), np.inf, np.float32)
        """Of the control's requests."""
        self._num_times = np.zeros(n, int)
        self._limit_s = np.full(n, np.nan)
        self.broken, self.sound = np.zeros(n, bool), np.zeros(n, bool)

    def begin(self, made: _Made) -> None:
        self._add(FIRST_ERRORS, made, made.failed[:, 0], np.ones(len(self._task)), made.counts, made.seen)

    def end(self, made: _Made, seen: Array) -> None:
        num = np.isfinite(made.times_s).sum(axis=1)
        slower, slower_token = (
            1 + increase * made.treated[:, None]
            for increase in (self._policy.max_latency_increase, self._policy.max_tpot_increase)
        )
        late = (made.times_s / slower > self._limit_s[:, None]).sum(axis=1)
        spent = np.nansum(made.times_s / slower_token, axis=1)
        requests = num + made.failed.sum(axis=1)
        self._add(ERRORS, made, made.failed.sum(axis=1), requests, made.counts, seen)
        self._add(LATENCY, made, late, num, made.counts & np.isfinite(self._limit_s) & (num > 0), seen)
        self._add(TPOT, made, spent, made.tokens, made.counts & (num > 0), seen)
        self._keep_times(made.times_s, made.counts & ~made.treated)

    def look(self, last: bool) -> None:
        """Brings `broken` and `sound` (measured, and nowhere beyond a limit) up to now."""
        limits = excess_limits(self._policy)
        bounds = {name: guard.bounds(last) for name, guard in self._guards.items()}
        self.broken = np.any([np.asarray(excess.low > limits[name]) for name, excess in bounds.items()], axis=0)
        beyond = np.any([is_beyond(excess, limits[name]) for name, excess in bounds.items()], axis=0)
        enough = [guard.difference.sessions >= self._policy.guardrail_sessions for guard in self._guards.values()]
        self.sound = np.all(enough, axis=0) & ~beyond
        most = max(1, int(self._num_times.max()))
        at = np.minimum((QUANTILE * self._num_times).astype(int), most - 1)
        limits_s = np.take_along_axis(np.sort(self._times_s[:, :most], axis=1), at[:, None], 1)[:, 0]
        self._limit_s = np.where(self._num_times >= MIN_TIMES, limits_s, np.nan)

    def _add(self, name: str, made: _Made, numerator: Array, denominator: Array, counts: Array, seen: Array) -> None:
        part = Part(self._task, numerator.astype(float), denominator.astype(float), denominator.astype(float))
        self._guards[name].add(made.treated, made.share, [part], seen, counts)

    def _keep_times(self, times_s: Array, counts: Array) -> None:
        for time_s in times_s.T:
            rows = np.flatnonzero(counts & np.isfinite(time_s))
            if rows.size:
                self._times_s[rows, self._num_times[rows]] = time_s[rows]
                self._num_times[rows] += 1


def _treat(rng: np.random.Generator, sessions: Sessions, case: Case) -> Array:
    """Rounds of every session under the challenger."""
    if case.kind == Kind.SHIFTED:
        return sessions.rounds * (1 + case.effect * rng.choice((-1, 1), sessions.rounds.shape))
    return treat(sessions, case.effect) if case.kind == Kind.GAIN else sessions.rounds


def _num_sessions(case: Case) -> int:
    """Enough for the planned requests in nearly every replication: sessions have at least one request each, 1.5 or more on average."""
    return int(case.requests / 1.3)
