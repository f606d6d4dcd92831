"""The `target` stage: the model being served, found, converted if it is a bundled one, and described."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.config import Settings
from components.forecast import Forecast, target_parameters
from components.stage import Artifact, Outcome, Output, Stage
from components.target.resolve import BUNDLED_PREFIX, resolve_target, target_identity, target_shape

log = logging.getLogger("aerie")

MODEL_FOLDER = "model"
DATED = (
    "its chat template writes today's date into every prompt: prompts of another day differ. "
    "If the template has a switch for the date, pin it with target.chat_template_kwargs"
)


def target_stage(settings: Settings) -> Stage:
    """Resolves `target.model`; a user's folder and a hub snapshot stay where they are, `target.json` describes them."""
    target = settings.target

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        with output.join(MODEL_FOLDER).staged() as folder:
            resolved = asdict(resolve_target(target.model, target.revision, folder, target.chat_template_kwargs))
        if target.model.startswith(BUNDLED_PREFIX):
            resolved["path"] = output.join(MODEL_FOLDER).uri
        if resolved["chat_template"]["is_dated"]:
            log.warning("target: %s", DATED)
        described = {name: value for name, value in resolved.items() if name != "path"}
        output.join("target.json").write_bytes(json.dumps(described, indent=1, sort_keys=True).encode())
        return Outcome(resolved)

    return Stage(
        name="target",
        run=run,
        config={
            "model": target.model,
            "revision": target.revision,
            "chat_template_kwargs": target.chat_template_kwargs,
        },
        extra=lambda: {"identity": target_identity(target.model, target.revision)},
        plan=lambda artifacts: f"find or convert {target.model}",
        forecast=lambda known, expected: _forecast(settings),
    )


def target_facts(settings: Settings, known: Mapping[str, Artifact]) -> Mapping[str, Any]:
    """The target's facts; of one that no run has looked at yet, what its config alone says of its size."""
    if "target" in known:
        return known["target"].facts
    return target_shape(settings.target.model, settings.target.revision)


def target_path(artifact: Artifact) -> Path:
    """The Hugging Face folder of a finished `target` output, on this machine."""
    if artifact.facts["model"].startswith(BUNDLED_PREFIX):
        return artifact.local(MODEL_FOLDER)
    return Path(artifact.facts["path"])


def _forecast(settings: Settings) -> Forecast:
    """Only a bundled target is written, in bfloat16; the others stay where they are."""
    if not settings.target.model.startswith(BUNDLED_PREFIX):
        return Forecast(bytes=0)
    return Forecast(bytes=2 * target_parameters(target_facts(settings, {})))
