"""What a run would do: which stages are done, what the others are expected to take, and whether the disk can hold it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from components.forecast import Duration, Forecast, Stopwatch, free_bytes
from components.section import ConfigError
from components.stage import Artifact, BrokenManifest, Stage, find_artifact, read_artifact
from components.storage import Location

log = logging.getLogger("aerie")

Done = tuple[float, float | None]
"""(seconds, tokens) of a finished output."""


@dataclass(frozen=True)
class PlannedStage:
    name: str
    state: Literal["done", "run", "resume"]
    """`resume`: an earlier run left finished files of it."""
    forecast: Forecast
    """Of a stage that is done: what it took."""
    detail: str
    bytes_there: int = 0
    """What an earlier run left of it."""
    duration: Duration | None = None

    @property
    def bytes_to_write(self) -> int:
        return max(0, (self.forecast.bytes or 0) - self.bytes_there) if self.state != "done" else 0


@dataclass(frozen=True)
class Plan:
    stages: Sequence[PlannedStage]
    storage: Location
    free_bytes: int | None
    """None: the storage does not say (S3)."""

    @property
    def bytes_to_write(self) -> int:
        return sum(stage.bytes_to_write for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Of all stages whose time is known."""
        return sum(stage.duration.seconds for stage in self.stages if stage.duration)

    def check_disk(self) -> None:
        """Raises ConfigError when the disk cannot hold what will be written."""
        check_room(self.storage, self.bytes_to_write, self.free_bytes)


def make_plan(
    stages: Sequence[Stage],
    artifacts: Mapping[str, Artifact],
    storage: Location,
    forced: Sequence[str] = (),
    stopwatch: Stopwatch | None = None,
) -> Plan:
    """Look at every stage in order; writes nothing.

    Args:
        stages: The ones to plan, in order.
        artifacts: Outputs that are known already.
        storage: Where outputs are and go.
        forced: Names of stages that are made again in any case.
        stopwatch: Tells how long; None: nobody asks.
    """
    known, expected, planned = dict(artifacts), dict[str, Forecast](), []
    for stage in stages:
        has_inputs = all(name in known for name in stage.inputs)
        found = find_artifact(stage, known, storage) if has_inputs and stage.name not in forced else None
        if found is not None:
            known[stage.name] = found
            planned.append(_done(stage, found))
            continue
        there = storage.join(stage.name, stage.fingerprint(known)).sizes_bytes() if has_inputs else {}
        forecast = expected[stage.name] = stage.forecast(known, expected)
        planned.append(
            PlannedStage(
                name=stage.name,
                state="resume" if there and stage.name not in forced else "run",
                forecast=forecast,
                detail=stage.plan(known),
                bytes_there=sum(there.values()),
                duration=stopwatch.duration(forecast, last_run(stage, known, storage)) if stopwatch else None,
            )
        )
    return Plan(planned, storage, free_bytes(storage))


class NoRoom(ConfigError):
    """The disk has less than a run is expected to write."""


def check_room(storage: Location, needed_bytes: int, available_bytes: int | None) -> None:
    """Raises NoRoom when less is available than needed; None: nobody knows."""
    if available_bytes is not None and needed_bytes > available_bytes:
        raise NoRoom(
            "storage.uri",
            f"{storage.uri} has {in_units(available_bytes, 'B')} free, the run writes about {in_units(needed_bytes, 'B')}",
            "free some disk (`pipelines/data.py --gc` lists outputs that nothing needs), lower data.max_prompts, name "
            "another place, or set storage.refuse_overfull=false if answers are shorter than data.max_new_tokens",
        )


def last_run(stage: Stage, known: Mapping[str, Artifact], storage: Location) -> Done | None:
    """What the newest finished output of this stage took, of those of the same target that were made in one go."""
    runs = [
        artifact.manifest for artifact in _finished(stage.name, storage) if not artifact.manifest.get("resumed", False)
    ]
    if "target" in stage.inputs:
        digest = known["target"].digest if "target" in known else None
        # a stage that was left out, or an older version of it, may have read less
        runs = [manifest for manifest in runs if manifest["inputs"].get("target", {}).get("digest") == digest]
    if not runs:
        return None
    newest = max(runs, key=lambda manifest: manifest["finished_at"])
    return newest["duration_s"], stage.tokens_done(newest)


def in_units(number: float | None, unit: str = "") -> str:
    """`68.0 k`, `1.4 GB`; a dash for what is not known."""
    if number is None:
        return "–"
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip()


def in_time(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _finished(stage_name: str, storage: Location) -> Iterator[Artifact]:
    folder = storage.join(stage_name)
    for name in folder.folders():
        try:
            artifact = read_artifact(stage_name, folder.join(name))
        except BrokenManifest as error:
            log.warning("%s; what it took is not looked at", error)
            continue
        if artifact is not None:
            yield artifact


def _done(stage: Stage, artifact: Artifact) -> PlannedStage:
    rows, tokens = artifact.manifest["rows"], stage.tokens_done(artifact.manifest)
    forecast = Forecast(
        rows=rows["kept"] + rows["truncated"] if rows else None,
        tokens=None if tokens is None else round(tokens),
        bytes=artifact.manifest["bytes"],
    )
    return PlannedStage(stage.name, "done", forecast, f"in {artifact.location.uri}")
