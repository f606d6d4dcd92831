"""The speed pass as curves, for every task: tokens/s and AL over concurrency and over K."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.publishing.canvas import Point, Series, line_plot
from components.publishing.speed_tables import UNLIMITED, arm_label, tasks_of

FIGURES = {"output_tokens_per_s": ("tokens/s", "tokens_per_s"), "al": ("AL", "al")}
"""Key of a point: what it is called, and its part of the file name."""

Points = Sequence[Mapping[str, Any]]


def draw_speed(speed: Mapping[str, Any] | None, folder: Path) -> list[Path]:
    """Four plots a task, those that have a line; points that are invalid or at a limited rate are left out."""
    if speed is None:
        return []
    sound = [p for p in speed["points"] if p["invalid"] is None and str(p["request_rate"]) == UNLIMITED]
    return [path for task in tasks_of(speed) for path in _draw(task, [p for p in sound if p["task"] == task], folder)]


def over_concurrency(points: Points, figure: str) -> Series:
    """A line an arm and K."""
    return _lines(points, figure, arm_label, "concurrency")


def over_k(points: Points, figure: str) -> Series:
    """A line an arm and concurrency, of the arms that were measured with more than one K."""
    speculating = [p for p in points if p["num_speculative_tokens"] is not None]
    lines = _lines(speculating, figure, lambda p: f"{p['arm']} c={p['concurrency']}", "num_speculative_tokens")
    return {name: line for name, line in lines.items() if len(line) > 1}


def _draw(task: str, points: Points, folder: Path) -> Iterator[Path]:
    stem = re.sub(r"\W+", "_", task)
    for key, (title, short) in FIGURES.items():
        for along, series in (("concurrency", over_concurrency(points, key)), ("K", over_k(points, key))):
            if series:
                ticks = sorted({x for line in series.values() for x, _ in line})
                path = folder / f"speed_{stem}_{short}_over_{along.lower()}.png"
                yield line_plot(path, f"{task}: {title} over {along}", along, series, ticks)


def _lines(points: Points, figure: str, name: Callable[[Mapping[str, Any]], str], along: str) -> Series:
    lines: dict[str, list[tuple[float, Point]]] = {}
    for point in sorted(points, key=lambda p: p[along]):
        if point[figure] is not None:
            lines.setdefault(name(point), []).append((point[along], Point(point[figure])))
    return lines
