"""The `target` stage: the model being served, found, converted if it is a bundled one, and described."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from components.config import Settings
from components.stage import Artifact, Outcome, Output, Stage
from components.target.resolve import BUNDLED_PREFIX, resolve_target, target_identity

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
        folder = output.join(MODEL_FOLDER).path
        resolved = asdict(resolve_target(target.model, target.revision, folder, target.chat_template_kwargs))
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
    )


def target_path(artifact: Artifact) -> Path:
    """The Hugging Face folder of a finished `target` output."""
    if artifact.facts["model"].startswith(BUNDLED_PREFIX):
        return artifact.join(MODEL_FOLDER).path
    return Path(artifact.facts["path"])
