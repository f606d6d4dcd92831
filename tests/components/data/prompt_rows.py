"""Prompts and files of prompts for the tests of the data package."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from components.config import PromptSource
from components.data.prompts import BadRow, Prompt, read_prompts, row_key


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def prompt(text: str, family: str = "f", occurrence: int = 0, line: int = 1, origin: int = 0) -> Prompt:
    """A prompt of one turn."""
    key = row_key(user(text), None, occurrence)
    return Prompt(key, family, user(text), None, "a.jsonl", line, origin=origin)


def write(path: Path, texts: Iterable[str]) -> str:
    """A JSONL file of prompts; its name."""
    return write_rows(path, ({"prompt": text} for text in texts))


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """A JSONL file of rows; its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(*paths: str | Path, **keys: Any) -> tuple[list[Prompt], list[BadRow]]:
    """What is read of these files or folders; `keys` are those of a source."""
    return read_prompts([PromptSource(path=str(path), **keys) for path in paths])
