#!/usr/bin/env python
"""Measure the head on real vLLM, after whatever stage before it is not done yet; measure a registered head again (--regression); or say
what is wrong with a measured one (--diagnose)."""

from collections.abc import Sequence
from typing import Annotated

import typer

from components.config import Settings
from components.pipeline import Pipeline
from components.publishing.diagnosis import print_diagnosis
from components.publishing.regression import is_reproduced, mark, registered_stage, regression_stage, sentence
from components.publishing.run_log import mlflow_errors
from components.publishing.stages import registry_of
from components.stage import Stage
from components.target.stages import target_stage
from pipelines.cli import guarded, make_pipeline, run_pipeline
from pipelines.full import define_stages
from pipelines.run_options import RunOptions, with_run_options


def define_regression(settings: Settings, which: str) -> Sequence[Stage]:
    return [
        target_stage(settings),  # the model being served
        registered_stage(settings, which),  # a version of the registry, and the prompts that it was measured on
        regression_stage(settings),  # the same head on the same prompts, with the installed vLLM
    ]


def conclude(pipeline: Pipeline) -> None:
    """Say whether AL is what was recorded and note it on the version; exit code 1 where it is not."""
    regression = pipeline.artifacts.get("regression")
    if regression is None:  # --until left it out
        return
    settings, facts = pipeline.settings, regression.facts
    tolerance = settings.evaluate.regression_tolerance
    reproduced = is_reproduced(facts, tolerance)
    with mlflow_errors(settings.mlflow.tracking_uri):
        mark(registry_of(settings, pipeline.storage), regression, reproduced)
    print(sentence(facts, tolerance, reproduced), flush=True)
    if not reproduced:
        raise typer.Exit(1)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
@with_run_options()
def main(
    options: RunOptions,
    regression: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Number or alias of a registered head: is its AL on the installed vLLM still what was recorded? Exit code 1 if not.",
        ),
    ] = None,
    diagnose: Annotated[
        bool,
        typer.Option(
            "--diagnose",
            help="Only name the likely causes of few accepted drafts, of no speed-up or of gains lost under load, with the numbers of "
            "the finished evaluation that say so and what to do next; starts no engine.",
        ),
    ] = False,
) -> None:
    if diagnose:
        settings = options.settings()
        print_diagnosis(make_pipeline(define_stages(settings), settings))
        return
    if regression is None:
        run_pipeline(define_stages, options._replace(until=options.until or "speed"))
        return
    pipeline = run_pipeline(lambda settings: define_regression(settings, regression), options)
    if not options.plan:
        conclude(pipeline)


if __name__ == "__main__":
    guarded(app)
