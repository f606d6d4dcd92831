"""Chain rows that ask the same, and the keys that all of them see.

A head's first layer reads one constant in every chain row, so there a row's query depends on its position alone: the rows of one
*place*, anchor + depth, of a document have equal queries. All of them see the prefix up to place - max_chain. That share is
computed once a place, not once a row; only the few keys after it, and the chains, are each row's own.

From place to place one key more is seen. The share of consecutive places is thereby a rectangle (the keys that the first of
them sees) and a plain causal square, both without another mask.

Legend: R chain rows, M = max_chain, Y places (consecutive in each document, so some may be no row's), A places of some row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.chain_attention.dense import CAUSAL_ROWS, MIN_KEYS, Block

WORTH = 0.75
"""Most places to be computed for each row that then needs no block: with more, the saving would not pay for the detour."""


class Places(NamedTuple):
    """The places of chain rows, a run of consecutive ones a document."""

    row_Y: Tensor
    """[Y] a chain row at each place, 0 where there is none."""

    member_YM: Tensor
    """[Y, M] int32: the chain row of each depth at each place, R where there is none."""

    place_R: Tensor
    """[R] place of each chain row, -1 where it has none and keeps all its keys."""

    asked_A: Tensor
    """[A] the places that chain rows have."""

    start_R: Tensor
    """[R] first prefix row that is a chain row's own."""

    blocks: Sequence[Block]
    """Their rows are places; a place is in up to two of them, over different keys."""


def cut_places(
    anchor_R: Tensor,
    first_R: Tensor,
    doc_start_R: Tensor,
    max_chain: int,
    multiple: int = CAUSAL_ROWS,
    min_keys: int = MIN_KEYS,
) -> Places | None:
    """The places of chain rows on the CPU; None where they are not few enough to pay.

    Args:
        anchor_R, first_R, doc_start_R, max_chain: as for `RowLayout.of_chains`.
        multiple: places of a run, and keys of its rectangle, are a multiple of this: cuDNN plans every new shape anew. A
            causal block's keys are padded to a multiple of `CAUSAL_ROWS`, which must come to the same number.
        min_keys: a document whose last place shares fewer keys has no run.
    """
    num_rows = anchor_R.shape[0]
    depth_R = torch.arange(num_rows) - first_R + 1
    at_R = anchor_R + depth_R
    place_R, start_R = torch.full_like(at_R, -1), doc_start_R.clone()
    blocks: list[Block] = []
    num_places = 0
    starts, counts = torch.unique_consecutive(doc_start_R, return_counts=True)
    end = 0
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        rows, end = slice(end, end + count), end + count
        first, last = int(at_R[rows.start]), int(at_R[rows].max())  # the first row is its anchor's depth 1
        if last - max_chain + 1 - start < min_keys:
            continue
        keys = slice(start, start + max(0, first - max_chain - start) // multiple * multiple)
        origin = keys.stop + max_chain  # the place that sees one key after the rectangle
        length = last + 1 - origin
        run = slice(num_places, num_places + -(-length // multiple) * multiple)
        if keys.stop > keys.start:
            blocks.append(Block(run, keys))
        blocks.append(Block(run, slice(keys.stop, keys.stop + length), causal=True))
        within = at_R[rows] >= origin
        place_R[rows] = torch.where(within, at_R[rows] - origin + run.start, -1)
        start_R[rows] = torch.where(within, at_R[rows] - max_chain + 1, start)
        num_places = run.stop
    placed_R = (place_R >= 0).nonzero()[:, 0]
    if not blocks or num_places > WORTH * len(placed_R):
        return None
    member_YM = torch.full((num_places, max_chain), num_rows, dtype=torch.int32)
    member_YM[place_R[placed_R], depth_R[placed_R] - 1] = placed_R.int()
    row_Y = member_YM.amin(1).long()
    asked_A = (row_Y < num_rows).nonzero()[:, 0]
    return Places(row_Y.where(row_Y < num_rows, 0), member_YM, place_R, asked_A, start_R, blocks)
