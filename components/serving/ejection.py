"""Keeping traffic off an arm that fails."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

FAILURES_TO_EJECT = 3
"""In a row: one failed request is no reason to move sessions."""
WINDOW = 20
"""Of this many last requests half may fail, and the arm is out as well."""
EJECTED_S = 30.0
"""About as long as Serve takes to notice a dead engine and start another."""


@dataclass
class Ejector:
    """An arm that fails several times in a row, or half of the time, is out for a while; then one request probes it.

    A probe that fails, or never says how it went, leaves the arm out for another while.
    """

    failures_to_eject: int = FAILURES_TO_EJECT
    ejected_s: float = EJECTED_S
    clock: Callable[[], float] = time.monotonic
    _failed: dict[str, deque[bool]] = field(default_factory=dict, init=False)
    """The last outcomes of each arm, the newest at the end; True for a failure."""
    _out_until: dict[str, float] = field(default_factory=dict, init=False)

    def admits(self, arm: str) -> bool:
        """Whether a request may go to `arm` now."""
        return self.clock() >= self._out_until.get(arm, 0.0)

    def is_out(self, arm: str) -> bool:
        """Whether `arm` has yet to prove that it answers again."""
        return arm in self._out_until

    def started(self, arm: str) -> None:
        """A request was sent to `arm`; if the arm was out, this is its probe and the others still stay away."""
        if arm in self._out_until:
            self._out_until[arm] = self.clock() + self.ejected_s

    def succeeded(self, arm: str) -> None:
        if arm in self._out_until:  # back: what was before its ejection counts no more
            self._failed.pop(arm, None)
            del self._out_until[arm]
        self._outcomes(arm).append(False)

    def failed(self, arm: str) -> None:
        outcomes = self._outcomes(arm)
        outcomes.append(True)
        last = list(outcomes)[-self.failures_to_eject :]
        in_a_row = len(last) == self.failures_to_eject and all(last)
        too_often = len(outcomes) == WINDOW and sum(outcomes) >= WINDOW // 2
        if in_a_row or too_often or arm in self._out_until:
            self._out_until[arm] = self.clock() + self.ejected_s

    def forget(self, arm: str) -> None:
        """Another engine answers under this name from now on."""
        self._failed.pop(arm, None)
        self._out_until.pop(arm, None)

    def _outcomes(self, arm: str) -> deque[bool]:
        return self._failed.setdefault(arm, deque(maxlen=WINDOW))
