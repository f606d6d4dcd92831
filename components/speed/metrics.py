"""The speed pass's facts as figures for MLflow: `speed/<arm>/k<K>/<task>/c<concurrency>/<figure>`, K 0 where nothing speculates.

Names hold nothing of the run, so that runs stand side by side.
"""

from collections.abc import Mapping
from typing import Any

from components.speed.loads import LATENCIES

POINT_FIGURES = {"output_tokens_per_s": "tokens_per_s", "al": "al"}
"""Key of a point, and its name in MLflow."""


def metrics_of_speed(facts: Mapping[str, Any] | None) -> dict[str, float]:
    """Figures by name; an invalid point has none, and what is undefined is left out."""
    figures: dict[str, float | None] = {}
    for point in facts["points"] if facts else ():
        if point["invalid"] is None:
            place = _place(point)
            figures |= {f"{place}/{name}": point[key] for key, name in POINT_FIGURES.items()}
            for latency in LATENCIES:
                figures |= {f"{place}/{latency}_{p}": value for p, value in (point[latency] or {}).items()}
    return {name: value for name, value in figures.items() if value is not None}


def _place(point: Mapping[str, Any]) -> str:
    rate = point["request_rate"]
    limited = "" if str(rate) == "inf" else f"_rate{rate:g}"
    return (
        f"speed/{point['arm']}/k{point['num_speculative_tokens'] or 0}/{point['task']}/c{point['concurrency']}{limited}"
    )
