"""Answers as the responses stage leaves them, made without an engine."""

import torch

from components.data.answers import write_answers
from components.data.parts import PartAccount, part_name
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
        write_answers(folder.join(part_name(number)), rows, PartAccount())
