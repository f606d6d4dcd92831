"""The run's report: one HTML file with its tables and plots inside; nothing is loaded from anywhere."""

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from components.publishing import tables
from components.publishing.diagnosis import NOTHING, diagnose_outputs, diagnosis_tables
from components.publishing.evidence import Evidence
from components.publishing.provenance import licences
from components.publishing.speed_tables import speed_tables
from components.publishing.tables import Table
from components.publishing.task_tables import task_tables


def render_report(evidence: Evidence, plots: Sequence[Path], outcome: str, addresses: Sequence[tuple[str, str]]) -> str:
    """The report's HTML.

    Args:
        evidence: What was found.
        plots: PNG files, in reading order.
        outcome: One sentence: what becomes of the head in the registry.
        addresses: (what, URL) of the run, the model and the endpoint.
    """
    environment = Environment(
        loader=PackageLoader("components.publishing"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = data_uri
    return environment.get_template("report.html.jinja").render(
        name=evidence.settings.publish.name,
        evidence=evidence,
        outcome=outcome,
        headline=tables.headline(evidence),
        verdict=tables.verdict_table(evidence.verdict),
        measured=[*measured_tables(evidence)],
        diagnosis=diagnosis_tables(diagnose_outputs(evidence.artifacts, evidence.settings)),
        nothing_found=NOTHING,
        plots=plots,
        background=[tables.training_table(evidence), tables.rows_table(evidence), tables.stages_table(evidence)],
        licences=licences(evidence),
        addresses=addresses,
        command=evidence.serve_command("HEAD_FOLDER"),
    )


def measured_tables(evidence: Evidence) -> list[Table]:
    evaluation = evidence.evaluation
    found = [
        tables.arms_table(evaluation),
        tables.position_table(evaluation),
        *task_tables(evaluation),
        tables.family_table(evaluation),
        *speed_tables(evidence.speed),
        tables.engines_table(evaluation),
        tables.lossless_table(evaluation),
        tables.differences_table(evidence),
        tables.ab_table(evidence.ab),
    ]
    return [table for table in found if table.rows]


def data_uri(image: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"
