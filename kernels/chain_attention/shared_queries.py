"""What rows with equal queries see together: forward, and a backward that folds their gradients first.

Rows e of one place have one query, so one score a key n, and probabilities that differ by a factor:

    P[e, n] = exp(S[n] - L[e]) = w[e] P[n]      P[n] = exp(S[n] - L),  w[e] = exp(L - L[e])

with L[e] the log-sum-exp of all that row e sees and L that of the shared keys. The gradients sum over the rows, so

    dV[n] = P[n] g              g = sum_e w[e] g[e]
    dS[n] = P[n] (g . v[n] - delta)      delta = sum_e w[e] delta[e]

which is the backward of one row with gradient g. cuDNN computes delta itself, as the row sum of gradient times output: it is given
the output g delta / (g . g), whose row sum that is.

Legend: R chain rows, N prefix rows, Y places, A places of some row, H query heads, G key heads, D head dimension, M rows a place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_attention import dense
from kernels.chain_attention.kernel import LOG2_E, padded_head_dim
from kernels.chain_attention.places import Places

FOLD_PLACES = 16
"""Places of a program of `_fold_kernel`."""


@triton.jit
def _fold_kernel(
    dout_ptr, lse_ptr, delta_ptr, member_ptr, place_lse_ptr, folded_ptr, out_ptr, num_rows, num_places,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    d = tl.arange(0, DP)
    place = tl.program_id(0) * BY + tl.arange(0, BY)
    place_ok = place < num_places
    place_lse = tl.load(place_lse_ptr + head.to(tl.int64) * num_places + place, mask=place_ok, other=-float("inf"))
    total = tl.zeros([BY, DP], tl.float32)
    delta = tl.zeros([BY], tl.float32)
    for m in range(M):
        row = tl.load(member_ptr + place.to(tl.int64) * M + m, mask=place_ok, other=num_rows)
        row_ok = row < num_rows
        line = head.to(tl.int64) * num_rows + row
        lse = tl.load(lse_ptr + line, mask=row_ok, other=float("inf"))
        weight = tl.math.exp2((place_lse - lse) * LOG2_E)
        address = dout_ptr + row.to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
        dout = tl.load(address, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
        total += weight[:, None] * dout.to(tl.float32)
        delta += weight * tl.load(delta_ptr + line, mask=row_ok, other=0.0)
    folded = total.to(folded_ptr.dtype.element_ty)
    rounded = folded.to(tl.float32)
    norm = tl.sum(rounded * rounded, 1)
    out = rounded * (delta / tl.where(norm > 0, norm, 1.0))[:, None]
    address = place.to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    stored = place_ok[:, None] & (d < D)[None, :]
    tl.store(folded_ptr + address, folded, mask=stored)
    tl.store(out_ptr + address, out.to(out_ptr.dtype.element_ty), mask=stored)


def can_share(q_RHD: Tensor) -> bool:
    """Whether the output that is made up for cuDNN fits the queries' dtype: fp16 has too few exponents."""
    return q_RHD.dtype == torch.bfloat16


def shared_forward(
    q_RHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, places: Places, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [R, H, D] and log-sum-exp [H, R] of each row over the shared keys, and that log-sum-exp by place, [H, Y].

    Rows of no place have -inf there and an undefined output.
    """
    q_YHD = q_RHD[places.row_Y]
    out_YHD = torch.zeros_like(q_YHD)
    lse_HY = torch.full((q_YHD.shape[1], q_YHD.shape[0]), -torch.inf, device=q_RHD.device)
    for block in places.blocks:
        rows = block.rows
        out, lse = dense.block_forward(q_YHD[rows], k_NGD[block.keys], v_NGD[block.keys], scale, block.causal)
        total = torch.logaddexp(lse_HY[:, rows], lse)
        before, after = ((x - total).exp().T[..., None] for x in (lse_HY[:, rows], lse))
        out_YHD[rows] = (out_YHD[rows] * before + out * after).to(out_YHD.dtype)
        lse_HY[:, rows] = total
    place_R = places.place_R.clamp(min=0)
    return out_YHD[place_R], lse_HY[:, place_R].masked_fill(places.place_R < 0, -torch.inf), lse_HY


def shared_backward(
    dout_RHD: Tensor,
    q_RHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    lse_HR: Tensor,
    delta_HR: Tensor,
    lse_HY: Tensor,
    places: Places,
    scale: float,
    prefix_grads: tuple[Tensor, Tensor],
) -> Tensor:
    """dq [R, H, D] of the shared keys, whole in one row of each place and 0 elsewhere; dk and dv are added to `prefix_grads`.

    `lse_HR` and `delta_HR`, the row sums of dO * O, are those of all that a row sees.
    """
    folded_YHD, out_YHD = _fold(dout_RHD, lse_HR, delta_HR, lse_HY, places)
    q_YHD = q_RHD[places.row_Y]
    dq_YHD = torch.zeros_like(q_YHD, dtype=torch.float32)
    dk_NGD, dv_NGD = prefix_grads
    for block in places.blocks:
        rows, keys = block.rows, block.keys
        dq, dk, dv = dense.block_backward(
            folded_YHD[rows], q_YHD[rows], k_NGD[keys], v_NGD[keys], out_YHD[rows], lse_HY[:, rows], scale, block.causal
        )
        dq_YHD[rows] += dq
        dk_NGD[keys] += dk
        dv_NGD[keys] += dv
    asked_A = places.asked_A
    return torch.zeros_like(q_RHD).index_copy_(0, places.row_Y[asked_A], dq_YHD[asked_A].to(q_RHD.dtype))


def _fold(dout_RHD: Tensor, lse_HR: Tensor, delta_HR: Tensor, lse_HY: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """The one row that a place's rows make in the backward: its gradient and its output, [Y, H, D] each."""
    num_rows, num_heads, head_dim = dout_RHD.shape
    num_places, num_members = places.member_YM.shape
    folded_YHD, out_YHD = (dout_RHD.new_empty(num_places, num_heads, head_dim) for _ in range(2))
    _fold_kernel[(triton.cdiv(num_places, FOLD_PLACES), num_heads)](
        dout_RHD, lse_HR, delta_HR, places.member_YM, lse_HY, folded_YHD, out_YHD, num_rows, num_places,
        H=num_heads, D=head_dim, DP=padded_head_dim(head_dim), M=num_members, BY=FOLD_PLACES,
    )  # fmt: skip
    return folded_YHD, out_YHD
