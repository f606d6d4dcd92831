"""Which elements are supervised and how long each anchor's chain is (COD sampling).

Legend: A supervised anchors, R chain rows (depth >= 1), N depth-0 rows, T packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from components.draft.batch import PackedBatch
from kernels.chain_attention import RowLayout
from kernels.chain_attention.layout import send


@dataclass(frozen=True)
class ChainRecipe:
    """COD: depth d is kept with probability max(keep_ratio ** d, keep_floor)."""

    num_depths: int
    """K_train: depths 0..K_train-1 are trained."""

    keep_ratio: float = 0.8
    keep_floor: float = 0.0

    def __post_init__(self) -> None:
        if self.num_depths < 1:
            raise ValueError(f"num_depths: must be at least 1, got {self.num_depths}")
        if not (0.0 <= self.keep_ratio <= 1.0 and 0.0 <= self.keep_floor <= 1.0):
            raise ValueError(f"keep_ratio, keep_floor: must lie in [0, 1], got {self.keep_ratio}, {self.keep_floor}")


@dataclass(frozen=True)
class Chains:
    """The supervised elements of a batch: one integer per anchor."""

    anchor_A: Tensor
    """[A] depth-0 row of each supervised anchor, increasing."""

    length_A: Tensor
    """[A] chain rows of each anchor: depths 1..length; 0 means that only depth 0 is supervised."""

    def __len__(self) -> int:
        return self.anchor_A.shape[0]

    @classmethod
    def none(cls) -> "Chains":
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(nothing, nothing)

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Anchor, depth and index of the chain's first row, [R] each, of the chain rows in their order."""
        chain_R = torch.repeat_interleave(torch.arange(len(self), device=self.anchor_A.device), self.length_A)
        first_R = (self.length_A.cumsum(0) - self.length_A)[chain_R]
        depth_R = torch.arange(len(chain_R), device=chain_R.device) - first_R + 1
        return self.anchor_A[chain_R], depth_R, first_R

    def __getitem__(self, part: slice) -> "Chains":
        return Chains(self.anchor_A[part], self.length_A[part])


@dataclass(frozen=True)
class ChainRows:
    """The rows of some chains of a batch, sorted by (anchor, depth)."""

    position_R: Tensor
    """[R] position id: the anchor's and the depth."""

    depth_R: Tensor
    """[R] depth, from 1 on."""

    layout: RowLayout
    """What each row sees, and its anchor."""

    @classmethod
    def of(cls, chains: Chains, batch: PackedBatch) -> "ChainRows":
        """All is worked out where the chains are: on the CPU, it does not make a GPU wait."""
        anchor_R, depth_R, first_R = chains.rows()
        _, start_R = batch.places_of(anchor_R)
        max_chain = int(depth_R.max()) if len(depth_R) else 1
        layout = RowLayout.of_chains(anchor_R, first_R, start_R, max_chain, sum(batch.doc_rows))
        return cls(anchor_R - start_R + depth_R, depth_R, layout)

    def to(self, device: torch.device) -> "ChainRows":
        return ChainRows(send(self.position_R, device), send(self.depth_R, device), self.layout.to(device))

    @property
    def anchor_R(self) -> Tensor:
        """[R] depth-0 row of each row's anchor."""
        return self.layout.anchor_R


def supervised_chains(batch: PackedBatch, num_depths: int) -> Chains:
    """Every supervised anchor with the longest chain that its answer has room for.

    Element (a, d) counts iff tokens a+1 and a+d+2 are of the same answer: token a+1 is the last one the server
    knows when it drafts, token a+d+2 is the one drafted. So an answer's first anchor is the last prompt token,
    its first token is never a target and its last one is.
    """
    # Row i's feature is token t; an index past the last token is no answer.
    answer = torch.cat([batch.answer_T, batch.answer_T.new_zeros(num_depths + 1)])
    known_N = answer[batch.token_N + 1]
    counted_ND = torch.stack(
        [(known_N > 0) & (answer[batch.token_N + depth + 2] == known_N) for depth in range(num_depths)], dim=1
    )
    anchor_A = counted_ND[:, 0].nonzero()[:, 0]
    return Chains(anchor_A, counted_ND[anchor_A, 1:].sum(1))


def sample_chains(batch: PackedBatch, recipe: ChainRecipe, seeds: Sequence[tuple[int, ...]]) -> Chains:
    """Draws a chain length for every supervised anchor: P(length >= d) = max(r ** d, r_min), cut at its answer's end.

    Args:
        batch: packed documents.
        recipe: depths and shares.
        seeds: one tuple of non-negative integers a document, for example (seed, epoch, row). A document's
            draws depend on nothing else, so neither packing nor the number of ranks changes them.

    Raises:
        ValueError: not one seed a document.
    """
    if len(seeds) != len(batch.doc_lengths):
        raise ValueError(f"seeds: {len(seeds)} for {len(batch.doc_lengths)} documents")
    chains = supervised_chains(batch, recipe.num_depths)
    draws = [np.random.default_rng(list(seed)).random(rows) for seed, rows in zip(seeds, batch.doc_rows, strict=True)]
    draw_A = torch.from_numpy(np.concatenate(draws)).to(batch.device)[chains.anchor_A]
    shares = [max(recipe.keep_ratio**depth, recipe.keep_floor) for depth in range(1, recipe.num_depths)]
    length_A = (draw_A[:, None] < draw_A.new_tensor(shares)).sum(1)
    return Chains(chains.anchor_A, torch.minimum(length_A, chains.length_A))
