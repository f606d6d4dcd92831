"""What MLflow shows on top of a run and of a registered version: the verdict, the figures that matter, the first thing to look at."""

from components.publishing import tables
from components.publishing.card import markdown
from components.publishing.diagnosis import diagnose_outputs
from components.publishing.evidence import Evidence
from components.publishing.tables import Table


def note(evidence: Evidence) -> str:
    """Markdown of a few lines."""
    verdict = evidence.verdict
    failed = "; ".join(f"{reason.check}: {reason.measured}" for reason in verdict.failures)
    said = "Better than what is served." if verdict.promote else f"Refused. {failed}."
    figures = Table("", ("figure", "value"), tables.headline(evidence))
    first = {finding.symptom: finding for finding in reversed(diagnose_outputs(evidence.artifacts, evidence.settings))}
    looks = [f"- {symptom}. Likely cause: {finding.cause}." for symptom, finding in reversed(first.items())]
    return "\n".join(
        [f"**{said}** Tables and plots: `report.html` among the artifacts.", "", markdown(figures), "", *looks]
    )
