"""Raw rows of JSONL, JSON and Parquet files, each with its place in the file and, where unusable, the reason."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.data.json_array import array_items
from components.data.reasons import Reason, RowError
from components.section import ConfigError

JSONL_SUFFIXES = {".jsonl", ".ndjson"}
SUFFIXES = {*JSONL_SUFFIXES, ".json", ".parquet"}
HEAD_BYTES = 1 << 20  # in which a JSON file shows what it is
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawRow:
    """One row as it stands in a file."""

    source: str
    line: int
    """Counted from 1: the line of a JSONL file, the row of a JSON or Parquet file."""
    value: Any
    """The parsed row, or the `RowError` that says why there is none."""


def data_files(source: str) -> list[Path]:
    """The data files that `source` names: itself, or all below it and what is linked there, hidden ones left out, in the order of their paths.

    Raises:
        ConfigError: nothing there, a folder without data files, or a file of another kind.
    """
    root = Path(source)
    if root.is_dir():
        return _files_below(root)
    if not root.is_file():
        fix = "name an existing file or folder, `builtin`, or a Hugging Face data set as {dataset: owner/name}"
        raise ConfigError("data.prompts", f"{source} does not exist", fix)
    if root.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            "data.prompts", f"{source} is of an unknown kind", f"use one of {', '.join(sorted(SUFFIXES))}"
        )
    return [root]


def read_rows(path: Path, source: str) -> Iterator[RawRow]:
    """Every row of one file; blank lines of JSONL are no rows. `source` is the name that the rows carry.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    readers = {".json": _read_json, ".parquet": _read_parquet}
    try:
        yield from readers.get(path.suffix.lower(), _read_jsonl)(path, source)
    except (OSError, pa.ArrowException) as error:
        text = " ".join(str(error).split())
        raise ConfigError("data.prompts", f"cannot read {source} ({text})", "replace or leave out the file") from None


def other_files(folder: Path) -> list[str]:
    """The files below a folder that are no data files, by their paths in it: hidden ones left out."""
    return [path.relative_to(folder).as_posix() for path in sorted(_visible_below(folder)) if not _is_data(path)]


def _files_below(root: Path) -> list[Path]:
    files = sorted(filter(_is_data, _visible_below(root)))
    if not files:
        raise ConfigError("data.prompts", f"{root} holds no data file", f"add one of {', '.join(sorted(SUFFIXES))}")
    return files


def _is_data(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def _visible_below(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """All but folders; links to folders are followed, unless they lead back to a folder `above`."""
    here = folder.resolve()
    for path in folder.iterdir() if here not in above else ():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _visible_below(path, above | {here})
        else:
            yield path


def _read_jsonl(path: Path, source: str) -> Iterator[RawRow]:
    # Bytes, so that only LF ends a line (text mode also splits on CR) and one bad line costs no other.
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            text = raw.removeprefix(BYTE_ORDER_MARK) if line == 1 else raw
            if text.strip():
                yield RawRow(source, line, _parse(text, is_whole=text.endswith(b"\n")))


def _read_json(path: Path, source: str) -> Iterator[RawRow]:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip()
    if head.startswith(b"["):
        yield from _read_array(path, source)
        return
    first, _, rest = head.partition(b"\n")
    is_jsonl = rest.strip() and not isinstance(_parse(first, is_whole=True), RowError)
    value = None if is_jsonl else _parse(path.read_bytes().removeprefix(BYTE_ORDER_MARK), is_whole=True)
    if is_jsonl or isinstance(value, RowError):
        # Not one document: JSONL under the wrong name.
        yield from _read_jsonl(path, source)
        return
    for line, row in enumerate(_unwrap(value), start=1):
        yield RawRow(source, line, row)


def _read_array(path: Path, source: str) -> Iterator[RawRow]:
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, row in enumerate(array_items(file), start=1):
                yield RawRow(source, line, row)
    except (ValueError, RecursionError) as error:
        # As one bad row, all those after it would count as one that is lost.
        problem = f"{source} is no whole JSON array (after {line} rows: {getattr(error, 'msg', error)})"
        raise ConfigError("data.prompts", problem, "mend, replace or leave out the file") from None


def _read_parquet(path: Path, source: str) -> Iterator[RawRow]:
    line = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for value in arrow_rows(batch):
                line += 1
                yield RawRow(source, line, value)


def arrow_rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """The rows of a batch as objects without their nulls; a row that is no UTF-8 is its `RowError`."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        # Parquet does not check its strings: find the row that is to blame.
        rows = [_arrow_row(batch.slice(i, 1)) for i in range(batch.num_rows)]
    return (_without_nulls(row) for row in rows)


def _arrow_row(batch: pa.RecordBatch) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowError(Reason.NOT_UTF8, str(error))


def _without_nulls(value: Any) -> Any:
    # A Parquet struct has every key that any row has: null stands for a key that this row lacks.
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _unwrap(value: Any) -> list[Any]:
    lists = [item for key, item in value.items() if key in ("data", "rows")] if isinstance(value, dict) else []
    return lists[0] if lists and isinstance(lists[0], list) else [value]


def _parse(raw: bytes, is_whole: bool) -> Any:
    """The JSON value, or a `RowError`. A last line without its LF that does not parse was cut off."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = Reason.NOT_UTF8 if is_whole or error.reason != "unexpected end of data" else Reason.TRUNCATED_LINE
        return RowError(reason, f"byte {error.start}: {error.reason}")
    except (ValueError, RecursionError) as error:
        return RowError(Reason.BAD_JSON if is_whole else Reason.TRUNCATED_LINE, str(error))
