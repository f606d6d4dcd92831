"""Prompts: the rows of all sources, as conversations that the target answers turn by turn, or as ids that it goes on from.

A row's key is a hash of what is asked, never of where it stands: `row_key` says what is normalised.
"""

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from components.config import PromptSource
from components.data.conversation import conversation
from components.data.pretokenised import id_prompt
from components.data.reasons import Reason, RowError
from components.data.sources import SourceRow, read_source, shown_name
from components.section import ConfigError

FAMILY_FIELDS = ("family", "task", "category")

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer."""

    key: str
    family: str
    messages: list[Message]
    """User turns; before each may stand a system turn, and tool calls with their results."""
    tools: list[Message] | None
    source: str
    """The file, and with `line` the place in it: for messages to people only."""
    line: int
    cut: Reason | None = None
    """Why parts of the recorded conversation were left out; None where all are here."""
    ids: list[int] | None = None
    """Token ids to answer as they are; there are no messages then."""
    origin: int = 0
    """Which of the settings' sources it comes from."""

    @property
    def content(self) -> str:
        """The key without its occurrence: the same for equal rows."""
        return self.key.rpartition("-")[0]

    def turns(self) -> list[list[Message]]:
        """The messages in pieces: the target answers after each piece, and its answer precedes the next."""
        pieces: list[list[Message]] = [[]]
        for message in self.messages:
            if message["role"] in ("system", "user") and any(asked["role"] == "user" for asked in pieces[-1]):
                pieces.append([])
            pieces[-1].append(message)
        return pieces


@dataclass(frozen=True)
class BadRow:
    """A row that is not used, with the name of the reason (`Reason`)."""

    source: str
    line: int
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line} {self.reason} ({self.detail})"


def read_prompts(
    sources: Sequence[PromptSource], reshape: Callable[[Any], Any] = lambda row: row
) -> tuple[list[Prompt], list[BadRow]]:
    """All prompts of the sources and the rows that are none; rows in = prompts + bad rows.

    Args:
        sources: Where the rows are.
        reshape: What a row is taken for, `published_row` for those of benchmarks.

    Returns:
        The prompts in the order of their keys, equal ones numbered, and the bad rows in the order of the files.

    Raises:
        ConfigError: at `data.prompts`: a source that cannot be read, or not a single usable row.
    """
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    for read in scan_prompts(sources, reshape):
        if isinstance(read, Prompt):
            prompts.append(read)
        else:
            bad.append(read)
    if not prompts:
        raise _nothing_usable(sources, bad)
    return sorted(_numbered(prompts), key=lambda prompt: prompt.key), bad


def scan_prompts(
    sources: Sequence[PromptSource], reshape: Callable[[Any], Any] = lambda row: row
) -> Iterator[Prompt | BadRow]:
    """The rows one by one, in the order of the files; the keys of equal ones are equal."""
    for origin, source in enumerate(sources):
        for row in read_source(source):
            yield _read_row(row, source, origin, reshape)


def row_key(
    messages: list[Message], tools: list[Message] | None, occurrence: int = 0, ids: list[int] | None = None
) -> str:
    """`<sha256 of the normalised conversation, or of the ids>-<occurrence>`.

    Normalised: every text in Unicode NFC, CRLF and CR as LF, without blanks at its ends; blanks inside count (they are
    code). Object keys are sorted. `occurrence` tells equal rows apart.
    """
    asked = [messages, tools or None] if ids is None else ids
    text = json.dumps(_normalised(asked), sort_keys=True, ensure_ascii=False)
    return f"{hashlib.sha256(text.encode()).hexdigest()}-{occurrence}"


def _read_row(row: SourceRow, source: PromptSource, origin: int, reshape: Callable[[Any], Any]) -> Prompt | BadRow:
    raw = row.raw
    try:
        if isinstance(raw.value, RowError):
            raise raw.value
        return _prompt(row, source, origin, reshape(raw.value))
    except RowError as error:
        return BadRow(raw.source, raw.line, error.reason.value, error.detail)
    except RecursionError:
        return BadRow(raw.source, raw.line, Reason.BAD_JSON.value, "nested too deeply")


def _prompt(row: SourceRow, source: PromptSource, origin: int, value: Any) -> Prompt:
    raw = row.raw
    if given := id_prompt(value):
        key, family = row_key([], None, ids=given.ids), source.family or _family(raw.value, row.family)
        return Prompt(key, family, [], None, raw.source, raw.line, given.cut, given.ids, origin)
    asked = conversation(value)
    key, family = row_key(asked.messages, asked.tools), source.family or _family(raw.value, row.family)
    return Prompt(key, family, asked.messages, asked.tools, raw.source, raw.line, asked.cut, None, origin)


def _family(row: dict[str, Any], default: str) -> str:
    named = [row[field] for field in FAMILY_FIELDS if isinstance(row.get(field), str) and row[field].strip()]
    return named[0].strip() if named else default


def _normalised(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).replace("\r\n", "\n").replace("\r", "\n").strip()
    if isinstance(value, list):
        return [_normalised(item) for item in value]
    return {key: _normalised(item) for key, item in value.items()} if isinstance(value, dict) else value


def _numbered(prompts: list[Prompt]) -> Iterator[Prompt]:
    # Sorted first, so that of equal rows it never matters which came first.
    seen: Counter[str] = Counter()
    for prompt in sorted(prompts, key=lambda p: (p.key, p.family, json.dumps(p.messages), p.source, p.line)):
        yield replace(prompt, key=f"{prompt.content}-{seen[prompt.content]}")
        seen[prompt.content] += 1


def _nothing_usable(sources: Sequence[PromptSource], bad: list[BadRow]) -> ConfigError:
    name = ", ".join(map(shown_name, sources))
    if not bad:
        return ConfigError("data.prompts", f"{name} holds no row", "add at least one prompt")
    counts = ", ".join(f"{reason} {count}" for reason, count in Counter(row.reason for row in bad).most_common())
    return ConfigError("data.prompts", f"no usable row in {name}: {counts}", f"mend the rows; the first is {bad[0]}")
