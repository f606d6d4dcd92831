"""One arm's AL and acceptance by position, with intervals over what was randomised: the prompt offline, the session live."""

from collections.abc import Sequence
from typing import Any

from components.evaluation.acceptance import Acceptance, RequestRecord, total
from components.evaluation.results import as_json
from components.evaluation.statistics import Bootstrap, Estimate, ratios_of_sums


def acceptance_length_estimate(records: Sequence[RequestRecord], bootstrap: Bootstrap) -> Estimate | None:
    """AL of the records without an error; those that share a key (the turns of a session) are drawn together. None without a round."""
    clusters = _clusters(records)
    if not clusters:
        return None
    accepted, rounds = [[c.accepted] for c in clusters], [c.rounds for c in clusters]
    return ratios_of_sums(accepted, rounds, bootstrap, offset=1.0)[0]


def position_estimates(records: Sequence[RequestRecord], bootstrap: Bootstrap) -> list[Estimate | None]:
    """Share of rounds that accepted at least i + 1 draft tokens, for each position i; as above."""
    clusters = _clusters(records)
    width = max((len(c.accepted_at) for c in clusters), default=0)
    if not width:
        return []
    counts = [[*c.accepted_at, *[0] * (width - len(c.accepted_at))] for c in clusters]
    return ratios_of_sums(counts, [c.rounds for c in clusters], bootstrap)


def interval_facts(records: Sequence[RequestRecord], bootstrap: Bootstrap | None = None) -> dict[str, Any]:
    """`{"al": estimate, "accepted_at": [estimate, ...]}` (JSON); an estimate is null or has `estimate`, `low`, `high`."""
    bootstrap = bootstrap or Bootstrap()
    return {
        "al": as_json(acceptance_length_estimate(records, bootstrap)),
        "accepted_at": [as_json(estimate) for estimate in position_estimates(records, bootstrap)],
    }


def _clusters(records: Sequence[RequestRecord]) -> list[Acceptance]:
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.error is None:
            groups.setdefault(record.key, []).append(record)
    return [total(groups[key]) for key in sorted(groups)]
