"""The bundle's model card: what the head is, the command that serves it, what was measured, where it comes from."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from components.publishing import tables
from components.publishing.evidence import Evidence
from components.publishing.provenance import licences
from components.publishing.speed_tables import speed_tables
from components.publishing.tables import Table
from components.publishing.task_tables import task_tables

HEAD_HERE = "."
"""The card's command runs in the bundle's folder."""


def model_card(evidence: Evidence) -> str:
    """README.md of the bundle."""
    environment = Environment(
        loader=PackageLoader("components.publishing"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["markdown"] = markdown
    evaluation = evidence.evaluation
    return environment.get_template("card.md.jinja").render(
        name=evidence.settings.publish.name,
        evidence=evidence,
        command=evidence.serve_command(HEAD_HERE),
        licences=licences(evidence),
        base_model=evidence.hub_id,
        candidate_al=tables.number(evidence.candidate["al"]),
        bigram_al=tables.number(evaluation["bigram_walked_al"]),
        measured=[table for table in _measured(evidence) if table.rows],
        verdict=tables.verdict_table(evidence.verdict),
        training=tables.training_table(evidence),
        rows=tables.rows_table(evidence),
        versions=evidence.artifacts["evaluation"].manifest["versions"],
    )


def _measured(evidence: Evidence) -> list[Table]:
    evaluation = evidence.evaluation
    return [
        tables.arms_table(evaluation),
        *speed_tables(evidence.speed),
        tables.position_table(evaluation),
        *task_tables(evaluation),
        tables.family_table(evaluation),
        tables.lossless_table(evaluation),
        tables.ab_table(evidence.ab),
    ]


def markdown(table: Table) -> str:
    lines = [_row(table.headers), _row(["---"] * len(table.headers)), *map(_row, table.rows)]
    return "\n".join([*lines, "", table.note] if table.note else lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
