"""Drawing values with their intervals: bars and lines, one PNG file each, readable on a phone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SIZE_INCHES = (6.0, 3.6)
DPI = 130
BAR_WIDTH = 0.8
"""Of the distance between two groups of bars."""
FEW_POINTS = 40
"""A line with fewer shows each of them."""
LEGEND_COLUMNS = 3
MOST_LABEL_CHARACTERS = 55
"""Labels of the horizontal axis that stand side by side; longer ones are turned."""


@dataclass(frozen=True)
class Point:
    """A value; without bounds where there is no interval."""

    value: float
    low: float | None = None
    high: float | None = None


Series = Mapping[str, Sequence[tuple[float, Point]]]
Bars = Mapping[str, Mapping[str, Point | None]]


def line_plot(path: Path, title: str, along: str, series: Series, ticks: Sequence[float] = ()) -> Path:
    """Values along `along`, a line a name, its interval as a band.

    Args:
        path: Of the PNG file.
        title: Above it.
        along: Below the horizontal axis.
        series: By name: (place, value).
        ticks: The only places of the horizontal axis, drawn at equal distances from 1 to 2 to 4; empty: a plain axis.
    """
    figure, axes = _figure(title)
    for name, points in series.items():
        xs = [x for x, _ in points]
        [line] = axes.plot(
            xs, [p.value for _, p in points], marker="o" if len(points) < FEW_POINTS else None, ms=4, label=name
        )
        low, high = (
            [nan if b is None else b for b in bounds]
            for bounds in zip(*((p.low, p.high) for _, p in points), strict=True)
        )
        axes.fill_between(xs, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel(along)
    axes.grid(alpha=0.3)
    return _save(figure, axes, path)


def bar_plot(path: Path, title: str, groups: Bars) -> Path:
    """One group of bars a label of the inner mappings, one colour a key of the outer; undefined ones are left out."""
    figure, axes = _figure(title)
    labels = list(dict.fromkeys(label for values in groups.values() for label in values))
    width = BAR_WIDTH / len(groups)
    for number, (name, values) in enumerate(groups.items()):
        shown = [(i, point) for i, label in enumerate(labels) if (point := values.get(label)) is not None]
        places = [i + (number - (len(groups) - 1) / 2) * width for i, _ in shown]
        axes.bar(places, [point.value for _, point in shown], width, label=name)
        _error_bars(axes, places, [point for _, point in shown])
    axes.set_xticks(range(len(labels)), labels)
    if sum(map(len, labels)) > MOST_LABEL_CHARACTERS:
        axes.tick_params(axis="x", rotation=20)
    axes.grid(axis="y", alpha=0.3)
    return _save(figure, axes, path)


def _error_bars(axes: Any, places: Sequence[float], points: Sequence[Point]) -> None:
    bounded = [(x, p.value, p.low, p.high) for x, p in zip(places, points, strict=True) if p.low is not None]
    for x, value, low, high in bounded:
        assert high is not None
        axes.errorbar(
            x, value, [[max(0.0, value - low)], [max(0.0, high - value)]], color="#333", capsize=3, linewidth=1
        )


def _figure(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _save(figure: Figure, axes: Any, path: Path) -> Path:
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:  # below the axes: it hides no line
        figure.legend(
            loc="outside lower center", ncols=min(LEGEND_COLUMNS, len(names)), fontsize="small", frameon=False
        )
    figure.savefig(path, metadata={"Software": None})
    return path
