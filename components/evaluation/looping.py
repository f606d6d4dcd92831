"""Answers that have got stuck: the model says the same again and again until its tokens run out."""

from collections.abc import Sequence

LOOP_REPEATS = 4
"""The same n-gram stands this often, one right after another, at the answer's end ..."""
LOOP_TOKENS = 16
"""... and they take at least so many tokens: a row of dashes or dots is no loop, a line of them is."""
LONGEST_LOOP = 64
"""Tokens of the longest n-gram that is looked for."""


def is_looped(output_ids: Sequence[int], finish_reason: str | None) -> bool:
    """Whether the answer was cut off (`length`) while its tail repeated one n-gram.

    Args:
        output_ids: The answer's tokens.
        finish_reason: Of vLLM; an answer that came to an end of its own is never looped.
    """
    if finish_reason != "length":
        return False
    longest = min(LONGEST_LOOP, len(output_ids) // LOOP_REPEATS)
    return any(_tail_repeats(output_ids, size) for size in range(1, longest + 1))


def _tail_repeats(ids: Sequence[int], size: int) -> bool:
    """Whether the last `LOOP_REPEATS` runs of `size` tokens, and at least `LOOP_TOKENS` tokens, have period `size`."""
    length = max(LOOP_REPEATS * size, LOOP_TOKENS)
    return length <= len(ids) and all(ids[-i] == ids[-i - size] for i in range(1, length - size + 1))
