"""Where a head comes from: the outputs it was made of, the code, the versions, the data and the licences."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from components.data.sources import BUILTIN
from components.publishing.evidence import Evidence
from components.stage import Artifact
from components.target.resolve import BUNDLED_PREFIX
from components.target.stages import target_path

RECORDED = ("fingerprint", "digest", "config", "extra", "rows", "versions", "git", "finished_at", "duration_s")
"""Keys of a manifest that say where an output comes from."""
BUNDLED_LICENCE = "apache-2.0"
OWN_LICENCE = "apache-2.0"


def provenance(evidence: Evidence) -> dict[str, Any]:
    """Everything that led to the head (JSON); the same for the same outputs."""
    target = evidence.target
    return {
        "target": {key: target[key] for key in ("model", "revision", "digest", "architecture")},
        "licences": licences(evidence),
        "stages": {name: _stage(artifact) for name, artifact in evidence.artifacts.items()},
        "settings": evidence.settings.model_dump(mode="json", exclude={"resources", "storage", "mlflow"}),
    }


def licences(evidence: Evidence) -> dict[str, str]:
    """The licence of each thing that the head was made of; the head holds rows of the target's own weights."""
    is_own = [source.path for source in evidence.settings.data.prompts] == [BUILTIN]
    return {
        "target": _target_licence(evidence.artifacts["target"]),
        "prompts": OWN_LICENCE if is_own else "of the sources named in data.prompts",
        "head": "derived from the target's weights and answers: the target's licence applies",
    }


def _target_licence(target: Artifact) -> str:
    model = target.facts["model"]
    if model.startswith(BUNDLED_PREFIX):
        return BUNDLED_LICENCE
    card = target_path(target) / "README.md"
    return _licence_of_card(card) or f"not stated in its folder: see {model}"


def _licence_of_card(card: Path) -> str | None:
    metadata: Mapping[str, Any] = (metadata_load(card) if card.is_file() else None) or {}
    return metadata.get("license")


def _stage(artifact: Artifact) -> dict[str, Any]:
    return {key: artifact.manifest[key] for key in RECORDED}
