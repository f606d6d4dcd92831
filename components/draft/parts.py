"""The parts that a step is cut into, and the integers that say what each of them computes.

All of it can be worked out on the CPU and sent before a step begins. A GPU then finds it there: asked for during the step it would
wait for the host, and behind the features of the next batch, which take the one way there for milliseconds.

Legend: A supervised anchors, R chain rows, E elements of a part (its anchors' depth-0 rows, then its chain rows).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.draft.batch import PackedBatch
from components.draft.chains import ChainRows, Chains
from components.draft.losses import TaughtRows
from kernels.chain_attention.layout import send


@dataclass(frozen=True)
class Part:
    """Some of a batch's anchors with their whole chains."""

    anchors: slice
    """Which of the supervised anchors."""

    rows: ChainRows
    depth_E: Tensor
    """[E] depth of each element."""

    drafted_E: Tensor
    """[E] index of the packed token that each element drafts."""

    taught: TaughtRows
    """Which packed token's features teach each element, ordered for the loss."""

    @classmethod
    def of(cls, chains: Chains, batch: PackedBatch, anchors: slice, chunk_rows: int) -> "Part":
        """Worked out where the chains are; `chunk_rows` elements have logits at once."""
        own = chains[anchors]
        rows = ChainRows.of(own, batch)
        depth_E = torch.cat([torch.zeros_like(own.anchor_A), rows.depth_R])
        token_E = batch.places_of(torch.cat([own.anchor_A, rows.anchor_R]))[0] + depth_E
        return cls(anchors, rows, depth_E, token_E + 2, TaughtRows.of(token_E + 1, chunk_rows))

    def to(self, device: torch.device) -> "Part":
        depth_E, drafted_E = send(self.depth_E, device), send(self.drafted_E, device)
        return Part(self.anchors, self.rows.to(device), depth_E, drafted_E, self.taught.to(device))


@dataclass(frozen=True)
class Parts:
    """A batch's supervised anchors, cut."""

    anchor_A: Tensor
    """[A] depth-0 row of each."""

    parts: Sequence[Part]

    @classmethod
    def of(
        cls, chains: Chains, batch: PackedBatch, rows_per_part: int, chunk_rows: int, head_start: int = 0
    ) -> "Parts":
        """Worked out where the chains are.

        Raises:
            ValueError: one anchor has more elements than `rows_per_part`.
        """
        cuts = cut_parts(chains, rows_per_part, head_start)
        return cls(chains.anchor_A, [Part.of(chains, batch, cut, chunk_rows) for cut in cuts])

    def to(self, device: torch.device) -> "Parts":
        return Parts(send(self.anchor_A, device), [part.to(device) for part in self.parts])


def cut_parts(chains: Chains, rows_per_part: int, head_start: int = 0) -> list[slice]:
    """Cuts the anchors into consecutive parts of at most `rows_per_part` elements (depth 0 and chain rows; see `head_start`).

    They are as few as can be, and with that number the largest is as small as can be: the largest part is what memory must hold.

    Args:
        chains: the supervised anchors.
        rows_per_part: most elements of a part.
        head_start: chain rows, with their share of depth-0 elements but at most as many of those, that the first part may
            have beyond the others: while it is computed memory does not hold the gradients yet.

    Raises:
        ValueError: one anchor alone has more elements than a part may have.
    """
    sizes_A = chains.length_A + 1
    if not len(chains):
        return []
    longest, ends = int(sizes_A.max()), sizes_A.cumsum(0).tolist()
    if longest > rows_per_part:
        raise ValueError(f"rows_per_part: {rows_per_part} is less than one anchor's {longest} elements")
    # Depth-0 elements hold next to nothing in a part: their rows were the prefix pass. Where nearly all are, two for each chain row do.
    beyond = min(head_start * ends[-1] // max(1, ends[-1] - len(ends)), 2 * head_start)
    num_parts = len(_fill_parts(ends, rows_per_part, beyond))
    sizes = range(longest, rows_per_part)  # the smallest one that does is searched for
    best = bisect_left(sizes, True, key=lambda size: len(_fill_parts(ends, size, beyond)) == num_parts)
    return _fill_parts(ends, sizes.start + best, beyond)


def _fill_parts(ends: Sequence[int], size: int, beyond: int) -> list[slice]:
    """Parts that take as many anchors as they may; `ends` counts the elements up to and with each anchor."""
    parts: list[slice] = []
    begin = filled = 0
    while begin < len(ends):
        end = bisect_right(ends, filled + size + (0 if parts else beyond), begin)
        parts.append(slice(begin, end))
        begin, filled = end, ends[end - 1]
    return parts
