"""Intervals for figures over prompts: a paired cluster bootstrap whose unit is the prompt.

Tokens and rounds of one answer are not independent, prompts are. Prompts are drawn with replacement, the same draw for both
arms, and AL is formed from the drawn sums. Percentiles are widened for small samples (Hesterberg 2015, "What teachers should
know about the bootstrap", section 5.3: the "expanded percentile" interval), or ten prompts would look too certain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from components.evaluation.acceptance import RequestRecord

MIN_PROMPTS = 5
"""Below this a bootstrap interval says nothing: it is None."""


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn."""

    confidence: float = 0.95
    samples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Interval:
    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A figure of one arm; bounds are None where there are too few prompts for an interval."""

    estimate: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """An arm's AL against a baseline's, on the prompts that both answered."""

    num_prompts: int
    acceptance_length: float | None
    baseline: float | None
    difference: Interval | None
    ratio: Interval | None
    """Arm / baseline."""


def ratios_of_sums(
    numerators: Sequence[Sequence[float]], denominators: Sequence[float], bootstrap: Bootstrap, offset: float = 0.0
) -> list[Estimate | None]:
    """offset + sum(numerators[:, c]) / sum(denominators) for every column c; None where the denominators sum to 0.

    Args:
        numerators: [prompts, columns]; all columns are drawn together.
        denominators: [prompts].
        bootstrap: How intervals are drawn.
        offset: Added to every ratio (1 for AL).
    """
    sums = np.column_stack([np.array(denominators, dtype=float), np.array(numerators, dtype=float)])
    divisor, *totals = sums.sum(axis=0)
    if not divisor:
        return [None] * len(totals)
    drawn = _draws(len(sums), bootstrap) @ sums
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = offset + drawn[:, 1:] / drawn[:, :1]
    estimates = [float(offset + total / divisor) for total in totals]
    return [_estimate(estimate, ratios[:, i], len(sums), bootstrap) for i, estimate in enumerate(estimates)]


def compare_acceptance(
    arm: Sequence[RequestRecord], baseline: Sequence[RequestRecord], bootstrap: Bootstrap
) -> Comparison:
    """AL difference and ratio with intervals; what has no denominator, or too few prompts, is None."""
    sums = _paired_sums(arm, baseline)
    lengths = _acceptance_lengths(sums.sum(axis=0))
    arm_al, base_al = (float(value) if np.isfinite(value) else None for value in lengths)
    if arm_al is None or base_al is None:
        return Comparison(len(sums), arm_al, base_al, None, None)
    drawn = _acceptance_lengths(_draws(len(sums), bootstrap) @ sums)
    return Comparison(
        num_prompts=len(sums),
        acceptance_length=arm_al,
        baseline=base_al,
        difference=_interval(arm_al - base_al, drawn[0] - drawn[1], len(sums), bootstrap),
        ratio=_interval(arm_al / base_al, drawn[0] / drawn[1], len(sums), bootstrap),
    )


def compare_acceptance_by_family(
    arm: Sequence[RequestRecord], baseline: Sequence[RequestRecord], bootstrap: Bootstrap
) -> dict[str, Comparison]:
    families = sorted({record.family for record in arm} | {record.family for record in baseline})
    return {
        family: compare_acceptance(
            [r for r in arm if r.family == family], [r for r in baseline if r.family == family], bootstrap
        )
        for family in families
    }


def compare_speed(arm: Mapping[str, float], baseline: Mapping[str, float], bootstrap: Bootstrap) -> Interval | None:
    """Median over prompts of (arm's tokens/s / baseline's tokens/s) on the same prompt.

    Args:
        arm: Output tokens/s by prompt key.
        baseline: The same of the baseline.

    Returns:
        None when a figure is missing, not finite or not positive, or with fewer than `MIN_PROMPTS` prompts.
    """
    keys = sorted(arm.keys() & baseline.keys())
    rates = np.array([(arm[key], baseline[key]) for key in keys], dtype=float).reshape(-1, 2)
    if not len(keys) or not np.isfinite(rates).all() or (rates <= 0).any():
        return None
    ratios = rates[:, 0] / rates[:, 1]
    rng = np.random.default_rng(bootstrap.seed)
    drawn = np.median(rng.choice(ratios, size=(bootstrap.samples, len(ratios))), axis=1)
    return _interval(float(np.median(ratios)), drawn, len(ratios), bootstrap)


def compare_throughput(
    arm: Sequence[Mapping[str, float]], baseline: Sequence[Mapping[str, float]], bootstrap: Bootstrap
) -> Interval | None:
    """Arm's tokens/s / baseline's tokens/s under a load of a fixed number of requests at once.

    Such a load gives tokens at a rate that goes with 1 / (mean seconds a token), so the ratio is one of sums over prompts. Prompts
    are drawn, the same for both; so are repetitions, in which arm and baseline took turns: what one of them gained from a
    quiet moment is no gain.

    Args:
        arm: A mapping a repetition: seconds that a request took a token of its answer, by prompt key.
        baseline: The same of the baseline, as many repetitions.
        bootstrap: How to draw.

    Returns:
        None when a figure is missing, not finite or not positive, or with fewer than `MIN_PROMPTS` prompts.
    """
    keys = sorted(set.intersection(*(set(times) for times in (*arm, *baseline)))) if arm and baseline else []
    repetitions = min(len(arm), len(baseline))
    times_ARP = np.array([[[times[k] for k in keys] for times in both[:repetitions]] for both in (arm, baseline)])
    if not len(keys) or not np.isfinite(times_ARP).all() or (times_ARP <= 0).any():
        return None
    prompts_SP = _draws(len(keys), bootstrap)
    rounds_SR = np.random.default_rng([bootstrap.seed, 1]).multinomial(
        repetitions, np.full(repetitions, 1 / repetitions), size=bootstrap.samples
    )
    drawn_AS = np.einsum("arp,sr,sp->as", times_ARP, rounds_SR, prompts_SP, optimize=True)
    ours, theirs = times_ARP.sum(axis=(1, 2))
    return _interval(float(theirs / ours), drawn_AS[1] / drawn_AS[0], len(keys), bootstrap)


def _paired_sums(arm: Sequence[RequestRecord], baseline: Sequence[RequestRecord]) -> np.ndarray:
    """[prompts, 4]: the arm's accepted and rounds, then the baseline's, of prompts that both answered."""
    ours, theirs = ({r.key: r for r in records if r.error is None} for records in (arm, baseline))
    keys = sorted(ours.keys() & theirs.keys())
    rows = [(ours[k].accepted, ours[k].rounds, theirs[k].accepted, theirs[k].rounds) for k in keys]
    return np.array(rows, dtype=float).reshape(-1, 4)


def _acceptance_lengths(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """AL of both arms from sums [..., 4]; NaN without a round."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1 + sums[..., 0] / sums[..., 1], 1 + sums[..., 2] / sums[..., 3]


def _draws(num_prompts: int, bootstrap: Bootstrap) -> np.ndarray:
    """[samples, prompts]: how often each prompt is drawn."""
    rng = np.random.default_rng(bootstrap.seed)
    return rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=bootstrap.samples)


def _estimate(estimate: float, drawn: np.ndarray, num_prompts: int, bootstrap: Bootstrap) -> Estimate:
    interval = _interval(estimate, drawn, num_prompts, bootstrap)
    return Estimate(estimate, *((interval.low, interval.high) if interval else (None, None)))


def _interval(estimate: float, drawn: np.ndarray, num_prompts: int, bootstrap: Bootstrap) -> Interval | None:
    drawn = drawn[np.isfinite(drawn)]  # a draw of prompts without a single round has no AL
    if num_prompts < MIN_PROMPTS or not np.isfinite(estimate) or not len(drawn):
        return None
    tail = (1 - bootstrap.confidence) / 2
    widened = stats.norm.cdf(np.sqrt(num_prompts / (num_prompts - 1)) * stats.t.ppf(tail, num_prompts - 1))
    low, high = np.quantile(drawn, [widened, 1 - widened])
    return Interval(estimate, float(low), float(high))
