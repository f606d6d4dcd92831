"""The two attentions of a head, by whatever computes them best where the tensors are.

Legend: R chain rows, N prefix rows, H query heads, G key heads, D head dimension.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kernels.chain_attention.layout import RowLayout, check_tensors
from kernels.chain_attention.reference import reference_attention, reference_document_attention


def chain_attention(
    q_RHD: Tensor,
    k_prefix_NHD: Tensor,
    v_prefix_NHD: Tensor,
    k_chain_RHD: Tensor,
    v_chain_RHD: Tensor,
    layout: RowLayout,
    *,
    scale: float | None = None,
    prefix_grads: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = False,
    equal_queries: bool = False,
) -> Tensor:
    """Attention of chain rows over their document's prefix up to the anchor and over their own chain.

    Row r sees prefix rows doc_start[r]..anchor[r] and chain rows first[r]..r (design.md, section 6; the
    predicate is P-EAGLE's, arXiv 2602.01469, restricted to depths of at least 1). Scores, softmax and
    all sums are at least fp32. No [R, N] array exists. CUDA tensors go through Triton and, where a block of rows sees
    the same keys, cuDNN; all others, and float64, through the plain reference.

    Args:
        q_RHD: [R, H, D] queries.
        k_prefix_NHD: [N, G, D] keys of the depth-0 rows; H is a multiple of G (grouped queries).
        v_prefix_NHD: [N, G, D] values of the depth-0 rows.
        k_chain_RHD: [R, G, D] keys of the chain rows.
        v_chain_RHD: [R, G, D] values of the chain rows.
        layout: what each row sees (`RowLayout.of_chains`).
        scale: factor on the scores, D ** -0.5 by default.
        prefix_grads: two [N, G, D] buffers in fp32 (or fp64). With them the backward adds the gradients of
            k_prefix and v_prefix there and returns none for the two arguments, so that several calls
            accumulate without rounding to the inputs' dtype.
        deterministic: on a GPU, equal bits in every run: Triton alone, which adds in a fixed order.
        equal_queries: rows of one document with the same anchor + depth have equal queries, as in a head's first layer, which
            reads a constant in every chain row. A GPU then computes what they see in common once for all of them (places.py).
            The gradient of the queries is right in sum over such rows only.

    Returns:
        [R, H, D] in the queries' dtype.

    Raises:
        ValueError: names the argument whose shape or dtype is wrong.
    """
    check_tensors(q_RHD, k_prefix_NHD, v_prefix_NHD, k_chain_RHD, v_chain_RHD, prefix_grads, layout)
    scale = q_RHD.shape[-1] ** -0.5 if scale is None else scale
    tensors = (q_RHD, k_prefix_NHD, v_prefix_NHD, k_chain_RHD, v_chain_RHD)
    if not fuses(q_RHD):
        return reference_attention(*tensors, layout, scale, prefix_grads)
    from kernels.chain_attention.fused import fused_attention  # Triton is only there where it is used

    return fused_attention(*tensors, layout, scale, prefix_grads, deterministic, equal_queries)


def document_attention(
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, doc_rows: Sequence[int], *, deterministic: bool = False
) -> Tensor:
    """Causal attention inside each of several packed documents (the prefix pass).

    Args:
        q_NHD: [N, H, D] queries.
        k_NHD: [N, G, D] keys; H is a multiple of G.
        v_NHD: [N, G, D] values.
        doc_rows: number of rows of each document, in order; sums to N.
        deterministic: as for `chain_attention`.

    Returns:
        [N, H, D].

    Raises:
        ValueError: `doc_rows` does not sum to the number of rows.
    """
    if sum(doc_rows) != q_NHD.shape[0]:
        raise ValueError(f"doc_rows: {sum(doc_rows)} rows in all, but q_NHD has {q_NHD.shape[0]}")
    if not fuses(q_NHD):
        return reference_document_attention(q_NHD, k_NHD, v_NHD, doc_rows)
    from kernels.chain_attention.fused import fused_attention

    layout = _document_layout(tuple(doc_rows), q_NHD.device)
    scale = q_NHD.shape[-1] ** -0.5
    return fused_attention(q_NHD, k_NHD, v_NHD, None, None, layout, scale, None, deterministic)


@lru_cache(maxsize=4)
def _document_layout(doc_rows: tuple[int, ...], device: torch.device) -> RowLayout:
    """Every layer of a pass asks for the same one."""
    return RowLayout.of_documents(doc_rows, device)


def fuses(q_RHD: Tensor) -> bool:
    """Whether the fused kernels take these queries: on a GPU, in a dtype that it multiplies."""
    return q_RHD.is_cuda and q_RHD.dtype.itemsize <= 4 and q_RHD.shape[2] <= 256
