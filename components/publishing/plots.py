"""The run's plots, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.publishing.canvas import Bars, Point, Series, bar_plot, line_plot
from components.publishing.evidence import Evidence
from components.publishing.speed_plots import draw_speed
from components.publishing.tables import intervals_of

STEP = "optimiser step"


def draw_plots(evidence: Evidence, folder: Path) -> list[Path]:
    """Write the plots that the evidence has figures for; their paths in reading order."""
    folder.mkdir(parents=True, exist_ok=True)
    curves, evaluation = evidence.curves, evidence.evaluation
    arms = evaluation["arms"]
    bars = {
        "accepted": ("Share of rounds accepting at least i tokens", _by_position(arms)),
        "family_al": ("AL by family", _by_family(arms)),
        "task_al": ("AL by task", _by_task(evaluation)),
        "tokens_per_s": ("Output tokens/s at concurrency 1", _by_arm(arms, "tokens_per_s_c1")),
        "tokens_per_step": ("Output tokens per target step", _by_arm(arms, "tokens_per_step")),
    }
    lines = {
        "ab_al": ("Live AL of all requests so far", "seconds of traffic", _over_time(evidence.ab)),
        "loss": ("Loss", STEP, _series(curves, ["train/loss", "validation/loss"])),
        "accuracy": ("Accuracy by depth (validation)", STEP, _family(curves, "validation/accuracy_depth_", "depth ")),
        "walked_al": ("Walked AL (validation)", STEP, _family(curves, "validation/walked_al_", "K=")),
    }
    drawn = [bar_plot(folder / f"{name}.png", title, groups) for name, (title, groups) in bars.items() if groups]
    drawn += draw_speed(evidence.speed, folder)
    return drawn + [
        line_plot(folder / f"{name}.png", title, along, series)
        for name, (title, along, series) in lines.items()
        if series
    ]


def _by_position(arms: Mapping[str, Any]) -> Bars:
    found = {}
    for name, arm in arms.items():
        rates = arm["accepted_at"]
        bounds = intervals_of(arm)["accepted_at"] or [None] * len(rates)
        if rates:
            pairs = zip(rates, bounds, strict=True)
            found[name] = {str(i): _bar(rate, interval) for i, (rate, interval) in enumerate(pairs, 1)}
    return found


def _by_family(arms: Mapping[str, Any]) -> Bars:
    speculating = {name: arm["family_al"] for name, arm in arms.items() if arm["accepted_at"]}
    return {name: {family: _bar(al, None) for family, al in lengths.items()} for name, lengths in speculating.items()}


def _by_task(evaluation: Mapping[str, Any]) -> Bars:
    found: dict[str, dict[str, Point | None]] = {}
    for task, facts in evaluation.get("tasks", {}).items():
        for name, arm in facts["arms"].items():
            if arm["al"] is not None:
                found.setdefault(name, {})[task] = _bar(arm["al"]["estimate"], arm["al"])
    return found


def _by_arm(arms: Mapping[str, Any], figure: str) -> Bars:
    values = {name: _bar(arm[figure], None) for name, arm in arms.items() if arm[figure] is not None}
    return {figure: values} if values else {}


def _bar(value: float | None, interval: Mapping[str, float | None] | None) -> Point | None:
    if value is None:
        return None
    return Point(value) if interval is None else Point(value, interval["low"], interval["high"])


def _over_time(ab: Mapping[str, Any]) -> Series:
    return {
        arm: [(m["elapsed_s"], Point(m["al"], m["low"], m["high"])) for m in moments]
        for arm, moments in ab.get("over_time", {}).items()
    }


def _family(curves: Sequence[Mapping[str, Any]], prefix: str, label: str) -> Series:
    """The figures that share a prefix, named by what follows it, in the order of these numbers."""
    names = sorted({name for row in curves for name in row if name.startswith(prefix)}, key=lambda n: (len(n), n))
    return {f"{label}{name.removeprefix(prefix)}": points for name, points in _series(curves, names).items()}


def _series(curves: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Series:
    series = {name: [(row["step"], Point(row[name])) for row in curves if row.get(name) is not None] for name in names}
    return {name: points for name, points in series.items() if points}
