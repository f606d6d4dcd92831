"""The diagnosis of a run's finished outputs, for the terminal and the report."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from components.config import Settings
from components.evaluation.diagnosis import Finding, diagnose
from components.pipeline import Pipeline
from components.publishing.evidence import training_curves
from components.publishing.summary import rich_table, wide_console
from components.publishing.tables import Table
from components.section import ConfigError
from components.stage import Artifact

NOTHING = (
    "Nothing stands out: drafts are accepted, they pay, and they go on paying under load (where that was measured)."
)


def diagnose_outputs(artifacts: Mapping[str, Artifact], settings: Settings) -> list[Finding]:
    """What the outputs say; `evaluation` must be among them, the others add to it where they exist."""
    facts = {name: artifact.facts for name, artifact in artifacts.items()}
    return diagnose(
        facts["evaluation"],
        target=facts.get("target"),
        vocabulary=facts.get("vocabulary"),
        head=facts.get("head"),
        curves=training_curves(artifacts["head"]) if "head" in artifacts else (),
        preflight=facts.get("preflight"),
        speed=facts.get("speed"),
        max_num_seqs=settings.resources.evaluate.engine.get("max_num_seqs"),
    )


def print_diagnosis(pipeline: Pipeline, console: Console | None = None) -> None:
    """Print the likely causes of what is wrong with the finished evaluation of these settings; starts nothing.

    Raises:
        ConfigError: there is none.
    """
    artifacts = pipeline.finished()
    if "evaluation" not in artifacts:
        missing = next(stage.name for stage in pipeline.stages if stage.name not in artifacts)
        raise ConfigError(
            "--diagnose",
            f"there is no finished evaluation with these settings in {pipeline.storage.uri} ({missing} is the first that is missing)",
            "run pipelines/evaluate.py with the same settings first",
        )
    console = console or wide_console()
    findings = diagnose_outputs(artifacts, pipeline.settings)
    for table in diagnosis_tables(findings):
        console.print(rich_table(table, show_lines=True))
    if not findings:
        console.print(NOTHING)


def diagnosis_tables(findings: Sequence[Finding]) -> list[Table]:
    """A table a symptom, the cause to rule out first on top."""
    symptoms = dict.fromkeys(finding.symptom for finding in findings)
    return [
        Table(
            symptom,
            ("likely cause", "what says so", "what to do"),
            [(f.cause, f.evidence, f.next_step) for f in findings if f.symptom == symptom],
        )
        for symptom in symptoms
    ]
