"""The run's plots, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from components.publishing.evidence import Evidence

SIZE_INCHES = (6.0, 3.4)
DPI = 130
BAR_WIDTH = 0.8
"""Of the distance between two groups of bars."""

Series = Mapping[str, Sequence[tuple[float, float]]]


def draw_plots(evidence: Evidence, folder: Path) -> list[Path]:
    """Write the plots that the evidence has figures for; their paths in reading order."""
    folder.mkdir(parents=True, exist_ok=True)
    curves, arms = evidence.curves, evidence.evaluation["arms"]
    lines = {
        "loss": ("Loss", _series(curves, ["train/loss", "validation/loss"])),
        "accuracy": ("Accuracy by depth", _series(curves, _names(curves, "validation/accuracy_depth_"))),
        "walked_al": ("Walked AL", _series(curves, _names(curves, "validation/walked_al"))),
    }
    bars = {
        "accepted": ("Share of rounds accepting at least i tokens", _by_position(arms)),
        "family_al": ("AL by family", _by_family(arms)),
        "tokens_per_s": ("Output tokens/s at concurrency 1", _by_arm(arms, "tokens_per_s_c1")),
        "tokens_per_step": ("Output tokens per target step", _by_arm(arms, "tokens_per_step")),
    }
    drawn = [line_plot(folder / f"{name}.png", title, series) for name, (title, series) in lines.items() if series]
    return drawn + [bar_plot(folder / f"{name}.png", title, groups) for name, (title, groups) in bars.items() if groups]


def line_plot(path: Path, title: str, series: Series) -> Path:
    """Values over optimiser steps, a line a name."""
    figure, axes = _figure(title)
    for name, points in series.items():
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="." if len(points) < 40 else None, label=name)
    axes.set_xlabel("optimiser step")
    axes.grid(alpha=0.3)
    return _save(figure, axes, path)


def bar_plot(path: Path, title: str, groups: Mapping[str, Mapping[str, float | None]]) -> Path:
    """One group of bars a label of the inner mappings, one colour a key of the outer; undefined ones are left out."""
    figure, axes = _figure(title)
    labels = list(dict.fromkeys(label for values in groups.values() for label in values))
    width = BAR_WIDTH / len(groups)
    for number, (name, values) in enumerate(groups.items()):
        shown = [(i, value) for i, label in enumerate(labels) if (value := values.get(label)) is not None]
        offset = (number - (len(groups) - 1) / 2) * width
        axes.bar([i + offset for i, _ in shown], [value for _, value in shown], width, label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(axis="y", alpha=0.3)
    return _save(figure, axes, path)


def _figure(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _save(figure: Figure, axes: Any, path: Path) -> Path:
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Software": None})
    return path


def _names(curves: Sequence[Mapping[str, Any]], prefix: str) -> list[str]:
    return sorted({name for row in curves for name in row if name.startswith(prefix)})


def _series(curves: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Series:
    series = {name: [(row["step"], row[name]) for row in curves if row.get(name) is not None] for name in names}
    return {name: points for name, points in series.items() if points}


def _by_position(arms: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    return {
        name: {str(i): rate for i, rate in enumerate(arm["accepted_at"], 1)}
        for name, arm in arms.items()
        if arm["accepted_at"]
    }


def _by_family(arms: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    return {name: dict(arm["family_al"]) for name, arm in arms.items() if arm["accepted_at"]}


def _by_arm(arms: Mapping[str, Any], figure: str) -> dict[str, dict[str, float | None]]:
    values = {name: arm[figure] for name, arm in arms.items() if arm[figure] is not None}
    return {figure: values} if values else {}
