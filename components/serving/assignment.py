"""Which arm a request goes to: the same one for the same session, and moved as little as the weights demand."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from components.serving.protocol import SESSION_HEADER


def session_key(headers: Mapping[str, str], body: Mapping[str, Any], raw_body: bytes) -> str:
    """What stays together: the session header, else OpenAI's `user` field, else the very same request."""
    named = headers.get(SESSION_HEADER) or body.get("user")
    return str(named) if named else hashlib.sha256(raw_body).hexdigest()


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
