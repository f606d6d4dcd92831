"""Checking stored outputs from end to end: files against their manifest, every row of responses and features, rows against each other.

One row of features, or one part of responses, is in memory at a time; nothing is written and no Ray is needed.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from components.data.part_checks import PartChecks
from components.data.parts import CorruptPart, part_names
from components.stage import MANIFEST, Artifact, BrokenManifest, read_artifact
from components.storage import Location

log = logging.getLogger("aerie")

PROGRESS_INTERVAL_S = 10.0


@dataclass(frozen=True)
class Finding:
    """Something wrong: in a file, or in one row of it."""

    file: str
    row: int | None
    key: str | None
    problem: str

    def __str__(self) -> str:
        place = "" if self.row is None else f", row {self.row}"
        named = "" if self.key is None else f", key {self.key}"
        return f"{self.file}{place}{named}: {self.problem}"


@dataclass
class Verification:
    """Checks outputs one after another; every finding is handed to `found` at once."""

    found: Callable[[Finding], None]
    sets: int = 0
    files: int = 0
    rows: int = 0
    bytes: int = 0
    findings: int = 0
    _spoken_at_s: float = field(default_factory=time.monotonic)
    _started_at_s: float = field(default_factory=time.monotonic)

    def check(self, root: Location) -> None:
        """Check the output at `root`, or every output below it.

        Raises:
            FileNotFoundError: there is none.
        """
        outputs = list(find_outputs(root))
        if not outputs:
            raise FileNotFoundError(f"{root.uri} holds no stage's output")
        for output in outputs:
            self._check_output(output)
            self.sets += 1

    def summary(self) -> str:
        elapsed_s = time.monotonic() - self._started_at_s
        return (
            f"{self.sets} outputs, {self.files} files, {self.rows} rows, {self.bytes / 1e6:.1f} MB "
            f"in {elapsed_s:.1f} s: {self.findings or 'no'} bad"
        )

    def _check_output(self, output: Location) -> None:
        artifact = self._artifact(output)
        if artifact is None:
            log.warning(
                "%s has no manifest to compare with: its rows are checked, its files have no checksums", output.uri
            )
        manifest = artifact.manifest if artifact else {}
        self._check_files(output, manifest.get("files", {}))
        parts = PartChecks(output, manifest, self._row_found)
        for name in part_names(output):
            self._progress(output)
            try:
                self.rows += parts.check(name)
            except CorruptPart as error:
                self._find(error.part.uri, error.row, None, error.problem)
        for problem in parts.total_problems():
            self._find(output.uri, None, None, problem)

    def _artifact(self, output: Location) -> Artifact | None:
        try:
            return read_artifact(output.uri.rsplit("/", 2)[-2], output)
        except BrokenManifest as error:
            self._find(error.path, None, None, error.problem)
            return None

    def _check_files(self, output: Location, expected: Mapping[str, Mapping[str, Any]]) -> None:
        there = output.sizes_bytes()
        for name, entry in expected.items():
            self._progress(output)
            self.files += 1
            self.bytes += there.get(name, 0)
            problem = _file_problem(output.join(name), there.get(name), entry)
            if problem:
                self._find(output.join(name).uri, None, None, problem)
        unlisted = sorted(set(part_names(output)) - set(expected)) if expected else []
        for name in unlisted:
            self._find(output.join(name).uri, None, None, "the manifest does not list it")

    def _row_found(self, part: Location, row: int | None, key: str | None, problem: str) -> None:
        self._find(part.uri, row, key, problem)

    def _find(self, file: str, row: int | None, key: str | None, problem: str) -> None:
        self.findings += 1
        self.found(Finding(file, row, key, problem))

    def _progress(self, output: Location) -> None:
        now_s = time.monotonic()
        if now_s - self._spoken_at_s < PROGRESS_INTERVAL_S:
            return
        self._spoken_at_s = now_s
        rate = self.bytes / (now_s - self._started_at_s) / 1e6
        log.info(
            "%s: %d files, %d rows, %.1f MB checked, %.0f MB/s",
            output.uri,
            self.files,
            self.rows,
            self.bytes / 1e6,
            rate,
        )


def find_outputs(root: Location) -> Iterator[Location]:
    """`root` itself if it is an output, else the outputs of every stage (or of one) below it."""
    if root.join(MANIFEST).exists() or part_names(root):
        yield root
        return
    names = root.files()
    folders = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2].startswith((MANIFEST, "part-"))}
    yield from (root.join(folder) for folder in sorted(folders))


def _file_problem(file: Location, num_bytes: int | None, entry: Mapping[str, Any]) -> str | None:
    if num_bytes is None:
        return "the manifest lists it, and it is not there"
    if num_bytes != entry["bytes"]:
        return f"it has {num_bytes} bytes, the manifest says {entry['bytes']}"
    if file.sha256() != entry["sha256"]:
        return "its sha256 is not the manifest's"
    return None
