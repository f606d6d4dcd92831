"""A stage: a name, the outputs it reads, the settings it depends on, and one function that writes its output.

Its identity is the hash of its inputs, so the same run again finds the output and does nothing. `_manifest.json` is written last:
it is what makes an output exist. A killed run finds its finished files in the same place and goes on.
"""

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.forecast import Forecast
from components.lease import Lease
from components.rows import RowAccount
from components.section import ConfigError
from components.storage import NO_SPACE_TEXTS, TEMPORARY_MARK, Location, full_place, is_full
from components.versions import git_commit, installed_versions

log = logging.getLogger("aerie")

MANIFEST = "_manifest.json"
LEASE = "_lease.json"
QUARANTINE = "quarantine.jsonl"
"""A line for every row that a stage lost. It is listed in the manifest, and no content that a later stage reads."""
PIN = "_pin"
"""A file of this name in an output's folder keeps it, and what it was made of, from `--gc`."""
CACHE = Path.home() / ".cache" / "aerie"
"""Copies of models and heads from S3, on every machine that needs them as files."""


class InputChanged(Exception):
    """What a stage depends on (a user's file, the champion) changed while it ran: its output belongs to neither."""


class BrokenManifest(ConfigError):
    """A manifest that a disk or a hand has damaged: nobody knows what the output holds."""

    def __init__(self, manifest: Location, problem: str) -> None:
        super().__init__(manifest.uri, problem, "delete it: the stage then goes on from the files that are there")


@dataclass(frozen=True)
class Outcome:
    """What a stage's function says of its output."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Figures and names for later stages, MLflow and the report (JSON)."""
    rows: RowAccount | None = None


@dataclass(frozen=True)
class Artifact:
    """A finished output."""

    stage: str
    location: Location
    fingerprint: str
    manifest: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """sha256 over the names and contents of the output's files, but for its quarantine."""
        return self.manifest["digest"]

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.manifest["facts"]

    def join(self, *parts: str) -> Location:
        return self.location.join(*parts)

    def local(self, folder: str) -> Path:
        """A folder of the output on this machine's disk: itself, or a checked copy of what lies on S3."""
        prefix = f"{folder}/"
        sums = {
            name.removeprefix(prefix): entry["sha256"]
            for name, entry in self.manifest["files"].items()
            if name.startswith(prefix)
        }
        return self.join(folder).fetch(CACHE / self.digest[:16] / folder, sums)


@dataclass(frozen=True)
class Output:
    """Where a running stage writes; files that an earlier, killed run finished are already there."""

    stage: str
    location: Location
    fingerprint: str
    report: Callable[[Mapping[str, float], int], None]
    """`report({"train/loss": 1.2}, step)`: figures while the stage runs."""

    def join(self, *parts: str) -> Location:
        return self.location.join(*parts)

    @property
    def storage(self) -> Location:
        """Of all stages: this one's output lies two levels below."""
        return Location(self.location.uri.rstrip("/").rsplit("/", 2)[0])


@dataclass(frozen=True)
class Stage:
    name: str
    run: Callable[[Mapping[str, Artifact], Output], Outcome]
    config: Mapping[str, Any]
    """The settings that change the output, and nothing else."""
    inputs: tuple[str, ...] = ()
    """Names of the stages it reads."""
    version: int = 1
    """Raise it when the output's format or meaning changes."""
    extra: Callable[[], Mapping[str, Any]] = dict
    """Other identities, looked up when the stage's turn comes: sha256 of user files, vLLM and device."""
    extra_for: Callable[[Mapping[str, Artifact]], Mapping[str, Any]] = lambda inputs: {}
    """The same where they depend on what the stage reads: the champion that this very head is compared with."""
    check: Callable[[], None] = lambda: None
    """Raises ConfigError where the settings cannot lead to an output; asked before any stage runs."""
    plan: Callable[[Mapping[str, Artifact]], str] = lambda inputs: ""
    """One line for `--plan`: what it does."""
    forecast: Callable[[Mapping[str, Artifact], Mapping[str, Forecast]], Forecast] = lambda known, expected: Forecast()
    """Rows, tokens, bytes and work, from finished outputs and, where there are none yet, forecasts of the stages before it."""
    tokens_done: Callable[[Mapping[str, Any]], float | None] = lambda manifest: None
    """The tokens that a finished output's time grew with, in the forecast's sense, from its manifest."""

    def identity(self, artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
        """All that the output depends on."""
        inputs = {name: artifacts[name] for name in self.inputs}
        return {
            "name": self.name,
            "version": self.version,
            "config": dict(self.config),
            "inputs": {name: artifact.digest for name, artifact in inputs.items()},
            "extra": {**self.extra(), **self.extra_for(inputs)},
        }

    def fingerprint(self, artifacts: Mapping[str, Artifact]) -> str:
        return fingerprint_of(self.identity(artifacts))


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def find_artifact(stage: Stage, artifacts: Mapping[str, Artifact], storage: Location) -> Artifact | None:
    """The finished output of `stage` on these inputs, if there is one.

    Raises:
        BrokenManifest: there is, but for its manifest.
    """
    fingerprint = stage.fingerprint(artifacts)
    return read_artifact(stage.name, storage.join(stage.name, fingerprint))


def read_artifact(stage_name: str, location: Location) -> Artifact | None:
    """The finished output at a place, if there is one.

    Raises:
        BrokenManifest: there is, but for its manifest.
    """
    file = location.join(MANIFEST)
    if not file.exists():
        return None
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as error:
        raise BrokenManifest(file, f"it is no JSON ({error})") from None
    if not isinstance(manifest, dict):
        raise BrokenManifest(file, "it is no JSON object")
    return Artifact(stage_name, location, location.name, manifest)


def run_stage(
    stage: Stage,
    artifacts: Mapping[str, Artifact],
    storage: Location,
    lease_ttl_s: float,
    report: Callable[[Mapping[str, float], int], None] = lambda figures, step: None,
    force: bool = False,
) -> tuple[Artifact, bool]:
    """The stage's output and whether it had to be made; `force` makes it again from nothing.

    Raises:
        LeaseHeld: another live run is writing this output.
        LeaseLost: it was taken over by another run meanwhile.
        BrokenManifest: the output has one, and `force` is not given.
        ConfigError: the disk of the storage is full; finished files stay, and the same run goes on with them.
        InputChanged: what the stage depends on is no longer what it was at its start.
    """
    identity = stage.identity(artifacts)
    location = storage.join(stage.name, fingerprint_of(identity))
    found = None if force else read_artifact(stage.name, location)
    if found is not None:
        return found, False
    try:
        # Of all that the run has made, not of the inputs only: a later stage may read what this one does not.
        with Lease(location.join(LEASE), lease_ttl_s, note={"inputs": _fingerprints(artifacts)}) as lease:
            found = None if force else read_artifact(stage.name, location)  # another run may have finished it meanwhile
            if found is not None:
                return found, False
            if force:
                _clear(location)
            return _make(stage, identity, artifacts, Output(stage.name, location, location.name, report), lease), True
    except Exception as error:
        if isinstance(error, ConfigError) or not is_full(error):
            raise
        raise storage_full(stage.name, location, error) from error


def _make(
    stage: Stage, identity: Mapping[str, Any], artifacts: Mapping[str, Artifact], output: Output, lease: Lease
) -> Artifact:
    location = output.location
    started, resumed = time.monotonic(), location.files() != [LEASE]
    _sweep(location)
    inputs = {name: artifacts[name] for name in stage.inputs}
    outcome = stage.run(inputs, output)
    lease.check()
    _discard_if_changed(stage, identity, artifacts, location)
    manifest = _manifest(identity, output.fingerprint, inputs, location, outcome)
    manifest |= {"duration_s": round(time.monotonic() - started, 3), "resumed": resumed}
    text = json.dumps(manifest, indent=1)
    location.join(MANIFEST).write_bytes(text.encode())
    return Artifact(stage.name, location, output.fingerprint, json.loads(text))  # as a later run will read it


def storage_full(stage_name: str, location: Location, error: Exception) -> ConfigError:
    """What to say when a stage cannot write on: where, what its finished files are, and how to go on."""
    place = full_place(error, location)
    kept = [size for name, size in location.sizes_bytes().items() if name != LEASE and TEMPORARY_MARK not in name]
    reason = next((line.strip() for line in str(error).splitlines() if any(t in line for t in NO_SPACE_TEXTS)), "full")
    return ConfigError(
        "storage.uri" if place == location.uri else "TMPDIR",
        f"no space left at {place} ({reason}); {len(kept)} finished files of {stage_name} "
        f"({sum(kept) / 1e6:.1f} MB) and all finished stages stay",
        "free some space there (`pipelines/data.py --gc` lists outputs that nothing needs) and repeat the command: it goes on",
    )


def _sweep(location: Location) -> None:
    """Remove what writers that were killed left half-written; the lease's own heartbeat is at work."""
    for name in location.sizes_bytes():
        if TEMPORARY_MARK in name and not name.startswith(LEASE):
            location.join(name).delete()


def _fingerprints(inputs: Mapping[str, Artifact]) -> dict[str, dict[str, str]]:
    return {name: {"fingerprint": a.fingerprint, "digest": a.digest} for name, a in inputs.items()}


def _clear(location: Location) -> None:
    location.join(MANIFEST).delete()  # first: without its manifest the output no longer exists
    for name in location.files():
        if name not in (LEASE, PIN):
            location.join(name).delete()


def _discard_if_changed(
    stage: Stage, identity: Mapping[str, Any], artifacts: Mapping[str, Artifact], location: Location
) -> None:
    before, after = identity["extra"], stage.identity(artifacts)["extra"]
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if changed:
        _clear(location)
        raise InputChanged(
            f"{stage.name}: {', '.join(changed)} changed while the stage ran, so its output was discarded; repeat the command"
        )


def _manifest(
    identity: Mapping[str, Any],
    fingerprint: str,
    inputs: Mapping[str, Artifact],
    location: Location,
    outcome: Outcome,
) -> dict[str, Any]:
    files = {
        name: {"bytes": location.join(name).size_bytes(), "sha256": location.join(name).sha256()}
        for name in location.files()
        if not _is_private(name)
    }
    return {
        "stage": identity["name"],
        "fingerprint": fingerprint,
        "version": identity["version"],
        "config": identity["config"],
        "extra": identity["extra"],
        "inputs": _fingerprints(inputs),
        "files": files,
        "bytes": sum(entry["bytes"] for entry in files.values()),
        "digest": _content_digest(files),
        "rows": asdict(outcome.rows) if outcome.rows else None,
        "facts": dict(outcome.facts),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": installed_versions(),
        "git": git_commit(),
        "argv": sys.argv,
    }


def _is_private(name: str) -> bool:
    """Leases, manifests and working state (`_checkpoints/...`) are no content."""
    return any(part.startswith("_") for part in name.split("/"))


def _content_digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    lines = "".join(f"{name} {entry['sha256']}\n" for name, entry in sorted(files.items()) if name != QUARANTINE)
    return hashlib.sha256(lines.encode()).hexdigest()
