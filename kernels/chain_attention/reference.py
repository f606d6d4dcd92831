"""Plain PyTorch `chain_attention`: what CPUs run and what a fused kernel is tested against.

Legend: R chain rows, N prefix rows, H query heads, G key heads, Q = H // G query heads a key head, D head
dimension, C rows of a chunk, W prefix rows that a chunk sees, M = max_chain.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.chain_attention.layout import Chunk, check_rows, check_tensors, cut_chunks

# Scores of a chunk take chunk_rows * H * (W + M) * 4 bytes: 10 MB at 9 heads and 1,000 prefix rows.
CHUNK_ROWS = 256


def chain_attention(
    q_RHD: Tensor,
    k_prefix_NHD: Tensor,
    v_prefix_NHD: Tensor,
    k_chain_RHD: Tensor,
    v_chain_RHD: Tensor,
    anchor_R: Tensor,
    first_R: Tensor,
    doc_start_R: Tensor,
    max_chain: int,
    *,
    scale: float | None = None,
    prefix_grads: tuple[Tensor, Tensor] | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> Tensor:
    """Attention of chain rows over their document's prefix up to the anchor and over their own chain.

    Row r sees prefix rows doc_start[r]..anchor[r] and chain rows first[r]..r (design.md, section 6; the
    predicate is P-EAGLE's, arXiv 2602.01469, restricted to depths of at least 1). Scores, softmax and
    all sums are fp32 (fp64 for fp64 inputs). No [R, N] array exists: forward and backward go through
    chunks of rows, and the backward recomputes a chunk's probabilities from the saved log-sum-exp.

    Args:
        q_RHD: [R, H, D] queries, rows sorted by (anchor, depth), a chain's rows contiguous.
        k_prefix_NHD: [N, G, D] keys of the depth-0 rows; H is a multiple of G (grouped queries).
        v_prefix_NHD: [N, G, D] values of the depth-0 rows.
        k_chain_RHD: [R, G, D] keys of the chain rows.
        v_chain_RHD: [R, G, D] values of the chain rows.
        anchor_R: [R] prefix row that each chain starts from.
        first_R: [R] index of the first row of each row's chain.
        doc_start_R: [R] first prefix row of each row's document.
        max_chain: most rows that one chain has (K - 1).
        scale: factor on the scores, D ** -0.5 by default.
        prefix_grads: two [N, G, D] buffers in fp32 (or fp64). With them the backward adds the gradients of
            k_prefix and v_prefix there and returns none for the two arguments, so that several calls
            accumulate without rounding to the inputs' dtype.
        chunk_rows: rows computed at once; bounds the memory, does not change the result.

    Returns:
        [R, H, D] in the queries' dtype.

    Raises:
        ValueError: names the argument whose shape, dtype, order or range is wrong.
    """
    check_tensors(q_RHD, k_prefix_NHD, v_prefix_NHD, k_chain_RHD, v_chain_RHD)
    check_rows(anchor_R, first_R, doc_start_R, max_chain, q_RHD.shape[0], k_prefix_NHD.shape[0])
    if prefix_grads is not None and any(grad.shape != k_prefix_NHD.shape for grad in prefix_grads):
        raise ValueError(f"prefix_grads: both buffers must have the shape {tuple(k_prefix_NHD.shape)}")
    chunks = cut_chunks(anchor_R, first_R, doc_start_R, max(chunk_rows, max_chain))
    scale = q_RHD.shape[-1] ** -0.5 if scale is None else scale
    return _ChainAttention.apply(
        q_RHD, k_prefix_NHD, v_prefix_NHD, k_chain_RHD, v_chain_RHD,
        anchor_R, first_R, max_chain, scale, chunks, prefix_grads,
    )  # fmt: skip


def document_attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, doc_rows: Sequence[int]) -> Tensor:
    """Causal attention inside each of several packed documents (the prefix pass).

    Args:
        q_NHD: [N, H, D] queries.
        k_NHD: [N, G, D] keys; H is a multiple of G.
        v_NHD: [N, G, D] values.
        doc_rows: number of rows of each document, in order; sums to N.

    Returns:
        [N, H, D].

    Raises:
        ValueError: `doc_rows` does not sum to the number of rows.
    """
    if sum(doc_rows) != q_NHD.shape[0]:
        raise ValueError(f"doc_rows: {sum(doc_rows)} rows in all, but q_NHD has {q_NHD.shape[0]}")
    parts = zip(*(x_NHD.transpose(0, 1).split(list(doc_rows), dim=1) for x_NHD in (q_NHD, k_NHD, v_NHD)), strict=True)
    grouped = q_NHD.shape[1] != k_NHD.shape[1]
    attended = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=grouped)[0]
        for q, k, v in parts
    ]
    return torch.cat(attended, dim=1).transpose(0, 1)


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_RHD: Tensor,
        k_prefix_NGD: Tensor,
        v_prefix_NGD: Tensor,
        k_chain_RGD: Tensor,
        v_chain_RGD: Tensor,
        anchor_R: Tensor,
        first_R: Tensor,
        max_chain: int,
        scale: float,
        chunks: list[Chunk],
        prefix_grads: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        tensors = (q_RHD, k_prefix_NGD, v_prefix_NGD, k_chain_RGD, v_chain_RGD, anchor_R, first_R)
        out_RHD = q_RHD.new_empty(q_RHD.shape)
        lse_RH = q_RHD.new_empty(q_RHD.shape[:2], dtype=_sum_dtype(q_RHD))
        with torch.autocast(q_RHD.device.type, enabled=False):
            for chunk in chunks:
                view = _ChunkView(chunk, tensors, max_chain, scale)
                out_CHD, lse_CH = view.forward()
                out_RHD[chunk.rows], lse_RH[chunk.rows] = out_CHD.to(out_RHD.dtype), lse_CH
        ctx.save_for_backward(*tensors, out_RHD, lse_RH)
        ctx.constants = (max_chain, scale, chunks, prefix_grads)
        return out_RHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out_RHD, lse_RH = ctx.saved_tensors
        max_chain, scale, chunks, prefix_grads = ctx.constants
        q_RHD, k_prefix_NGD, v_prefix_NGD, k_chain_RGD, v_chain_RGD = tensors[:5]
        sums = _sum_dtype(q_RHD)
        dq_RHD, dk_RGD, dv_RGD = (x.new_empty(x.shape) for x in (q_RHD, k_chain_RGD, v_chain_RGD))
        dk_NGD, dv_NGD = prefix_grads or (x.new_zeros(x.shape, dtype=sums) for x in (k_prefix_NGD, v_prefix_NGD))
        with torch.autocast(q_RHD.device.type, enabled=False):
            for chunk in chunks:
                view = _ChunkView(chunk, tensors, max_chain, scale)
                pieces = view.backward(out_RHD[chunk.rows], lse_RH[chunk.rows], grads[0][chunk.rows])
                dq, dk_win, dv_win, dk, dv = pieces
                dk_NGD[chunk.prefix] += dk_win
                dv_NGD[chunk.prefix] += dv_win
                for full, piece in ((dq_RHD, dq), (dk_RGD, dk), (dv_RGD, dv)):
                    full[chunk.rows] = piece.to(full.dtype)
        if prefix_grads is not None:
            return dq_RHD, None, None, dk_RGD, dv_RGD, None, None, None, None, None, None
        dk_NGD, dv_NGD = dk_NGD.to(k_prefix_NGD.dtype), dv_NGD.to(k_prefix_NGD.dtype)
        return dq_RHD, dk_NGD, dv_NGD, dk_RGD, dv_RGD, None, None, None, None, None, None


class _ChunkView:
    """One chunk's operands in the summing dtype, heads first: products over a key head's queries are one batch."""

    def __init__(self, chunk: Chunk, tensors: Sequence[Tensor], max_chain: int, scale: float) -> None:
        q_RHD, k_prefix_NGD, v_prefix_NGD, k_chain_RGD, v_chain_RGD, anchor_R, first_R = tensors
        dtype = _sum_dtype(q_RHD)
        self.num_rows = chunk.rows.stop - chunk.rows.start
        self.num_window = chunk.prefix.stop - chunk.prefix.start
        self.num_groups = k_prefix_NGD.shape[1]
        self.scale = scale
        self.q_GCQD = self._by_group(q_RHD[chunk.rows].to(dtype)) * scale
        self.k_GWD, self.v_GWD = (x[chunk.prefix].to(dtype).transpose(0, 1) for x in (k_prefix_NGD, v_prefix_NGD))
        self.k_GCD, self.v_GCD = (x[chunk.rows].to(dtype).transpose(0, 1) for x in (k_chain_RGD, v_chain_RGD))
        window_W = torch.arange(chunk.prefix.start, chunk.prefix.stop, device=q_RHD.device)
        self.hidden_CW = window_W > anchor_R[chunk.rows, None]
        # Depth of a row inside its chain: it sees the row `back` places before it iff its depth is at least that.
        self.depth_C = torch.arange(chunk.rows.start, chunk.rows.stop, device=q_RHD.device) - first_R[chunk.rows]
        self.num_back = min(max_chain, self.num_rows)

    def forward(self) -> tuple[Tensor, Tensor]:
        scores = self._scores()
        lse_GCQ = scores.logsumexp(-1)
        probs = scores.sub_(lse_GCQ[..., None]).exp_()
        window, band = probs.split([self.num_window, self.num_back], dim=-1)
        out_GCQD = self._window_product(window, self.v_GWD)
        for back in range(self.num_back):
            out_GCQD[:, back:] += band[:, back:, :, back, None] * self._shifted(self.v_GCD, back)
        return self._by_row(out_GCQD), self._by_row(lse_GCQ[..., None])[..., 0]

    def backward(self, out_CHD: Tensor, lse_CH: Tensor, dout_CHD: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q [C,H,D], the window's k and v [W,G,D] and the chain's k and v [C,G,D]."""
        out_GCQD, dout_GCQD = (self._by_group(x.to(self.q_GCQD.dtype)) for x in (out_CHD, dout_CHD))
        probs = self._scores().sub_(self._by_group(lse_CH[..., None])).exp_()
        delta_GCQ1 = (out_GCQD * dout_GCQD).sum(-1, keepdim=True)
        window, band = probs.split([self.num_window, self.num_back], dim=-1)
        dv_win = window.flatten(1, 2).transpose(1, 2) @ dout_GCQD.flatten(1, 2)
        dscores = self._window_product(dout_GCQD, self.v_GWD.transpose(1, 2)).sub_(delta_GCQ1).mul_(window)
        dq_GCQD = self._window_product(dscores, self.k_GWD)
        dk_win = dscores.flatten(1, 2).transpose(1, 2) @ self.q_GCQD.flatten(1, 2)
        dk_GCD, dv_GCD = torch.zeros_like(self.k_GCD), torch.zeros_like(self.v_GCD)
        rows = self.num_rows
        for back in range(self.num_back):
            prob, dout = band[:, back:, :, back, None], dout_GCQD[:, back:]
            dscore = prob * ((dout * self._shifted(self.v_GCD, back)).sum(-1, keepdim=True) - delta_GCQ1[:, back:])
            dq_GCQD[:, back:] += dscore * self._shifted(self.k_GCD, back)
            dk_GCD[:, : rows - back] += (dscore * self.q_GCQD[:, back:]).sum(2)
            dv_GCD[:, : rows - back] += (prob * dout).sum(2)
        by_row = (x.transpose(0, 1) for x in (dk_win, dv_win, dk_GCD, dv_GCD))
        return self._by_row(dq_GCQD * self.scale), *by_row

    def _scores(self) -> Tensor:
        """[G, C, Q, W + back] scores with -inf where a key is not visible; one column a step back in the chain."""
        window = self._window_product(self.q_GCQD, self.k_GWD.transpose(1, 2))
        window.masked_fill_(self.hidden_CW[:, None], float("-inf"))
        band = torch.full_like(window[..., :1], float("-inf")).repeat(1, 1, 1, self.num_back)
        for back in range(self.num_back):
            score = (self.q_GCQD[:, back:] * self._shifted(self.k_GCD, back)).sum(-1)
            band[:, back:, :, back] = score.masked_fill((self.depth_C[back:] < back)[:, None], float("-inf"))
        return torch.cat([window, band], dim=-1)

    def _window_product(self, x_GCQX: Tensor, y_GXY: Tensor) -> Tensor:
        return (x_GCQX.flatten(1, 2) @ y_GXY).view(*x_GCQX.shape[:3], y_GXY.shape[-1])

    def _shifted(self, x_GCD: Tensor, back: int) -> Tensor:
        """[G, C - back, 1, D]: the row `back` places before each of the rows back..C-1."""
        return x_GCD[:, : self.num_rows - back, None]

    def _by_group(self, x_CHD: Tensor) -> Tensor:
        return x_CHD.unflatten(1, (self.num_groups, -1)).transpose(0, 1)

    def _by_row(self, x_GCQD: Tensor) -> Tensor:
        return x_GCQD.transpose(0, 1).flatten(1, 2)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
