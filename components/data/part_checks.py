"""Checking the parts of responses or features, row by row, also where they are damaged: what can be read is checked."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import pyarrow.parquet as pq

from components.data.answers import SCHEMA as ANSWERS
from components.data.answers import read_answers
from components.data.documents import Turns, merge_turns
from components.data.parts import (
    CorruptPart,
    PartAccount,
    account_in,
    damage_named,
    open_part,
    part_names,
    read_columns,
)
from components.data.row_checks import (
    FeatureWidths,
    SeenKeys,
    difference_problems,
    document_problems,
    response_problems,
)
from components.data.shards import INDEX_COLUMNS, read_stored_row
from components.storage import Location

log = logging.getLogger("aerie")

Problem = tuple[int, str | None, str]
"""(row, its key as far as it can be read, what is wrong)."""


class PartChecks:
    """The parts of one output, checked one by one, and what must hold for all of them together."""

    def __init__(
        self,
        output: Location,
        manifest: Mapping[str, Any],
        found: Callable[[Location, int | None, str | None, str], None],
    ) -> None:
        self._output, self._found = output, found
        self._keys = SeenKeys()
        self._account = PartAccount()
        self._expected_rows = manifest.get("rows")
        facts = manifest.get("facts", {})
        self._widths = FeatureWidths.of(facts) if "num_aux_layers" in facts else None
        self._responses = self._sibling(manifest, "responses")

    def check(self, name: str) -> int:
        """Check every row of a part; how many it has.

        Raises:
            CorruptPart: something is wrong with the part as a whole.
        """
        part = self._output.join(name)
        with open_part(part) as file:
            holds_features, stored = "aux_hidden" in file.schema_arrow.names, file.metadata.num_rows
            account = self._checked_account(part, file)
            problems = self._features(part, file, account) if holds_features else self._answers(part, file)
            is_intact = True
            for row, key, problem in problems:
                self._found(part, row, key, problem)
                is_intact = False
        if is_intact:  # Parquet's checksums, which name no row: what reads single columns relies on them
            read_columns(part, [*INDEX_COLUMNS, "input_ids"] if holds_features else None)
        if account is None:
            return stored
        counted = account.figures["documents"] if holds_features else account.kept + account.truncated
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

    def _checked_account(self, part: Location, file: pq.ParquetFile) -> PartAccount | None:
        try:
            account = account_in(part, file)
        except CorruptPart as error:
            self._found(part, None, None, error.problem)
            return None
        self._account.add(account)
        return account

    def _answers(self, part: Location, file: pq.ParquetFile) -> Iterator[Problem]:
        for row, turn in enumerate(_rows(part, file)):
            yield from ((row, turn["key"], problem) for problem in response_problems(turn))
            yield from self._repeated(row, turn["key"])

    def _features(self, part: Location, file: pq.ParquetFile, account: PartAccount | None) -> Iterator[Problem]:
        expected = self._documents(part.name)
        keys = [_key(part, file, row) for row in range(file.num_row_groups)]
        for row, key in enumerate(keys):
            yield from self._repeated(row, key)
            try:
                stored = read_stored_row(part, file, row)
            except CorruptPart as error:
                yield row, key, error.problem
                continue
            yield from ((row, key, problem) for problem in document_problems(stored.document, self._widths))
            if expected is not None:
                turns = expected.get(stored.document.key)
                yield from ((row, key, problem) for problem in difference_problems(stored, turns))
        if expected is None or account is None:
            return
        lost = {entry["key"] for entry in account.quarantine}
        for key in sorted(expected.keys() - set(keys) - lost):
            yield len(keys), key, "the responses have this document, and it is neither here nor in the quarantine"

    def _repeated(self, row: int, key: str | None) -> Iterator[Problem]:
        if key is not None and not self._keys.add(key):
            yield row, key, "the set has this key already"

    def _documents(self, name: str) -> dict[str, Turns] | None:
        """The documents that the part was to be made of; None where the responses are not there, or damaged."""
        if self._responses is None or not self._responses.join(name).exists():
            return None
        try:
            return {turns.key: turns for turns in merge_turns(read_answers(self._responses.join(name)))}
        except CorruptPart as error:
            self._found(
                error.part, error.row, None, f"{error.problem}: the features made of it are not compared with it"
            )
            return None

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


def _rows(part: Location, file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    for group in range(file.num_row_groups):
        with damage_named(part, None, "cannot be read"):
            rows = file.read_row_group(group).select(ANSWERS.names).to_pylist()
        yield from rows


def _key(part: Location, file: pq.ParquetFile, row: int) -> str | None:
    """The key of a row as far as it can be read."""
    with suppress(CorruptPart), damage_named(part, row, "has no key"):
        return file.read_row_group(row, columns=["key"])["key"][0].as_py()
    return None
