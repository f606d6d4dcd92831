"""Benchmarks: files of prompts beside the held-out ones, read once by the driver and answered by every arm turn by turn.

A later turn follows plain decoding's own answer to the turn before it, so that every arm is asked the very same tokens.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from components.config import BenchmarkConfig, PromptSource
from components.data.conversation import conversation
from components.data.prompts import FAMILY_FIELDS, Message, Prompt, row_key
from components.data.reasons import RowError
from components.data.shapes import published_row
from components.data.sources import SourceRow, blamed_on, read_source, source_identity
from components.evaluation.scorers import plain_reference, reference_of
from components.section import ConfigError
from components.storage import Location

FOLDER = "benchmarks"
ROWS = "rows.json"


@dataclass(frozen=True)
class BenchmarkRow:
    key: str
    family: str
    turns: list[list[Message]]
    """The messages in pieces: the target answers after each."""
    tools: list[Message] | None
    reference: dict[str, str] | None
    """What the scorer needs; None without a scorer."""


_ROWS = TypeAdapter(list[BenchmarkRow])


def read_benchmark(name: str, config: BenchmarkConfig) -> list[BenchmarkRow]:
    """The rows of a benchmark, in the order of their keys: which are the first does not depend on the file's order.

    Raises:
        ConfigError: no file, no row, or a row that is no prompt.
    """
    setting = f"evaluate.benchmarks.{name}"
    with blamed_on(f"{setting}.path"):
        found = list(read_source(PromptSource(path=config.path)))
    seen: Counter[str] = Counter()
    rows = sorted((_row(row, config.scorer, setting, seen) for row in found), key=lambda row: row.key)
    rows = rows[: config.max_prompts]
    if not rows:
        raise ConfigError(f"{setting}.path", f"{config.path} holds no row", "name a file with prompts")
    return rows


def benchmark_identity(config: BenchmarkConfig) -> dict[str, Any]:
    """What the file holds right now."""
    return source_identity(PromptSource(path=config.path))


def save_rows(rows: list[BenchmarkRow], output: Location, name: str) -> None:
    output.join(FOLDER, name, ROWS).write_bytes(_ROWS.dump_json(rows))


def load_rows(output: Location, name: str) -> list[BenchmarkRow]:
    return _ROWS.validate_json(output.join(FOLDER, name, ROWS).read_bytes())


def num_turns(rows: list[BenchmarkRow]) -> int:
    """Of the longest conversation."""
    return max(len(row.turns) for row in rows)


def place_of(name: str, turn: int) -> str:
    """Folder of the answers to one turn (counted from 1), one file an arm."""
    return f"{FOLDER}/{name}/turn-{turn}"


def _row(row: SourceRow, scorer: str, setting: str, seen: Counter[str]) -> BenchmarkRow:
    raw = row.raw
    try:
        if isinstance(raw.value, RowError):
            raise raw.value
        value = published_row(raw.value)
        asked = conversation(value)
    except RowError as error:
        raise ConfigError(
            f"{setting}.path", f"{raw.source}:{raw.line} is no prompt ({error.detail})", "mend the row or leave it out"
        ) from None
    key = row_key(asked.messages, asked.tools)
    prompt = Prompt(key, "", asked.messages, asked.tools, raw.source, raw.line)
    number = seen[key]
    seen[key] += 1
    family = next((value[field] for field in FAMILY_FIELDS if isinstance(value.get(field), str)), row.family)
    last = asked.messages[-1]["content"]
    reference = None if scorer == "none" else reference_of(scorer, value, last) or plain_reference(scorer, last)
    return BenchmarkRow(f"{prompt.content}-{number}", family, prompt.turns(), asked.tools, reference)
