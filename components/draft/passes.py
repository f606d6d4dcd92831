"""The two passes of a head: all depth-0 rows, then chain rows that read the depth-0 keys and values.

Legend: N depth-0 rows, R chain rows, H hidden size, X = aux layers * target hidden size, Q query heads, G key
heads, D head dimension.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from components.draft.batch import PackedBatch
from components.draft.chains import ChainRows
from components.draft.elementwise import rotate
from kernels.chain_attention import RowLayout, chain_attention, document_attention

if TYPE_CHECKING:
    from components.draft.head import DraftHead  # whose forward is the prefix pass


class MaskRow(NamedTuple):
    """Layer 0 of every chain row before the rotary embedding: one constant."""

    q_1QD: Tensor
    k_1GD: Tensor
    v_1GD: Tensor
    residual_1H: Tensor


class Prefix(NamedTuple):
    """What the depth-0 rows leave for the chain rows and for their own loss."""

    hidden_NH: Tensor
    """Residual stream after the last layer, before the final norm."""

    keys: list[Tensor]
    """[N, G, D] a layer, turned by the rotary embedding."""

    values: list[Tensor]
    """[N, G, D] a layer."""

    mask_row: MaskRow


def prefix_pass(head: "DraftHead", batch: PackedBatch, recompute: bool = False) -> Prefix:
    """Computes all depth-0 rows: element (a, 0) reads [emb(x_{a+1}) ; fc(h_a)] at position a.

    The mask row goes through the input projections as one more row, so its gradient needs no pass of its own.

    Args:
        head: the head.
        batch: packed documents.
        recompute: keep only each layer's input, keys and values, and compute the layer again in the backward
            (activation checkpointing): for documents whose activations would not leave room for the parts.
    """
    next_ids_N = batch.input_ids_T[batch.token_N + 1]
    mask_id = next_ids_N.new_tensor([head.config.mask_token_id])
    mask_hidden_1X = head.mask_hidden.view(1, -1)
    aux_NX = batch.aux_hidden_TX[batch.token_N].to(mask_hidden_1X.dtype)
    x, residual = head.layer_inputs(torch.cat([next_ids_N, mask_id]), torch.cat([aux_NX, mask_hidden_1X]))
    projected = head.layers[0].self_attn.project(x)
    mask_row = MaskRow(*(tensor[-1:] for tensor in (*projected, residual)))
    first_projected = [tensor[:-1] for tensor in projected]
    residual = residual[:-1]
    cos, sin = head.rope(batch.position_N)

    def run(index: int, residual: Tensor, *projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = head.layers[index]
        q, k, v = projected or layer.self_attn.project(layer.input_layernorm(residual))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return layer.finish(document_attention(q, k, v, batch.doc_rows), residual), k, v

    keys, values = [], []
    for index in range(len(head.layers)):
        inputs = (index, residual, *(first_projected if index == 0 else ()))
        residual, k, v = checkpoint(run, *inputs, use_reentrant=False) if recompute else run(*inputs)
        keys.append(k)
        values.append(v)
    return Prefix(residual, keys, values, mask_row)


def chain_pass(
    head: "DraftHead",
    batch: PackedBatch,
    rows: ChainRows,
    prefix: Prefix,
    prefix_grads: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Computes chain rows: element (a, d > 0) reads [emb(mask) ; fc(mask_hidden)] at position a + d.

    Args:
        head: the head.
        batch: packed documents, for positions and document bounds.
        rows: chain rows sorted by (anchor, depth).
        prefix: the depth-0 keys, values and the mask row; only `keys`, `values` and `mask_row` are read.
        prefix_grads: a pair of fp32 buffers a layer that receive the gradients of keys and values.

    Returns:
        [R, H] residual stream after the last layer, before the final norm.
    """
    num_rows = len(rows.anchor_R)
    cos, sin = head.rope(batch.position_N[rows.anchor_R] + rows.depth_R)
    max_chain = int(rows.depth_R.max()) if num_rows else 1
    layout = RowLayout.of_chains(
        rows.anchor_R, rows.first_R, batch.doc_start_N[rows.anchor_R], max_chain, len(batch.position_N)
    )
    dtype = prefix.keys[0].dtype
    q, k, v = (tensor.to(dtype).expand(num_rows, -1, -1) for tensor in prefix.mask_row[:3])
    residual = prefix.mask_row.residual_1H.expand(num_rows, -1)
    for index, layer in enumerate(head.layers):
        if index > 0:
            q, k, v = layer.self_attn.project(layer.input_layernorm(residual))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = chain_attention(
            q, prefix.keys[index], prefix.values[index], k, v, layout,
            prefix_grads=None if prefix_grads is None else prefix_grads[index],
        )  # fmt: skip
        residual = layer.finish(attended, residual)
    return residual
