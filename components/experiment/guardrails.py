"""What may stop a challenger besides AL: the plan of its guardrails, and whether sessions were dealt as the weights say."""

import numpy as np

from components.config import ExperimentConfig
from components.experiment.difference import Array, Difference, early_quantile, mixing_scale
from components.experiment.sequential import Plan

FIRST_ERRORS, ERRORS, LATENCY, TPOT = "errors at once", "errors", "p95 latency", "time per output token"
"""The first one looks at a session's first request when it ends, the others at whole sessions when they are over."""
GUARDRAILS = (FIRST_ERRORS, ERRORS, LATENCY, TPOT)
MAY_BE_UNKNOWN = frozenset({TPOT})
"""Only streams have a time per token; the others must be known before a promotion."""
EARLY_SHARE = 0.8
SHARPEST_AT = 0.05
"""A bad arm should be stopped early: shares of the error rate and of the planned information."""
MISDEALT_LEVEL = 0.001
"""Chance that sessions dealt as weighted are taken for misdealt, over all looks."""


def guardrail_plan(policy: ExperimentConfig, max_requests: int) -> Plan:
    """Of each guardrail; together they stop a sound challenger with at most `alpha`."""
    level = policy.alpha / len(GUARDRAILS)
    return Plan(level, policy.guardrail_sessions, max_requests, early_share=EARLY_SHARE, sharpest_at=SHARPEST_AT)


def excess_limits(policy: ExperimentConfig) -> dict[str, float]:
    """By how much each figure may be larger; 0 where times are relieved of that before (`relief`)."""
    return {FIRST_ERRORS: policy.max_error_increase, ERRORS: policy.max_error_increase, LATENCY: 0.0, TPOT: 0.0}


def is_dealt_as_weighted(assignment: Difference, policy: ExperimentConfig) -> Array:
    """Whether the sessions' arms agree with the weights, at a look at any time.

    `assignment` has a session's draw alone, (Z - w), as its score. The boundary is tightest after `min_sessions` sessions: it has to find
    what is grossly wrong before the first decision, not what is slightly wrong at the end.
    """
    level, variance = MISDEALT_LEVEL / 2, assignment.variance()
    mixing = mixing_scale(np.asarray(policy.min_sessions / 4), level)
    return np.asarray(
        np.abs(assignment.score[0]) <= early_quantile(variance, mixing, level) * np.sqrt(variance + mixing)
    )
