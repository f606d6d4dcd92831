"""Which arm with which K to serve at a load, "off" included: a pure function of what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from components.evaluation.statistics import Interval


@dataclass(frozen=True)
class Option:
    """An arm with one K at one load."""

    arm: str
    num_speculative_tokens: int
    tokens_per_s: float
    ratio: Interval | None
    """Its speed / the speed without speculation; None: nobody knows."""


@dataclass(frozen=True)
class Recommendation:
    arm: str
    num_speculative_tokens: int | None
    """K; None: no speculation."""
    gain: float
    """Over no speculation: 0.1 is a tenth faster."""
    low: float
    high: float


def recommend(options: Sequence[Option], off: str) -> Recommendation:
    """The fastest of the options that are faster than no speculation beyond doubt; without one, none of them.

    Options of equal speed: the one with the smaller K, which wastes less of the target when load comes.

    Args:
        options: What was measured at this load.
        off: Name of the arm that does not speculate.
    """
    sure = [option for option in options if option.ratio is not None and option.ratio.low > 1]
    if not sure:
        return Recommendation(off, None, 0.0, 0.0, 0.0)
    best = min(sure, key=lambda option: (-option.tokens_per_s, option.num_speculative_tokens, option.arm))
    assert best.ratio is not None
    gain, low, high = (value - 1 for value in (best.ratio.estimate, best.ratio.low, best.ratio.high))
    return Recommendation(best.arm, best.num_speculative_tokens, gain, low, high)
