"""Data sets as the `datasets` library knows them: ids of the Hub, folders laid out like one, folders that it saved.

The library says which files make up a split. Rows of JSON Lines, JSON and Parquet are then read as any user's file is, so
that a bad row costs itself only and a column may change its type from row to row; other kinds are left to the library.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.config import PromptSource
from components.data.formats import SUFFIXES, RawRow, arrow_rows
from components.hub import HUB_ID, first_line, snapshot
from components.section import ConfigError

CARD = "README.md"
OTHER_SUFFIXES = {".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".bz2", ".xz", ".zip"}
SAVED_SPLIT, SAVED_SPLITS = "state.json", "dataset_dict.json"
SHORT_COMMIT = 8
DEFAULT_SPLIT = "train"
ROWS_AT_ONCE = 1024


def dataset_commit(source: PromptSource) -> str:
    """The commit that the revision of a data set id stands for now; without a network, when it was last fetched.

    Raises:
        ConfigError: at `data.prompts`: no such data set or revision, no access, or neither network nor cache.
    """
    return _snapshot(source, source.revision, [CARD]).name


def dataset_folder(source: PromptSource) -> Path:
    """The data files of a data set id, in the Hugging Face cache; scripts are never fetched.

    Raises:
        ConfigError: as `dataset_commit`.
    """
    kinds = [f"*{suffix}" for suffix in sorted(SUFFIXES | OTHER_SUFFIXES)]
    return _snapshot(source, dataset_commit(source), [CARD, *([source.files] if source.files else kinds)])


def split_files(folder: Path, name: str | None, split: str | None, shown: str) -> list[Path]:
    """The files of one split of a folder laid out like a data set, as its card or its file names say.

    Raises:
        ConfigError: at `data.prompts`: no such configuration or split, or no data.
    """
    found = _splits(folder, name, shown)
    return [Path(file) for file in found[_chosen(list(found), split, shown)]]


def other_rows(folder: Path, name: str | None, split: str | None, shown: str) -> Iterator[RawRow]:
    """The rows of one split of such a folder, whatever kind its files are of, read by `datasets` without a copy.

    Raises:
        ConfigError: at `data.prompts`: the library cannot read them.
    """
    import datasets  # a second, and few runs need it

    chosen = _chosen(list(_splits(folder, name, shown)), split, shown)
    try:
        stream = datasets.load_dataset(str(folder), name, split=chosen, streaming=True)
        yield from _rows(stream, f"{shown}:{chosen}")
    except (ValueError, OSError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise _unreadable(shown, error) from None


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any((folder / name).is_file() for name in (SAVED_SPLIT, SAVED_SPLITS))


def saved_files(folder: Path, split: str | None) -> list[Path]:
    """The files that hold the rows of a saved folder, or of one split of it.

    Raises:
        ConfigError: at `data.prompts`: no such split.
    """
    return sorted((folder / _saved_split(folder, split)).glob("*.arrow"))


def saved_rows(folder: Path, split: str | None) -> Iterator[RawRow]:
    """The rows of a saved folder, or of one split of it.

    Raises:
        ConfigError: at `data.prompts`: no such split, or not readable.
    """
    import datasets

    part = _saved_split(folder, split)
    try:
        yield from _rows(datasets.load_from_disk(str(folder / part)), str(folder / part))
    except (ValueError, OSError, KeyError, pa.ArrowException) as error:
        raise _unreadable(str(folder), error) from None


def _snapshot(source: PromptSource, revision: str | None, patterns: list[str]) -> Path:
    if not HUB_ID.fullmatch(str(source.dataset)):
        fix = "write owner/name, or name local files with `path`"
        raise ConfigError("data.prompts", f"{source.dataset} is no data set id", fix)
    places = {"setting": "data.prompts", "revision_setting": "data.prompts"}
    return snapshot(str(source.dataset), revision, "dataset", patterns, **places)


def _splits(folder: Path, name: str | None, shown: str) -> dict[str, list[str]]:
    import datasets

    try:
        found = datasets.load_dataset_builder(str(folder), name).config.data_files
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise _unreadable(shown, error) from None
    return {str(split): sorted(map(str, files)) for split, files in (found or {}).items()}


def _saved_split(folder: Path, split: str | None) -> str:
    if (folder / SAVED_SPLIT).is_file():
        if split is not None:
            fix = "leave `split` out"
            raise ConfigError("data.prompts", f"{folder} was saved as one split", fix)
        return "."
    return _chosen([path.parent.name for path in sorted(folder.glob(f"*/{SAVED_SPLIT}"))], split, str(folder))


def _chosen(splits: list[str], split: str | None, shown: str) -> str:
    if split is None:
        split = splits[0] if len(splits) == 1 else DEFAULT_SPLIT
    if split not in splits:
        raise ConfigError("data.prompts", f"{shown} has no split {split}", f"set split to one of {', '.join(splits)}")
    return split


def _rows(dataset: Any, shown: str) -> Iterator[RawRow]:
    line = 0
    for table in dataset.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
        for batch in table.to_batches():
            for value in arrow_rows(batch):
                line += 1
                yield RawRow(shown, line, value)


def _unreadable(shown: str, error: Exception) -> ConfigError:
    fix = "check its name and configuration, or give the files themselves as `path`"
    return ConfigError("data.prompts", f"`datasets` cannot read {shown} ({first_line(error)})", fix)
