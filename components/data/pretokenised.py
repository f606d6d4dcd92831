"""Rows that hold token ids instead of text: the target answers these ids as they are, without a chat template.

Nothing is added to them and nothing is left out, a beginning-of-sequence token neither.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from components.data.reasons import Reason, RowError
from components.data.shapes import has_text_shape

PROMPT_KEYS = ("prompt_ids", "prompt_token_ids")
RECORD_KEY = "input_ids"
"""A prompt, or a whole recorded conversation where a mask beside it says what are answers."""
MASK_KEYS = ("loss_mask", "assistant_masks", "assistant_mask")
NO_LABEL = -100
MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class IdPrompt:
    """The ids to answer; `cut` names why the recorded conversation was longer, if it was."""

    ids: list[int]
    cut: Reason | None


def id_prompt(row: Any) -> IdPrompt | None:
    """The prompt of a row that gives ids, or None for every other row.

    `prompt_ids` and `prompt_token_ids` win over any text beside them, as does a `prompt` that is a list of integers;
    `input_ids` count only where the row has no text. Of a recorded conversation (`loss_mask`, `assistant_masks`, or
    `labels` with -100) the prompt is what precedes the first answer, and later turns are left out: they would stand on
    answers that the target did not give.

    Raises:
        RowError: what stands there are no ids, or the mask does not fit them.
    """
    if not isinstance(row, dict):
        return None
    key = next((key for key in PROMPT_KEYS if row.get(key) is not None), None)
    if key is None and is_id_list(row.get("prompt")):
        key = "prompt"
    if key is not None:
        return IdPrompt(_ids(row[key], key), None)
    if row.get(RECORD_KEY) is None or has_text_shape(row):
        return None
    return _before_first_answer(row, _ids(row[RECORD_KEY], RECORD_KEY))


def check_vocabulary(ids: list[int], vocab_size: int) -> None:
    """Raises RowError where an id is none of the target's `vocab_size`."""
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RowError(Reason.IDS_OUT_OF_VOCABULARY, f"id {outside}, the target has {vocab_size}")


def is_id_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _ids(value: Any, key: str) -> list[int]:
    if not is_id_list(value):
        raise RowError(Reason.BAD_IDS, f"{key} is no list of integers, or an empty one")
    if not all(abs(token) <= MAX_ID for token in value):
        raise RowError(Reason.BAD_IDS, f"{key} holds an integer of more than 32 bits")
    return value


def _before_first_answer(row: dict[str, Any], ids: list[int]) -> IdPrompt:
    is_answer = _answer_mask(row, len(ids))
    is_padding = [not shown for shown in _column(row, "attention_mask", len(ids)) or [1] * len(ids)]
    kept = [i for i in range(len(ids)) if not is_padding[i]]
    if is_answer is None:
        return IdPrompt([ids[i] for i in kept], None)
    runs = [(answered, list(run)) for answered, run in groupby(kept, key=lambda i: bool(is_answer[i]))]
    if not any(answered for answered, _ in runs):
        raise RowError(Reason.BAD_IDS, "the mask marks no answer")
    if runs[0][0]:
        raise RowError(Reason.NO_USER_TURN, "the mask marks the first id as an answer")
    num_answers = sum(answered for answered, _ in runs)
    return IdPrompt([ids[i] for i in runs[0][1]], Reason.LATER_TURNS if num_answers > 1 else None)


def _answer_mask(row: dict[str, Any], length: int) -> list[Any] | None:
    for key in MASK_KEYS:
        if (mask := _column(row, key, length)) is not None:
            return mask
    labels = _column(row, "labels", length)
    return None if labels is None else [label != NO_LABEL for label in labels]


def _column(row: dict[str, Any], key: str, length: int) -> list[Any] | None:
    column = row.get(key)
    if column is None:
        return None
    if not isinstance(column, list) or not all(isinstance(item, int) for item in column):
        raise RowError(Reason.BAD_IDS, f"{key} is no list of integers")
    if len(column) != length:
        raise RowError(Reason.BAD_IDS, f"{key} has {len(column)} entries for {length} ids")
    return column
