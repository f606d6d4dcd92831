"""The champion of the registry: found, described, and put on disk as a stage's output."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from components.publishing import registry
from components.publishing.bundle import HEAD_FILES
from components.publishing.promotion import replaced_version
from components.section import ConfigError
from components.storage import Location

DESCRIBED = {
    "head_digest": registry.HEAD_DIGEST_TAG,
    "target_model": registry.TARGET_MODEL_TAG,
    "target_revision": registry.TARGET_REVISION_TAG,
    "target_digest": registry.TARGET_DIGEST_TAG,
}


@dataclass(frozen=True)
class Candidate:
    """What tells one head to serve from another."""

    head_digest: str
    num_speculative_tokens: int
    target_digest: str

    def is_served_by(self, version: ModelVersion) -> bool:
        """Whether `version` is this very head at this K."""
        tags = version.tags
        return tags.get(registry.HEAD_DIGEST_TAG) == self.head_digest and tags.get(
            registry.NUM_SPECULATIVE_TOKENS_TAG
        ) == str(self.num_speculative_tokens)


def find_champion(client: MlflowClient, name: str) -> ModelVersion | None:
    """The champion; None when there is none. Raises as `find_described`."""
    return find_described(client, name, registry.CHAMPION)


def find_described(client: MlflowClient, name: str, which: str) -> ModelVersion | None:
    """The version with the alias or the number `which`; None when there is none.

    Raises:
        ConfigError: the version does not say what it is.
    """
    version = registry.find(client, name, which)
    if version is not None and (missing := missing_tags(version)):
        raise ConfigError(
            "publish.name",
            f"{which} of {name}, version {version.version}, lacks the tag {missing[0]}: it is no head of this project",
            "move the alias to a version that a run registered, or choose another name",
        )
    return version


def missing_tags(version: ModelVersion) -> list[str]:
    """Tags that a head of this project has, and this version has not."""
    wanted = (*DESCRIBED.values(), registry.NUM_SPECULATIVE_TOKENS_TAG, registry.BUNDLE_SHA256_TAG)
    return [tag for tag in wanted if tag not in version.tags]


def find_incumbent(client: MlflowClient, name: str, candidates: Sequence[Candidate]) -> ModelVersion | None:
    """The version that the candidates of a run must beat: the champion, or what it replaced if the champion is one of them.

    So the same job that promoted a head finds, when it is repeated, the incumbent that it found before.

    Raises:
        ConfigError: the champion drafts for another target.
    """
    champion = find_champion(client, name)
    if champion is None:
        return None
    if any(champion.tags[registry.TARGET_DIGEST_TAG] != candidate.target_digest for candidate in candidates):
        raise ConfigError(
            "publish.name",
            f"the champion of {name}, version {champion.version}, drafts for another target "
            f"({champion.tags[registry.TARGET_MODEL_TAG]})",
            "give the heads of this target a name of their own",
        )
    if not any(candidate.is_served_by(champion) for candidate in candidates):
        return champion
    replaced = replaced_version(champion)
    return None if replaced is None else registry.find_version(client, name, replaced)


def describe(name: str, version: ModelVersion | None) -> dict[str, Any]:
    """What later stages know of a registered head (JSON); `version` is None when there is none."""
    if version is None:
        return {"name": name, "version": None, "num_speculative_tokens": None} | dict.fromkeys(DESCRIBED)
    return {
        "name": name,
        "version": int(version.version),
        "num_speculative_tokens": int(version.tags[registry.NUM_SPECULATIVE_TOKENS_TAG]),
        **{key: version.tags[tag] for key, tag in DESCRIBED.items()},
    }


def store_head(client: MlflowClient, description: Mapping[str, Any], folder: Location) -> None:
    """Put the registered head into `folder`, its bundle's checksums verified."""
    with tempfile.TemporaryDirectory() as scratch:
        bundle = registry.download_version(
            client, description["name"], description["version"], Path(scratch) / "bundle"
        )
        for name in HEAD_FILES:
            folder.join(name).write_bytes((bundle / name).read_bytes())
