"""Answers as the responses stage leaves them, made without an engine."""

import pyarrow as pa
import torch

from components.data.answering import SCHEMA
from components.data.parts import PartAccount, part_name, part_writer
from components.storage import Location

FIRST_ID, END_ID = 8, 300
"""Range of the ids that answers are made of."""


def answered(number: int, ids: list[int], num_prompt: int, split: str) -> dict:
    """One turn; its first `num_prompt` ids are the prompt's."""
    return {
        "key": f"p{number}:0",
        "prompt_key": f"p{number}",
        "family": "maths",
        "split": split,
        "turn": 0,
        "prompt_ids": ids[:num_prompt],
        "output_ids": ids[num_prompt:],
        "finish_reason": "stop",
    }


def random_ids(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(FIRST_ID, END_ID, (length,), generator=generator).tolist()


def write_responses(folder: Location, *parts: list[dict]) -> None:
    for number, rows in enumerate(parts):
        with part_writer(folder.join(part_name(number)), SCHEMA, PartAccount()) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
