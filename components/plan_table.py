"""A plan as it is printed: one row a stage, that fits into 80 columns, then what each stage does, then the totals."""

from rich.console import Console
from rich.table import Table

from components.planning import Plan, PlannedStage, in_time, in_units


def print_plan(plan: Plan) -> None:
    console = Console(highlight=False)
    table = Table(title="Plan (nothing was written)")
    for heading in ("stage", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("rows", "tokens", "disk", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in plan.stages:
        table.add_row(*_cells(stage))
    console.print(table)
    for stage in plan.stages:
        if stage.detail:
            console.print(f"{stage.name}: {stage.detail}", soft_wrap=True, markup=False)
    console.print(_totals(plan), soft_wrap=True, markup=False)


def _cells(stage: PlannedStage) -> tuple[str, ...]:
    expected, duration = stage.forecast, stage.duration
    time = f"{in_time(duration.seconds)} ({duration.basis})" if duration else "–"
    rows = "–" if expected.rows is None else str(expected.rows)
    return stage.name, stage.state, rows, in_units(expected.tokens), in_units(expected.bytes, "B"), time


def _totals(plan: Plan) -> str:
    unknown = [stage.name for stage in plan.stages if stage.state != "done" and stage.duration is None]
    time = f"time: about {in_time(plan.seconds)}" + (f", without {', '.join(unknown)}" if unknown else "")
    free = "S3 does not say what is free" if plan.free_bytes is None else f"{in_units(plan.free_bytes, 'B')} free"
    lines = [
        f"disk: about {in_units(plan.bytes_to_write, 'B')} to write, at {plan.storage.uri}: {free}",
        f"{time}. last run: as the newest finished one on this target took; target: from its own forward pass here; sample: from this "
        "machine's matrix products; guess: from usual speeds. Answers are taken to be of full length until they are there.",
    ]
    return "\n".join(lines)
