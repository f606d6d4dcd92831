"""The Triton kernels of `chain_attention`: forward, and a backward in three launches without atomics.

Legend: R chain rows, N prefix rows, H query heads, G key heads, D head dimension (padded to a power of two in a tile),
BM rows of a query tile, BN keys of a key tile.

A row sees the *edge* of the prefix, start[r]..anchor[r], and the *band* first[r]..r of the chain rows. What lies before
start[r] was attended to elsewhere (`dense.py`) and comes in as an output with its log-sum-exp, to be merged; without that
part start[r] is the document's first row and the kernels do everything. Scores live in base 2: exp2 is what the hardware has.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_attention.layout import Edge

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """Shape of a launch: query rows and keys of a tile, warps, and loads in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """Launches of one head dimension."""

    forward: Tile
    dq: Tile
    dkv: Tile
    band: Tile


# Measured on an H200 (benchmark.py); a tile must fit the shared memory of one multiprocessor.
TILES = {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 4, 2), Tile(16, 32, 2, 2)),
    128: Tiles(Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 2), Tile(16, 16, 2, 2)),
    256: Tiles(Tile(64, 64, 8, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(32, 64, 8, 1)),
}
WIDE_TILES = {
    64: Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(32, 32, 4, 1)),
    128: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
}
"""For float32, whose tiles are twice as big and whose products do not run on tensor cores."""


@triton.jit
def _load_rows(pointer, row, stride, d, d_ok, row_ok, MASK_ROWS: tl.constexpr, MASK_D: tl.constexpr):
    """[len(row), len(d)] of a row-major array; rows and columns that do not exist read as 0."""
    address = pointer + row.to(tl.int64)[:, None] * stride + d[None, :]
    if MASK_ROWS:
        if MASK_D:
            return tl.load(address, mask=row_ok[:, None] & d_ok[None, :], other=0.0)
        return tl.load(address, mask=row_ok[:, None], other=0.0)
    if MASK_D:
        return tl.load(address, mask=d_ok[None, :], other=0.0)
    return tl.load(address)


@triton.jit
def _attend(
    acc, m, mass, q, k_base, v_base, stride, begin, end, limit, low, high, scale, d, d_ok,
    BN: tl.constexpr, MASKED: tl.constexpr, MASK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [begin, end); row i sees those in low[i]..high[i] (all of them unless MASKED)."""
    for n0 in range(begin, end, BN):
        n = n0 + tl.arange(0, BN)
        seen = n < limit
        if MASKED:
            visible = (n[None, :] >= low[:, None]) & (n[None, :] <= high[:, None])
            seen = tl.max(visible.to(tl.int32), 0) > 0  # what no row sees is not read: it may be anything
        k = _load_rows(k_base, n, stride, d, d_ok, seen, MASKED, MASK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            s = tl.where(visible, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new  # a row may have seen nothing yet
        p = tl.math.exp2(s - shift[:, None])
        decay = tl.math.exp2(m - shift)
        mass = mass * decay + tl.sum(p, 1)
        v = _load_rows(v_base, n, stride, d, d_ok, seen, MASKED, MASK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, mass


@triton.jit
def _edge_bounds(low, high, BN: tl.constexpr):
    """Key tiles of a query tile: [begin, head) masked, [head, body) seen by every row, [body, end) masked."""
    begin = tl.min(low) // BN * BN
    end = tl.max(high) + 1
    head = tl.where(tl.max(low) > begin, tl.cdiv(tl.max(low), BN) * BN, begin)
    head = tl.maximum(begin, tl.minimum(head, end))
    body = tl.maximum(head, (tl.min(high) + 1) // BN * BN)
    return begin, head, body, end


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, chain_k_ptr, chain_v_ptr, anchor_ptr, start_ptr, first_ptr,
    dense_out_ptr, dense_lse_ptr, out_ptr, lse_ptr, num_rows, num_keys, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BAND: tl.constexpr, HAS_DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    MASK_D: tl.constexpr = DP != D
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    group = head // (H // G)
    d = tl.arange(0, DP)
    d_ok = d < D
    offset = tile * BM + tl.arange(0, BM)
    row_ok = offset < num_rows
    row = tl.minimum(offset, num_rows - 1)  # a tile's rows past the end repeat the last one
    anchor, start = tl.load(anchor_ptr + row), tl.load(start_ptr + row)
    q = _load_rows(q_ptr + head * D, row, H * D, d, d_ok, row_ok, False, MASK_D)
    acc = tl.zeros([BM, DP], tl.float32)
    m = tl.full([BM], -float("inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    k_base, v_base = k_ptr + group * D, v_ptr + group * D
    begin, head_end, body_end, end = _edge_bounds(start, anchor, BN)
    acc, m, mass = _attend(
        acc, m, mass, q, k_base, v_base, G * D, begin, head_end, num_keys, start, anchor, scale, d, d_ok,
        BN, True, MASK_D, PRECISION,
    )  # fmt: skip
    acc, m, mass = _attend(
        acc, m, mass, q, k_base, v_base, G * D, head_end, body_end, num_keys, start, anchor, scale, d, d_ok,
        BN, False, MASK_D, PRECISION,
    )  # fmt: skip
    acc, m, mass = _attend(
        acc, m, mass, q, k_base, v_base, G * D, body_end, end, num_keys, start, anchor, scale, d, d_ok,
        BN, True, MASK_D, PRECISION,
    )  # fmt: skip
    if HAS_BAND:
        first = tl.load(first_ptr + row)
        band_end = tl.minimum(tile * BM + BM, num_rows)
        acc, m, mass = _attend(
            acc, m, mass, q, chain_k_ptr + group * D, chain_v_ptr + group * D, G * D, tl.min(first), band_end, num_rows,
            first, row, scale, d, d_ok, BN, True, MASK_D, PRECISION,
        )  # fmt: skip
    lse = tl.where(mass > 0, m + tl.math.log2(mass), -float("inf"))
    out = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    out_address = row.to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    lse_address = head.to(tl.int64) * num_rows + row
    stored = row_ok[:, None] & d_ok[None, :]
    if HAS_DENSE:
        dense_lse = tl.load(dense_lse_ptr + lse_address) * LOG2_E
        top = tl.maximum(lse, dense_lse)
        total = top + tl.math.log2(tl.math.exp2(lse - top) + tl.math.exp2(dense_lse - top))
        share = tl.math.exp2(dense_lse - total)
        dense = tl.load(dense_out_ptr + out_address, mask=stored & (share > 0)[:, None], other=0.0).to(tl.float32)
        out = out * tl.math.exp2(lse - total)[:, None] + dense * share[:, None]
        lse = total
    tl.store(out_ptr + out_address, out.to(out_ptr.dtype.element_ty), mask=stored)
    tl.store(lse_ptr + lse_address, lse * LN_2, mask=row_ok)


@triton.jit
def _delta_kernel(
    dout_ptr, out_ptr, delta_ptr, num_rows,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    d = tl.arange(0, DP)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = row < num_rows
    dout = _load_rows(dout_ptr + head * D, row, H * D, d, d < D, row_ok, True, DP != D).to(tl.float32)
    out = _load_rows(out_ptr + head * D, row, H * D, d, d < D, row_ok, True, DP != D).to(tl.float32)
    tl.store(delta_ptr + head.to(tl.int64) * num_rows + row, tl.sum(dout * out, 1), mask=row_ok)


@triton.jit
def _dq_step(
    dq, q, dout, lse, delta, k_base, v_base, stride, begin, end, limit, low, high, scale, d, d_ok,
    BN: tl.constexpr, MASKED: tl.constexpr, MASK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for n0 in range(begin, end, BN):
        n = n0 + tl.arange(0, BN)
        seen = n < limit
        if MASKED:
            visible = (n[None, :] >= low[:, None]) & (n[None, :] <= high[:, None])
            seen = tl.max(visible.to(tl.int32), 0) > 0
        k = _load_rows(k_base, n, stride, d, d_ok, seen, MASKED, MASK_D)
        v = _load_rows(v_base, n, stride, d, d_ok, seen, MASKED, MASK_D)
        p = tl.math.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
        if MASKED:
            p = tl.where(visible, p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, chain_k_ptr, chain_v_ptr, anchor_ptr, start_ptr, first_ptr,
    dout_ptr, lse_ptr, delta_ptr, dense_dq_ptr, dq_ptr, num_rows, num_keys, scale, factor,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BAND: tl.constexpr, HAS_DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    MASK_D: tl.constexpr = DP != D
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    group = head // (H // G)
    d = tl.arange(0, DP)
    d_ok = d < D
    offset = tile * BM + tl.arange(0, BM)
    row_ok = offset < num_rows
    row = tl.minimum(offset, num_rows - 1)
    anchor, start = tl.load(anchor_ptr + row), tl.load(start_ptr + row)
    q = _load_rows(q_ptr + head * D, row, H * D, d, d_ok, row_ok, False, MASK_D)
    dout = _load_rows(dout_ptr + head * D, row, H * D, d, d_ok, row_ok, False, MASK_D)
    line = head.to(tl.int64) * num_rows + row
    lse, delta = tl.load(lse_ptr + line) * LOG2_E, tl.load(delta_ptr + line)
    dq = tl.zeros([BM, DP], tl.float32)
    k_base, v_base = k_ptr + group * D, v_ptr + group * D
    begin, head_end, body_end, end = _edge_bounds(start, anchor, BN)
    dq = _dq_step(
        dq, q, dout, lse, delta, k_base, v_base, G * D, begin, head_end, num_keys, start, anchor, scale, d, d_ok,
        BN, True, MASK_D, PRECISION,
    )  # fmt: skip
    dq = _dq_step(
        dq, q, dout, lse, delta, k_base, v_base, G * D, head_end, body_end, num_keys, start, anchor, scale, d, d_ok,
        BN, False, MASK_D, PRECISION,
    )  # fmt: skip
    dq = _dq_step(
        dq, q, dout, lse, delta, k_base, v_base, G * D, body_end, end, num_keys, start, anchor, scale, d, d_ok,
        BN, True, MASK_D, PRECISION,
    )  # fmt: skip
    if HAS_BAND:
        first = tl.load(first_ptr + row)
        band_end = tl.minimum(tile * BM + BM, num_rows)
        dq = _dq_step(
            dq, q, dout, lse, delta, chain_k_ptr + group * D, chain_v_ptr + group * D, G * D, tl.min(first), band_end,
            num_rows, first, row, scale, d, d_ok, BN, True, MASK_D, PRECISION,
        )  # fmt: skip
    address = row.to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    stored = row_ok[:, None] & d_ok[None, :]
    dq = dq * factor
    if HAS_DENSE:
        dq += tl.load(dense_dq_ptr + address, mask=stored, other=0.0).to(tl.float32)
    tl.store(dq_ptr + address, dq.to(dq_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _dkv_step(
    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, low_ptr, high_ptr, stride, begin, end, limit, n, scale, d, d_ok,
    BM: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr, MASK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gathers the gradients of the keys n from the query rows [begin, end) of one head; tiles are [keys, rows]."""
    for m0 in range(begin, end, BM):
        row = m0 + tl.arange(0, BM)
        row_ok = row < limit
        q = _load_rows(q_base, row, stride, d, d_ok, row_ok, MASKED, MASK_D)
        dout = _load_rows(dout_base, row, stride, d, d_ok, row_ok, MASKED, MASK_D)
        if MASKED:
            lse = tl.load(lse_base + row, mask=row_ok, other=0.0) * LOG2_E
            delta = tl.load(delta_base + row, mask=row_ok, other=0.0)
        else:
            lse, delta = tl.load(lse_base + row) * LOG2_E, tl.load(delta_base + row)
        p = tl.math.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
        if MASKED:
            low = tl.load(low_ptr + row, mask=row_ok, other=2147483647)
            high = row if BAND else tl.load(high_ptr + row, mask=row_ok, other=-1)
            visible = (n[:, None] >= low[None, :]) & (n[:, None] <= high[None, :])
            p = tl.where(visible, p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if MASKED:
            ds = tl.where(visible, ds, 0.0)  # a key that nobody sees may be NaN, and 0 * NaN is NaN
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, anchor_ptr, start_ptr, dout_ptr, lse_ptr, delta_ptr, bounds_ptr, dk_ptr, dv_ptr,
    num_rows, num_keys, scale, factor,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds dK and dV of one tile of prefix keys to the caller's buffers; no other program touches that tile."""
    MASK_D: tl.constexpr = DP != D
    tile = tl.program_id(0)  # early keys are seen by the most rows: they go first
    group = tl.program_id(1)
    d = tl.arange(0, DP)
    d_ok = d < D
    n = tile * BN + tl.arange(0, BN)
    key_ok = n < num_keys
    k = _load_rows(k_ptr + group * D, n, G * D, d, d_ok, key_ok, True, MASK_D)
    v = _load_rows(v_ptr + group * D, n, G * D, d, d_ok, key_ok, True, MASK_D)
    begin, full_begin = tl.load(bounds_ptr + tile * 4), tl.load(bounds_ptr + tile * 4 + 1)
    full_end, end = tl.load(bounds_ptr + tile * 4 + 2), tl.load(bounds_ptr + tile * 4 + 3)
    head_end = tl.minimum(begin + tl.cdiv(tl.maximum(full_begin - begin, 0), BM) * BM, tl.maximum(begin, end))
    body_end = head_end + tl.maximum(full_end - head_end, 0) // BM * BM
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        line = tl.cast(head, tl.int64) * num_rows
        dk, dv = _dkv_step(
            dk, dv, k, v, q_ptr + head * D, dout_ptr + head * D, lse_ptr + line, delta_ptr + line, start_ptr,
            anchor_ptr, H * D, begin, head_end, num_rows, n, scale, d, d_ok, BM, True, False, MASK_D, PRECISION,
        )  # fmt: skip
        dk, dv = _dkv_step(
            dk, dv, k, v, q_ptr + head * D, dout_ptr + head * D, lse_ptr + line, delta_ptr + line, start_ptr,
            anchor_ptr, H * D, head_end, body_end, num_rows, n, scale, d, d_ok, BM, False, False, MASK_D, PRECISION,
        )  # fmt: skip
        dk, dv = _dkv_step(
            dk, dv, k, v, q_ptr + head * D, dout_ptr + head * D, lse_ptr + line, delta_ptr + line, start_ptr,
            anchor_ptr, H * D, body_end, end, num_rows, n, scale, d, d_ok, BM, True, False, MASK_D, PRECISION,
        )  # fmt: skip
    address = n.to(tl.int64)[:, None] * (G * D) + group * D + d[None, :]
    stored = key_ok[:, None] & d_ok[None, :]
    dk = dk * factor + tl.load(dk_ptr + address, mask=stored, other=0.0)
    dv = dv + tl.load(dv_ptr + address, mask=stored, other=0.0)
    tl.store(dk_ptr + address, dk, mask=stored)
    tl.store(dv_ptr + address, dv, mask=stored)


@triton.jit
def _band_kernel(
    q_ptr, chain_k_ptr, chain_v_ptr, first_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    num_rows, max_chain, scale, factor,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of chain rows, gathered from the rows up to max_chain - 1 after each."""
    MASK_D: tl.constexpr = DP != D
    tile, group = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, DP)
    d_ok = d < D
    n = tile * BN + tl.arange(0, BN)
    key_ok = n < num_rows
    k = _load_rows(chain_k_ptr + group * D, n, G * D, d, d_ok, key_ok, True, MASK_D)
    v = _load_rows(chain_v_ptr + group * D, n, G * D, d, d_ok, key_ok, True, MASK_D)
    end = tl.minimum(tile * BN + BN + max_chain - 1, num_rows)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        line = tl.cast(head, tl.int64) * num_rows
        dk, dv = _dkv_step(
            dk, dv, k, v, q_ptr + head * D, dout_ptr + head * D, lse_ptr + line, delta_ptr + line, first_ptr,
            first_ptr, H * D, tile * BN, end, num_rows, n, scale, d, d_ok, BM, True, True, MASK_D, PRECISION,
        )  # fmt: skip
    address = n.to(tl.int64)[:, None] * (G * D) + group * D + d[None, :]
    stored = key_ok[:, None] & d_ok[None, :]
    tl.store(dk_ptr + address, (dk * factor).to(dk_ptr.dtype.element_ty), mask=stored)
    tl.store(dv_ptr + address, dv.to(dv_ptr.dtype.element_ty), mask=stored)


def forward(
    q_RHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    chain: tuple[Tensor, Tensor] | None,
    edge: Edge,
    scale: float,
    dense: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [R, H, D] and log-sum-exp [H, R] (natural, fp32).

    Args:
        q_RHD: queries, contiguous like all tensors here.
        k_NGD: prefix keys.
        v_NGD: prefix values.
        chain: keys and values of the chain rows [R, G, D].
        edge: which keys each row sees.
        scale: factor on the scores.
        dense: output [R, H, D] and log-sum-exp [H, R] of what lies before `edge.start_R`; -inf where nothing does.
        tile: another launch than the usual one.
    """
    num_rows, num_heads, _ = q_RHD.shape
    out_RHD = torch.empty_like(q_RHD)
    lse_HR = torch.empty(num_heads, num_rows, dtype=torch.float32, device=q_RHD.device)
    if num_rows == 0:
        return out_RHD, lse_HR
    tile = tile or _tiles(q_RHD).forward
    k_chain, v_chain = chain or (k_NGD, v_NGD)
    dense_out, dense_lse = dense or (out_RHD, lse_HR)
    _forward_kernel[(triton.cdiv(num_rows, tile.rows), num_heads)](
        q_RHD, k_NGD, v_NGD, k_chain, v_chain, edge.anchor_R, edge.start_R, _first(edge),
        dense_out, dense_lse, out_RHD, lse_HR, num_rows, k_NGD.shape[0], scale * LOG2_E.value,
        BM=tile.rows, BN=tile.keys, HAS_BAND=chain is not None, HAS_DENSE=dense is not None,
        **_shape(q_RHD, k_NGD), **_launch(tile),
    )  # fmt: skip
    return out_RHD, lse_HR


def row_sums(dout_RHD: Tensor, out_RHD: Tensor) -> Tensor:
    """Row sums of dO * O, [H, R] fp32."""
    num_rows, num_heads, head_dim = out_RHD.shape
    delta_HR = torch.empty(num_heads, num_rows, dtype=torch.float32, device=out_RHD.device)
    if num_rows:
        _delta_kernel[(triton.cdiv(num_rows, 64), num_heads)](
            dout_RHD, out_RHD, delta_HR, num_rows, H=num_heads, D=head_dim, DP=padded_head_dim(head_dim), BM=64
        )
    return delta_HR


class Saved(NamedTuple):
    """What the backward recomputes probabilities from."""

    q_RHD: Tensor
    k_NGD: Tensor
    v_NGD: Tensor
    chain: tuple[Tensor, Tensor] | None
    edge: Edge
    scale: float
    lse_HR: Tensor
    """Log-sum-exp of the whole softmax."""
    dout_RHD: Tensor
    delta_HR: Tensor
    """Row sums of dO * O."""


def query_grad(saved: Saved, dense_dq_RHD: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """dq [R, H, D]; `dense_dq_RHD` is what the keys before `edge.start_R` give to it."""
    q_RHD, k_NGD, v_NGD, chain, edge, scale, lse_HR, dout_RHD, delta_HR = saved
    dq_RHD = torch.empty_like(q_RHD)
    num_rows, num_heads, _ = q_RHD.shape
    if num_rows == 0:
        return dq_RHD
    tile = tile or _tiles(q_RHD).dq
    k_chain, v_chain = chain or (k_NGD, v_NGD)
    _dq_kernel[(triton.cdiv(num_rows, tile.rows), num_heads)](
        q_RHD, k_NGD, v_NGD, k_chain, v_chain, edge.anchor_R, edge.start_R, _first(edge),
        dout_RHD, lse_HR, delta_HR, dq_RHD if dense_dq_RHD is None else dense_dq_RHD, dq_RHD, num_rows, k_NGD.shape[0],
        scale * LOG2_E.value, scale, BM=tile.rows, BN=tile.keys, HAS_BAND=chain is not None,
        HAS_DENSE=dense_dq_RHD is not None, **_shape(q_RHD, k_NGD), **_launch(tile),
    )  # fmt: skip
    return dq_RHD


def add_prefix_grads(saved: Saved, prefix_grads: tuple[Tensor, Tensor], tile: Tile | None = None) -> None:
    """Adds dk and dv of the edge's prefix rows to two [N, G, D] fp32 buffers."""
    q_RHD, k_NGD, v_NGD, _, edge, scale, lse_HR, dout_RHD, delta_HR = saved
    num_rows, num_keys = q_RHD.shape[0], k_NGD.shape[0]
    if num_rows == 0:
        return
    tile = tile or _tiles(q_RHD).dkv
    _dkv_kernel[(triton.cdiv(num_keys, tile.keys), k_NGD.shape[1])](
        q_RHD, k_NGD, v_NGD, edge.anchor_R, edge.start_R, dout_RHD, lse_HR, delta_HR,
        key_tile_bounds(edge, num_keys, tile.keys), *prefix_grads, num_rows, num_keys, scale * LOG2_E.value, scale,
        BM=tile.rows, BN=tile.keys, **_shape(q_RHD, k_NGD), **_launch(tile),
    )  # fmt: skip


def chain_grads(saved: Saved, tile: Tile | None = None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """dk and dv of the chain rows [R, G, D]."""
    if saved.chain is None or saved.edge.first_R is None:
        return None, None
    q_RHD, edge = saved.q_RHD, saved.edge
    dk_RGD, dv_RGD = (torch.empty_like(x) for x in saved.chain)
    num_rows = q_RHD.shape[0]
    if num_rows == 0:
        return dk_RGD, dv_RGD
    tile = tile or _tiles(q_RHD).band
    _band_kernel[(triton.cdiv(num_rows, tile.keys), saved.k_NGD.shape[1])](
        q_RHD, *saved.chain, edge.first_R, saved.dout_RHD, saved.lse_HR, saved.delta_HR, dk_RGD, dv_RGD,
        num_rows, edge.max_chain, saved.scale * LOG2_E.value, saved.scale,
        BM=tile.rows, BN=tile.keys, **_shape(q_RHD, saved.k_NGD), **_launch(tile),
    )  # fmt: skip
    return dk_RGD, dv_RGD


def key_tile_bounds(edge: Edge, num_keys: int, tile_keys: int) -> Tensor:
    """[tiles, 4] int32: rows [0, 3) hold all that see a key of the tile, and rows [1, 2) see every one of them."""
    first_key = torch.arange(0, num_keys, tile_keys, device=edge.anchor_R.device, dtype=edge.anchor_R.dtype)
    last_key = (first_key + (tile_keys - 1)).clamp_(max=num_keys - 1)
    anchor = edge.anchor_R
    bounds = [
        torch.searchsorted(anchor, first_key, out_int32=True),
        torch.searchsorted(anchor, last_key, out_int32=True),
        torch.searchsorted(edge.ceiling_R, first_key, right=True, out_int32=True),
        torch.searchsorted(edge.floor_R, last_key, right=True, out_int32=True),
    ]
    return torch.stack(bounds, dim=1)


def _first(edge: Edge) -> Tensor:
    return edge.anchor_R if edge.first_R is None else edge.first_R


def padded_head_dim(head_dim: int) -> int:
    return max(64, triton.next_power_of_2(head_dim))


def _tiles(q_RHD: Tensor) -> Tiles:
    return (WIDE_TILES if q_RHD.element_size() > 2 else TILES)[padded_head_dim(q_RHD.shape[2])]


def _shape(q_RHD: Tensor, k_NGD: Tensor) -> dict[str, Any]:
    head_dim = q_RHD.shape[2]
    # products of fp32 tiles would be rounded to tf32 otherwise
    precision = "ieee" if q_RHD.dtype == torch.float32 else "tf32"
    return {
        "H": q_RHD.shape[1],
        "G": k_NGD.shape[1],
        "D": head_dim,
        "DP": padded_head_dim(head_dim),
        "PRECISION": precision,
    }


def _launch(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
