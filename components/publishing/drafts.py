"""What the arms of `evaluate.baselines` draft with: heads of the registry, released heads and draft models, found and pinned.

A folder stays where it is and vLLM downloads what a Hugging Face id names, at the commit found here; a head of the registry is fetched.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from components.arm_config import REGISTRY, ArmConfig
from components.publishing import registry
from components.publishing.incumbent import missing_tags
from components.section import ConfigError
from components.stage import Artifact
from components.target.resolve import target_identity

Drafts = dict[str, dict[str, Any]]
"""By arm: what `model` stands for right now."""


def find_drafts(
    baselines: Mapping[str, ArmConfig], target_digest: str, make_client: Callable[[], MlflowClient]
) -> Drafts:
    """What every arm that names a model drafts with.

    Args:
        baselines: The settings.
        target_digest: Heads of the registry must draft for this target.
        make_client: Called only where an arm names a head of the registry.

    Raises:
        ConfigError: at the arm's `model` or `revision`, with a fix.
    """
    return {
        name: _find_registered(name, config.model, target_digest, make_client())
        if REGISTRY.fullmatch(config.model)
        else _find_released(name, config.model, config.revision)
        for name, config in baselines.items()
        if config.model is not None
    }


def draft_keys(drafts: Artifact) -> dict[str, dict[str, str]]:
    """By arm: `model`, and `revision` where there is one, for vLLM's speculative config."""
    return {
        name: {"model": str(drafts.local(name))} if "version" in found else _keys(found)
        for name, found in drafts.facts["drafts"].items()
    }


def without_paths(drafts: Drafts) -> Drafts:
    """What an output depends on: not where a folder lies."""
    return {name: {key: value for key, value in found.items() if key != "path"} for name, found in drafts.items()}


def draft_label(found: Mapping[str, Any], num_characters: int) -> str:
    """Version and digest as responses name them."""
    version = f"v{found['version']}-" if "version" in found else ""
    return f"{version}{found['digest'][:num_characters]}"


def _keys(found: Mapping[str, Any]) -> dict[str, str]:
    if "path" in found:
        return {"model": found["path"]}
    return {"model": found["model"], "revision": found["digest"]}


def _find_released(name: str, model: str, revision: str | None) -> dict[str, Any]:
    """A folder's path and digest, or the commit of a Hugging Face id as its digest."""
    place, folder = f"evaluate.baselines.{name}", Path(model).expanduser()
    if folder.is_dir():
        _check_folder(place, folder, revision)
    try:
        digest = target_identity(str(folder) if folder.is_dir() else model, revision)
    except ConfigError as error:  # it speaks of the target
        key = "revision" if error.path.endswith("revision") else "model"
        raise ConfigError(f"{place}.{key}", error.problem, error.fix) from None
    return {"model": model, "digest": digest} | ({"path": str(folder.resolve())} if folder.is_dir() else {})


def _check_folder(place: str, folder: Path, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(f"{place}.revision", f"{folder} has no revisions", "remove it")
    for pattern, fix in (("config.json", "name the folder that holds it"), ("*.safetensors", "convert its weights")):
        if not any(folder.glob(pattern)):
            raise ConfigError(f"{place}.model", f"the folder {folder} has no {pattern}", fix)


def _find_registered(name: str, model: str, target_digest: str, client: MlflowClient) -> dict[str, Any]:
    place = f"evaluate.baselines.{name}.model"
    matched = REGISTRY.fullmatch(model)
    assert matched
    head, which = matched["name"], matched["which"]
    version = (
        registry.find_version(client, head, which) if which.isdigit() else registry.find_alias(client, head, which)
    )
    if version is None:
        raise ConfigError(place, f"MLflow has no {which} of {head}", "name one of its versions or aliases")
    _check_version(place, version, target_digest)
    digest = version.tags[registry.HEAD_DIGEST_TAG]
    return {"model": model, "name": head, "version": int(version.version), "digest": digest}


def _check_version(place: str, version: ModelVersion, target_digest: str) -> None:
    named = f"version {version.version} of {version.name}"
    if missing := missing_tags(version):
        problem = f"{named} lacks the tag {missing[0]}: it is no head of this project"
        raise ConfigError(place, problem, "name a version that a run registered")
    if version.tags[registry.TARGET_DIGEST_TAG] != target_digest:
        problem = f"{named} drafts for another target ({version.tags.get(registry.TARGET_MODEL_TAG)})"
        raise ConfigError(place, problem, "name a head of this target")
