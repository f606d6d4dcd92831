"""Which stored outputs are still needed, and removing the others.

Needed is what a root needs: a registered version that holds an alias, a stage that runs, a pinned output, one that was finished a
moment ago; and whatever the manifest of a needed output names as its input.
"""

import json
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from components.lease import Lease, LeaseHeld, describe_holder, live_holder
from components.publishing.registry import aliased_versions
from components.section import ConfigError
from components.stage import LEASE, MANIFEST, PIN, BrokenManifest, read_artifact
from components.storage import Location

log = logging.getLogger("aerie")

FINGERPRINT = re.compile(r"[0-9a-f]{16}")
BETWEEN_STAGES_S = 600.0
"""A run that has just finished a stage holds no lease until the next one starts."""
NAMES_ITS_VERSION = ("publish", "champion", "challenger")
"""Stages whose output belongs to the registered version that its facts name."""

Place = tuple[str, str]
"""(stage, fingerprint)."""


@dataclass(frozen=True)
class StoredOutput:
    stage: str
    fingerprint: str
    location: Location
    bytes: int
    manifest: Mapping[str, Any] | None
    """None: unfinished."""
    holder: Mapping[str, Any] | None
    """Of its lease: the run that is writing it."""
    is_pinned: bool
    problem: BrokenManifest | None = None
    """Why it counts as unfinished although there is a manifest."""

    @property
    def place(self) -> Place:
        return self.stage, self.fingerprint

    @property
    def inputs(self) -> list[Place]:
        """What it was, or is being, made of."""
        record = self.manifest or (self.holder or {}).get("note", {})
        return [(stage, read["fingerprint"]) for stage, read in record.get("inputs", {}).items()]

    @property
    def age_s(self) -> float | None:
        """Since it was finished."""
        if self.manifest is None:
            return None
        return (datetime.now(UTC) - datetime.fromisoformat(self.manifest["finished_at"])).total_seconds()


def stored_outputs(storage: Location, lease_ttl_s: float) -> list[StoredOutput]:
    """Every output below a storage, finished or not; folders that no stage made are left out."""
    return [
        _look_at(stage, name, storage.join(stage, name), lease_ttl_s)
        for stage in storage.folders()
        for name in storage.join(stage).folders()
        if FINGERPRINT.fullmatch(name)
    ]


def needed_outputs(
    outputs: Sequence[StoredOutput],
    client: MlflowClient,
    keep: Iterable[str] = (),
    between_stages_s: float = BETWEEN_STAGES_S,
) -> dict[Place, str]:
    """Why each needed output is needed.

    Args:
        outputs: Of one storage.
        client: Of the MLflow server whose aliased versions are kept.
        keep: Fingerprints of outputs to keep.
        between_stages_s: Younger outputs are kept.

    Raises:
        ConfigError: a fingerprint to keep that is not there, or a version whose provenance, or a needed output whose manifest, cannot be read:
            what they were made of is needed, and unknown.
    """
    _check_kept(outputs, keep)
    reasons: dict[Place, str] = {}
    for place, reason in [*_registered_roots(outputs, client), *_own_roots(outputs, set(keep), between_stages_s)]:
        reasons.setdefault(place, reason)
    there = {output.place: output for output in outputs}
    pending = list(reasons)
    while pending:
        output = there.get(pending.pop())
        if output is None:
            continue
        if output.problem is not None:
            raise output.problem
        for place in output.inputs:
            if place not in reasons:
                reasons[place] = f"read by {output.stage}/{output.fingerprint}"
                pending.append(place)
    return reasons


def places_in_use(storage: Location, lease_ttl_s: float) -> set[Place]:
    """What the stages that run at this moment write, and all that their runs have made so far: a look at the leases only."""
    places: set[Place] = set()
    for stage in storage.folders():
        for name in filter(FINGERPRINT.fullmatch, storage.join(stage).folders()):
            holder = live_holder(storage.join(stage, name, LEASE), lease_ttl_s)
            if holder is not None:
                read = holder.get("note", {}).get("inputs", {})
                places |= {(stage, name), *((of, artifact["fingerprint"]) for of, artifact in read.items())}
    return places


def remove_output(output: StoredOutput, lease_ttl_s: float) -> bool:
    """Remove it, its manifest first: half removed it no longer exists. False when a run began to write it meanwhile."""
    try:
        with Lease(output.location.join(LEASE), lease_ttl_s):
            output.location.join(MANIFEST).delete()
            for name in output.location.sizes_bytes():
                if not name.startswith(LEASE):
                    output.location.join(name).delete()
            for name in output.location.folders():
                output.location.join(name).delete()
    except LeaseHeld as error:
        log.warning("%s stays: %s", output.location.uri, error)
        return False
    output.location.delete_if_empty()
    return True


def _look_at(stage: str, name: str, location: Location, lease_ttl_s: float) -> StoredOutput:
    artifact, problem = None, None
    try:
        artifact = read_artifact(stage, location)
    except BrokenManifest as error:
        problem = error
        log.warning("%s; it is taken for unfinished", error)
    return StoredOutput(
        stage=stage,
        fingerprint=name,
        location=location,
        bytes=sum(location.sizes_bytes().values()),
        manifest=artifact.manifest if artifact else None,
        holder=live_holder(location.join(LEASE), lease_ttl_s),
        is_pinned=location.join(PIN).exists(),
        problem=problem,
    )


def _check_kept(outputs: Sequence[StoredOutput], keep: Iterable[str]) -> None:
    there = {output.fingerprint for output in outputs}
    for fingerprint in keep:
        if fingerprint not in there:
            raise ConfigError("--keep", f"there is no output {fingerprint}", "give a fingerprint that --gc lists")


def _own_roots(outputs: Sequence[StoredOutput], keep: set[str], young_s: float) -> Iterator[tuple[Place, str]]:
    for output in outputs:
        if output.is_pinned:
            yield output.place, f"pinned ({PIN})"
        if output.fingerprint in keep:
            yield output.place, "pinned (--keep)"
        if output.holder is not None:
            yield output.place, f"being written by {describe_holder(output.holder)}"
        if output.age_s is not None and output.age_s < young_s:
            yield output.place, f"finished {output.age_s / 60:.0f} minutes ago: its run may be between two stages"


def _registered_roots(outputs: Sequence[StoredOutput], client: MlflowClient) -> Iterator[tuple[Place, str]]:
    for alias, version in aliased_versions(client):
        reason = f"{alias} of {version.name}, version {version.version}"
        for stage, recorded in _provenance(client, version)["stages"].items():
            yield (stage, recorded["fingerprint"]), reason
        for output in outputs:
            facts = output.manifest["facts"] if output.manifest and output.stage in NAMES_ITS_VERSION else {}
            if (facts.get("name"), str(facts.get("version"))) == (version.name, str(version.version)):
                yield output.place, reason


def _provenance(client: MlflowClient, version: ModelVersion) -> Mapping[str, Any]:
    run_id, _, bundle = (version.source or "").removeprefix("runs:/").partition("/")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            file = Path(client.download_artifacts(run_id, f"{bundle}/provenance.json", scratch))
        except (MlflowException, OSError) as error:
            raise ConfigError(
                "publish.name",
                f"what {version.name} version {version.version} was made of cannot be read ({str(error).splitlines()[0]})",
                "restore its bundle in MLflow, or take its aliases away: without it nothing can be removed safely",
            ) from None
        return json.loads(file.read_bytes())
