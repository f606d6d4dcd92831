"""Plain PyTorch `chain_attention`: what CPUs run and what a fused kernel is tested against.

Legend: R chain rows, N prefix rows, H query heads, G key heads, Q = H // G query heads a key head, D head
dimension, C rows of a chunk, Y = C * Q, W prefix rows that a chunk sees, X = W + C.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.chain_attention.layout import Chunk, RowLayout, cut_chunks

# A chunk's chain rows are all scored against each other, so its size bounds that waste as well as the memory.
CHUNK_ROWS = 128


def reference_attention(
    q_RHD: Tensor,
    k_prefix_NHD: Tensor,
    v_prefix_NHD: Tensor,
    k_chain_RHD: Tensor,
    v_chain_RHD: Tensor,
    layout: RowLayout,
    scale: float,
    prefix_grads: tuple[Tensor, Tensor] | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> Tensor:
    """`chain_attention` in plain PyTorch, on any device.

    Scores, softmax and all sums are fp32 (fp64 for fp64 inputs). No [R, N] array exists: forward and backward go
    through chunks of `chunk_rows` rows, and the backward recomputes a chunk's probabilities from the saved log-sum-exp.
    """
    assert layout.first_R is not None
    chunks = cut_chunks(layout.anchor_R, layout.first_R, layout.doc_start_R, max(chunk_rows, layout.max_chain))
    return _ChainAttention.apply(
        q_RHD, k_prefix_NHD, v_prefix_NHD, k_chain_RHD, v_chain_RHD,
        layout.anchor_R, layout.first_R, scale, chunks, prefix_grads,
    )  # fmt: skip


def reference_document_attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, doc_rows: Sequence[int]) -> Tensor:
    """`document_attention` by PyTorch's own attention, a document at a time."""
    # PyTorch's CPU kernel is slower, and less exact, in bf16 than in fp32.
    dtype = q_NHD.dtype
    if q_NHD.device.type == "cpu":
        q_NHD, k_NHD, v_NHD = (x.to(_sum_dtype(x)) for x in (q_NHD, k_NHD, v_NHD))
    parts = zip(*(x_NHD.transpose(0, 1).split(list(doc_rows), dim=1) for x_NHD in (q_NHD, k_NHD, v_NHD)), strict=True)
    grouped = q_NHD.shape[1] != k_NHD.shape[1]
    attended = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=grouped)[0]
        for q, k, v in parts
    ]
    return torch.cat(attended, dim=1).transpose(0, 1).to(dtype)


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
        scale: float,
        chunks: list[Chunk],
        prefix_grads: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        tensors = (q_RHD, k_prefix_NGD, v_prefix_NGD, k_chain_RGD, v_chain_RGD, anchor_R, first_R)
        out_RHD = q_RHD.new_empty(q_RHD.shape)
        lse_RH = q_RHD.new_empty(q_RHD.shape[:2], dtype=_sum_dtype(q_RHD))
        with torch.autocast(q_RHD.device.type, enabled=False):
            for chunk in chunks:
                view = _ChunkView(chunk, tensors, scale)
                out_CHD, lse_CH = view.forward()
                out_RHD[chunk.rows], lse_RH[chunk.rows] = out_CHD.to(out_RHD.dtype), lse_CH
        ctx.save_for_backward(*tensors, out_RHD, lse_RH)
        ctx.constants = (scale, chunks, prefix_grads)
        return out_RHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out_RHD, lse_RH = ctx.saved_tensors
        scale, chunks, prefix_grads = ctx.constants
        q_RHD, k_prefix_NGD, v_prefix_NGD, k_chain_RGD, v_chain_RGD = tensors[:5]
        sums = _sum_dtype(q_RHD)
        dq_RHD, dk_RGD, dv_RGD = (x.new_empty(x.shape) for x in (q_RHD, k_chain_RGD, v_chain_RGD))
        dk_NGD, dv_NGD = prefix_grads or (x.new_zeros(x.shape, dtype=sums) for x in (k_prefix_NGD, v_prefix_NGD))
        with torch.autocast(q_RHD.device.type, enabled=False):
            for chunk in chunks:
                view = _ChunkView(chunk, tensors, scale)
                pieces = view.backward(out_RHD[chunk.rows], lse_RH[chunk.rows], grads[0][chunk.rows])
                dq, dk_win, dv_win, dk, dv = pieces
                dk_NGD[chunk.prefix] += dk_win
                dv_NGD[chunk.prefix] += dv_win
                for full, piece in ((dq_RHD, dq), (dk_RGD, dk), (dv_RGD, dv)):
                    full[chunk.rows] = piece.to(full.dtype)
        if prefix_grads is not None:
            return dq_RHD, None, None, dk_RGD, dv_RGD, None, None, None, None, None
        dk_NGD, dv_NGD = dk_NGD.to(k_prefix_NGD.dtype), dv_NGD.to(k_prefix_NGD.dtype)
        return dq_RHD, dk_NGD, dv_NGD, dk_RGD, dv_RGD, None, None, None, None, None


class _ChunkView:
    """One chunk's operands in the summing dtype, heads first: a key head's queries are rows of one product.

    Keys are the window followed by the chunk's own chain rows, C = their number and X = W + C.
    """

    def __init__(self, chunk: Chunk, tensors: Sequence[Tensor], scale: float) -> None:
        q_RHD, k_prefix_NGD, v_prefix_NGD, k_chain_RGD, v_chain_RGD, anchor_R, first_R = tensors
        self.dtype = _sum_dtype(q_RHD)
        self.num_groups = k_prefix_NGD.shape[1]
        self.num_window = chunk.prefix.stop - chunk.prefix.start
        self.scale = scale
        self.q_GYD = self._by_group(q_RHD[chunk.rows]) * scale
        self.k_GXD = self._keys(k_prefix_NGD[chunk.prefix], k_chain_RGD[chunk.rows])
        self.v_GXD = self._keys(v_prefix_NGD[chunk.prefix], v_chain_RGD[chunk.rows])
        self.bias_CX = self._bias(chunk, anchor_R[chunk.rows, None], first_R[chunk.rows, None])

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output [C, H, D] and log-sum-exp [C, H]."""
        scores = self._scores()
        lse_GY1 = scores.logsumexp(-1, keepdim=True)
        out_GYD = scores.sub_(lse_GY1).exp_() @ self.v_GXD
        return self._by_row(out_GYD), self._by_row(lse_GY1)[..., 0]

    def backward(self, out_CHD: Tensor, lse_CH: Tensor, dout_CHD: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q [C, H, D], the window's k and v [W, G, D] and the chain's k and v [C, G, D]."""
        out_GYD, dout_GYD, lse_GY1 = (self._by_group(x) for x in (out_CHD, dout_CHD, lse_CH[..., None]))
        probs_GYX = self._scores().sub_(lse_GY1).exp_()
        dv_GXD = probs_GYX.transpose(1, 2) @ dout_GYD
        delta_GY1 = (out_GYD * dout_GYD).sum(-1, keepdim=True)
        dscores_GYX = (dout_GYD @ self.v_GXD.transpose(1, 2)).sub_(delta_GY1).mul_(probs_GYX)
        dq_GYD = (dscores_GYX @ self.k_GXD).mul_(self.scale)
        dk_GXD = dscores_GYX.transpose(1, 2) @ self.q_GYD
        dk_XGD, dv_XGD = dk_GXD.transpose(0, 1), dv_GXD.transpose(0, 1)
        window, chain = slice(self.num_window), slice(self.num_window, None)
        return self._by_row(dq_GYD), dk_XGD[window], dv_XGD[window], dk_XGD[chain], dv_XGD[chain]

    def _scores(self) -> Tensor:
        """[G, C * Q, X], -inf where a key is not visible."""
        scores_GYX = self.q_GYD @ self.k_GXD.transpose(1, 2)
        scores_GYX.unflatten(1, (self.bias_CX.shape[0], -1)).add_(self.bias_CX[:, None])
        return scores_GYX

    def _bias(self, chunk: Chunk, anchor_C1: Tensor, first_C1: Tensor) -> Tensor:
        window_W = torch.arange(chunk.prefix.start, chunk.prefix.stop, device=anchor_C1.device)
        row_C = torch.arange(chunk.rows.start, chunk.rows.stop, device=anchor_C1.device)
        sees_CX = torch.cat([window_W <= anchor_C1, (row_C >= first_C1) & (row_C <= row_C[:, None])], dim=1)
        return torch.zeros(sees_CX.shape, dtype=self.dtype, device=sees_CX.device).masked_fill_(~sees_CX, -torch.inf)

    def _keys(self, window_WGD: Tensor, chain_CGD: Tensor) -> Tensor:
        return torch.cat([window_WGD, chain_CGD]).to(self.dtype).transpose(0, 1).contiguous()

    def _by_group(self, x_CHD: Tensor) -> Tensor:
        return x_CHD.to(self.dtype).unflatten(1, (self.num_groups, -1)).transpose(0, 1).flatten(1, 2)

    def _by_row(self, x_GYD: Tensor) -> Tensor:
        return x_GYD.unflatten(1, (self.bias_CX.shape[0], -1)).transpose(0, 1).flatten(1, 2)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
