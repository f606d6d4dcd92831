"""From answered turns to documents: the sequences that features are recorded for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Turns:
    """One document to be: turns that continue one another, token by token."""

    key: str
    """Key of its first turn."""
    prompt_key: str
    family: str
    split: str
    turn_keys: tuple[str, ...]
    input_ids: list[int]
    loss_mask: list[int]
    """1 at the tokens of answers."""


def merge_turns(rows: Sequence[Mapping[str, Any]]) -> Iterator[Turns]:
    """Documents of answered turns, in the order of the rows; turns of one prompt stand one after another.

    Turns become one document only where the next prompt's ids start with the document so far. Where the template strips
    or rewrites an earlier answer, or its text is tokenised another way, each turn is a document of its own.
    """
    document: Turns | None = None
    for row in rows:
        following = _continued(document, row) if document else None
        if document and not following:
            yield document
        document = following or _started(row)
    if document:
        yield document


def merged_tokens(rows: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of all documents of these turns."""
    return sum(len(document.input_ids) for document in merge_turns(rows))


def _started(row: Mapping[str, Any]) -> Turns:
    prompt_ids, output_ids = list(row["prompt_ids"]), list(row["output_ids"])
    return Turns(
        key=row["key"],
        prompt_key=row["prompt_key"],
        family=row["family"],
        split=row["split"],
        turn_keys=(row["key"],),
        input_ids=prompt_ids + output_ids,
        loss_mask=[0] * len(prompt_ids) + [1] * len(output_ids),
    )


def _continued(document: Turns, row: Mapping[str, Any]) -> Turns | None:
    prompt_ids, output_ids = list(row["prompt_ids"]), list(row["output_ids"])
    length = len(document.input_ids)
    if row["prompt_key"] != document.prompt_key or prompt_ids[:length] != document.input_ids:
        return None
    return Turns(
        key=document.key,
        prompt_key=document.prompt_key,
        family=document.family,
        split=document.split,
        turn_keys=(*document.turn_keys, row["key"]),
        input_ids=prompt_ids + output_ids,
        loss_mask=document.loss_mask + [0] * (len(prompt_ids) - length) + [1] * len(output_ids),
    )
