"""What cuDNN's attention does of a layer: blocks of rows whose keys need no mask, or only the plain causal one.

Chain rows are sorted by anchor, so a block of consecutive rows of one document sees every prefix row up to its first
anchor: a rectangle without a mask. The prefix pass of a document is causal. cuDNN's kernels, the fastest on Hopper, take
both as they are. Triton does the ragged rest, the *edge*, and merges the two by their log-sum-exp. The backward is
given the *merged* output and log-sum-exp, so probabilities and the row sums of dO * O are those of the whole softmax and
the pieces just add up.

Legend: R rows, N prefix rows, H query heads, G key heads, D head dimension, B rows of a block, W its keys.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = (4096, 2048, 1024, 512, 256)
"""A document's rows are cut into these: cuDNN plans every new shape anew (0.1 s), so there must be few."""

BLOCK_KEYS = 128
"""Keys are a multiple of this, for the same reason."""

CAUSAL_ROWS = 256
"""A causal block is padded to a multiple of this, for the same reason."""

MIN_KEYS = 512
"""With fewer keys a launch costs more than it saves."""

MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class Block:
    """Rows of one document and the prefix rows that all of them see; in a causal block row i sees the first i + 1."""

    rows: slice
    keys: slice
    causal: bool = False


def cut_blocks(
    anchors: Sequence[int],
    starts: Sequence[int],
    block_rows: Sequence[int] = BLOCK_ROWS,
    block_keys: int = BLOCK_KEYS,
    min_keys: int = MIN_KEYS,
) -> list[Block]:
    """Cuts chain rows into blocks over whole multiples of `block_keys` keys.

    Every document is cut from its end, so that the rows left over are its first ones, which see the fewest keys.

    Args:
        anchors: of each row, ascending.
        starts: first prefix row of each row's document, ascending.
        block_rows: sizes of blocks, largest first.
        block_keys: the keys of a block are a multiple of this.
        min_keys: no block has fewer.
    """
    blocks = []
    begin = 0
    while begin < len(anchors):
        start = int(starts[begin])
        document_end = end = bisect_right(starts, start, lo=begin)
        while (size := next((size for size in block_rows if end - size >= begin), None)) is not None:
            num_keys = (int(anchors[end - size]) + 1 - start) // block_keys * block_keys
            if num_keys >= min_keys:
                blocks.append(Block(slice(end - size, end), slice(start, start + num_keys)))
            end -= size
        begin = document_end
    return sorted(blocks, key=lambda block: block.rows.start)


def causal_blocks(doc_rows: Sequence[int], min_keys: int = MIN_KEYS) -> list[Block]:
    """The documents that are long enough, each a causal block."""
    blocks, start = [], 0
    for rows in doc_rows:
        if rows >= min_keys:
            blocks.append(Block(slice(start, start + rows), slice(start, start + rows), causal=True))
        start += rows
    return blocks


def can_be_dense(q_RHD: Tensor) -> bool:
    """Whether cuDNN's attention takes these queries."""
    half = q_RHD.dtype in (torch.bfloat16, torch.float16)
    return q_RHD.is_cuda and half and q_RHD.shape[2] <= MAX_HEAD_DIM and q_RHD.shape[2] % 8 == 0


def dense_forward(
    q_RHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, blocks: Sequence[Block], scale: float
) -> tuple[Tensor, Tensor]:
    """Output [R, H, D] and log-sum-exp [H, R] of the blocks; rows of no block have -inf there and an undefined output."""
    out_RHD = torch.empty_like(q_RHD)
    lse_HR = torch.full((q_RHD.shape[1], q_RHD.shape[0]), -torch.inf, device=q_RHD.device)
    for block in blocks:
        q, k, v = q_RHD[block.rows], k_NGD[block.keys], v_NGD[block.keys]
        out_RHD[block.rows], lse_HR[:, block.rows] = block_forward(q, k, v, scale, block.causal)
    return out_RHD, lse_HR


def dense_backward(
    dout_RHD: Tensor,
    q_RHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    out_RHD: Tensor,
    lse_HR: Tensor,
    blocks: Sequence[Block],
    scale: float,
    prefix_grads: tuple[Tensor, Tensor],
) -> Tensor:
    """dq [R, H, D] of the blocks' share, 0 elsewhere; dk and dv are added to `prefix_grads`.

    `out_RHD` and `lse_HR` are those of the whole softmax.
    """
    dq_RHD = torch.empty_like(q_RHD)
    dk_NGD, dv_NGD = prefix_grads
    end = 0
    for block in blocks:  # in the order of their rows
        dq_RHD[end : block.rows.start].zero_()
        end = block.rows.stop
        rows, keys = block.rows, block.keys
        dq, dk, dv = block_backward(
            dout_RHD[rows], q_RHD[rows], k_NGD[keys], v_NGD[keys], out_RHD[rows], lse_HR[:, rows], scale, block.causal
        )
        dq_RHD[rows] = dq
        dk_NGD[keys] += dk
        dv_NGD[keys] += dv
    dq_RHD[end:].zero_()
    return dq_RHD


def block_forward(
    q_BHD: Tensor, k_WGD: Tensor, v_WGD: Tensor, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention without a mask, or causal: output [B, H, D] and log-sum-exp [H, B]."""
    num_rows = q_BHD.shape[0]
    q, k, v = (_heads_first(x, causal) for x in (q_BHD, k_WGD, v_WGD))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return found[0][0].transpose(0, 1)[:num_rows], found[1][0, :, :num_rows, 0]


def block_backward(
    dout_BHD: Tensor,
    q_BHD: Tensor,
    k_WGD: Tensor,
    v_WGD: Tensor,
    out_BHD: Tensor,
    lse_HB: Tensor,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, H, D], dk and dv [W, G, D], with output and log-sum-exp as they are given."""
    num_rows, num_keys = q_BHD.shape[0], k_WGD.shape[0]
    dout, q, k, v, out = (_heads_first(x, causal) for x in (dout_BHD, q_BHD, k_WGD, v_WGD, out_BHD))
    lse = F.pad(lse_HB, (0, q.shape[2] - num_rows)).contiguous()[None, :, :, None]
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
    return dq[:num_rows], dk[:num_keys], dv[:num_keys]


def _heads_first(x_BHD: Tensor, causal: bool) -> Tensor:
    """[1, H, B, D]; a causal block's rows are padded at the end, where no real row looks."""
    missing = -x_BHD.shape[0] % CAUSAL_ROWS if causal else 0
    padded = F.pad(x_BHD, (0, 0, 0, 0, 0, missing)) if missing else x_BHD
    return padded.transpose(0, 1)[None]
