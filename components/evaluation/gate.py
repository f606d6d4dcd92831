"""The gate: a pure function from measurements and policy to a verdict with reasons.

Against a champion: at the champion's K, AL better by `min_effect` with the interval of the difference above 0 and no family worse than
`task_margin` beyond doubt; at the K each is served with, median tokens/s no more than `speed_margin` lower. Without a champion: tokens/s
against plain decoding decides; the interval of the median per-prompt ratio must lie above 1. Where the speed pass ran: at each of its
concurrencies tokens/s no more than `speed_margin` below the champion's (without one: plain decoding's). Always: lossless, no errors, one
vLLM and one target, and no arm that accepted by chance. A figure that is missing or not finite passes no check.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from components.config import GateConfig
from components.evaluation.acceptance import RequestRecord
from components.evaluation.statistics import (
    Bootstrap,
    Comparison,
    Interval,
    compare_acceptance,
    compare_acceptance_by_family,
    compare_speed,
)


@dataclass(frozen=True)
class Measured:
    """What was measured of one arm."""

    name: str
    platform: Mapping[str, str]
    """vLLM, torch, device and the target's digest: figures of different platforms are never compared."""
    num_speculative_tokens: int | None = None
    """The K that it is served with."""
    head_digest: str | None = None
    records: Mapping[int, Sequence[RequestRecord]] = field(default_factory=dict)
    """Greedy answers to the held-out prompts, by the K that they were measured with."""
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """Output tokens/s at concurrency 1 and the K it is served with, by prompt key."""
    num_errors: int | None = None
    """Failed or empty answers; None when they were not counted."""
    is_synthetic: bool = False
    """Drafts were accepted by chance (a load test)."""
    num_faults: int | None = None
    """Greedy answers that differ from plain decoding's by more than rounding; None when they were not compared."""


@dataclass(frozen=True)
class UnderLoad:
    """The candidate's speed under one load, as served."""

    concurrency: int
    baseline: str
    """The champion as it is served, or plain decoding."""
    ratio: Interval | None
    """Tokens/s over the baseline's; None when one of the two has no valid figure."""


@dataclass(frozen=True)
class Reason:
    check: str
    passed: bool
    measured: str
    required: str


@dataclass(frozen=True)
class Verdict:
    promote: bool
    reasons: tuple[Reason, ...]

    @property
    def failures(self) -> tuple[Reason, ...]:
        return tuple(reason for reason in self.reasons if not reason.passed)


def decide(
    candidate: Measured,
    incumbent: Measured | None,
    none_arm: Measured,
    policy: GateConfig,
    num_candidates: int = 1,
    loads: Sequence[UnderLoad] = (),
) -> Verdict:
    """Whether the candidate replaces the incumbent champion (or becomes the first one), and why.

    The best of several candidates is better than the champion by luck more often than one is. Its intervals for a gain are therefore
    those of Bonferroni's inequality (Dunn 1961, "Multiple comparisons among means", JASA 56): at confidence 1 - (1 - c)/n for the best
    of n, no candidate that is no better passes more often than 1 - c says, however they depend on each other. Intervals that
    look for harm stay at c: wider ones would overlook it.

    Args:
        candidate: The new head, the best of its run; `records` must hold the incumbent's K too.
        incumbent: The champion; None when there is none yet.
        none_arm: Plain decoding.
        policy: The margins.
        num_candidates: Among how many it was chosen by the same prompts.
        loads: Of the speed pass; empty where it was left out.
    """
    gain = policy.model_copy(update={"confidence": 1 - (1 - policy.confidence) / num_candidates})
    arms = [candidate, none_arm] if incumbent is None else [candidate, incumbent, none_arm]
    reasons = [_real_acceptance(arms), _one_platform(arms), _no_errors(arms, policy), _lossless(candidate)]
    if incumbent is None:
        reasons.append(_faster_than_plain(candidate, none_arm, gain))
    else:
        reasons.append(_another_head(candidate, incumbent))
        reasons += _better_acceptance(candidate, incumbent, policy, gain)
        reasons.append(_no_slower(candidate, incumbent, policy))
    reasons += [_no_slower_under(load, policy) for load in loads]
    return Verdict(all(reason.passed for reason in reasons), tuple(reasons))


def _real_acceptance(arms: Sequence[Measured]) -> Reason:
    """Refuses what a load test measured, whatever it measured."""
    synthetic = [arm.name for arm in arms if arm.is_synthetic]
    measured = f"synthetic: {', '.join(synthetic)}" if synthetic else "by verification"
    return Reason("real acceptance", not synthetic, measured, "no draft accepted by chance")


def _one_platform(arms: Sequence[Measured]) -> Reason:
    names = sorted({name for arm in arms for name in arm.platform})
    differing = [
        f"{name}: " + ", ".join(f"{arm.name} {arm.platform.get(name)}" for arm in arms)
        for name in names
        if len({arm.platform.get(name) for arm in arms}) > 1
    ]
    passed = bool(names) and not differing
    return Reason("same platform", passed, "; ".join(differing) or ", ".join(names) or "unknown", "equal on every arm")


def _no_errors(arms: Sequence[Measured], policy: GateConfig) -> Reason:
    passed = all(arm.num_errors is not None and arm.num_errors <= policy.max_errors for arm in arms)
    counts = ", ".join(f"{arm.name} {_number(arm.num_errors)}" for arm in arms)
    return Reason("no errors", passed, counts, f"at most {policy.max_errors} on every arm")


def _lossless(candidate: Measured) -> Reason:
    measured = f"{_number(candidate.num_faults)} faults"
    return Reason("lossless", candidate.num_faults == 0, measured, "no greedy answer changed by more than rounding")


def _another_head(candidate: Measured, incumbent: Measured) -> Reason:
    known = candidate.head_digest is not None and incumbent.head_digest is not None
    same = candidate.head_digest == incumbent.head_digest
    measured = "unknown digest" if not known else "same head" if same else "another head"
    return Reason("another head", known and not same, measured, "not the champion's own weights, whatever its K")


def _faster_than_plain(candidate: Measured, none_arm: Measured, policy: GateConfig) -> Reason:
    ratio = compare_speed(candidate.tokens_per_s, none_arm.tokens_per_s, _bootstrap(policy))
    return Reason(
        "faster than plain decoding",
        _finite(ratio) and ratio is not None and ratio.low > 1,
        _interval(ratio, policy),
        "tokens/s at c=1, median ratio over prompts: interval above 1",
    )


def _no_slower(candidate: Measured, incumbent: Measured, policy: GateConfig) -> Reason:
    ratio = compare_speed(candidate.tokens_per_s, incumbent.tokens_per_s, _bootstrap(policy))
    floor = 1 - policy.speed_margin
    return Reason(
        f"speed as served (K={candidate.num_speculative_tokens} against K={incumbent.num_speculative_tokens})",
        _finite(ratio) and ratio is not None and ratio.estimate >= floor,
        _interval(ratio, policy),
        f"tokens/s at c=1, median ratio over prompts at least {floor:.3f}",
    )


def _no_slower_under(load: UnderLoad, policy: GateConfig) -> Reason:
    floor = 1 - policy.speed_margin
    return Reason(
        f"speed at c={load.concurrency} against {load.baseline}",
        _finite(load.ratio) and load.ratio is not None and load.ratio.estimate >= floor,
        _interval(load.ratio, policy),
        f"tokens/s under that load, each as served, ratio at least {floor:.3f}",
    )


def _better_acceptance(
    candidate: Measured, incumbent: Measured, policy: GateConfig, gain: GateConfig
) -> Iterator[Reason]:
    k = incumbent.num_speculative_tokens
    ours = candidate.records.get(k, ()) if k is not None else ()
    theirs = incumbent.records.get(k, ()) if k is not None else ()
    yield _acceptance(compare_acceptance(ours, theirs, _bootstrap(gain)), k, gain)
    yield _same_prompts(ours, theirs)
    for family, comparison in compare_acceptance_by_family(ours, theirs, _bootstrap(policy)).items():
        yield _family(family, comparison, policy)


def _acceptance(comparison: Comparison, k: int | None, policy: GateConfig) -> Reason:
    ratio, difference = comparison.ratio, comparison.difference
    passed = False
    measured = "not measured at this K"
    if ratio is not None and difference is not None and _finite(ratio) and _finite(difference):
        passed = ratio.estimate - 1 >= policy.min_effect and difference.low > 0
        measured = (
            f"{comparison.baseline:.3f} -> {comparison.acceptance_length:.3f} ({ratio.estimate - 1:+.1%}), "
            f"difference {_interval(difference, policy)}"
        )
    return Reason(
        f"acceptance length at K={k}",
        passed,
        measured,
        f"at least {policy.min_effect:+.1%}, difference's interval above 0",
    )


def _same_prompts(ours: Sequence[RequestRecord], theirs: Sequence[RequestRecord]) -> Reason:
    """A prompt that one arm left out could be the one that it is bad at."""
    common = {r.key for r in ours} & {r.key for r in theirs}
    either = {r.key for r in ours} | {r.key for r in theirs}
    return Reason("same prompts", common == either and bool(common), f"{len(common)} of {len(either)}", "all of them")


def _family(family: str, comparison: Comparison, policy: GateConfig) -> Reason:
    """Fails only beyond doubt: too few prompts for an interval are no proof of harm."""
    floor = 1 - policy.task_margin
    ratio = comparison.ratio
    measured = f"AL ratio {_interval(ratio, policy)}, {comparison.num_prompts} prompts"
    harmed = ratio is not None and not (_finite(ratio) and ratio.high >= floor)
    return Reason(f"family {family}", not harmed, measured, f"not below {floor:.3f} beyond doubt")


def _bootstrap(policy: GateConfig) -> Bootstrap:
    return Bootstrap(policy.confidence, policy.bootstrap_samples, policy.seed)


def _finite(interval: Interval | None) -> bool:
    return interval is not None and all(map(math.isfinite, (interval.estimate, interval.low, interval.high)))


def _interval(interval: Interval | None, policy: GateConfig) -> str:
    if interval is None:
        return "undefined"
    return f"{interval.estimate:.3f} [{interval.low:.3f}, {interval.high:.3f}] ({100 * policy.confidence:.3g}%)"


def _number(count: int | None) -> str:
    return "not counted" if count is None else str(count)
