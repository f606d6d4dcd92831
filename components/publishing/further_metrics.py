"""Bounds of AL and the points of the speed pass as figures for MLflow.

Names hold arm, task, K and concurrency alone, so that runs stand side by side: `eval/<arm>/al_low`, `eval/<arm>/<task>/al_high`,
`speed/<arm>/k<K>/<task>/c<concurrency>/tokens_per_s` (K is 0 where nothing speculates).
"""

from collections.abc import Mapping
from typing import Any

Figures = dict[str, float | None]

POINT_FIGURES = {"output_tokens_per_s": "tokens_per_s", "al": "al"}
"""Key of a point, and its name in MLflow."""
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms")


def interval_metrics(evaluation: Mapping[str, Any]) -> Figures:
    """Of an evaluation's facts; where prompts were too few for bounds they are None."""
    figures: Figures = {}
    for name, arm in evaluation["arms"].items():
        figures |= _bounds(f"eval/{name}", arm.get("intervals", {}).get("al"))
    for task, facts in evaluation.get("tasks", {}).items():
        for name, arm in facts["arms"].items():
            figures |= _bounds(f"eval/{name}/{task}", arm["al"])
    return figures


def speed_metrics(speed: Mapping[str, Any] | None) -> Figures:
    """Of the speed pass's facts; an invalid point has none."""
    figures: Figures = {}
    for point in speed["points"] if speed else ():
        if point["invalid"] is None:
            place = _place(point)
            figures |= {f"{place}/{name}": point[key] for key, name in POINT_FIGURES.items()}
            for latency in LATENCIES:
                figures |= {f"{place}/{latency}_{p}": value for p, value in (point[latency] or {}).items()}
    return figures


def _bounds(place: str, al: Mapping[str, float | None] | None) -> Figures:
    return {} if al is None else {f"{place}/al_{side}": al[side] for side in ("low", "high")}


def _place(point: Mapping[str, Any]) -> str:
    rate = point["request_rate"]
    limited = "" if str(rate) == "inf" else f"_rate{rate:g}"
    return (
        f"speed/{point['arm']}/k{point['num_speculative_tokens'] or 0}/{point['task']}/c{point['concurrency']}{limited}"
    )
