"""What must hold for every row of responses and features; each check says what is wrong with one row.

Names: n tokens of a document, A aux layers, H the target's hidden size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from components.data.answers import CUT_OFF, FINISHED, IDS, is_intact
from components.data.documents import Turns
from components.data.shards import StoredDocument, StoredRow


@dataclass(frozen=True)
class FeatureWidths:
    """Values a token that a shard must have."""

    aux: int
    """A * H"""
    last: int
    """H"""
    outlines: bool = False
    """Whether documents may be without states, for training to capture."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "FeatureWidths":
        """From the facts of a finished features output."""
        size, outlines = facts["hidden_size"], facts.get("streamed_documents", 0) > 0
        return cls(facts["num_aux_layers"] * size, size, outlines)

    def fit(self, document: StoredDocument) -> Iterator[str]:
        """How the document's widths differ from these."""
        if self.outlines and document.aux_hidden.shape[1] == document.last_hidden.shape[1] == 0:
            return
        for name, width in (("aux_hidden", self.aux), ("last_hidden", self.last)):
            found = getattr(document, name).shape[1]
            if found != width:
                yield f"{name} has {found} values a token, the manifest says {width}"


@dataclass
class SeenKeys:
    """Keys of a whole set, eight bytes each, so that the keys of millions of rows fit in memory."""

    _seen: set[int] = field(default_factory=set)

    def add(self, key: str) -> bool:
        """False when the key was there before."""
        number = int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
        is_new = number not in self._seen
        self._seen.add(number)
        return is_new


def response_problems(row: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with an answered turn."""
    if not is_intact(row):
        yield "its checksum is not the one that was written with it"
        return
    if row["key"] != f"{row['prompt_key']}:{row['turn']}":
        yield f"its key is not that of turn {row['turn']} of prompt {row['prompt_key']}"
    for name in IDS:
        if not row[name]:
            yield f"{name} is empty"
        elif min(row[name]) < 0:
            yield f"{name} holds a negative id"
    if row["finish_reason"] not in (FINISHED, CUT_OFF):
        yield f"its finish reason is {row['finish_reason']!r}"


def document_problems(document: StoredDocument, widths: FeatureWidths | None) -> Iterator[str]:
    """What is wrong with a document whose checksum is right."""
    if not document.loss_mask.any():
        yield "no token of it is supervised"
    yield from widths.fit(document) if widths else ()
    for name in ("aux_hidden", "last_hidden"):
        if not getattr(document, name).isfinite().all():
            yield f"{name} holds NaN or infinity"


def difference_problems(row: StoredRow, turns: Turns | None) -> Iterator[str]:
    """How a recorded document differs from the answered turns it was recorded for; None: there are none."""
    if turns is None:
        yield "no answered turn of the same part begins it"
        return
    document = row.document
    if document.input_ids.tolist() != turns.input_ids:
        yield "its ids are not those of the responses"
    elif document.loss_mask.int().tolist() != turns.loss_mask:
        yield "its loss mask does not mark the answers of the responses"
    named = {"family": document.family, "split": row.split, "prompt key": row.prompt_key}
    expected = {"family": turns.family, "split": turns.split, "prompt key": turns.prompt_key}
    for name, found in named.items():
        if found != expected[name]:
            yield f"its {name} is {found}, the responses say {expected[name]}"
