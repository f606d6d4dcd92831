#!/usr/bin/env python
"""Serve the champion behind the endpoint, until something else is served there; or try the challenger beside it (--experiment)."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from components.config import ConfigError, Settings
from components.experiment.run import run_experiment
from components.pipeline import Pipeline, Selection
from components.publishing.incumbent import check_target
from components.publishing.stages import challenger_stage, champion_stage
from components.serving.apps import Service
from components.serving.deploy import deploy
from components.serving.records import live_records
from components.serving.stages import champion_arm
from components.stage import Stage
from components.target.stages import target_path, target_stage
from pipelines.cli import (
    DEFAULT_CONFIG,
    Cluster,
    Config,
    First,
    Forced,
    Last,
    Overrides,
    Plan,
    connect_to_ray,
    guarded,
    run_pipeline,
)


def define_stages(settings: Settings) -> Sequence[Stage]:
    return [
        target_stage(settings),  # the model being served
        champion_stage(settings),  # the head that the registry calls champion
    ]


def serve_champion(pipeline: Pipeline) -> None:
    """Deploys the champion as the only arm and says how to use it; nothing when `--until` left it out."""
    champion = pipeline.artifacts.get("champion")
    if champion is None:
        return
    check_target(champion.facts, pipeline.artifacts["target"].facts)
    connect_to_ray()
    arms = [champion_arm(champion, 1.0)]
    records = live_records(pipeline.settings, pipeline.storage)
    service = Service(pipeline.settings, target_path(pipeline.artifacts["target"]), arms, records)
    address = deploy(service)
    body = {"model": service.model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    facts = champion.facts
    print(f"{facts['name']} version {facts['version']} serves {service.model} at {address}/v1")
    print(f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'", flush=True)


def define_experiment(settings: Settings) -> Sequence[Stage]:
    return [
        *define_stages(settings),
        challenger_stage(settings),  # the latest registered head
    ]


def conduct_experiment(pipeline: Pipeline, watch: bool, override: str | None) -> None:
    """Serves both heads and acts on what their traffic says; nothing when `--until` left one out."""
    if not {"champion", "challenger"} <= pipeline.artifacts.keys():
        return
    check_target(pipeline.artifacts["champion"].facts, pipeline.artifacts["target"].facts)
    connect_to_ray()
    try:
        run_experiment(pipeline.settings, pipeline.storage, pipeline.artifacts, watch, override)
    except KeyboardInterrupt:
        print("interrupted: both heads go on serving; the same command goes on with the experiment", flush=True)
        raise typer.Exit(130) from None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    config: Config = DEFAULT_CONFIG,
    cluster: Cluster = None,
    overrides: Overrides = [],
    plan: Plan = False,
    first: First = None,
    until: Last = None,
    forced: Forced = [],
    experiment: Annotated[
        bool,
        typer.Option(help="Serve the challenger beside the champion until their traffic decides; promote or stop."),
    ] = False,
    override: Annotated[
        str | None,
        typer.Option(help="With --experiment: why a challenger that the gate refused may be tried; kept as a tag."),
    ] = None,
    watch: Annotated[bool, typer.Option(help="With --experiment: after a promotion watch AL and latency.")] = False,
) -> None:
    if watch and not experiment:
        raise ConfigError("--watch", "there is nothing to compare the champion with", "give --experiment as well")
    stages = define_experiment if experiment else define_stages
    pipeline = run_pipeline(stages, config, cluster, overrides, plan, Selection(first, until, tuple(forced)))
    if plan:
        return
    if experiment:
        conduct_experiment(pipeline, watch, override)
    else:
        serve_champion(pipeline)


if __name__ == "__main__":
    guarded(app)
