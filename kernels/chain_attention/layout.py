"""Which rows `chain_attention` may be given, and how they are cut into chunks.

Legend: R chain rows, N prefix rows, H query heads, G key heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels.chain_attention.dense import Block, causal_blocks, cut_blocks
from kernels.chain_attention.places import Places, cut_places


class Edge(NamedTuple):
    """What each row sees, as a kernel reads it: int32, on the device."""

    anchor_R: Tensor
    start_R: Tensor
    """First prefix row of the kernel's share, after the anchor where it has none."""
    floor_R: Tensor
    """Ascending and nowhere above `start_R`; with `ceiling_R`, what the rows of a key are searched with."""
    ceiling_R: Tensor
    """Ascending and nowhere below `start_R`."""
    first_R: Tensor | None
    max_chain: int


Integers = TypeVar("Integers", Edge, Places)


@dataclass(frozen=True)
class RowLayout:
    """What each row sees: prefix rows doc_start[r]..anchor[r] and, where there are chains, chain rows first[r]..r.

    Made once for the rows of a part and used by every layer: checking and cutting wait for the device.
    """

    anchor_R: Tensor
    """[R] prefix row that each chain starts from, ascending."""

    first_R: Tensor | None
    """[R] index of the first row of each row's chain; None when rows see the prefix alone."""

    doc_start_R: Tensor
    """[R] first prefix row of each row's document, ascending."""

    max_chain: int
    """Most rows that one chain has (K - 1)."""

    num_prefix: int
    """N."""

    doc_rows: tuple[int, ...] = ()
    """Rows of each document, where the rows are the prefix rows themselves."""

    @classmethod
    def of_chains(
        cls, anchor_R: Tensor, first_R: Tensor, doc_start_R: Tensor, max_chain: int, num_prefix: int
    ) -> "RowLayout":
        """Chain rows, sorted by (anchor, depth), a chain's rows contiguous.

        Raises:
            ValueError: names the argument that breaks the order or points outside.
        """
        check_rows(anchor_R, first_R, doc_start_R, max_chain, num_prefix)
        return cls(anchor_R, first_R, doc_start_R, max_chain, num_prefix)

    @classmethod
    def of_documents(cls, doc_rows: Sequence[int], device: torch.device | str = "cpu") -> "RowLayout":
        """The prefix rows themselves: causal attention inside each of several packed documents.

        Args:
            doc_rows: number of rows of each document, in order.
            device: where the tensors go.
        """
        rows = torch.tensor(list(doc_rows), device=device)
        num_rows = sum(doc_rows)
        start_R = torch.repeat_interleave(rows.cumsum(0) - rows, rows, output_size=num_rows)
        return cls(torch.arange(num_rows, device=device), None, start_R, 1, num_rows, tuple(doc_rows))

    @property
    def num_rows(self) -> int:
        return self.anchor_R.shape[0]

    @cached_property
    def blocks(self) -> list[Block]:
        """Blocks of rows over keys that all of them see."""
        if self.first_R is None:
            return causal_blocks(self.doc_rows)
        return cut_blocks(self.anchor_R.cpu().numpy(), self.doc_start_R.cpu().numpy())

    @cached_property
    def whole_edge(self) -> Edge:
        """Every key."""
        return self._edge(self.doc_start_R)

    @cached_property
    def edge(self) -> Edge | None:
        """What `blocks` leave: of a block's rows, the keys after the block's. None when nothing is left."""
        covered = sum(block.rows.stop - block.rows.start for block in self.blocks if block.causal)
        if self.num_rows and covered == self.num_rows:
            return None
        start_R = self.doc_start_R.clone()
        for block in self.blocks:
            start_R[block.rows] = self.anchor_R[block.rows] + 1 if block.causal else block.keys.stop
        return self._edge(start_R)

    @cached_property
    def places(self) -> Places | None:
        """The places of chain rows whose queries are equal there; None where they would not pay."""
        if self.first_R is None:
            return None
        rows = (self.anchor_R.cpu(), self.first_R.cpu(), self.doc_start_R.cpu())
        places = cut_places(*rows, self.max_chain)
        return places and _sent(places, self.anchor_R.device)

    @cached_property
    def places_edge(self) -> Edge | None:
        """What `places` leave: the keys that are a row's own."""
        return self.places and self._edge(self.places.start_R)

    def to(self, device: torch.device) -> "RowLayout":
        """The same layout on another device, cut where it was: a GPU then waits for nothing."""
        if self.anchor_R.device == device:
            return self
        first_R = None if self.first_R is None else send(self.first_R, device)
        moved = replace(
            self, anchor_R=send(self.anchor_R, device), first_R=first_R, doc_start_R=send(self.doc_start_R, device)
        )
        moved.__dict__["blocks"] = self.blocks  # what the cached properties would find
        for name in ("edge", "places", "places_edge"):
            found = getattr(self, name)
            moved.__dict__[name] = found and _sent(found, device)
        return moved

    def _edge(self, start_R: Tensor) -> Edge:
        start_R = start_R.to(torch.int32)
        first_R = None if self.first_R is None else self.first_R.to(torch.int32)
        ceiling_R, floor_R = start_R, start_R
        if self.num_rows:
            ceiling_R, floor_R = start_R.cummax(0).values, start_R.flip(0).cummin(0).values.flip(0)
        return Edge(self.anchor_R.to(torch.int32), start_R, floor_R, ceiling_R, first_R, self.max_chain)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` that the host does not wait for."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


def _sent(integers: Integers, device: torch.device) -> Integers:
    return integers._replace(**{k: send(x, device) for k, x in integers._asdict().items() if isinstance(x, Tensor)})


@dataclass(frozen=True)
class Chunk:
    """Consecutive chain rows of one document and the prefix rows that they can see."""

    rows: slice
    """Chain rows; starts and ends where a chain does, so that no chain is cut."""

    prefix: slice
    """Prefix rows from the document's start to the largest anchor of the chunk."""


def cut_chunks(anchor_R: Tensor, first_R: Tensor, doc_start_R: Tensor, chunk_rows: int) -> list[Chunk]:
    """Cuts the rows at documents and then every `chunk_rows` rows, never inside a chain.

    A chunk stays inside a document so that its window holds no row that none of its queries sees.
    """
    num_rows = first_R.shape[0]
    doc_ends = torch.searchsorted(doc_start_R, doc_start_R, right=True).tolist()
    anchors, firsts, starts = anchor_R.tolist(), first_R.tolist(), doc_start_R.tolist()
    chunks = []
    begin = 0
    while begin < num_rows:
        end = min(begin + chunk_rows, doc_ends[begin])
        if end < num_rows:
            end = firsts[end]
        chunks.append(Chunk(slice(begin, end), slice(starts[begin], anchors[end - 1] + 1)))
        begin = end
    return chunks


def check_tensors(
    q_RHD: Tensor,
    k_prefix_NGD: Tensor,
    v_prefix_NGD: Tensor,
    k_chain_RGD: Tensor,
    v_chain_RGD: Tensor,
    prefix_grads: tuple[Tensor, Tensor] | None,
    layout: RowLayout,
) -> None:
    """Raises ValueError that names the first argument whose shape or dtype does not fit the others."""
    if q_RHD.dim() != 3:
        raise ValueError(f"q_RHD: expected 3 dimensions [rows, heads, head_dim], got {tuple(q_RHD.shape)}")
    if k_prefix_NGD.dim() != 3 or k_prefix_NGD.shape[2] != q_RHD.shape[2]:
        raise ValueError(f"k_prefix_NHD: expected [rows, kv_heads, {q_RHD.shape[2]}], got {tuple(k_prefix_NGD.shape)}")
    if k_prefix_NGD.shape[1] == 0 or q_RHD.shape[1] % k_prefix_NGD.shape[1]:
        raise ValueError(f"q_RHD: {q_RHD.shape[1]} query heads are not a multiple of {k_prefix_NGD.shape[1]} key heads")
    chain_shape = (q_RHD.shape[0], *k_prefix_NGD.shape[1:])
    expected = (
        ("v_prefix_NHD", v_prefix_NGD, tuple(k_prefix_NGD.shape)),
        ("k_chain_RHD", k_chain_RGD, chain_shape),
        ("v_chain_RHD", v_chain_RGD, chain_shape),
    )
    for name, tensor, shape in expected:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    for name, tensor in (("k_prefix_NHD", k_prefix_NGD), *((n, t) for n, t, _ in expected)):
        if tensor.dtype != q_RHD.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype} differs from q_RHD's {q_RHD.dtype}")
    if (layout.num_rows, layout.num_prefix) != (q_RHD.shape[0], k_prefix_NGD.shape[0]):
        made_for = f"{layout.num_rows} rows over {layout.num_prefix} prefix rows"
        raise ValueError(f"layout: it is of {made_for}, the tensors have {q_RHD.shape[0]} and {k_prefix_NGD.shape[0]}")
    if prefix_grads is not None and any(grad.shape != k_prefix_NGD.shape for grad in prefix_grads):
        raise ValueError(f"prefix_grads: both buffers must have the shape {tuple(k_prefix_NGD.shape)}")


def check_rows(anchor_R: Tensor, first_R: Tensor, doc_start_R: Tensor, max_chain: int, num_prefix: int) -> None:
    """Raises ValueError that names the argument which breaks the order (anchor, depth) or points outside."""
    num_rows = first_R.shape[0]
    if max_chain < 1:
        raise ValueError(f"max_chain: must be at least 1, got {max_chain}")
    for name, tensor in (("anchor_R", anchor_R), ("first_R", first_R), ("doc_start_R", doc_start_R)):
        if tuple(tensor.shape) != (num_rows,) or tensor.is_floating_point():
            raise ValueError(f"{name}: expected {num_rows} integers, got {tensor.dtype} {tuple(tensor.shape)}")
    if num_rows == 0:
        return
    same_anchor = anchor_R[1:] == anchor_R[:-1]
    index_R = torch.arange(num_rows, device=first_R.device)
    problems = (
        ("anchor_R", "rows must be sorted by anchor", (anchor_R[1:] < anchor_R[:-1]).any()),
        ("anchor_R", f"anchors must lie in [0, {num_prefix})", ((anchor_R < 0) | (anchor_R >= num_prefix)).any()),
        ("doc_start_R", "must lie in [0, anchor_R]", ((doc_start_R < 0) | (doc_start_R > anchor_R)).any()),
        ("doc_start_R", "must not decrease", (doc_start_R[1:] < doc_start_R[:-1]).any()),
        ("doc_start_R", "one chain lies in two documents", (same_anchor & (doc_start_R[1:] != doc_start_R[:-1])).any()),
        ("first_R", "must be the index of the chain's first row", first_R[0] != 0),
        (
            "first_R",
            "must be the index of the chain's first row",
            (first_R[1:] != torch.where(same_anchor, first_R[:-1], index_R[1:])).any(),
        ),
        ("max_chain", f"a chain is longer than {max_chain} rows", (index_R - first_R >= max_chain).any()),
    )
    found = torch.stack([broken for _, _, broken in problems]).tolist()  # one wait for the device, not one a check
    for (name, problem, _), broken in zip(problems, found, strict=True):
        if broken:
            raise ValueError(f"{name}: {problem}")
