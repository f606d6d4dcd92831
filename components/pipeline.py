"""Running a list of stages in order: what exists is kept, what is missing is made, `--plan` only says which is which."""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from components.config import Settings
from components.forecast import TARGET_SAMPLE_S, Stopwatch, free_bytes
from components.planning import NoRoom, Plan, check_room, in_units, make_plan
from components.section import ConfigError
from components.stage import Artifact, Stage, find_artifact, run_stage
from components.storage import IN_MEMORY_BYTES, Location
from components.target.sample import target_operations_per_s
from components.tracking import Tracker

log = logging.getLogger("aerie")


@dataclass(frozen=True)
class Selection:
    """Which stages to run: from `first` (earlier ones must exist) to `last`, `forced` ones again from nothing."""

    first: str | None = None
    last: str | None = None
    forced: tuple[str, ...] = ()

    def check(self, names: Sequence[str]) -> None:
        """Raises ConfigError for a name that is no stage, or a range that is empty."""
        for flag, given in (("--from", self.first), ("--until", self.last), *(("--force", f) for f in self.forced)):
            if given is not None and given not in names:
                raise ConfigError(flag, f"there is no stage {given!r}", f"use one of {', '.join(names)}")
        if self.first and self.last and names.index(self.first) > names.index(self.last):
            raise ConfigError("--from", f"{self.first} comes after --until {self.last}", "swap the two")


@dataclass
class Pipeline:
    stages: Sequence[Stage]
    settings: Settings
    storage: Location
    tracker: Tracker
    before_first_run: Callable[[Sequence[str]], None] = lambda stages: None
    """Called once before the first stage that has to run, with the names of all that have to (connects to Ray)."""
    artifacts: dict[str, Artifact] = field(default_factory=dict, init=False)
    made: list[str] = field(default_factory=list, init=False)
    """Names of the stages that this run had to make."""

    def run(self, selection: Selection) -> Mapping[str, Artifact]:
        """Run the selected stages; what is finished already is only read.

        Raises:
            ConfigError: a selection that names no stage, or skips one that was never run; settings that a selected stage
                refuses; a storage that cannot be read, or cannot hold what the run would write.
        """
        self._check(selection)
        before_first = selection.first is not None
        for number, stage in enumerate(self.stages, 1):
            before_first = before_first and stage.name != selection.first
            self._step(stage, f"[{number}/{len(self.stages)}] {stage.name}", selection, must_exist=before_first)
            if stage.name == selection.last:
                break
        return self.artifacts

    def plan(self, selection: Selection) -> Plan:
        """What a run of the selected stages would do and take; writes nothing."""
        self._check(selection)
        return make_plan(self._until(selection), {}, self.storage, selection.forced, self._stopwatch())

    def finished(self) -> Mapping[str, Artifact]:
        """The outputs of these settings that exist already, by stage; runs nothing."""
        for stage in self.stages:
            if all(name in self.artifacts for name in stage.inputs):
                found = find_artifact(stage, self.artifacts, self.storage)
                if found is not None:
                    self.artifacts[stage.name] = found
        return self.artifacts

    def _stopwatch(self) -> Stopwatch:
        """Measures the target itself where an earlier run left it."""
        dtype = self.settings.target.dtype
        found = [find_artifact(stage, {}, self.storage) for stage in self.stages if stage.name == "target"]
        if not found or found[0] is None:
            return Stopwatch(dtype)
        return Stopwatch(dtype, measure_target=partial(target_operations_per_s, found[0], dtype, TARGET_SAMPLE_S))

    def _until(self, selection: Selection, start: int = 0) -> Sequence[Stage]:
        names = [stage.name for stage in self.stages]
        return self.stages[start : names.index(selection.last) + 1 if selection.last else None]

    def _before_first_run(self, stage: Stage, selection: Selection) -> None:
        """No engine starts for what the disk cannot hold, or for a run that the cluster cannot finish."""
        rest = self._until(selection, start=[s.name for s in self.stages].index(stage.name))
        plan = make_plan(rest, self.artifacts, self.storage, selection.forced)
        try:
            plan.check_disk()
        except NoRoom as error:
            if self.settings.storage.refuse_overfull:
                raise
            log.warning("%s; going on, as storage.refuse_overfull is false", error.problem)
        self.before_first_run([planned.name for planned in plan.stages if planned.state != "done"])

    def _check(self, selection: Selection) -> None:
        """What the user can mend is said before anything runs."""
        selection.check([stage.name for stage in self.stages])
        self.storage.check()
        for stage in self._until(selection):
            stage.check()

    def _step(self, stage: Stage, title: str, selection: Selection, must_exist: bool) -> None:
        forced = stage.name in selection.forced
        found = None if forced else find_artifact(stage, self.artifacts, self.storage)
        if found is not None:
            log.info("%s: done already (%s)", title, found.fingerprint)
            self.artifacts[stage.name] = found
            return
        if must_exist:
            raise ConfigError(
                "--from", f"{stage.name} was never run with these settings", f"start at --from {stage.name} or earlier"
            )
        if not self.made:
            self._before_first_run(stage, selection)
        log.info("%s: running", title)
        artifact, _ = run_stage(
            stage, self.artifacts, self.storage, self.settings.storage.lease_ttl_s, self.tracker.report, forced
        )
        self.made.append(stage.name)
        self.artifacts[stage.name] = artifact
        log.info(
            "%s: done in %.0f s, %.1f MB%s",
            title,
            artifact.manifest["duration_s"],
            artifact.manifest["bytes"] / 1e6,
            _rows(artifact),
        )


def check_disk(storage: Location, needed_bytes: int) -> None:
    """Raises ConfigError when a local storage has less room than a stage will write."""
    check_room(storage, needed_bytes, free_bytes(storage))


def check_scratch(storage: Location, file_bytes: int) -> None:
    """Raises ConfigError when a file on its way to S3 has no room where it waits on this machine (on its nodes a cluster may have other disks)."""
    scratch = Location(tempfile.gettempdir())
    free = free_bytes(scratch)
    if not storage.is_local and free is not None and IN_MEMORY_BYTES < file_bytes > free:
        raise ConfigError(
            "TMPDIR",
            f"{scratch.uri} has {in_units(free, 'B')} free; a file on its way to S3 waits there, and one takes about {in_units(file_bytes, 'B')}",
            "free some space there, or name another folder in TMPDIR, where `ray start` runs as well",
        )


def _rows(artifact: Artifact) -> str:
    rows = artifact.manifest["rows"]
    if not rows:
        return ""
    lost = {**rows["dropped"], **rows["failed"]}
    return f", {rows['kept']} rows kept, {rows['truncated']} truncated" + (f", lost {lost}" if lost else "")
