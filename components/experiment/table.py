"""An experiment's state for people: a table for terminals, a line for logs."""

from rich.table import Table

from components.experiment.monitor import Arms
from components.experiment.policy import Decision, Findings


def findings_table(findings: Findings, decision: Decision, arms: Arms, max_requests: int) -> Table:
    """Every reason with what was measured and what is required."""
    title = f"{arms.challenger} against {arms.control}: {decision.action}, {findings.requests}/{max_requests} requests"
    table = Table("", "measured", "required", "", title=title)
    lengths = ", ".join(f"{name} {_number(al)}" for name, al in findings.al.items())
    if findings.left_out:
        table.caption = (
            f"{findings.left_out} requests left out: dealt by weights that nobody noted, or without a choice"
        )
    table.add_row("AL", lengths, "", "")
    for reason in decision.reasons:
        table.add_row(reason.check, reason.measured, reason.required, "yes" if reason.passed else "no")
    return table


def findings_line(findings: Findings, decision: Decision, max_requests: int) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in findings.sessions.items())
    difference = next(reason.measured for reason in decision.reasons if reason.check == "acceptance length")
    return (
        f"{decision.action}: {findings.requests}/{max_requests} requests, sessions {counts}, AL difference {difference}"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
