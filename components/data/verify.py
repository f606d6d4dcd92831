"""Checking stored outputs from end to end: files against their manifest, every row of responses and features, rows against each other.

One row of features, or one part of responses, is in memory at a time; nothing is written and no Ray is needed.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from components.data.documents import Turns, merge_turns
from components.data.parts import CorruptPart, PartAccount, open_part, part_names, read_account, read_columns
from components.data.row_checks import (
    FeatureWidths,
    SeenKeys,
    difference_problems,
    document_problems,
    response_problems,
)
from components.data.shards import read_row
from components.stage import read_artifact
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
        artifact = read_artifact(output.uri.rsplit("/", 2)[-2], output)
        if artifact is None:
            log.warning(
                "%s has no manifest (unfinished): its rows are checked, its files have no checksums", output.uri
            )
        manifest = artifact.manifest if artifact else {}
        self._check_files(output, manifest.get("files", {}))
        parts = _Parts(output, manifest, self._row_found)
        for name in part_names(output):
            self._progress(output)
            try:
                self.rows += parts.check(name)
            except CorruptPart as error:
                self._find(error.part.uri, error.row, None, error.problem)
        for problem in parts.total_problems():
            self._find(output.uri, None, None, problem)

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

    def _row_found(self, part: Location, row: int, key: str | None, problem: str) -> None:
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
    if read_artifact("", root) is not None or part_names(root):
        yield root
        return
    names = root.files()
    folders = {
        name.rpartition("/")[0] for name in names if name.rpartition("/")[2].startswith(("_manifest.json", "part-"))
    }
    yield from (root.join(folder) for folder in sorted(folders))


class _Parts:
    """The parts of one output, checked one by one, and what must hold for all of them together."""

    def __init__(
        self, output: Location, manifest: Mapping[str, Any], found: Callable[[Location, int, str | None, str], None]
    ) -> None:
        self._output, self._found = output, found
        self._keys = SeenKeys()
        self._account = PartAccount()
        self._expected_rows = manifest.get("rows")
        facts = manifest.get("facts", {})
        self._widths = FeatureWidths.of(facts) if "num_aux_layers" in facts else None
        self._responses = self._sibling(manifest, "responses")

    def check(self, name: str) -> int:
        """Check every row of a part; how many it has."""
        part = self._output.join(name)
        account = read_account(part)
        self._account.add(account)
        with open_part(part) as file:
            columns = set(file.schema_arrow.names)
            problems = self._features(part, file, account) if "aux_hidden" in columns else self._answers(part, file)
            for row, key, problem in problems:
                self._found(part, row, key, problem)
            stored = file.metadata.num_rows
        counted = account.figures["documents"] if "aux_hidden" in columns else account.kept + account.truncated
        if stored != counted:
            raise CorruptPart(part, None, f"it has {stored} rows, its account says {counted}")
        return stored

    def total_problems(self) -> Iterator[str]:
        """What is wrong with the accounts of all parts together."""
        if self._expected_rows is None or not part_names(self._output):
            return
        kept = self._account.kept + self._account.truncated
        expected = self._expected_rows["kept"] + self._expected_rows["truncated"]
        if kept != expected:
            yield f"its parts account for {kept} kept rows, the manifest for {expected}"

    def _answers(self, part: Location, file: pq.ParquetFile) -> Iterator[tuple[int, str | None, str]]:
        for row, turn in enumerate(_rows(file)):
            yield from ((row, turn["key"], problem) for problem in response_problems(turn))
            yield from self._repeated(row, turn["key"])

    def _features(
        self, part: Location, file: pq.ParquetFile, account: PartAccount
    ) -> Iterator[tuple[int, str | None, str]]:
        expected = self._documents(part.name)
        index = file.read(columns=["key", "num_tokens"]).to_pylist()
        for row, entry in enumerate(index):
            yield from self._repeated(row, entry["key"])
            try:
                document = read_row(part, file, row)
            except (CorruptPart, ValueError, RuntimeError) as error:
                yield row, entry["key"], getattr(error, "problem", str(error))
                continue
            yield from ((row, entry["key"], p) for p in document_problems(document, entry["num_tokens"], self._widths))
            if expected is not None:
                turns = expected.get(entry["key"])
                yield from ((row, entry["key"], p) for p in difference_problems(document, turns))
        lost = {entry["key"] for entry in account.quarantine}
        for key in sorted((expected or {}).keys() - {entry["key"] for entry in index} - lost):
            yield len(index), key, "the responses have this document, and it is neither here nor in the quarantine"

    def _repeated(self, row: int, key: str) -> Iterator[tuple[int, str | None, str]]:
        if not self._keys.add(key):
            yield row, key, "the set has this key already"

    def _documents(self, name: str) -> dict[str, Turns] | None:
        """The documents that the part was to be made of; None where the responses are not in this storage."""
        if self._responses is None or not self._responses.join(name).exists():
            return None
        return {turns.key: turns for turns in merge_turns(read_columns(self._responses.join(name), None).to_pylist())}

    def _sibling(self, manifest: Mapping[str, Any], stage: str) -> Location | None:
        read = manifest.get("inputs", {}).get(stage)
        if read is None:
            return None
        root = self._output.uri.rstrip("/").rsplit("/", 2)[0]
        folder = Location(root).join(stage, read["fingerprint"])
        if not folder.exists():
            log.warning("%s is not there: the rows of %s are not compared with it", folder.uri, self._output.uri)
            return None
        return folder


def _file_problem(file: Location, num_bytes: int | None, entry: Mapping[str, Any]) -> str | None:
    if num_bytes is None:
        return "the manifest lists it, and it is not there"
    if num_bytes != entry["bytes"]:
        return f"it has {num_bytes} bytes, the manifest says {entry['bytes']}"
    if file.sha256() != entry["sha256"]:
        return "its sha256 is not the manifest's"
    return None


def _rows(file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    for group in range(file.num_row_groups):
        yield from file.read_row_group(group).to_pylist()
