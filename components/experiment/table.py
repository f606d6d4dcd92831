"""An experiment's state for people: a table for terminals, a line for logs."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from components.evaluation.gate import Reason
from components.experiment.conduct import Show
from components.experiment.monitor import Arms
from components.experiment.policy import Decision, Findings
from components.experiment.watch import Figure

log = logging.getLogger("aerie")


def findings_table(findings: Findings, decision: Decision, arms: Arms, max_requests: int) -> Table:
    """Every reason with what was measured and what is required."""
    title = f"{arms.challenger} against {arms.control}: {decision.action}, {findings.requests}/{max_requests} requests"
    table = _table(title, findings.al, decision.reasons)
    if findings.left_out:
        table.caption = (
            f"{findings.left_out} requests left out: dealt by weights that nobody noted, or without a choice"
        )
    return table


def decision_table(kept: Mapping[str, Any], arms: Arms) -> Table:
    """The same of a decision that a journal keeps."""
    when = f"{datetime.fromtimestamp(kept['decided_at'], UTC):%Y-%m-%d %H:%M} UTC"
    title = f"{arms.challenger} against {arms.control}: {kept['action']}, {kept['requests']} requests, decided {when}"
    return _table(title, kept["al"], [Reason(**reason) for reason in kept["reasons"]])


def _table(title: str, al: Mapping[str, float | None], reasons: Iterable[Reason]) -> Table:
    table = Table("", "measured", "required", "", title=title)
    table.add_row("AL", ", ".join(f"{name} {_number(value)}" for name, value in al.items()), "", "")
    for reason in reasons:
        table.add_row(reason.check, reason.measured, reason.required, "yes" if reason.passed else "no")
    return table


def watch_table(head: str, arm: str, figures: Iterable[Figure]) -> Table:
    """A window that was tested, and with what it was compared."""
    table = Table("", "measured", "reference", "which is", "", title=f"watch: {head} (arm {arm})")
    for figure in figures:
        table.add_row(figure.name, figure.measured, figure.reference, figure.source, "alarm" if figure.alarm else "")
    return table


def findings_line(findings: Findings, decision: Decision, max_requests: int) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in findings.sessions.items())
    difference = next(reason.measured for reason in decision.reasons if reason.check == "acceptance length")
    return (
        f"{decision.action}: {findings.requests}/{max_requests} requests, sessions {counts}, AL difference {difference}"
    )


@contextmanager
def shown(arms: Arms, end: int, console: Console) -> Iterator[Show]:
    """A table that stays in place on a terminal; elsewhere a line when something has come. `end`: the planned requests."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda findings, decision: live.update(findings_table(findings, decision, arms, end), refresh=True)
        return
    said = ""

    def say(findings: Findings, decision: Decision) -> None:
        nonlocal said
        line = findings_line(findings, decision, end)
        if line != said:
            said = line
            log.info("experiment: %s", line)
        if decision.is_final:
            console.print(findings_table(findings, decision, arms, end))

    yield say


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
