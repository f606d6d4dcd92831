"""Where prompts come from: the built-in set, files and folders (here or on S3, some that `datasets` saved or lays out), and data set ids.

Every kind ends as raw rows, each with its place, and has an identity: the sha256 of its files, or its commit.
"""

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.config import PromptSource
from components.data.formats import SUFFIXES, RawRow, data_files, other_files, read_rows
from components.data.layouts import (
    SHORT_COMMIT,
    dataset_commit,
    dataset_folder,
    is_saved,
    other_rows,
    saved_files,
    saved_rows,
    split_files,
)
from components.section import ConfigError
from components.storage import Location

log = logging.getLogger("aerie")

BUILTIN = "builtin"
S3 = "s3://"
BUILTIN_FOLDER = Path(__file__).parent / "builtin"
MOST_NAMED = 5


@dataclass(frozen=True)
class SourceRow:
    """A raw row, with the family that it belongs to where it names none itself."""

    raw: RawRow
    family: str


def read_source(source: PromptSource) -> Iterator[SourceRow]:
    """Every row of a source, in the order of its files.

    Raises:
        ConfigError: at `data.prompts`: nothing there, or not readable.
    """
    if source.dataset is not None:
        yield from _read_dataset(source)
    elif source.path == BUILTIN:
        yield from _read_files(data_files(str(BUILTIN_FOLDER)), BUILTIN_FOLDER, BUILTIN, None)
    elif is_saved(folder := _on_disk(source)):
        yield from (SourceRow(row, folder.name) for row in saved_rows(folder, source.split))
    elif _is_one_set(source, folder):
        yield from _read_split(source, folder, shown_name(source), folder.name)
    elif (files := data_files(str(folder))) == [folder]:
        yield from _read_files(files, None, shown_name(source), None)
    else:
        yield from _read_files(files, folder, shown_name(source).rstrip("/"), None)


def source_identity(source: PromptSource) -> dict[str, Any]:
    """What a source is right now; a file's name matters (it can be a family), a folder's where it is one data set.

    Files of a folder that are not read are named in a warning, once a process.

    Raises:
        ConfigError: at `data.prompts`: nothing there.
    """
    settings = source.model_dump(mode="json", exclude={"path", "revision"}, exclude_none=True)
    if source.dataset is not None:
        return settings | {"commit": dataset_commit(source)}
    folder = _on_disk(source)
    if _is_one_set(source, folder):
        settings = {"family": folder.name} | settings
    return settings | {"files": sorted([file.name, _digest(file)] for file in _local_files(source, folder))}


@contextmanager
def blamed_on(setting: str) -> Iterator[None]:
    """Errors of sources name `setting` instead of `data.prompts`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(setting, error.problem, error.fix) from None


def shown_name(source: PromptSource) -> str:
    """How messages call a source."""
    return source.path or source.dataset or ""


def _on_disk(source: PromptSource) -> Path:
    if source.path == BUILTIN:
        return BUILTIN_FOLDER
    path = str(source.path)
    return _fetched(path) if path.startswith(S3) else Path(path)


def _fetched(uri: str) -> Path:
    """A copy of what lies at an s3:// address, an object or all below a prefix; another one once that has changed."""
    try:
        stamps = Location(uri).stamps()
    except (OSError, pa.ArrowInvalid) as error:
        raise _unreadable(uri, error) from None
    if not stamps:
        raise ConfigError("data.prompts", f"{uri} does not exist", "name an existing object or the prefix of some")
    return _copied(uri, tuple(sorted(stamps.items())))


@lru_cache
def _copied(uri: str, stamps: tuple[tuple[str, tuple[int, int]], ...]) -> Path:
    digest = hashlib.sha256(repr((uri, stamps)).encode()).hexdigest()
    try:
        copy = Path(_copies().name) / digest[:16] / Path(uri).name
        for name, _ in stamps:
            _copy(Location(uri).join(name) if name else Location(uri), copy / name)
    except OSError as error:
        problem = f"{uri} cannot be copied to {tempfile.gettempdir()} ({' '.join(str(error).split())})"
        fix = "free some space there, or set TMPDIR to a folder that has room"
        raise ConfigError("data.prompts", problem, fix) from None
    return copy


def _copy(place: Location, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as target:
        for block in _blocks(place):
            target.write(block)


def _blocks(place: Location) -> Iterator[bytes]:
    try:
        yield from place.blocks()
    except OSError as error:
        raise _unreadable(place.uri, error) from None


def _unreadable(uri: str, error: Exception) -> ConfigError:
    fix = "check the address, the credentials and AWS_ENDPOINT_URL"
    return ConfigError("data.prompts", f"{uri} cannot be read ({' '.join(str(error).split())})", fix)


@cache
def _copies() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="aerie-prompts-")


def _is_one_set(source: PromptSource, folder: Path) -> bool:
    """Whether a folder is one data set, whose name is its rows' family; else each file is a family."""
    return source.path != BUILTIN and (is_saved(folder) or bool(source.split or source.name))


def _local_files(source: PromptSource, folder: Path) -> list[Path]:
    if is_saved(folder):
        return saved_files(folder, source.split)
    if _is_one_set(source, folder):
        return split_files(folder, source.name, source.split, shown_name(source))
    files = data_files(str(folder))
    if others := other_files(folder) if folder.is_dir() else []:
        _warn_of_others(shown_name(source), tuple(others))
    return files


@cache
def _warn_of_others(shown: str, others: tuple[str, ...]) -> None:
    named = ", ".join(others[:MOST_NAMED]) + (", ..." if len(others) > MOST_NAMED else "")
    kinds = ", ".join(sorted(SUFFIXES))
    log.warning("prompts: %d files of %s are not read, as they are none of %s: %s", len(others), shown, kinds, named)


def _read_dataset(source: PromptSource) -> Iterator[SourceRow]:
    folder = dataset_folder(source)
    shown, family = f"{source.dataset}@{folder.name[:SHORT_COMMIT]}", str(source.dataset).rpartition("/")[2]
    if source.files is None:
        yield from _read_split(source, folder, shown, family)
        return
    files = sorted(path for path in folder.glob(source.files) if path.suffix.lower() in SUFFIXES)
    if not files:
        fix = f"give a pattern of files that are one of {', '.join(sorted(SUFFIXES))}"
        raise ConfigError("data.prompts", f"{source.dataset} has no data file {source.files}", fix)
    yield from _read_files(files, folder, shown, family)


def _read_split(source: PromptSource, folder: Path, shown: str, family: str) -> Iterator[SourceRow]:
    files = split_files(folder, source.name, source.split, shown)
    if all(file.suffix.lower() in SUFFIXES for file in files):
        yield from _read_files(files, folder, shown, family)
        return
    yield from (SourceRow(row, family) for row in other_rows(folder, source.name, source.split, shown))


def _read_files(files: list[Path], root: Path | None, shown: str, family: str | None) -> Iterator[SourceRow]:
    for file in files:
        name = f"{shown}/{file.relative_to(root).as_posix()}" if root else shown
        for row in read_rows(file, name):
            yield SourceRow(row, family or file.stem)


def _digest(file: Path) -> str:
    state = file.stat()
    return _sha256(file, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=4096)
def _sha256(file: Path, size: int, mtime_ns: int) -> str:
    """A run asks several times; a file is read once as long as its size and time stay."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
