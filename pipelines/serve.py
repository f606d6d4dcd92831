#!/usr/bin/env python
"""Serve the champion behind the endpoint, until something else is served there."""

import json
from collections.abc import Sequence

from components.config import ConfigError, Settings
from components.pipeline import Pipeline
from components.publishing.stages import champion_stage
from components.serving.apps import Service
from components.serving.deploy import deploy
from components.serving.records import live_records
from components.serving.stages import champion_arm
from components.stage import Artifact, Stage
from components.target.stages import target_path, target_stage
from pipelines.cli import connect_to_ray, guarded, pipeline_app


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
    check_target(champion, pipeline.artifacts["target"])
    connect_to_ray()
    arms = [champion_arm(champion, 1.0)]
    records = live_records(pipeline.settings, pipeline.storage)
    service = Service(pipeline.settings, target_path(pipeline.artifacts["target"]), arms, records)
    address = deploy(service)
    body = {"model": service.model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    facts = champion.facts
    print(f"{facts['name']} version {facts['version']} serves {service.model} at {address}/v1")
    print(f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'", flush=True)


def check_target(champion: Artifact, target: Artifact) -> None:
    """Raises ConfigError when the champion drafts for another target than the one to serve."""
    wanted = champion.facts
    if wanted["target_digest"] != target.facts["digest"]:
        raise ConfigError(
            "target.model",
            f"{wanted['name']} version {wanted['version']} drafts for {wanted['target_model']}",
            "serve that target, or name another publish.name",
        )


app = pipeline_app(__doc__ or "", define_stages, done=serve_champion)

if __name__ == "__main__":
    guarded(app)
