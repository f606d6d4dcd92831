"""Prompts: the built-in set or the user's files, as conversations that the target answers turn by turn.

A row's key is a hash of what is asked, never of where it stands: `row_key` says what is normalised. Splits go by the same
hash, so a row never changes sides when others are added, moved or renamed.
"""

import hashlib
import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from components.config import ConfigError
from components.data.conversation import conversation
from components.data.formats import RawRow, data_files, read_rows
from components.data.reasons import Reason, RowError

BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).parent / "builtin"
FAMILY_FIELDS = ("family", "task", "category")

Message = dict[str, Any]
Split = Literal["train", "validation", "held_out"]


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer."""

    key: str
    family: str
    messages: list[Message]
    """A system turn or none, then user turns; before a user turn may stand tool calls with their results."""
    tools: list[Message] | None
    source: str
    """The file, and with `line` the place in it: for messages to people only."""
    line: int
    cut: Reason | None = None
    """Why turns of the recorded conversation were left out; None where all are here."""

    def turns(self) -> list[list[Message]]:
        """The messages in pieces: the target answers after each piece, and its answer precedes the next."""
        pieces: list[list[Message]] = [[]]
        for message in self.messages:
            if message["role"] == "user" and pieces[-1] and pieces[-1][-1]["role"] != "system":
                pieces.append([])
            pieces[-1].append(message)
        return pieces


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, with the name of the reason (`Reason`)."""

    source: str
    line: int
    reason: str
    detail: str


def read_prompts(source: str | list[str], max_prompts: int | None, seed: int) -> tuple[list[Prompt], list[BadRow]]:
    """All prompts of `source` and the rows that are none; rows in = prompts + bad rows, before the cap.

    Args:
        source: `builtin`, a file or folder (JSONL, JSON, Parquet), or several of them.
        max_prompts: keep at most this many, each family its share, chosen by hash.
        seed: another seed chooses others.

    Returns:
        The prompts in the order of their keys, and the bad rows in the order of the files.

    Raises:
        ConfigError: a source that does not exist or cannot be read, or not a single usable row.
    """
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    for row in iter_prompts([source] if isinstance(source, str) else source):
        if isinstance(row, Prompt):
            prompts.append(row)
        else:
            bad.append(row)
    if not prompts:
        raise _nothing_usable(source, bad)
    return sorted(_capped(_numbered(prompts), max_prompts, seed), key=lambda prompt: prompt.key), bad


def iter_prompts(sources: Iterable[str]) -> Iterator[Prompt | BadRow]:
    """Every row of the sources, one by one; equal rows still share one key, that of occurrence 0."""
    for name in sources:
        is_builtin = name == BUILTIN
        for path in data_files(str(BUILTIN_FOLDER) if is_builtin else name):
            shown = f"{BUILTIN}/{path.name}" if is_builtin else str(path)
            for row in read_rows(path, shown):
                yield _prompt(row, path.stem)


def row_key(messages: list[Message], tools: list[Message] | None, occurrence: int = 0) -> str:
    """`<sha256 of the normalised conversation>-<occurrence>`.

    Normalised: every text in Unicode NFC, CRLF and CR as LF, without blanks at its ends; blanks inside count (they are
    code). Object keys are sorted. `occurrence` tells equal rows apart.
    """
    text = json.dumps(_normalised([messages, tools or None]), sort_keys=True, ensure_ascii=False)
    return f"{hashlib.sha256(text.encode()).hexdigest()}-{occurrence}"


def split_of(prompt: Prompt, held_out_families: list[str], validation_fraction: float) -> Split:
    """The side of one prompt: its family decides, else the hash of its content; equal rows go to one side.

    `split_prompts` splits a whole set; it also knows what to do when no family is held out.
    """
    if prompt.family in held_out_families:
        return "held_out"
    return "validation" if _position(prompt) < validation_fraction else "train"


def split_prompts(prompts: list[Prompt], held_out_families: list[str], validation_fraction: float) -> dict[str, Split]:
    """The side of every prompt, by key.

    A row that equals one of a held-out family is held out too, whatever its own family. Where no prompt is of a held-out
    family, the hash range [0, f) is held out and [f, 2f) is validation, with f the `validation_fraction`.
    """
    held_out = {_content(prompt) for prompt in prompts if prompt.family in held_out_families}
    if held_out:
        return {
            prompt.key: "held_out"
            if _content(prompt) in held_out
            else split_of(prompt, held_out_families, validation_fraction)
            for prompt in prompts
        }
    return {prompt.key: _split_by_hash(_position(prompt), validation_fraction) for prompt in prompts}


def _split_by_hash(position: float, fraction: float) -> Split:
    if position < fraction:
        return "held_out"
    return "validation" if position < 2 * fraction else "train"


def _prompt(row: RawRow, stem: str) -> Prompt | BadRow:
    try:
        if isinstance(row.value, RowError):
            raise row.value
        asked = conversation(row.value)
    except RowError as error:
        return BadRow(row.source, row.line, error.reason.value, error.detail)
    key = row_key(asked.messages, asked.tools)
    return Prompt(key, _family(row.value, stem), asked.messages, asked.tools, row.source, row.line, asked.cut)


def _family(row: dict[str, Any], stem: str) -> str:
    named = [row[field] for field in FAMILY_FIELDS if isinstance(row.get(field), str) and row[field].strip()]
    return named[0].strip() if named else stem


def _normalised(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).replace("\r\n", "\n").replace("\r", "\n").strip()
    if isinstance(value, list):
        return [_normalised(item) for item in value]
    return {key: _normalised(item) for key, item in value.items()} if isinstance(value, dict) else value


def _numbered(prompts: list[Prompt]) -> list[Prompt]:
    # Sorted first, so that of equal rows it never matters which came first.
    ordered = sorted(prompts, key=lambda p: (p.key, p.family, json.dumps(p.messages), p.source, p.line))
    seen: Counter[str] = Counter()
    numbered = []
    for prompt in ordered:
        content = _content(prompt)
        numbered.append(replace(prompt, key=f"{content}-{seen[content]}"))
        seen[content] += 1
    return numbered


def _capped(prompts: list[Prompt], max_prompts: int | None, seed: int) -> list[Prompt]:
    """At most `max_prompts`, each family its share to within one, chosen by hash and never by position."""
    if max_prompts is None or len(prompts) <= max_prompts:
        return prompts
    families: dict[str, list[tuple[str, Prompt]]] = defaultdict(list)
    for prompt in prompts:
        families[prompt.family].append((hashlib.sha256(f"{seed}:{prompt.key}".encode()).hexdigest(), prompt))
    return [prompt for _, _, prompt in sorted(_places(families.values()), key=lambda place: place[:2])[:max_prompts]]


def _places(families: Iterable[list[tuple[str, Prompt]]]) -> Iterator[tuple[float, str, Prompt]]:
    # The i-th of n stands at (i + u) / n of its family, u in [0, 1) by hash: the smallest come from all families alike.
    for family in families:
        ordered = sorted(family, key=lambda pair: pair[0])
        offset = int(ordered[0][0][-13:], 16) / 16**13
        for i, (drawn, prompt) in enumerate(ordered):
            yield (i + offset) / len(ordered), drawn, prompt


def _content(prompt: Prompt) -> str:
    return prompt.key.rpartition("-")[0]


def _position(prompt: Prompt) -> float:
    """Where the content's hash lies in [0, 1); 52 bits, so that a float holds it exactly."""
    return int(_content(prompt)[:13], 16) / 16**13


def _nothing_usable(source: str | list[str], bad: list[BadRow]) -> ConfigError:
    name = source if isinstance(source, str) else ", ".join(source)
    if not bad:
        return ConfigError("data.prompts", f"{name} holds no row", "add at least one prompt")
    counts = ", ".join(f"{reason} {count}" for reason, count in Counter(row.reason for row in bad).most_common())
    first = f"{bad[0].source}:{bad[0].line} {bad[0].reason} ({bad[0].detail})"
    return ConfigError("data.prompts", f"no usable row in {name}: {counts}", f"mend the rows; the first is {first}")
