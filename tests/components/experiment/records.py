"""Live records as the router writes them, made by the tests."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from components.serving.protocol import CLIENT_CLOSED
from components.serving.records import LiveRecord

CHALLENGER, CONTROL = "challenger", "champion"
EPOCH = 1000


def live_record(session: str, treated: bool = False, **changes: Any) -> LiveRecord:
    arm = CHALLENGER if treated else CONTROL
    fields: dict[str, Any] = {
        "arm": arm, "assigned_arm": arm, "session": session, "weight_epoch": EPOCH, "task": None, "prompt_tokens": 50,
        "output_tokens": 100, "rounds": 40, "drafted": 120, "accepted": 60, "histogram": [10, 10, 10, 10],
        "started_at": 0.0, "ttft_s": 0.1, "tpot_s": 0.02, "error": None, "duration_s": 2.0,
    }  # fmt: skip
    return LiveRecord(**fields | changes)


def live_traffic(
    rng: np.random.Generator,
    sessions: int,
    effect: float = 0.0,
    share: float = 0.5,
    fails: float = 0.0,
    slower: float = 1.0,
    first: int = 0,
    **changes: Any,
) -> list[LiveRecord]:
    """One session a second, of one to four requests of two tasks; AL 2.5 and 3, larger by the share `effect` on the challenger, whose
    requests fail with chance `fails` and take `slower` times as long."""
    records = []
    for i in range(first, first + sessions):
        treated = bool(rng.random() < share)
        task = "code" if rng.random() < 0.4 else "chat"
        start = float(i)
        length = (3.0 if task == "code" else 2.5) * np.exp(0.1 * rng.standard_normal()) * (1 + effect * treated)
        for _ in range(rng.integers(1, 5)):
            tokens = int(rng.integers(50, 200))
            rounds = round(tokens / length)
            pace = 0.02 * np.exp(0.1 * rng.standard_normal()) * (slower if treated else 1.0)
            fields: dict[str, Any] = {
                "task": task,
                "rounds": rounds,
                "accepted": tokens - rounds,
                "output_tokens": tokens,
            }
            fields |= {"started_at": start, "tpot_s": pace, "duration_s": pace * tokens}
            if treated and rng.random() < fails:
                fields |= {"error": "502", "rounds": 0, "accepted": 0, "output_tokens": 0, "tpot_s": None}
            start += 0.1 + float(fields["duration_s"])
            records.append(live_record(f"s{i}", treated, **fields | changes))
    return records


def left(
    rng: np.random.Generator,
    records: Iterable[LiveRecord],
    share: float,
    arms: Iterable[str],
    after_s: float = 60.0,
    ttft_s: float | None = None,
) -> list[LiveRecord]:
    """The records, but this share of the requests that were dealt to `arms` was left by its client after `after_s` seconds: with nothing to
    read, or in the middle of its answer."""
    nothing: dict[str, Any] = {"rounds": 0, "accepted": 0, "output_tokens": 0, "histogram": [], "tpot_s": None}
    gone = nothing | {"error": CLIENT_CLOSED, "ttft_s": ttft_s, "duration_s": after_s}
    return [replace(r, **gone) if r.assigned_arm in arms and rng.random() < share else r for r in records]
