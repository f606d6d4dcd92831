"""`prompts.jsonl`: the prompts that a run answers, in the order of their keys, and its fixed cut into ranges of lines."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from components.data.prompts import Prompt
from components.storage import Location

PROMPTS = "prompts.jsonl"
PLACES = "_places.jsonl"
"""File and line of each prompt, and why it was cut: for messages to people, so no content that makes anything else be done again."""
CUT = "_cut.json"

Place = dict[str, Any]
"""`{"source": file, "line": number}`."""


@dataclass(frozen=True)
class ListedPrompt:
    prompt: Prompt
    """Without its place."""
    split: str


@dataclass(frozen=True)
class PromptRange:
    """Consecutive lines of the list: the prompts of one part."""

    number: int
    start: int
    """First byte."""
    num_bytes: int


def write_prompts(folder: Location, prompts: Iterable[Prompt], splits: Mapping[str, str]) -> None:
    """`prompts.jsonl` and, beside it, the places of the prompts: one line a prompt, in the order given."""
    with folder.join(PROMPTS).writer() as listed, folder.join(PLACES).writer() as places:
        for prompt in prompts:
            listed.write(_json_line(_line(prompt, splits[prompt.key])))
            place = {"key": prompt.key, "source": prompt.source, "line": prompt.line}
            places.write(_json_line(place | {"cut": prompt.cut} if prompt.cut else place))


def read_places(folder: Location, keys: set[str]) -> dict[str, Place]:
    """Where the prompts of these keys stand, from the output folder of the prompts stage."""
    if not keys:
        return {}
    with folder.join(PLACES).open() as stream:
        rows = (json.loads(line) for line in _lines(stream))
        return {row["key"]: {"source": row["source"], "line": row["line"]} for row in rows if row["key"] in keys}


def with_places(lost: Iterable[Mapping[str, Any]], places: Mapping[str, Place]) -> Iterator[dict[str, Any]]:
    """Lines of a quarantine, each with the place of its prompt where that is known."""
    for row in lost:
        yield {"key": row["key"], **places.get(prompt_key(row["key"]), {}), **row}


def prompt_key(turn_key: Any) -> str:
    """Of the prompt that a turn belongs to."""
    return str(turn_key).rpartition(":")[0]


def _line(prompt: Prompt, split: str) -> dict[str, Any]:
    line = {
        "key": prompt.key,
        "family": prompt.family,
        "split": split,
        "messages": prompt.messages,
        "tools": prompt.tools,
    }
    return line if prompt.ids is None else line | {"ids": prompt.ids}


def prompt_ranges(file: Location, prompts_per_part: int) -> list[PromptRange]:
    """Cut the list after every `prompts_per_part` lines; reads it once and keeps no prompt."""
    starts, end = [], 0
    with file.open() as stream:
        for index, line in enumerate(_lines(stream)):
            if index % prompts_per_part == 0:
                starts.append(end)
            end += len(line)
    ends = [*starts[1:], end]
    return [PromptRange(i, start, stop - start) for i, (start, stop) in enumerate(zip(starts, ends, strict=True))]


def read_range(file: Location, part: PromptRange) -> list[ListedPrompt]:
    """The prompts of one range."""
    with file.open() as stream:
        stream.seek(part.start)
        lines = stream.read(part.num_bytes).splitlines()
    return [_parse(line) for line in lines]


def read_all(file: Location) -> Iterator[ListedPrompt]:
    """One prompt after another."""
    with file.open() as stream:
        yield from map(_parse, _lines(stream))


def fixed_cut(output: Location, prompts_per_part: int) -> int:
    """Prompts of a part in this output: the number that its first run was started with.

    Another cut would answer prompts of finished parts again, or leave some out.
    """
    output.join(CUT).create(json.dumps({"prompts_per_part": prompts_per_part}).encode())
    return json.loads(output.join(CUT).read_bytes())["prompts_per_part"]


def _lines(stream):
    rest = b""
    while block := stream.read(1 << 20):
        *lines, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in lines)


def _json_line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode()


def _parse(line: bytes) -> ListedPrompt:
    row = json.loads(line)
    split = row.pop("split")
    return ListedPrompt(Prompt(**row, source="", line=0), split)
