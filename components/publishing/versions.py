"""Registered versions as an operator sees and moves them: listed, checked against their checksums, promoted by hand."""

import logging
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from components.publishing import registry
from components.publishing.promotion import Promotion, promote
from components.publishing.registry import Registry
from components.section import ConfigError

log = logging.getLogger("aerie")


@dataclass(frozen=True)
class VersionRow:
    """One line of the list."""

    version: int
    aliases: tuple[str, ...]
    verdict: str
    """The gate's: `promote`, `refuse`, or `unknown` for a version that no gate has seen."""
    num_speculative_tokens: str
    al: float | None
    vllm: str
    is_stale: bool
    """Measured on another vLLM than the installed one: its figures may not hold here."""
    target: str
    head_digest: str
    created_at: datetime


def list_versions(client: MlflowClient, name: str, installed_vllm: str | None) -> list[VersionRow]:
    """Every version of the registered model, newest first; none when there is no such model."""
    versions = sorted(client.search_model_versions(f"name = '{name}'"), key=lambda v: int(v.version), reverse=True)
    # the search leaves the aliases out
    return [_row(client.get_model_version(name, v.version), installed_vllm) for v in versions]


def find(client: MlflowClient, name: str, which: str) -> ModelVersion:
    """The version with the number or the alias `which`.

    Raises:
        ConfigError: there is none.
    """
    found = registry.find(client, name, which)
    if found is None:
        known = ", ".join(sorted((str(v.version) for v in client.search_model_versions(f"name = '{name}'")), key=int))
        raise ConfigError(
            "VERSION", f"{name} has no version or alias {which!r}", f"use one of {known}" if known else "publish first"
        )
    return found


def verify(client: MlflowClient, version: ModelVersion) -> None:
    """Download the version's bundle and check every file and the digests of its tags.

    Raises:
        BundleError: what arrived is not what was registered.
    """
    with tempfile.TemporaryDirectory() as scratch:
        registry.download_version(client, version.name, version.version, Path(scratch) / "bundle")


def promote_by_hand(
    heads: Registry, which: str, override: str | None, move_traffic: Callable[[int], None] = lambda version: None
) -> Promotion:
    """Make a registered version the champion, whatever was measured since.

    Args:
        heads: The registered model.
        which: Number or alias.
        override: Why a version that the gate refused may serve all the same; kept as a tag of the version.
        move_traffic: Called with the version before its alias moves.

    Raises:
        ConfigError: no such version, one that the gate refused or never saw, that has no finite AL, or that drafts for another
            target than the champion.
        BundleError: its files are not what was registered.
        ChampionChanged, LeaseHeld: somebody else moves the champion at this moment.
    """
    client = heads.client
    version, champion = find(client, heads.name, which), registry.champion(client, heads.name)
    check_verdict(version, override)
    if champion is not None:
        _check_target(version, champion)
    verify(client, version)
    if override:
        client.set_model_version_tag(heads.name, version.version, registry.OVERRIDE_TAG, override)
    number = int(version.version)
    return promote(heads, number, int(champion.version) if champion else None, lambda: move_traffic(number))


def check_verdict(version: ModelVersion, override: str | None) -> None:
    """Raises ConfigError for a version that the gate refused or never saw, or whose AL is not known, unless `override` says why it may serve."""
    verdict = version.tags.get(registry.VERDICT_TAG, "unknown")
    if verdict != "promote" and not override:
        said = "the gate refused it" if verdict == "refuse" else "no gate has seen it"
        raise ConfigError(
            "VERSION", f"{version.name} version {version.version}: {said}", "say why with --override 'REASON'"
        )
    if recorded_al(version) is None and not override:
        raise ConfigError(
            "VERSION",
            f"{version.name} version {version.version} has no measured acceptance length",
            "measure it with pipelines/evaluate.py, or say why with --override 'REASON'",
        )


def measured_tag(vllm: str | None) -> str:
    """The tag of a version whose AL was measured again, and found as recorded, on another vLLM."""
    return f"{registry.REPRODUCED_TAG}{vllm}"


def is_stale(version: ModelVersion, installed_vllm: str | None) -> bool:
    """Whether what is known of the version was measured on another vLLM than this one."""
    return version.tags.get(registry.VLLM_TAG) != installed_vllm and measured_tag(installed_vllm) not in version.tags


def warn_if_stale(client: MlflowClient, name: str, installed_vllm: str | None) -> None:
    """Say in the log that the champion was measured on another vLLM; nothing where there is no champion."""
    version = registry.champion(client, name)
    if version is not None and is_stale(version, installed_vllm):
        log.warning(
            "the champion of %s, version %s, is stale: measured on vLLM %s, installed is %s; "
            "pipelines/evaluate.py --regression champion measures it again",
            name, version.version, version.tags.get(registry.VLLM_TAG, "unknown"), installed_vllm,
        )  # fmt: skip


def _row(version: ModelVersion, installed_vllm: str | None) -> VersionRow:
    tags = version.tags
    measured_on = tags.get(registry.VLLM_TAG, "unknown")
    return VersionRow(
        version=int(version.version),
        aliases=tuple(sorted(version.aliases)),
        verdict=tags.get(registry.VERDICT_TAG, "unknown"),
        num_speculative_tokens=tags.get(registry.NUM_SPECULATIVE_TOKENS_TAG, "unknown"),
        al=recorded_al(version),
        vllm=measured_on,
        is_stale=is_stale(version, installed_vllm),
        target=tags.get(registry.TARGET_MODEL_TAG, "unknown"),
        head_digest=tags.get(registry.HEAD_DIGEST_TAG, "unknown"),
        created_at=datetime.fromtimestamp(version.creation_timestamp / 1000, UTC),
    )


def recorded_al(version: ModelVersion) -> float | None:
    """As measured when it was registered; None where that is missing or no finite number."""
    try:
        al = float(version.tags.get(registry.AL_TAG, ""))
    except ValueError:
        return None
    return al if math.isfinite(al) else None


def _check_target(version: ModelVersion, champion: ModelVersion) -> None:
    tag = registry.TARGET_DIGEST_TAG
    if version.tags.get(tag) != champion.tags.get(tag):
        raise ConfigError(
            "VERSION",
            f"{version.name} version {version.version} drafts for another target than the champion, version {champion.version}",
            "give the heads of another target a name of their own (publish.name)",
        )
