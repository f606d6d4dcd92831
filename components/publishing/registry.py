"""Registered heads in MLflow: versions with their digests as tags, and the aliases champion, challenger and previous.

A version never changes its content: its bundle lies under a path that carries the bundle's digest.
"""

import math
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from components.publishing.bundle import SUMS, BundleError, file_sha256, head_digest, verify_bundle
from components.storage import Location

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"

HEAD_DIGEST_TAG = "aerie.head_digest"
NUM_SPECULATIVE_TOKENS_TAG = "aerie.num_speculative_tokens"
BUNDLE_SHA256_TAG = "aerie.bundle_sha256"
TARGET_MODEL_TAG = "aerie.target_model"
TARGET_REVISION_TAG = "aerie.target_revision"
TARGET_DIGEST_TAG = "aerie.target_digest"
VLLM_TAG = "aerie.vllm"
DATA_DIGEST_TAG = "aerie.data_digest"
GIT_TAG = "aerie.git"
AL_TAG = "aerie.al"
VERDICT_TAG = "aerie.verdict"
OVERRIDE_TAG = "aerie.promoted_in_spite_of_the_gate"
LICENCE_TAG = "aerie.licence."
"""With `target`, `prompts` or `head` behind it: the licence of what the head was made of, and what follows for the head."""
REPRODUCED_TAG = "aerie.al_on_vllm."
"""With a vLLM's version behind it: the AL that a later regression check measured on that one."""

NO_SUCH_ALIAS = "INVALID_PARAMETER_VALUE"
NO_SUCH_NAME = "RESOURCE_DOES_NOT_EXIST"


@dataclass(frozen=True)
class Registry:
    """One registered model, and the lease under which its champion changes."""

    client: MlflowClient
    name: str
    lease: Location
    """`registry/<name>/_lease.json` in the run's storage."""
    lease_ttl_s: float


def find_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version that holds `alias`; None when there is no such model or alias."""
    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in (NO_SUCH_ALIAS, NO_SUCH_NAME):
            return None
        raise


def champion(client: MlflowClient, name: str) -> ModelVersion | None:
    return find_alias(client, name, CHAMPION)


def holder(client: MlflowClient, name: str, alias: str) -> int | None:
    """The version that holds `alias`; None when there is none."""
    found = find_alias(client, name, alias)
    return int(found.version) if found else None


def set_alias(client: MlflowClient, name: str, alias: str, version: int) -> None:
    """Moves the alias unless it is there."""
    if holder(client, name, alias) != version:
        client.set_registered_model_alias(name, alias, str(version))


def aliased_versions(client: MlflowClient) -> Iterator[tuple[str, ModelVersion]]:
    """(alias, version) of every version of ours, of any registered model, that holds champion, challenger or previous."""
    models, token = [], None
    while True:
        page = client.search_registered_models(page_token=token)
        models += page
        if not (token := page.token):
            break
    for name in sorted(model.name for model in models):
        for alias in (CHAMPION, CHALLENGER, PREVIOUS):
            version = find_alias(client, name, alias)
            if version is not None and HEAD_DIGEST_TAG in version.tags:
                yield alias, version


def find_version(client: MlflowClient, name: str, version: int | str) -> ModelVersion | None:
    """The version; None when there is no such version or model."""
    try:
        return client.get_model_version(name, str(version))
    except MlflowException as error:
        if error.error_code == NO_SUCH_NAME:
            return None
        raise


def find(client: MlflowClient, name: str, which: str) -> ModelVersion | None:
    """The version with the number or the alias `which`; None when there is none."""
    return find_version(client, name, which) if which.isdigit() else find_alias(client, name, which)


def register_version(
    client: MlflowClient, name: str, run_id: str, artifact_path: str, tags: Mapping[str, str], description: str = ""
) -> ModelVersion:
    """The version of the bundle at `artifact_path` of the run, made unless it exists, with `tags`, `description` and alias challenger.

    The same run, head and bundle give the same version, however often the command is repeated.

    Raises:
        ValueError: the tag of the AL is no finite number.
    """
    if not math.isfinite(float(tags.get(AL_TAG, 0.0))):
        raise ValueError(f"{AL_TAG} must be finite, not {tags[AL_TAG]}: leave it out where it is not known")
    _ensure_model(client, name)
    wanted = {key: tags[key] for key in (HEAD_DIGEST_TAG, BUNDLE_SHA256_TAG)}
    version = _only_version(client, name, run_id, wanted)
    if version is None:
        made = client.create_model_version(name, f"runs:/{run_id}/{artifact_path}", run_id, tags=wanted)
        version = _only_version(client, name, run_id, wanted) or made
    for key, value in tags.items():
        if version.tags.get(key) != value:
            client.set_model_version_tag(name, version.version, key, value)
    if description and version.description != description:
        client.update_model_version(name, version.version, description)
    set_alias(client, name, CHALLENGER, int(version.version))
    return client.get_model_version(name, version.version)


def _only_version(client: MlflowClient, name: str, run_id: str, wanted: Mapping[str, str]) -> ModelVersion | None:
    """The run's version with these tags; a second one goes: the client asks twice by itself when it misses a reply."""
    found = [version for version in versions_of_run(client, name, run_id) if wanted.items() <= version.tags.items()]
    for again in found[1:]:
        client.delete_model_version(name, again.version)
    return found[0] if found else None


def versions_of_run(client: MlflowClient, name: str, run_id: str) -> list[ModelVersion]:
    found = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    return sorted(found, key=lambda version: int(version.version))


def download_version(client: MlflowClient, name: str, version: int | str, dest: Path) -> Path:
    """The version's bundle in the folder `dest`, checked file by file; kept when it is there already.

    Raises:
        BundleError: what arrived is not what was registered.
    """
    entry = client.get_model_version(name, str(version))
    if (dest / SUMS).is_file():
        _check_version(dest, entry)
        return dest
    run_id, _, path = entry.source.removeprefix("runs:/").partition("/")
    scratch = dest.with_name(f"{dest.name}.tmp-{uuid.uuid4().hex}")
    scratch.mkdir(parents=True)
    try:
        arrived = Path(client.download_artifacts(run_id, path, str(scratch)))
        _check_version(arrived, entry)
        arrived.rename(dest)
    finally:
        shutil.rmtree(scratch)
    return dest


def _check_version(folder: Path, entry: ModelVersion) -> None:
    verify_bundle(folder)
    for tag, found in ((BUNDLE_SHA256_TAG, file_sha256(folder / SUMS)), (HEAD_DIGEST_TAG, head_digest(folder))):
        if entry.tags.get(tag) != found:
            raise BundleError(
                f"{entry.name} version {entry.version}: {tag} is {entry.tags.get(tag)}, but the files give {found}"
            )


def _ensure_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
