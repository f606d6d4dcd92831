"""Which rows `chain_attention` may be given, and how they are cut into chunks.

Legend: R chain rows, N prefix rows, H query heads, G key heads, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    num_rows = anchor_R.shape[0]
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
    q_RHD: Tensor, k_prefix_NGD: Tensor, v_prefix_NGD: Tensor, k_chain_RGD: Tensor, v_chain_RGD: Tensor
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


def check_rows(
    anchor_R: Tensor, first_R: Tensor, doc_start_R: Tensor, max_chain: int, num_rows: int, num_prefix: int
) -> None:
    """Raises ValueError that names the argument which breaks the order (anchor, depth) or points outside."""
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
    for name, problem, broken in problems:
        if broken:
            raise ValueError(f"{name}: {problem}")
