"""The items of a JSON array one by one, so that an array may be longer than the memory.

By the standard library's decoder, as lines of JSONL are: ijson reads a stricter language, so that a NaN, which Python itself writes, would cost the
whole array.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

BLOCK_CHARS = 1 << 20

BLANKS = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()


def array_items(file: TextIO) -> Iterator[Any]:
    """The items as `json` reads them; one that is longer than a block is parsed again as more of it is there.

    Raises:
        ValueError: what stands there is no whole array (a JSONDecodeError), or no UTF-8.
        RecursionError: an item is nested too deeply.
    """
    text, place, opening, is_over = file.read(BLOCK_CHARS), 0, "[", False
    while not is_over:
        try:
            items, place, is_over = _next(text, place, opening)
        except json.JSONDecodeError:
            more = file.read(max(BLOCK_CHARS, len(text) - place))
            if not more:
                raise
            text, place = text[place:] + more, 0
            continue
        opening = ""
        yield from items
    rest = text[place:]
    while not rest.strip() and (more := file.read(BLOCK_CHARS)):
        rest = more
    if rest.strip():
        raise json.JSONDecodeError("Extra data", text, place)


def _next(text: str, place: int, opening: str) -> tuple[list[Any], int, bool]:
    """The next item, if there is one, where it ends with the sign after it, and whether that ends the array."""
    place = _after_blanks(text, place)
    if not text.startswith(opening, place):
        raise json.JSONDecodeError("Expecting an array", text, place)
    if opening:
        place = _after_blanks(text, place + len(opening))
        if text.startswith("]", place):
            return [], place + 1, True
    item, place = DECODER.raw_decode(text, place)
    place = _after_blanks(text, place)
    # without the sign a number may go on in what is not read yet
    if text[place : place + 1] not in (",", "]"):
        raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
    return [item], place + 1, text[place] == "]"


def _after_blanks(text: str, place: int) -> int:
    found = BLANKS.match(text, place)
    assert found is not None
    return found.end()
