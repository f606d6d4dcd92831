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

    A probe that fails, or never says how it went, leaves the arm out for another while. What was sent before an arm went out says nothing
    of it any more, however it ends.
    """

    failures_to_eject: int = FAILURES_TO_EJECT
    ejected_s: float = EJECTED_S
    clock: Callable[[], float] = time.monotonic
    _failed: dict[str, deque[bool]] = field(default_factory=dict, init=False)
    """The last outcomes of each arm, the newest at the end; True for a failure."""
    _out_since: dict[str, float] = field(default_factory=dict, init=False)
    _out_until: dict[str, float] = field(default_factory=dict, init=False)

    def admits(self, arm: str) -> bool:
        """Whether a request may go to `arm` now."""
        return self.clock() >= self._out_until.get(arm, 0.0)

    def is_out(self, arm: str) -> bool:
        """Whether `arm` has yet to prove that it answers again."""
        return arm in self._out_until

    def started(self, arm: str) -> float:
        """A request was sent to `arm`; if the arm was out, this is its probe and the others still stay away.

        Returns:
            When, on the ejector's clock: for `succeeded` and `failed`.
        """
        now = self.clock()
        if arm in self._out_until:
            self._out_until[arm] = now + self.ejected_s
        return now

    def succeeded(self, arm: str, sent_at: float) -> None:
        """A request that was sent then was answered. A refusal is no success: the engine may not have heard of the request."""
        if self._is_stale(arm, sent_at):
            return
        if arm in self._out_until:  # back: what was before its ejection counts no more
            self.forget(arm)
        self._outcomes(arm).append(False)

    def failed(self, arm: str, sent_at: float) -> None:
        if self._is_stale(arm, sent_at):
            return
        outcomes = self._outcomes(arm)
        outcomes.append(True)
        last = list(outcomes)[-self.failures_to_eject :]
        in_a_row = len(last) == self.failures_to_eject and all(last)
        too_often = len(outcomes) == WINDOW and sum(outcomes) >= WINDOW // 2
        if in_a_row or too_often or arm in self._out_until:
            self._out_since[arm] = self.clock()
            self._out_until[arm] = self._out_since[arm] + self.ejected_s

    def forget(self, arm: str) -> None:
        """As if nothing had failed: another engine answers under this name from now on, or the arm is back."""
        self._failed.pop(arm, None)
        self._out_since.pop(arm, None)
        self._out_until.pop(arm, None)

    def _is_stale(self, arm: str, sent_at: float) -> bool:
        return arm in self._out_since and sent_at < self._out_since[arm]

    def _outcomes(self, arm: str) -> deque[bool]:
        return self._failed.setdefault(arm, deque(maxlen=WINDOW))
