"""Triton and cuDNN as one differentiable attention.

Legend: R rows, N prefix rows, H query heads, G key heads, D head dimension.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.chain_attention import kernel
from kernels.chain_attention.dense import Block, can_be_dense, dense_backward, dense_forward
from kernels.chain_attention.layout import Edge, RowLayout
from kernels.chain_attention.places import Places
from kernels.chain_attention.shared_queries import can_share, shared_backward, shared_forward


def fused_attention(
    q_RHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    k_chain_RGD: Tensor | None,
    v_chain_RGD: Tensor | None,
    layout: RowLayout,
    scale: float,
    prefix_grads: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = False,
    equal_queries: bool = False,
) -> Tensor:
    """`chain_attention`, or `document_attention` when there are no chain rows among the keys."""
    dense = can_be_dense(q_RHD) and not deterministic
    shared: Sequence[Block] | Places
    if dense and equal_queries and can_share(q_RHD) and layout.places is not None:
        shared, edge = layout.places, layout.places_edge
    else:
        shared, edge = (layout.blocks, layout.edge) if dense else ([], layout.whole_edge)
    tensors = [None if x is None else x.contiguous() for x in (q_RHD, k_NGD, v_NGD, k_chain_RGD, v_chain_RGD)]
    return _FusedAttention.apply(*tensors, edge, shared, scale, prefix_grads)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_RHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        k_chain_RGD: Tensor | None,
        v_chain_RGD: Tensor | None,
        edge: Edge | None,
        shared: Sequence[Block] | Places,
        scale: float,
        prefix_grads: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        chain = None if k_chain_RGD is None or v_chain_RGD is None else (k_chain_RGD, v_chain_RGD)
        dense: tuple[Tensor, Tensor] | None = None
        lse_HY = None
        if isinstance(shared, Places):
            out_RHD, lse_HR, lse_HY = shared_forward(q_RHD, k_NGD, v_NGD, shared, scale)
            dense = out_RHD, lse_HR
        elif shared:
            dense = dense_forward(q_RHD, k_NGD, v_NGD, shared, scale)
        if edge is not None:
            dense = kernel.forward(q_RHD, k_NGD, v_NGD, chain, edge, scale, dense)
        assert dense is not None
        out_RHD, lse_HR = dense
        ctx.save_for_backward(q_RHD, k_NGD, v_NGD, lse_HY, *(chain or ()), out_RHD, lse_HR)
        ctx.constants = (edge, shared, scale, prefix_grads)
        return out_RHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_RHD, k_NGD, v_NGD, lse_HY, *chain, out_RHD, lse_HR = ctx.saved_tensors
        edge, shared, scale, prefix_grads = ctx.constants
        dout_RHD = grads[0].contiguous()
        sums = prefix_grads or tuple(torch.zeros_like(x, dtype=torch.float32) for x in (k_NGD, v_NGD))
        dq_RHD, chain_grads = None, (None, None)
        delta_HR = None if edge is None else kernel.row_sums(dout_RHD, out_RHD)
        if isinstance(shared, Places):
            dq_RHD = shared_backward(dout_RHD, q_RHD, k_NGD, v_NGD, lse_HR, delta_HR, lse_HY, shared, scale, sums)
        elif shared:
            dq_RHD = dense_backward(dout_RHD, q_RHD, k_NGD, v_NGD, out_RHD, lse_HR, shared, scale, sums)
        if edge is not None:
            saved = kernel.Saved(q_RHD, k_NGD, v_NGD, tuple(chain) or None, edge, scale, lse_HR, dout_RHD, delta_HR)
            dq_RHD = kernel.query_grad(saved, dq_RHD)
            kernel.add_prefix_grads(saved, sums)
            chain_grads = kernel.chain_grads(saved)
        dk_NGD, dv_NGD = (None, None) if prefix_grads else (x.to(k_NGD.dtype) for x in sums)
        return dq_RHD, dk_NGD, dv_NGD, *chain_grads, None, None, None, None
