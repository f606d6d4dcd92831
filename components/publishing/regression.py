"""Measuring a registered head again, after a new vLLM: the same head, prompts and lengths must give the AL that was recorded.

Two stages: `registered` fetches the version with the prompts that it was measured on, `regression` lets it answer them.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient

from components.config import Settings
from components.evaluation.acceptance import total
from components.evaluation.arms import head_arm
from components.evaluation.job import Job
from components.evaluation.prompts import PROMPTS
from components.evaluation.results import load_result
from components.evaluation.stages import HEAD_FOLDER, platform_identity
from components.publishing import registry
from components.publishing.bundle import HEAD_FILES
from components.publishing.incumbent import check_target, describe, missing_tags
from components.publishing.registry import Registry
from components.publishing.run_log import mlflow_errors
from components.publishing.versions import find, measured_tag
from components.section import ConfigError
from components.stage import Artifact, Outcome, Output, Stage
from components.target.engine import engine_identity
from components.target.stages import target_path
from components.tracking import Tracker
from components.versions import vllm_of

ARM = "registered"
PLACE = "regression"


def registered_stage(settings: Settings, which: str) -> Stage:
    """Fetches a version and what was recorded of it: `registered.json`, `prompts.json` and `head/`.

    Args:
        settings: The run's.
        which: Number or alias.
    """

    def look_up() -> dict[str, Any]:
        with mlflow_errors(settings.mlflow.tracking_uri):
            version = find(_client(settings), settings.publish.name, which)
        if missing := missing_tags(version):
            raise ConfigError(
                "--regression",
                f"version {version.version} of {settings.publish.name} lacks the tag {missing[0]}: it is no head of this project",
                "name a version that a run registered",
            )
        return describe(settings.publish.name, version)

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        found = look_up()
        with tempfile.TemporaryDirectory() as scratch, mlflow_errors(settings.mlflow.tracking_uri):
            client = _client(settings)
            bundle = registry.download_version(client, found["name"], found["version"], Path(scratch) / "bundle")
            facts = found | {"recorded": recorded(bundle)}
            output.join(PROMPTS).write_bytes((bundle / PROMPTS).read_bytes())
            for name in HEAD_FILES:
                output.join(HEAD_FOLDER, name).write_bytes((bundle / name).read_bytes())
        output.join("registered.json").write_bytes(json.dumps(facts, indent=1, sort_keys=True).encode())
        return Outcome(facts)

    return Stage(
        name="registered",
        run=run,
        config={"name": settings.publish.name},
        extra=lambda: {"version": look_up()["version"]},
        plan=lambda artifacts: f"download {which} of {settings.publish.name}",
    )


def recorded(bundle: Path) -> dict[str, Any]:
    """What a bundle says of its own measurement (JSON).

    Raises:
        ConfigError: it does not hold the prompts.
    """
    if not (bundle / PROMPTS).is_file():
        raise ConfigError(
            "--regression",
            f"the version's bundle has no {PROMPTS}: what it was measured on is not known",
            "register the head again with this version of the code, or with publish.include_prompts on",
        )
    evaluation = json.loads((bundle / "evaluation.json").read_text())
    provenance = json.loads((bundle / "provenance.json").read_text())
    evaluate, target = (provenance["settings"][name] for name in ("evaluate", "target"))
    return {
        "al": evaluation["arms"][evaluation["candidate"]["arm"]]["al"],
        "vllm": vllm_of(provenance["stages"]["evaluation"]["versions"]),
        "evaluate": {key: evaluate[key] for key in ("max_new_tokens", "concurrency")},
        "target": {key: target[key] for key in ("dtype", "max_model_len")},
    }


def regression_stage(settings: Settings) -> Stage:
    """Lets the registered head answer the recorded prompts, as they were asked then."""

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.evaluation.tasks import answer_task, fresh_processes

        target, registered = inputs["target"], inputs["registered"]
        check_target(registered.facts, target.facts)
        job = Job(
            settings=_as_recorded(settings, registered.facts["recorded"]),
            target_path=str(target_path(target)),
            target_digest=target.facts["digest"],
            vocab_size=target.facts["vocab_size"],
            responses=registered.location,
            output=output.location,
        )
        arm = head_arm(ARM, registered.local(HEAD_FOLDER), registered.facts["num_speculative_tokens"])
        if not job.arm_file(ARM, PLACE).exists():
            with fresh_processes(job) as processes:
                processes.run("regression", answer_task, job, arm, registered.join(PROMPTS), PLACE)
        facts = _facts(job, registered.facts)
        output.join("regression.json").write_bytes(json.dumps(facts, indent=1, sort_keys=True).encode())
        return Outcome(facts)

    return Stage(
        name="regression",
        run=run,
        config=engine_identity(settings, settings.resources.evaluate),
        inputs=("target", "registered"),
        extra=lambda: platform_identity(settings),
        plan=lambda artifacts: "one vLLM engine, the prompts that the version was measured on",
    )


def is_reproduced(facts: Mapping[str, Any], tolerance: float) -> bool:
    """Whether AL is what was recorded, within `tolerance` (relative); answers that failed reproduce nothing."""
    difference = facts["relative_difference"]
    return not facts["problems"] and difference is not None and abs(difference) <= tolerance


def mark(heads: Registry, regression: Artifact, reproduced: bool) -> None:
    """Note on the version that it holds on this vLLM, or take such a note away."""
    facts = regression.facts
    tag, version = measured_tag(facts["vllm"]), str(facts["version"])
    if reproduced:
        heads.client.set_model_version_tag(heads.name, version, tag, str(facts["al"]))
    elif tag in heads.client.get_model_version(heads.name, version).tags:
        heads.client.delete_model_version_tag(heads.name, version, tag)


def sentence(facts: Mapping[str, Any], tolerance: float, reproduced: bool) -> str:
    """One line with both figures."""
    al, before = (f"{v:.4f}" if v is not None else "undefined" for v in (facts["al"], facts["recorded_al"]))
    difference = "" if facts["relative_difference"] is None else f", {facts['relative_difference']:+.2%}"
    problems = "".join(f"; {problem}" for problem in facts["problems"])
    return (
        f"{facts['name']} version {facts['version']}, K={facts['num_speculative_tokens']}, {facts['num_prompts']} prompts: "
        f"AL {al} on vLLM {facts['vllm']}, {before} recorded on vLLM {facts['recorded_vllm']}{difference} "
        f"({'within' if reproduced else 'NOT within'} {tolerance:.1%}){problems}"
    )


def _facts(job: Job, registered: Mapping[str, Any]) -> dict[str, Any]:
    result = load_result(job.arm_file(ARM, PLACE))
    al, before = total(result.records).acceptance_length, registered["recorded"]["al"]
    return {
        "name": registered["name"],
        "version": registered["version"],
        "num_speculative_tokens": registered["num_speculative_tokens"],
        "num_prompts": len(result.answers),
        "al": al,
        "recorded_al": before,
        "relative_difference": al / before - 1 if al is not None and before else None,
        "vllm": vllm_of(),
        "recorded_vllm": registered["recorded"]["vllm"],
        "problems": list(result.problems),
    }


def _as_recorded(settings: Settings, recorded: Mapping[str, Any]) -> Settings:
    """The settings of today with the lengths and the dtype of then."""
    sections = {name: getattr(settings, name).model_copy(update=recorded[name]) for name in ("evaluate", "target")}
    return settings.model_copy(update=sections)


def _client(settings: Settings) -> MlflowClient:
    tracker = Tracker.of(settings)
    tracker.check()
    return tracker.client
