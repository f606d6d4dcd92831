"""An evaluation's facts as figures for MLflow, in its vocabulary: `eval/<arm>/<figure>` and `eval/<arm>/<task>/<figure>`.

The candidate that went on is there twice, the second time as arm `chosen`: which of several it was differs between runs.
"""

from collections.abc import Mapping
from typing import Any

ARM_FIGURES = (
    "al",
    "acceptance_rate",
    "tokens_per_s_c1",
    "tokens_per_step",
    "coverage",
    "looped",
    "preemptions",
    "kv_capacity_tokens",
)
TASK_FIGURES = ("tokens_per_step", "coverage", "looped")
CHOSEN = "chosen"
BY_ARM = ("eval", "speed")
"""Figures whose second part is an arm of the evaluation."""


def metrics_of_evaluation(facts: Mapping[str, Any]) -> dict[str, float]:
    """Figures by name; what is undefined is left out, and of an arm that is not valid all but its errors: they would win comparisons."""
    figures: dict[str, float | None] = {}
    for name, arm in facts["arms"].items():
        figures[f"eval/{name}/errors"] = arm["errors"]
        if not arm["problems"]:
            figures |= {f"eval/{name}/{figure}": arm[figure] for figure in ARM_FIGURES}
            figures |= {f"eval/{name}/accepted_at_{i}": rate for i, rate in enumerate(arm["accepted_at"], 1)}
            figures |= _bounds(f"eval/{name}", arm.get("intervals", {}).get("al"))
    for task, entry in facts["tasks"].items():
        for name, arm in entry["arms"].items():
            if not facts["arms"][name]["problems"] and not arm.get("problems"):
                figures |= _task_figures(f"eval/{name}/{task}", arm)
    for temperature, arms in facts.get("sampled", {}).items():
        for name, arm in arms.items():
            if not facts["arms"][name]["problems"] and not arm["problems"]:
                figures |= _task_figures(f"eval/{name}/sampled_t{temperature}", arm)
    figures = with_chosen(figures, facts["candidate"]["arm"])
    return {name: value for name, value in figures.items() if value is not None}


def with_chosen(figures: Mapping[str, float | None], arm: str) -> dict[str, float | None]:
    """The figures, and those of this arm under the name that all runs share."""
    shared = {}
    for name, value in figures.items():
        kind, _, rest = name.partition("/")
        if kind in BY_ARM and rest.startswith(f"{arm}/"):
            shared[f"{kind}/{CHOSEN}/{rest.removeprefix(f'{arm}/')}"] = value
    return {**figures, **shared}


def _task_figures(prefix: str, arm: Mapping[str, Any]) -> dict[str, float | None]:
    figures = {f"{prefix}/{figure}": arm[figure] for figure in TASK_FIGURES}
    for figure in ("al", "score", "kept"):
        figures[f"{prefix}/{figure}"] = arm[figure]["estimate"] if arm.get(figure) else None
    return figures | _bounds(prefix, arm["al"])


def _bounds(prefix: str, al: Mapping[str, float | None] | None) -> dict[str, float | None]:
    """Of AL's interval; None where there were too few prompts for one."""
    return {} if al is None else {f"{prefix}/al_{side}": al[side] for side in ("low", "high")}
