"""The difference of a ratio of sums between two arms under live traffic, with bounds that hold at every look.

Sessions are dealt to the arms by known weights, so the weights are the randomness that the bounds rest on. Session i enters once, when it is
over, with its assigned arm Z_i (1: challenger; by intention to treat, whoever answered), the chance w_i of that in its weight epoch, a
numerator A_i and a denominator N_i (accepted tokens and rounds: then the ratio is AL - 1), and a size T_i that no arm can change (the tokens
of its answers: decoding is lossless). For a supposed difference t

    x_i(t) = (Z_i - w_i) (A_i - t Z_i N_i - r_i(t) N_i - m_i(t) T_i),     S(t) = sum x_i(t).

r_i(t) is the pooled rate of the latest sessions before, after taking t off the challenger's; m_i(t) is what such sessions of the same task had left
over for each unit of size. Neither depends on Z_i, so x_i(t) has mean zero whatever the sessions, their drift in time and the weights of
their epochs: centring by the epoch's own w_i is the stratification, and m_i takes the differences between tasks out of the noise
(regression adjustment) without changing what is estimated. The estimate solves S(t) = 0; in large samples it is A/N of the challenger minus
A/N of the control, each summed first and divided once.

Bounds. exp(l S - l^2 V / 2) with V = (sum x_i^2 + 2 sum E[x_i^2]) / 3 is a supermartingale for any square-integrable x_i (Delyon 2009,
"Exponential inequalities for sums of weakly dependent variables", from exp(x - x^2/6) <= 1 + x + x^2/3; Howard, Ramdas, McAuliffe and
Sekhon 2020, "Time-uniform Chernoff bounds via nonnegative supermartingales"), and E[x_i^2] is known: w_i (1 - w_i) times a square. Mixing
over l > 0 by half a normal density and Ville's inequality give the boundary of Howard, Ramdas, McAuliffe and Sekhon 2021, "Time-uniform,
nonparametric, nonasymptotic confidence sequences". Where the arms do not differ (t = 0) this holds for every sample size and however heavy
the tails; for other t, and for arms that differ but not in the ratio, it is the asymptotic confidence sequence of Waudby-Smith, Arbour,
Sinha, Kennedy and Ramdas 2024, "Time-uniform central limit theory and asymptotic confidence sequences", for which V is never taken
below sum x_i^2.

The last look of a planned number of requests has a boundary of its own, that of a single normal test (a Haybittle-Peto design): early looks
may spend a stated share of the error rate, and both together at most all of it.

Assumed: sessions do not influence each other; what a session is (its text, its length, when it is over) does not depend on its arm, as holds
for lossless decoding. Every figure may be an array of independent replications, which is how the simulation runs this very code.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import lambertw, log_ndtr, ndtri

Array = np.ndarray

MEMORY_SESSIONS = 50
"""What a session is compared with forgets older ones at this rate, to follow drift."""
NEWTON_STEPS = 4
BOUND_STEPS = 3


@dataclass(frozen=True)
class Bounds:
    """Of a difference; each bound errs with at most the level it was asked for, over all looks. Infinite while nothing is known."""

    estimate: Array | float
    low: Array | float
    high: Array | float


class Difference:
    """Running sums of one metric, a constant number of operations a session.

    Args:
        shape: Of the replications; () for one experiment.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.sessions = np.zeros(shape, dtype=int)
        self.score = np.zeros((2, *shape))
        """S(t) = score[0] - t score[1]."""
        self.observed = np.zeros((3, *shape))
        """sum x_i(t)^2 = observed[0] - 2 t observed[1] + t^2 observed[2]."""
        self.designed = np.zeros((3, *shape))
        """sum E[x_i(t)^2], likewise."""

    def add(
        self, treated: Array | bool, share: Array | float, centred: tuple[Array, Array], counts: Array | bool = True
    ) -> None:
        """One more session.

        Args:
            treated: Whether its assigned arm is the challenger.
            share: Chance of that; a session that had no choice (0 or 1) says nothing about a difference.
            centred: From `Centre.centre`.
            counts: Replications that have this session.
        """
        share = np.asarray(share, dtype=float)
        counts = counts & (share > 0) & (share < 1)
        outcome, exposure = (np.where(counts, part, 0.0) for part in centred)
        pushed = np.asarray(treated, dtype=float) - share
        self.sessions += counts
        self.score += pushed * np.stack([outcome, exposure])
        squares = np.stack([outcome**2, outcome * exposure, exposure**2])
        self.observed += pushed**2 * squares
        self.designed += share * (1 - share) * squares

    def information(self) -> Array:
        """sum E[x_i(0)^2]: what planning goes by, because it does not depend on how the arms were dealt."""
        return self.designed[0]

    def variance(self) -> Array:
        """V(0): what S(0) is measured by where the arms do not differ."""
        return self._variance_parts(np.zeros(self.sessions.shape))[0]

    def early(self, level: float, mixing: Array) -> Bounds:
        """Bounds for a look at any time; `mixing` > 0 is the boundary's scale, fixed before (`mixing_scale`)."""
        return self._bounds(lambda variance: early_quantile(variance, mixing, level), mixing)

    def final(self, level: float) -> Bounds:
        """Bounds for one look at a time that was fixed before."""
        quantile = -ndtri(level)
        return self._bounds(lambda variance: np.full_like(variance, quantile), 0.0)

    def _bounds(self, quantile, mixing: Array | float) -> Bounds:
        with np.errstate(divide="ignore", invalid="ignore"):
            estimate = np.where(self.score[1] > 0, self.score[0] / self.score[1], np.nan)
            low, high = (self._bound(side, estimate, quantile, mixing) for side in (-1, 1))
        return Bounds(estimate, low, high)

    def _bound(self, side: int, estimate: Array, quantile, mixing: Array | float) -> Array:
        """The t on this side of the estimate where S(t)^2 meets quantile^2 (V(t) + mixing): a root of a quadratic, as Fieller's."""
        bound = estimate
        for _ in range(BOUND_STEPS):  # V(t) and its quantile hardly move with t
            v0, v1, v2 = self._variance_parts(bound)
            square = quantile(np.maximum(v0 - 2 * bound * v1 + bound**2 * v2, 0.0)) ** 2
            lead = self.score[1] ** 2 - square * v2
            middle = self.score[0] * self.score[1] - square * v1
            last = self.score[0] ** 2 - square * (v0 + mixing)
            root = (middle + side * np.sqrt(np.maximum(middle**2 - lead * last, 0.0))) / lead
            known = (lead > 0) & (self.score[1] > 0)
            bound = np.where(known, root, np.nan)
        return np.where(known, root, side * np.inf)

    def _variance_parts(self, t: Array) -> Array:
        """Parts of V(t) as of `observed`: never below sum x_i(t)^2 nor below (sum x_i(t)^2 + 2 sum E[x_i(t)^2]) / 3."""
        t = np.nan_to_num(t)
        spread = self.designed - self.observed
        above = spread[0] - 2 * t * spread[1] + t**2 * spread[2] > 0
        return np.where(above, (self.observed + 2 * self.designed) / 3, self.observed)


@dataclass(frozen=True)
class Part:
    """What a session did in one task."""

    task: Array
    """Index of the task."""
    numerator: Array
    denominator: Array
    size: Array
    """What no arm can change: the answers' tokens, or the requests."""


class Centre:
    """What a session's numerator is compared with: pooled sums of the sessions so far, of both arms together.

    Args:
        num_tasks: Rows.
        shape: Of the replications.
    """

    def __init__(self, num_tasks: int = 1, shape: tuple[int, ...] = ()) -> None:
        self._sums = np.zeros((4, num_tasks, *shape))
        """Numerator, denominator, denominator of the challenger's sessions, size; [4, tasks, ...]."""
        self._sessions = np.zeros(shape)

    def grow(self) -> int:
        """The index of one more task."""
        self._sums = np.concatenate([self._sums, np.zeros((4, 1, *self._sums.shape[2:]))], axis=1)
        return self._sums.shape[1] - 1

    def centre(self, treated: Array | bool, part: Part) -> tuple[Array, Array]:
        """(A - r N - m_k T, Z N - p N - n_k T) of one session's part; zeros before any session.

        r and p are the rates of all sessions, m_k and n_k what is left over in this task for each unit of size, shrunk to 0 by one
        average session: with it, sessions of an easy task are compared with such sessions, while the difference stays that of all tasks
        together.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            numerator, denominator, exposed, size = self._sums.sum(axis=1)
            rate, exposure = numerator / denominator, exposed / denominator
            mine = self._sums[self._at(part.task)]
            total = mine[3] + size / self._sessions
            outcome_left, exposure_left = (mine[0] - rate * mine[1]) / total, (mine[2] - exposure * mine[1]) / total
            own = np.asarray(treated, dtype=float) - exposure
            outcome = part.numerator - rate * part.denominator - outcome_left * part.size
            exposed_more = own * part.denominator - exposure_left * part.size
        known = (denominator > 0) & (total > 0)
        return np.where(known, outcome, 0.0), np.where(known, exposed_more, 0.0)

    def add(self, treated: Array | bool, part: Part, counts: Array | bool = True) -> None:
        exposed = np.asarray(treated, dtype=float) * part.denominator
        values = np.stack([part.numerator, part.denominator, exposed, part.size])
        self._sums[self._at(part.task)] += np.where(counts, values, 0.0)

    def end_session(self, counts: Array | bool = True) -> None:
        """After the last part of a session: older ones weigh a little less."""
        kept = np.where(counts, 1 - 1 / MEMORY_SESSIONS, 1.0)
        self._sessions = self._sessions * kept + counts
        self._sums *= kept

    def _at(self, task: Array) -> tuple:
        """Index of [4, ...] sums: one task for all replications, or one for each."""
        each = self._sums.shape[2:]
        return (slice(None), task, *(np.arange(n) for n in each))


def early_quantile(variance: Array, mixing: Array, level: float) -> Array:
    """x with x^2/2 + log(2 Phi(x)) = log(1/level) + log((V + mixing) / mixing) / 2: S beyond x sqrt(V + mixing) is an early finding."""
    target = np.log(1 / level) + 0.5 * np.log1p(variance / mixing)
    x = np.sqrt(2 * target)
    for _ in range(NEWTON_STEPS):  # from above, of a function that is convex there
        hazard = np.exp(-0.5 * x**2 - log_ndtr(x)) / np.sqrt(2 * np.pi)
        x = x - (0.5 * x**2 + log_ndtr(x) + np.log(2) - target) / (x + hazard)
    return x


def mixing_scale(variance: Array, level: float) -> Array:
    """The mixing that makes the early boundary tightest at this V (Howard et al. 2021, section 3.5)."""
    return variance / (-lambertw(-((2 * level) ** 2) / np.e, -1).real - 1)
