"""Keeping traffic off an arm that fails."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

FAILURES_TO_EJECT = 3
"""In a row: one failed request is no reason to move sessions."""
EJECTED_S = 30.0
"""About as long as Serve takes to notice a dead engine and start another."""


@dataclass
class Ejector:
    """After some failures in a row an arm is out for a while; then one request probes it.

    A probe that fails, or never says how it went, leaves the arm out for another while.
    """

    failures_to_eject: int = FAILURES_TO_EJECT
    ejected_s: float = EJECTED_S
    clock: Callable[[], float] = time.monotonic
    _failures: dict[str, int] = field(default_factory=dict, init=False)
    _out_until: dict[str, float] = field(default_factory=dict, init=False)

    def admits(self, arm: str) -> bool:
        """Whether a request may go to `arm` now."""
        return self.clock() >= self._out_until.get(arm, 0.0)

    def started(self, arm: str) -> None:
        """A request was sent to `arm`; if the arm was out, this is its probe and the others still stay away."""
        if arm in self._out_until:
            self._out_until[arm] = self.clock() + self.ejected_s

    def succeeded(self, arm: str) -> None:
        self._failures.pop(arm, None)
        self._out_until.pop(arm, None)

    def failed(self, arm: str) -> None:
        self._failures[arm] = self._failures.get(arm, 0) + 1
        if self._failures[arm] >= self.failures_to_eject:
            self._out_until[arm] = self.clock() + self.ejected_s
