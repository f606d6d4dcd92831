"""Which arm a request goes to: the same one for the same session, and moved as little as the weights demand."""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from components.serving.protocol import SESSION_HEADER

SESSION_IDLE_S = 1800.0
"""A session that is silent for longer is over."""
MAX_SESSIONS = 100_000
"""Remembered, for arms that drain; about 20 MB."""


def session_key(headers: Mapping[str, str], body: Mapping[str, Any], raw_body: bytes) -> str:
    """What stays together: the session header, else OpenAI's `user` field, else the very same request."""
    named = headers.get(SESSION_HEADER) or body.get("user")
    return str(named) if named else hashlib.sha256(raw_body).hexdigest()


def session_hash(key: str, salt: str) -> str:
    """What records say of a session: the same for the same key, and not the key."""
    return hashlib.sha256(f"{salt}\x1f{key}".encode()).hexdigest()[:16]


def assign(key: str, weights: Mapping[str, float], salt: str) -> str | None:
    """The arm of session `key`; None when no arm has a weight above 0.

    Weighted rendezvous hashing: every arm draws an exponential time with rate `weight`, seeded by (salt, arm, key), and
    the first one wins. An arm gets its share of the sessions, and a change of one weight moves sessions only to
    or from that arm, never between two others.
    """
    times = {arm: -math.log(_uniform(salt, arm, key)) / weight for arm, weight in weights.items() if weight > 0}
    return min(times, key=lambda arm: (times[arm], arm), default=None)


def _uniform(salt: str, arm: str, key: str) -> float:
    """A number in (0, 1) that the three strings decide."""
    text = "\x1f".join((salt, arm, key)).encode()
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) + 0.5) / 2**64


@dataclass
class Sessions:
    """The arm that each live session was answered by last: an arm that drains keeps them until they fall silent."""

    idle_s: float = SESSION_IDLE_S
    max_sessions: int = MAX_SESSIONS
    clock: Callable[[], float] = time.monotonic
    _last: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict, init=False)

    def saw(self, session: str, arm: str) -> None:
        self._last[session] = (arm, self.clock())
        self._last.move_to_end(session)
        if len(self._last) > self.max_sessions:
            self._last.popitem(last=False)

    def arm_of(self, session: str) -> str | None:
        """None for a new session and for one that has been silent for too long."""
        arm, seen_s = self._last.get(session, (None, -math.inf))
        return arm if self.clock() - seen_s <= self.idle_s else None

    def num_on(self, arm: str) -> int:
        return sum(1 for name, seen_s in self._last.values() if name == arm and self.clock() - seen_s <= self.idle_s)
