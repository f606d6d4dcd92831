"""One metric watched over an experiment: its sessions, its early looks and its last one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from components.experiment.difference import Array, Bounds, Centre, Difference, Part, mixing_scale


@dataclass(frozen=True)
class Plan:
    """What is fixed before the first look."""

    level: float
    """Largest chance that a bound of one side is ever wrong."""
    min_sessions: int
    """No look before; the early boundary's scale is taken from these sessions."""
    max_requests: int
    """The last look."""
    early_share: float = 0.2
    """Of the level, for all looks before the last one: small where the end decides, large where harm should show early."""
    sharpest_at: float = 0.5
    """Share of the planned information at which the early boundary is tightest."""

    @property
    def early_level(self) -> float:
        return self.level * self.early_share

    @property
    def last_level(self) -> float:
        return self.level * (1 - self.early_share)


class SequentialDifference:
    """`Difference` with its centring and with the boundary that its plan gives at each look.

    Args:
        plan: Fixed before.
        num_tasks: Strata to begin with; `grow` adds one.
        shape: Of independent replications; () for one experiment.
    """

    def __init__(self, plan: Plan, num_tasks: int = 1, shape: tuple[int, ...] = ()) -> None:
        self.plan = plan
        self.difference = Difference(shape)
        self.centre = Centre(num_tasks, shape)
        self._mixing = np.full(shape, np.nan)

    def add(
        self,
        treated: Array | bool,
        share: Array | float,
        parts: Sequence[Part],
        requests: Array,
        counts: Array | bool = True,
    ) -> None:
        """One more session that is over.

        Args:
            treated: Whether its assigned arm is the challenger.
            share: Chance of that.
            parts: One a task.
            requests: Of the experiment so far.
            counts: Replications that have this session.
        """
        centred = [self.centre.centre(treated, part) for part in parts]
        outcomes, exposures = zip(*centred, strict=True)
        self.difference.add(treated, share, (np.sum(outcomes, axis=0), np.sum(exposures, axis=0)), counts)
        for part in parts:
            self.centre.add(treated, part, counts)
        self.centre.end_session(counts)
        self._fix_mixing(requests)

    def bounds(self, last: bool = False) -> Bounds:
        """At an early look (infinite before `min_sessions`), or at the last one."""
        if last:
            return self.difference.final(self.plan.last_level)
        bounds = self.difference.early(self.plan.early_level, self._mixing)
        silent = np.isnan(self._mixing)
        return Bounds(bounds.estimate, np.where(silent, -np.inf, bounds.low), np.where(silent, np.inf, bounds.high))

    def _fix_mixing(self, requests: Array) -> None:
        """Once: from the information that the planned requests would give at the pace so far."""
        information = self.difference.information()
        due = np.isnan(self._mixing) & (self.difference.sessions >= self.plan.min_sessions) & (information > 0)
        if np.any(due):
            planned = information * self.plan.max_requests / np.maximum(requests, 1)
            scale = mixing_scale(self.plan.sharpest_at * planned, self.plan.early_level)
            self._mixing = np.where(due, scale, self._mixing)
