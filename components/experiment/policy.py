"""What to do after a look: a pure function from findings and policy to a decision with reasons.

In this order: stop for harm when a guardrail's lower bound passes its limit or AL's upper bound is below 0; promote when AL's lower bound is
above 0, its estimate at least `min_effect`, no guardrail's estimate is beyond its limit, and nothing else speaks against it or is missing;
stop as futile when AL's upper bound is below `min_effect`, or at the planned end; else continue.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from components.config import ExperimentConfig
from components.evaluation.gate import Reason
from components.experiment.difference import Array, Bounds


class Action(StrEnum):
    CONTINUE = "continue"
    PROMOTE = "promote"
    STOP_HARM = "stop: harm"
    STOP_FUTILE = "stop: futile"


@dataclass(frozen=True)
class Guardrail:
    """A figure that the challenger may not worsen by more than `limit`."""

    name: str
    challenger: float | None
    control: float | None
    excess: Bounds
    """Of the challenger's figure over the control's, after what it may be worse by was taken off where `limit` is 0."""
    limit: float
    measured: bool
    """Whether both arms have enough of it; without, it neither stops the challenger nor, if `required`, lets it be promoted."""
    required: bool


@dataclass(frozen=True)
class Verdict:
    """At most one of them; none: continue. Arrays of independent experiments, or single values."""

    harm: Array
    promote: Array
    futile: Array


@dataclass(frozen=True)
class Findings:
    """Everything known at a look."""

    requests: int
    """That count."""
    left_out: int
    """Requests to the arms whose weights nobody noted, or which had no choice."""
    sessions: Mapping[str, int]
    """That are over, by assigned arm."""
    begun: Mapping[str, int]
    """Sessions dealt, by assigned arm."""
    expected: float
    """Of them to the challenger, by the weights."""
    al: Mapping[str, float | None]
    """By assigned arm, summed first and divided once; None without a round."""
    difference: Bounds
    """Of AL, challenger - control."""
    guardrails: tuple[Guardrail, ...]
    dealt_as_weighted: bool
    """Whether the arms of the sessions that began agree with the weights."""
    own_answers: float | None
    """Share of the challenger's requests that it answered itself; None without one."""
    last: bool
    """The planned requests have been made."""


@dataclass(frozen=True)
class Decision:
    action: Action
    reasons: tuple[Reason, ...]

    @property
    def is_final(self) -> bool:
        return self.action != Action.CONTINUE


def decide(findings: Findings, control: str, policy: ExperimentConfig) -> Decision:
    """The action that the findings call for.

    Args:
        findings: Of this look.
        control: Name of the control's arm in them.
        policy: The margins.
    """
    al = findings.al.get(control)
    length = math.nan if al is None else al
    bounds = findings.difference
    others = (*map(_guardrail, findings.guardrails), _dealt(findings, control), _own(findings, policy))
    reasons = (_gain(bounds, length, policy), *others)
    broken = any(_is_broken(guardrail) for guardrail in findings.guardrails)
    sound = all(reason.passed for reason in others)
    verdict = judge(bounds, length, np.asarray(broken), np.asarray(sound), findings.last, policy)
    if verdict.harm:
        return Decision(Action.STOP_HARM, reasons)
    if verdict.promote:
        return Decision(Action.PROMOTE, reasons)
    if findings.last:
        end = Reason("planned end", False, f"{findings.requests} requests", f"a gain within {policy.max_requests}")
        return Decision(Action.STOP_FUTILE, (*reasons, end))
    return Decision(Action.STOP_FUTILE if verdict.futile else Action.CONTINUE, reasons)


def judge(
    difference: Bounds, control_al: Array | float, broken: Array, sound: Array, last: bool, policy: ExperimentConfig
) -> Verdict:
    """What a look calls for.

    Args:
        difference: Of AL.
        control_al: The control's AL; nan while it is not known.
        broken: Whether a guardrail is, beyond doubt.
        sound: Whether nothing but AL speaks against a promotion.
        last: Whether the planned requests have been made.
        policy: The margins.
    """
    harm = is_harm(difference) | broken
    promote = ~harm & is_gain(difference, control_al, policy) & sound
    futile = ~harm & ~promote & (is_futile(difference, control_al, policy) | last)
    return Verdict(harm, promote, futile)


def is_gain(difference: Bounds, control_al: Array | float, policy: ExperimentConfig) -> Array:
    """AL is larger beyond doubt, and the estimate is worth a change. Arrays give an array."""
    return np.asarray((difference.low > 0) & (difference.estimate >= policy.min_effect * control_al))


def is_harm(difference: Bounds) -> Array:
    """AL is smaller beyond doubt."""
    return np.asarray(difference.high < 0)


def is_futile(difference: Bounds, control_al: Array | float, policy: ExperimentConfig) -> Array:
    """AL is not larger by what is worth a change, beyond doubt."""
    return np.asarray(difference.high < policy.min_effect * control_al)


def is_beyond(excess: Bounds, limit: float) -> Array:
    """A guardrail's estimate is beyond its limit: no proof of harm, but too much for a promotion."""
    return np.asarray(excess.estimate > limit)


def _gain(bounds: Bounds, length: float, policy: ExperimentConfig) -> Reason:
    measured = "not known yet"
    if math.isfinite(bounds.estimate):
        measured = f"{float(bounds.estimate):+.3f} [{float(bounds.low):+.3f}, {float(bounds.high):+.3f}]"
    if math.isfinite(bounds.estimate) and math.isfinite(length):
        measured += f" on {length:.3f} ({float(bounds.estimate) / length:+.1%})"
    required = f"lower bound above 0, estimate at least {policy.min_effect:+.1%}"
    return Reason("acceptance length", bool(is_gain(bounds, length, policy)), measured, required)


def _is_broken(guardrail: Guardrail) -> bool:
    return bool(guardrail.excess.low > guardrail.limit)


def _guardrail(guardrail: Guardrail) -> Reason:
    required = f"excess not beyond {guardrail.limit:.4g}"
    if not guardrail.measured and not _is_broken(guardrail):
        return Reason(guardrail.name, not guardrail.required, "not measured", required)
    estimate, low = float(guardrail.excess.estimate), float(guardrail.excess.low)
    figures = f"{_number(guardrail.challenger)} against {_number(guardrail.control)}"
    measured = f"{figures}, excess {estimate:+.4f}, at least {low:+.4f}"
    passed = not (_is_broken(guardrail) or is_beyond(guardrail.excess, guardrail.limit))
    return Reason(guardrail.name, passed, measured, required)


def _dealt(findings: Findings, control: str) -> Reason:
    begun = ", ".join(f"{name} {count}" for name, count in findings.begun.items())
    challenger = next(name for name in findings.begun if name != control)
    measured = f"begun: {begun}; {findings.expected:.1f} expected for {challenger}"
    return Reason(
        "sessions dealt as weighted", findings.dealt_as_weighted, measured, "counts that agree with the weights"
    )


def _own(findings: Findings, policy: ExperimentConfig) -> Reason:
    share = findings.own_answers
    measured = "not known yet" if share is None else f"{share:.2%}"
    passed = share is not None and share >= policy.min_own_answers
    return Reason("answered by its own arm", passed, measured, f"at least {policy.min_own_answers:.4g}")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
