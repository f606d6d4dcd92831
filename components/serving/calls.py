"""The calls that run in this router process, shadows' copies included."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection

from components.serving.routing import ArmState, Routing
from components.serving.upstream import Call


class Calls:
    def __init__(self) -> None:
        self._on: defaultdict[str, set[Call]] = defaultdict(set)
        """By the name that the arm had when it was asked."""

    def add(self, call: Call) -> None:
        self._on[call.arm].add(call)

    def discard(self, call: Call) -> None:
        self._on[call.arm].discard(call)

    def num_on(self, arm: str) -> int:
        return len(self._on[arm])

    def num_leaving(self, routing: Routing) -> dict[str, int]:
        """How many there are, by application that no arm names any more."""
        named = {arm.app for arm in routing.arms.values()}
        running = Counter(call.app for calls in self._on.values() for call in calls)
        return {app: num for app, num in running.items() if app not in named}

    def oldest_start(self, shadows: Collection[str]) -> float:
        """Unix time in seconds at which the oldest one began that is no shadow's; infinite without one. Any thread may ask."""
        calls = [call for arm, on_arm in list(self._on.items()) if arm not in shadows for call in list(on_arm)]
        return min((call.started_at for call in calls), default=math.inf)

    def cut_off_killed(self, routing: Routing) -> None:
        """Ends what runs on killed arms."""
        for call in [call for calls in self._on.values() for call in calls if _is_killed(routing, call)]:
            call.kill()


def _is_killed(routing: Routing, call: Call) -> bool:
    """Whether the engine that the call runs on is that of a killed arm, whatever the arm was called when it was asked."""
    named = routing.arms.get(call.arm)
    if named is not None and named.app == call.app:
        return named.state == ArmState.KILLED
    return any(arm.app == call.app and arm.state == ArmState.KILLED for arm in routing.arms.values())
