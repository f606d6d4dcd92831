"""From the measured loads to the stage's facts: a row a load, intervals against no speculation, and what to serve."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from components.evaluation.results import as_json
from components.evaluation.statistics import Bootstrap, Interval, compare_throughput
from components.speed.loads import LATENCIES, Load
from components.speed.recommendation import Option, Recommendation, recommend

OVERALL = "overall"
"""All tasks together."""

Recommended = dict[str, dict[int, Recommendation]]
"""By task and concurrency."""


def summarise(loads: Sequence[Load]) -> dict[str, Any]:
    """The facts that the report draws (JSON): `points`, `arms`, `recommended`, and `recommended_by_arm`.

    `gain`, `low` and `high` are relative: 0.1 is a tenth more tokens/s than without speculation on the same prompts.
    """
    names = dict.fromkeys(load.arm for load in loads if load.num_speculative_tokens)
    return {
        "points": [_row(load, loads) for load in loads],
        "arms": {load.arm: _capacity([other for other in loads if other.arm == load.arm]) for load in loads},
        "recommended": _as_facts(recommended(loads)),
        "recommended_by_arm": {name: _as_facts(recommended(loads, name)) for name in names},
    }


def recommended(loads: Sequence[Load], arm: str | None = None) -> Recommended:
    """What to serve by task, and for all tasks together, at every concurrency where no speculation was measured too.

    Args:
        loads: All of them.
        arm: Choose among this arm's Ks; None: among all arms.
    """
    free = [load for load in loads if load.point.request_rate is None]
    tasks = list(dict.fromkeys(load.point.task for load in free))
    concurrencies = sorted({load.point.concurrency for load in free})
    found: Recommended = {}
    for name, members in [(task, [task]) for task in tasks] + [(OVERALL, tasks)]:
        here = {c: [x for x in free if x.point.concurrency == c and x.point.task in members] for c in concurrencies}
        chosen = {c: _recommend(at_c, len(members), arm) for c, at_c in here.items()}
        found[name] = {c: choice for c, choice in chosen.items() if choice is not None}
    return found


def best_k(loads: Sequence[Load], arm: str) -> dict[int, int]:
    """By concurrency the arm's best K over all tasks; 0 is no speculation."""
    return {c: best.num_speculative_tokens or 0 for c, best in recommended(loads, arm)[OVERALL].items()}


def compare(loads: Sequence[Load], off: Sequence[Load], bootstrap: Bootstrap) -> Interval | None:
    """Tokens/s of the loads / those of others at the same points, over the prompts of all of them; None with an invalid one."""
    if any(load.invalid for load in (*loads, *off)):
        return None
    return compare_throughput(_pooled(loads), _pooled(off), bootstrap)


def _row(load: Load, loads: Sequence[Load]) -> dict[str, Any]:
    point, is_valid = load.point, load.invalid is None
    return {
        "arm": load.arm,
        "num_speculative_tokens": load.num_speculative_tokens,
        "task": point.task,
        "concurrency": point.concurrency,
        "request_rate": point.rate,
        "repetitions": len(load.repetitions),
        "completed": load.total("completed"),
        "errors": load.total("requests") - load.total("completed"),
        "output_tokens_per_s": load.tokens_per_s,
        **{name: load.latencies.get(name) for name in LATENCIES},
        "al": load.al,
        "accepted_at": load.accepted_at,
        "drafted": load.total("drafted") if is_valid else None,
        "rounds": load.total("rounds") if is_valid else None,
        "against_off": as_json(_against_off(load, loads)),
        "invalid": load.invalid,
    }


def _against_off(load: Load, loads: Sequence[Load]) -> Interval | None:
    """Speed / speed without speculation at the same point; a limited rate bounds both, so there is no such figure."""
    off = [other for other in loads if other.num_speculative_tokens is None and other.point == load.point]
    if load.point.request_rate is not None or load.num_speculative_tokens is None or not off:
        return None
    return compare([load], off, Bootstrap())


def _capacity(loads: Sequence[Load]) -> dict[str, Any]:
    """KV cache and preemptions of an arm: over its Ks the smallest cache, and by K."""
    by_k: dict[str, dict[str, int | None]] = {}
    for load in loads:
        k = str(load.num_speculative_tokens or 0)
        before = by_k.get(k, {}).get("preemptions") or 0
        capacity = load.repetitions[0].kv_capacity_tokens
        by_k[k] = {"kv_capacity_tokens": capacity, "preemptions": before + load.total("preemptions")}
    known = [entry["kv_capacity_tokens"] for entry in by_k.values() if entry["kv_capacity_tokens"] is not None]
    total = sum(entry["preemptions"] or 0 for entry in by_k.values())
    return {"kv_capacity_tokens": min(known) if known else None, "preemptions": total, "by_k": by_k}


def _recommend(loads: Sequence[Load], num_tasks: int, arm: str | None) -> Recommendation | None:
    """None where no speculation was not measured, or not validly: there is nothing to compare with."""
    off = [load for load in loads if load.num_speculative_tokens is None]
    if len(off) != num_tasks or any(load.invalid for load in off):
        return None
    groups = [g for g in _by_server(loads) if len(g) == num_tasks and not any(load.invalid for load in g)]
    chosen = [g for g in groups if arm is None or g[0].arm == arm]
    # the best of n looks better by luck than one does (Bonferroni)
    bootstrap = Bootstrap(confidence=1 - (1 - Bootstrap().confidence) / max(1, len(chosen)))
    return recommend([_option(group, off, bootstrap) for group in chosen], off[0].arm)


def _by_server(loads: Sequence[Load]) -> Iterator[list[Load]]:
    groups: dict[tuple[str, int], list[Load]] = {}
    for load in loads:
        if load.num_speculative_tokens is not None:
            groups.setdefault((load.arm, load.num_speculative_tokens), []).append(load)
    return iter(groups.values())


def _option(group: Sequence[Load], off: Sequence[Load], bootstrap: Bootstrap) -> Option:
    k = group[0].num_speculative_tokens
    assert k is not None
    tokens, seconds = (sum(load.total(name) for load in group) for name in ("output_tokens", "duration_s"))
    return Option(group[0].arm, k, tokens / seconds, compare(group, off, bootstrap))


def _pooled(loads: Sequence[Load]) -> list[dict[str, float]]:
    """A mapping a repetition over the prompts of all these loads."""
    repetitions = zip(*(load.times for load in loads), strict=True)
    labels = [load.point.label for load in loads]
    return [
        {f"{label}/{key}": s for label, times in zip(labels, together, strict=True) for key, s in times.items()}
        for together in repetitions
    ]


def _as_facts(found: Mapping[str, Mapping[int, Recommendation]]) -> dict[str, dict[str, dict[str, Any]]]:
    return {task: {str(c): asdict(choice) for c, choice in by_c.items()} for task, by_c in found.items()}
