#!/usr/bin/env python
"""Measure the head on real vLLM, after whatever stage before it is not done yet; or say what is wrong with it (--diagnose)."""

from typing import Annotated

import typer

from components.pipeline import Selection
from components.publishing.summary import print_diagnosis
from pipelines.cli import (
    DEFAULT_CONFIG,
    Cluster,
    Config,
    First,
    Forced,
    Last,
    Overrides,
    Plan,
    guarded,
    make_pipeline,
    read_settings,
    run_pipeline,
)
from pipelines.full import define_stages

Diagnose = Annotated[
    bool,
    typer.Option(
        "--diagnose",
        help="Only name the likely causes of few accepted drafts, of no speed-up or of gains lost under load, with the numbers of "
        "the finished evaluation that say so and what to do next; starts no engine.",
    ),
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    config: Config = DEFAULT_CONFIG,
    cluster: Cluster = None,
    overrides: Overrides = [],
    plan: Plan = False,
    first: First = None,
    until: Last = "evaluation",
    forced: Forced = [],
    diagnose: Diagnose = False,
) -> None:
    if diagnose:
        settings = read_settings(config, cluster, overrides)
        return print_diagnosis(make_pipeline(define_stages(settings), settings))
    run_pipeline(define_stages, config, cluster, overrides, plan, Selection(first, until, tuple(forced)))


if __name__ == "__main__":
    guarded(app)
