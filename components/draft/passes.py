"""The two passes of a head: all depth-0 rows, then chain rows that read the depth-0 keys and values.

Legend: N depth-0 rows, R chain rows, H hidden size, X = aux layers * target hidden size, Q query heads, G key
heads, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from components.draft.batch import PackedBatch
from components.draft.chains import ChainRows
from components.draft.head import DraftHead, rotate
from kernels.chain_attention import RowLayout, chain_attention, document_attention


@dataclass(frozen=True)
class MaskRow:
    """Layer 0 of every chain row before the rotary embedding: one constant."""

    q_1QD: Tensor
    k_1GD: Tensor
    v_1GD: Tensor
    residual_1H: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.q_1QD, self.k_1GD, self.v_1GD, self.residual_1H]


@dataclass(frozen=True)
class Prefix:
    """What the depth-0 rows leave for the chain rows and for their own loss."""

    hidden_NH: Tensor
    """Residual stream after the last layer, before the final norm."""

    keys: list[Tensor]
    """[N, G, D] a layer, turned by the rotary embedding."""

    values: list[Tensor]
    """[N, G, D] a layer."""

    mask_row: MaskRow


def prefix_pass(head: DraftHead, batch: PackedBatch) -> Prefix:
    """Computes all depth-0 rows: element (a, 0) reads [emb(x_{a+1}) ; fc(h_a)] at position a.

    The mask row goes through the input projections as one more row, so its gradient needs no pass of its own.
    """
    next_ids_N = batch.input_ids_T[batch.token_N + 1]
    mask_id = next_ids_N.new_tensor([head.config.mask_token_id])
    mask_hidden_1X = head.mask_hidden.view(1, -1)
    aux_NX = batch.aux_hidden_TX[batch.token_N].to(mask_hidden_1X.dtype)
    x, residual = head.layer_inputs(torch.cat([next_ids_N, mask_id]), torch.cat([aux_NX, mask_hidden_1X]))
    projected = head.layers[0].self_attn.project(x)
    mask_row = MaskRow(*(tensor[-1:] for tensor in (*projected, residual)))
    q, k, v = (tensor[:-1] for tensor in projected)
    residual = residual[:-1]
    cos, sin = head.rope(batch.position_N)
    keys, values = [], []
    for index, layer in enumerate(head.layers):
        if index > 0:
            q, k, v = layer.self_attn.project(layer.input_layernorm(residual))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys.append(k)
        values.append(v)
        residual = layer.finish(document_attention(q, k, v, batch.doc_rows), residual)
    return Prefix(residual, keys, values, mask_row)


def chain_pass(
    head: DraftHead,
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
    q, k, v, residual = (tensor.expand(num_rows, *tensor.shape[1:]) for tensor in prefix.mask_row.tensors())
    for index, layer in enumerate(head.layers):
        if index > 0:
            q, k, v = layer.self_attn.project(layer.input_layernorm(residual))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = chain_attention(
            q.to(dtype), prefix.keys[index], prefix.values[index], k.to(dtype), v.to(dtype), layout,
            prefix_grads=None if prefix_grads is None else prefix_grads[index],
        )  # fmt: skip
        residual = layer.finish(attended, residual)
    return residual
