"""What a session brings to each figure: a numerator, a denominator and a size that no arm can change."""

from collections.abc import Sequence

import numpy as np

from components.experiment.difference import Part
from components.experiment.sessions import Session
from components.serving.protocol import CLIENT_CLOSED
from components.serving.records import LiveRecord


def decoding(records: Sequence[LiveRecord]) -> tuple[float, int]:
    """Seconds, and tokens after the first, of the requests whose time per token is known."""
    known = [(r.tpot_s, r.output_tokens - 1) for r in records if r.tpot_s is not None and r.output_tokens > 1]
    return sum(tpot * tokens for tpot, tokens in known), sum(tokens for _, tokens in known)


def al_part(records: Sequence[LiveRecord], task: int) -> Part:
    accepted, rounds = sum(r.accepted for r in records), sum(r.rounds for r in records)
    return part(accepted, rounds, accepted + rounds, task)


def wait_s(record: LiveRecord) -> float:
    """Seconds until the client of a sound answer had something to read."""
    return record.duration_s if record.ttft_s is None else record.ttft_s


def left_in_vain(record: LiveRecord, usual_s: float | None, relief: float = 1.0) -> bool:
    """Whether the client left with nothing to read after it had waited for longer than usual, times what the arm may be slower.

    Who leaves earlier, or has read something, had a reason of its own for all that is known.
    """
    left = record.error == CLIENT_CLOSED and record.ttft_s is None
    return left and usual_s is not None and record.duration_s / relief > usual_s


def error_part(session: Session, usual_s: float | None, relief: float) -> Part:
    """Requests that failed, or whose client left in vain."""
    failed = sum(r.failed or left_in_vain(r, usual_s, relief) for r in session.records)
    return part(failed, len(session.records), len(session.records))


def slow_part(session: Session, limit_s: float | None, relief: float) -> Part | None:
    """Requests beyond the limit, after their times were relieved (divided) of what the arm may be slower; None where nothing is known.

    A request whose client left took at least so long: beyond the limit it is slow, before it nothing is known.
    """
    if limit_s is None:
        return None
    slow = [
        r.duration_s / relief > limit_s
        for r in session.records
        if r.error is None or (r.error == CLIENT_CLOSED and r.duration_s / relief > limit_s)
    ]
    return part(sum(slow), len(slow), len(slow)) if slow else None


def decoding_part(session: Session, relief: float) -> Part | None:
    spent, decoded = decoding(session.records)
    return part(spent / relief, decoded, decoded) if decoded else None


def part(numerator: float, denominator: float, size: float, task: int = 0) -> Part:
    return Part(np.asarray(task), *(np.asarray(value, dtype=float) for value in (numerator, denominator, size)))
