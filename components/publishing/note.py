"""What MLflow shows on top of a run and of a registered version: the verdict, the figures that matter, the first thing to look at."""

from components.publishing import tables
from components.publishing.diagnosis import diagnose_outputs
from components.publishing.evidence import Evidence


def note(evidence: Evidence) -> str:
    """Markdown of a few lines: MLflow folds what is longer."""
    verdict = evidence.verdict
    failed = "; ".join(f"{reason.check}: {reason.measured}" for reason in verdict.failures)
    said = "Better than what is served." if verdict.promote else f"Refused. {failed}."
    first = {finding.symptom: finding for finding in reversed(diagnose_outputs(evidence.artifacts, evidence.settings))}
    looks = [f"{symptom}. Likely cause: {finding.cause}." for symptom, finding in reversed(first.items())]
    figures = ", ".join(f"{what} {value}" for what, value in tables.headline(evidence))
    return "\n\n".join([f"**{said}** Tables and plots: `report.html` among the artifacts.", *looks, figures])
