"""The prompts that every arm answers, as token ids: the same ids on every arm."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from components.data.parts import part_names, read_columns
from components.storage import Location

PREFLIGHT_PROMPTS = 8
PREFLIGHT_TOKENS = 32
PROMPTS = "prompts.json"
"""The held-out prompts as they were asked: with them a head can be measured again wherever it is registered."""
COLUMNS = ["prompt_key", "family", "turn", "prompt_ids"]


@dataclass(frozen=True)
class EvaluationPrompt:
    key: str
    family: str
    prompt_ids: tuple[int, ...]


_PROMPTS = TypeAdapter(tuple[EvaluationPrompt, ...])


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are answered in one pass, and how; figures of two sets are never mixed."""

    place: str
    """Folder of its results in the evaluation's output, one file an arm."""
    prompts: tuple[EvaluationPrompt, ...]
    max_new_tokens: int
    temperature: float = 0.0
    is_timed: bool = False
    """Whether the speed pass runs on its first prompts."""


@dataclass(frozen=True)
class Selection:
    prompts: tuple[EvaluationPrompt, ...]
    num_too_long: int
    """Held-out prompts left out because prompt and answer would not fit the engine."""


def select_prompts(responses: Location, num_prompts: int, max_prompt_tokens: int) -> Selection:
    """Held-out prompts in an order that takes every family in turn; the first n are the same for every n.

    A conversation is asked at its last answered turn, with the recorded answers of the turns before it.

    Args:
        responses: Output folder of the responses stage.
        num_prompts: At most this many.
        max_prompt_tokens: Longer prompts are left out.

    Raises:
        ValueError: no held-out prompt is left.
    """
    last: dict[str, tuple[int, EvaluationPrompt]] = {}
    for row in read_responses(responses, COLUMNS, split="held_out").to_pylist():
        key = row["prompt_key"]
        if key not in last or row["turn"] > last[key][0]:
            last[key] = (row["turn"], EvaluationPrompt(key, row["family"], tuple(row["prompt_ids"])))
    prompts = [prompt for _, prompt in last.values()]
    fitting = [prompt for prompt in prompts if len(prompt.prompt_ids) <= max_prompt_tokens]
    if not fitting:
        raise ValueError(
            f"{len(prompts)} held-out prompts in {responses.uri}, none of at most {max_prompt_tokens} tokens: "
            "raise target.max_model_len, lower evaluate.max_new_tokens or name other data.held_out_families"
        )
    return Selection(tuple(_in_turn(fitting)[:num_prompts]), len(prompts) - len(fitting))


def read_responses(responses: Location, columns: Sequence[str], split: str) -> pa.Table:
    """Columns of the answered turns of one split, in the order of the shards.

    Raises:
        CorruptPart: a shard is not whole, or of another version's format.
    """
    wanted = pc.field("split") == split
    tables = [
        read_columns(responses.join(name), [*columns, "split"]).filter(wanted).select(list(columns))
        for name in part_names(responses)
    ]
    return pa.concat_tables(tables) if tables else pa.table({name: [] for name in columns})


def dump_prompts(prompts: Sequence[EvaluationPrompt]) -> bytes:
    """The prompts as JSON, in their order: what `load_prompts` reads."""
    return _PROMPTS.dump_json(tuple(prompts))


def load_prompts(file: Location) -> tuple[EvaluationPrompt, ...]:
    return _PROMPTS.validate_json(file.read_bytes())


def _in_turn(prompts: Sequence[EvaluationPrompt]) -> list[EvaluationPrompt]:
    """One prompt of each family after another, each family's by hash (file order often groups what is alike)."""
    families: dict[str, list[EvaluationPrompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda p: hashlib.sha256(p.key.encode()).hexdigest()):
        families[prompt.family].append(prompt)
    columns = [families[name] for name in sorted(families)]
    return [prompt for row in zip_longest(*columns) for prompt in row if prompt is not None]
