"""What a session brings to each figure: a numerator, a denominator and a size that no arm can change."""

from collections.abc import Sequence

import numpy as np

from components.experiment.difference import Part
from components.experiment.sessions import Session
from components.serving.records import LiveRecord


def decoding(records: Sequence[LiveRecord]) -> tuple[float, int]:
    """Seconds, and tokens after the first, of the requests whose time per token is known."""
    known = [(r.tpot_s, r.output_tokens - 1) for r in records if r.tpot_s is not None and r.output_tokens > 1]
    return sum(tpot * tokens for tpot, tokens in known), sum(tokens for _, tokens in known)


def al_part(records: Sequence[LiveRecord], task: int) -> Part:
    accepted, rounds = sum(r.accepted for r in records), sum(r.rounds for r in records)
    return part(accepted, rounds, accepted + rounds, task)


def error_part(session: Session) -> Part:
    return part(sum(r.failed for r in session.records), len(session.records), len(session.records))


def slow_part(session: Session, limit_s: float | None, relief: float) -> Part | None:
    """Requests beyond the limit, after their times were relieved (divided) of what the arm may be slower; None where nothing is known."""
    times = [r.duration_s for r in session.records if r.error is None]
    if limit_s is None or not times:
        return None
    return part(sum(time / relief > limit_s for time in times), len(times), len(times))


def decoding_part(session: Session, relief: float) -> Part | None:
    spent, decoded = decoding(session.records)
    return part(spent / relief, decoded, decoded) if decoded else None


def part(numerator: float, denominator: float, size: float, task: int = 0) -> Part:
    return Part(np.asarray(task), *(np.asarray(value, dtype=float) for value in (numerator, denominator, size)))
