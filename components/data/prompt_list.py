"""`prompts.jsonl`: the prompts that a run answers, in the order of their keys, and its fixed cut into ranges of lines."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from components.data.prompts import Prompt
from components.storage import Location

PROMPTS = "prompts.jsonl"
CUT = "_cut.json"


@dataclass(frozen=True)
class ListedPrompt:
    prompt: Prompt
    split: str


@dataclass(frozen=True)
class PromptRange:
    """Consecutive lines of the list: the prompts of one part."""

    number: int
    start: int
    """First byte."""
    num_bytes: int


def write_prompts(file: Location, prompts: Iterable[Prompt], splits: Mapping[str, str]) -> None:
    """One line a prompt, in the order given."""
    lines = (_line(prompt, splits[prompt.key]) for prompt in prompts)
    file.write_bytes("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


def _line(prompt: Prompt, split: str) -> dict[str, Any]:
    line = {
        "key": prompt.key,
        "family": prompt.family,
        "split": split,
        "messages": prompt.messages,
        "tools": prompt.tools,
        "source": prompt.source,
        "line": prompt.line,
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


def _parse(line: bytes) -> ListedPrompt:
    row = json.loads(line)
    split = row.pop("split")
    return ListedPrompt(Prompt(**row), split)
