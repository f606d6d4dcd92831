#!/usr/bin/env python
"""Serve the champion behind the endpoint, until something else is served there; try the challenger beside it (--experiment); watch what serves (--watch)."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from components.config import Settings
from components.experiment.conduct import ask_health, live_weight
from components.experiment.recorded import recorded_acceptance
from components.experiment.run import opponent, records_of, run_experiment, show_window
from components.experiment.watching import watch_endpoint
from components.pipeline import Pipeline, Selection
from components.publishing.incumbent import check_target
from components.publishing.stages import challenger_stage, champion_stage, registry_of
from components.section import ConfigError
from components.serving.apps import Service, model_name
from components.serving.deploy import deploy, routed_model
from components.serving.records import live_records
from components.serving.stages import champion_arm, plain_arm
from components.stage import Stage
from components.storage import Location
from components.target.stages import target_path, target_stage
from pipelines.cli import connect_to_ray, guarded, make_pipeline, run_pipeline
from pipelines.run_options import RunOptions, with_run_options

AllowGap = Annotated[
    bool,
    typer.Option(
        "--allow-gap", help="Without room for a second copy of the target: end the old arm before the new one starts."
    ),
]


def define_stages(settings: Settings, version: int | None = None) -> Sequence[Stage]:
    return [
        target_stage(settings),  # the model being served
        champion_stage(settings, version),  # the head that the registry calls champion, or will
    ]


def serve_champion(pipeline: Pipeline, allow_gap: bool = False) -> None:
    """Deploys the champion as the only arm and says how to use it; nothing when `--until` left it out."""
    champion = pipeline.artifacts.get("champion")
    if champion is None:
        return
    service = champion_service(pipeline)
    connect_to_ray()
    address = deploy(service, allow_gap)
    body = {"model": service.model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    facts = champion.facts
    print(f"{facts['name']} version {facts['version']} serves {service.model} at {address}/v1")
    print(f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'", flush=True)


def champion_service(pipeline: Pipeline) -> Service:
    """The champion alone, or plain decoding where the pipeline has none; ConfigError when it drafts for another target."""
    champion, target = pipeline.artifacts.get("champion"), pipeline.artifacts["target"]
    if champion is not None:
        check_target(champion.facts, target.facts)
    arm = plain_arm(1.0) if champion is None else champion_arm(champion, 1.0)
    records = live_records(pipeline.settings, pipeline.storage)
    return Service(pipeline.settings, target_path(target), [arm], records)


def move_endpoint(settings: Settings, version: int | None, allow_gap: bool) -> bool:
    """Puts a registered version behind the endpoint, in place of all that serves there; False where no endpoint of this target is up.

    Args:
        settings: With its address.
        version: None is plain decoding.
        allow_gap: Where there is no room for a second copy of the target.

    Raises:
        ConfigError: no room, another target, or an endpoint whose Ray cluster does not answer; then what served serves on.
        DeploymentFailed: the new arm did not start; what served serves on.
    """
    ab = settings.ab
    try:
        connect_to_ray()
    except ConfigError:
        if ask_health(f"http://{ab.host}:{ab.port}") is None:
            print("no Ray cluster is up, so no endpoint either", flush=True)
            return False
        raise
    served = routed_model()
    if served != model_name(settings):
        print(f"the endpoint serves {served} and is left alone" if served else "no endpoint is up", flush=True)
        return False
    pipeline = make_pipeline(define_stages(settings, version), settings)
    pipeline.run(Selection(last="target" if version is None else None))
    deploy(champion_service(pipeline), allow_gap)
    return True


def watch_champion(pipeline: Pipeline, allow_gap: bool) -> None:
    """Watches what serves, until it is interrupted; deploys the champion first where no session reaches it."""
    champion, settings = pipeline.artifacts.get("champion"), pipeline.settings
    if champion is None:
        return
    records, address = records_of(settings, pipeline.storage), f"http://{settings.ab.host}:{settings.ab.port}"
    if not _serves(address, champion_arm(champion, 1.0).head):
        serve_champion(pipeline, allow_gap)
    policy, config = settings.ab.experiment, settings.ab.watch
    heads = registry_of(settings, pipeline.storage)
    endpoint = watch_endpoint(
        lambda: ask_health(address), records, policy, config, time.time(),
        recorded=lambda head: recorded_acceptance(heads, head), show=show_window,
    )  # fmt: skip
    for _ in endpoint:
        pass  # it logs its alarms, and nothing else follows from them


def _serves(address: str, head: str) -> bool:
    """Whether sessions reach an arm with this head."""
    health = ask_health(address)
    if health is None:
        return False
    return any(told["head"] == head and live_weight(health, name) > 0 for name, told in health["arms"].items())


def define_experiment(settings: Settings, version: int | None = None) -> Sequence[Stage]:
    return [
        *define_stages(settings, version),  # after a promotion the champion before, which an alarm may bring back
        challenger_stage(settings),  # the latest registered head
    ]


def conduct_experiment(pipeline: Pipeline, watch: bool, override: str | None, allow_gap: bool) -> None:
    """Serves both heads and acts on what their traffic says; nothing when `--until` left one out."""
    if not {"champion", "challenger"} <= pipeline.artifacts.keys():
        return
    check_target(pipeline.artifacts["champion"].facts, pipeline.artifacts["target"].facts)
    connect_to_ray()
    try:
        run_experiment(pipeline.settings, pipeline.storage, pipeline.artifacts, watch, override, allow_gap)
    except KeyboardInterrupt:
        print("interrupted: what serves goes on serving; the same command goes on from here", flush=True)
        raise typer.Exit(130) from None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
@with_run_options()
def main(
    options: RunOptions,
    experiment: Annotated[
        bool,
        typer.Option(help="Serve the challenger beside the champion until their traffic decides; promote or stop."),
    ] = False,
    override: Annotated[
        str | None,
        typer.Option(help="With --experiment: why a challenger that the gate refused may be tried; kept as a tag."),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            help="Watch AL and latency of what serves, and say so in the log when they get worse; with --experiment after a promotion."
        ),
    ] = False,
    allow_gap: AllowGap = False,
) -> None:
    pipeline = run_pipeline(_define_experiment if experiment else define_stages, options)
    if options.plan:
        return
    if experiment:
        conduct_experiment(pipeline, watch, override, allow_gap)
    elif watch:
        with suppress(KeyboardInterrupt):
            watch_champion(pipeline, allow_gap)
    else:
        serve_champion(pipeline, allow_gap)


def _define_experiment(settings: Settings) -> Sequence[Stage]:
    return define_experiment(settings, opponent(settings, Location(settings.storage.uri)))


if __name__ == "__main__":
    guarded(app)
