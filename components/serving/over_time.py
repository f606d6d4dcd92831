"""How AL went while the traffic ran: per arm, over everything that had ended by then."""

from collections.abc import Sequence
from typing import Any

from components.evaluation.acceptance import RequestRecord
from components.evaluation.estimates import acceptance_length_estimate
from components.evaluation.statistics import Bootstrap

NUM_MOMENTS = 20


def acceptance_over_time(
    records: Sequence[RequestRecord], num_moments: int = NUM_MOMENTS
) -> dict[str, list[dict[str, Any]]]:
    """By arm: its AL at moments between which equally many requests ended (JSON); an arm that drafted nothing yet has no moment.

    Each moment has `elapsed_s` since the first request, the arm's `requests` that had ended, `al`, and `low` and `high` of its bootstrap
    interval over sessions (None with few sessions). Intervals hold at each moment, not at all of them together: they are no reason to
    stop early.
    """
    timed = [(r.started_at, r.started_at + r.duration_s, r) for r in records if r.started_at is not None]
    if not timed:
        return {}
    first = min(started_at for started_at, _, _ in timed)
    ended = sorted(((ended_at, r) for _, ended_at, r in timed), key=lambda pair: pair[0])
    series: dict[str, list[dict[str, Any]]] = {}
    for count in sorted({round(len(ended) * number / num_moments) for number in range(1, num_moments + 1)} - {0}):
        so_far = [record for _, record in ended[:count]]
        for arm in sorted({record.arm for record in so_far}):
            if moment := _moment([record for record in so_far if record.arm == arm]):
                elapsed_s = round(ended[count - 1][0] - first, 3)
                series.setdefault(arm, []).append({"elapsed_s": elapsed_s} | moment)
    return series


def _moment(records: Sequence[RequestRecord]) -> dict[str, Any] | None:
    al = acceptance_length_estimate(records, Bootstrap())
    if al is None:
        return None
    return {"requests": len(records), "al": al.estimate, "low": al.low, "high": al.high}
