"""The two passes of a head: all depth-0 rows, then chain rows that read the depth-0 keys and values.

Legend: N depth-0 rows, R chain rows, H hidden size, X = aux layers * target hidden size, Q query heads, G key
heads, D head dimension.
"""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from components.draft.batch import PackedBatch
from components.draft.chains import ChainRows
from components.draft.elementwise import rotate
from kernels.chain_attention import chain_attention, document_attention

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
    mask_id = next_ids_N.new_full((1,), head.config.mask_token_id)
    mask_hidden_1X = head.mask_hidden.view(1, -1)
    aux_NX = batch.aux_hidden_TX[batch.token_N].to(mask_hidden_1X.dtype)
    x, residual = head.layer_inputs(torch.cat([next_ids_N, mask_id]), torch.cat([aux_NX, mask_hidden_1X]))
    projected = head.layers[0].self_attn.project(x)
    mask_row = MaskRow(*(tensor[-1:] for tensor in (*projected, residual)))
    cos, sin = head.rope(batch.position_N)

    def run(index: int, residual: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        layer = head.layers[index]
        if index == 0:
            q, k, v = rest
        else:
            residual, q, k, v = layer.project_sum(residual, *rest)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return *layer.finish(document_attention(q, k, v, batch.doc_rows), residual), k, v

    keys, values = [], []
    inputs = [residual[:-1], *(tensor[:-1] for tensor in projected)]
    for index in range(len(head.layers)):
        call = partial(checkpoint, run, use_reentrant=False) if recompute else run
        *inputs, k, v = call(index, *inputs)
        keys.append(k)
        values.append(v)
    residual, update = inputs
    return Prefix(residual + update, keys, values, mask_row)


def chain_pass(
    head: "DraftHead", rows: ChainRows, prefix: Prefix, prefix_grads: list[tuple[Tensor, Tensor]] | None = None
) -> Tensor:
    """Computes chain rows: element (a, d > 0) reads [emb(mask) ; fc(mask_hidden)] at position a + d.

    Args:
        head: the head.
        rows: chain rows of the batch that the prefix is of.
        prefix: the depth-0 keys, values and the mask row; only `keys`, `values` and `mask_row` are read.
        prefix_grads: a pair of fp32 buffers a layer that receive the gradients of keys and values.

    Returns:
        [R, H] residual stream after the last layer, before the final norm.
    """
    num_rows = rows.layout.num_rows
    cos, sin = head.rope(rows.position_R)
    dtype = prefix.keys[0].dtype
    q, k, v = (tensor.to(dtype).expand(num_rows, -1, -1) for tensor in prefix.mask_row[:3])
    residual = prefix.mask_row.residual_1H.expand(num_rows, -1)
    for index, layer in enumerate(head.layers):
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = chain_attention(
            q, prefix.keys[index], prefix.values[index], k, v, rows.layout,
            prefix_grads=None if prefix_grads is None else prefix_grads[index],
            equal_queries=index == 0,  # the mask row, turned by the position
        )  # fmt: skip
        residual, update = layer.finish(attended, residual)
        if index + 1 < len(head.layers):
            residual, q, k, v = head.layers[index + 1].project_sum(residual, update)
    return residual + update
