"""Registered heads in MLflow: versions with their digests as tags, and the aliases champion, challenger and previous.

A version never changes its content: its bundle lies under a path that carries the bundle's digest. An alias moves last, under a
lease, and only from the version that the head was measured against.
"""

import logging
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from components.lease import Lease
from components.publishing.bundle import SUMS, BundleError, file_sha256, head_digest, verify_bundle
from components.storage import Location

log = logging.getLogger("aerie")

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"

HEAD_DIGEST_TAG = "aerie.head_digest"
NUM_SPECULATIVE_TOKENS_TAG = "aerie.num_speculative_tokens"
REPLACED_VERSION_TAG = "aerie.replaced_version"
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

NO_SUCH_ALIAS = "INVALID_PARAMETER_VALUE"
NO_SUCH_NAME = "RESOURCE_DOES_NOT_EXIST"


class ChampionChanged(Exception):
    """The champion is another version than the one that the head was measured against."""


class NothingToRollBack(Exception):
    """No version held the champion alias before."""


@dataclass(frozen=True)
class Registry:
    """One registered model, and the lease under which its champion changes."""

    client: MlflowClient
    name: str
    lease: Location
    """`registry/<name>/_lease.json` in the run's storage."""
    lease_ttl_s: float


@dataclass(frozen=True)
class Promotion:
    """What became of the champion alias."""

    version: int
    replaced: int | None
    moved: bool
    """False when the alias was at `version` already."""


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


def register_version(
    client: MlflowClient, name: str, run_id: str, artifact_path: str, tags: Mapping[str, str], description: str = ""
) -> ModelVersion:
    """The version of the bundle at `artifact_path` of the run, made unless it exists, with `tags`, `description` and alias challenger.

    The same run, head and bundle give the same version, however often the command is repeated.
    """
    _ensure_model(client, name)
    wanted = {key: tags[key] for key in (HEAD_DIGEST_TAG, BUNDLE_SHA256_TAG)}
    version = next(
        (v for v in versions_of_run(client, name, run_id) if wanted.items() <= v.tags.items()), None
    ) or client.create_model_version(name, f"runs:/{run_id}/{artifact_path}", run_id, tags=wanted)
    for key, value in tags.items():
        if version.tags.get(key) != value:
            client.set_model_version_tag(name, version.version, key, value)
    if description and version.description != description:
        client.update_model_version(name, version.version, description)
    _set_alias(client, name, CHALLENGER, int(version.version))
    return client.get_model_version(name, version.version)


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


def promote(registry: Registry, version: int, incumbent: int | None) -> Promotion:
    """Make `version` the champion, in place of `incumbent`, the one that it was measured against.

    The alias `previous` and the tag of what was replaced are written first, the champion alias last: a command killed
    anywhere in between does the rest when it is repeated.

    Raises:
        ChampionChanged: the champion is neither `incumbent` nor `version` by now.
        LeaseHeld: another run changes this champion at this moment.
    """
    client, name = registry.client, registry.name
    with Lease(registry.lease, registry.lease_ttl_s) as lease:
        holder = _holder(client, name, CHAMPION)
        if holder == version:
            return Promotion(version, incumbent, moved=False)
        if holder != incumbent:
            raise ChampionChanged(
                f"{name}: the champion was {_text(incumbent)} when this head was measured and is {_text(holder)} now; "
                f"repeat the command: it measures against {_text(holder)}"
            )
        client.set_model_version_tag(name, str(version), REPLACED_VERSION_TAG, str(incumbent or ""))
        lease.check()
        if incumbent is not None:
            _set_alias(client, name, PREVIOUS, incumbent)
        _set_alias(client, name, CHAMPION, version)
    log.info("%s: version %d is the champion, in place of %s", name, version, _text(incumbent))
    return Promotion(version, incumbent, moved=True)


def rollback(registry: Registry) -> Promotion:
    """Give the champion alias back to the version that held it before; the two swap, so that a second call undoes it.

    Raises:
        NothingToRollBack: there is no `previous` version.
        LeaseHeld: another run changes this champion at this moment.
    """
    client, name = registry.client, registry.name
    with Lease(registry.lease, registry.lease_ttl_s) as lease:
        now, before = _holder(client, name, CHAMPION), _holder(client, name, PREVIOUS)
        if before is None or before == now:
            raise NothingToRollBack(f"{name} has no earlier champion: promote a version instead")
        lease.check()
        _set_alias(client, name, CHAMPION, before)
        if now is not None:
            _set_alias(client, name, PREVIOUS, now)
    log.info("%s: rolled back from %s to version %d", name, _text(now), before)
    return Promotion(before, now, moved=True)


def replaced_version(version: ModelVersion) -> int | None:
    """The version that `version` took the champion alias from; None for the first champion."""
    text = version.tags.get(REPLACED_VERSION_TAG, "")
    return int(text) if text else None


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


def _holder(client: MlflowClient, name: str, alias: str) -> int | None:
    found = find_alias(client, name, alias)
    return int(found.version) if found else None


def _set_alias(client: MlflowClient, name: str, alias: str, version: int) -> None:
    if _holder(client, name, alias) != version:
        client.set_registered_model_alias(name, alias, str(version))


def _text(version: int | None) -> str:
    return "none" if version is None else f"version {version}"
