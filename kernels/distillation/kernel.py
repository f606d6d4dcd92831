"""KL(teacher || head) or cross entropy of rows of logits, with the gradient of the logits, in Triton.

Legend: C rows, P teacher positions, U draft vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def _loss_kernel(
    logits_ptr, teacher_ptr, teacher_row_ptr, target_ptr, dlogits_ptr, loss_ptr, hit_ptr, size,
    HAS_TEACHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * size
    dlogits_ptr += row * size
    target = tl.load(target_ptr + row)
    if HAS_TEACHER:
        teacher_ptr += tl.load(teacher_row_ptr + row).to(tl.int64) * size
    top = -float("inf")
    mass = 0.0
    teacher_top = -float("inf")
    teacher_mass = 0.0  # of exp(t - teacher_top), like the two sums below
    sum_teacher = 0.0  # of exp(t) t
    sum_head = 0.0  # of exp(t) x
    for begin in range(0, size, BLOCK):
        u = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + u, mask=u < size, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        mass = mass * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
        if HAS_TEACHER:
            t = tl.load(teacher_ptr + u, mask=u < size, other=-float("inf")).to(tl.float32)
            new_top = tl.maximum(teacher_top, tl.max(t, 0))
            decay = tl.exp(teacher_top - new_top)
            weight = tl.exp(t - new_top)
            teacher_mass = teacher_mass * decay + tl.sum(weight, 0)
            sum_teacher = sum_teacher * decay + tl.sum(tl.where(u < size, weight * t, 0.0), 0)
            sum_head = sum_head * decay + tl.sum(tl.where(u < size, weight * x, 0.0), 0)
            teacher_top = new_top
    lse = top + tl.log(mass)
    true = tl.load(logits_ptr + tl.maximum(target, 0)).to(tl.float32)
    if HAS_TEACHER:
        teacher_lse = teacher_top + tl.log(teacher_mass)
        loss = (sum_teacher - sum_head) / teacher_mass - teacher_lse + lse
    else:
        teacher_lse = 0.0
        loss = tl.where(target >= 0, lse - true, 0.0)
    tl.store(loss_ptr + row, loss)
    tl.store(hit_ptr + row, (target >= 0) & (true >= top))
    for begin in range(0, size, BLOCK):
        u = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + u, mask=u < size, other=-float("inf")).to(tl.float32)
        grad = tl.exp(x - lse)
        if HAS_TEACHER:
            t = tl.load(teacher_ptr + u, mask=u < size, other=-float("inf")).to(tl.float32)
            grad -= tl.exp(t - teacher_lse)
        else:
            grad = tl.where(target >= 0, grad - tl.where(u == target, 1.0, 0.0), 0.0)
        tl.store(dlogits_ptr + u, grad.to(dlogits_ptr.dtype.element_ty), mask=u < size)


def rows_loss(
    logits_CU: Tensor,
    target_C: Tensor,
    teacher: tuple[Tensor, Tensor] | None,
    loss_C: Tensor,
    hit_C: Tensor,
    dtype: torch.dtype,
    block: int = BLOCK,
) -> Tensor:
    """Fills the rows' losses and hits and returns the gradient of the logits [C, U] in `dtype`.

    Args:
        logits_CU: the head's logits, contiguous, at least fp16; sums are fp32.
        target_C: [C] draft id of the recorded token, -1 when it has none.
        teacher: the teacher's logits [P, U], contiguous, and which of them teaches each row [C]; None: cross entropy with
            the recorded token.
        loss_C: [C] fp32, written.
        hit_C: [C] bool, written: the recorded token has the largest logit.
        dtype: of the gradient.
        block: logits that a program reads at once.
    """
    num_rows, size = logits_CU.shape
    dlogits_CU = torch.empty_like(logits_CU, dtype=dtype)
    if num_rows == 0:
        return dlogits_CU
    teacher_PU, teacher_C = teacher or (logits_CU, target_C)
    _loss_kernel[(num_rows,)](
        logits_CU, teacher_PU, teacher_C, target_C, dlogits_CU, loss_C, hit_C, size,
        HAS_TEACHER=teacher is not None, BLOCK=min(block, triton.next_power_of_2(size)), num_warps=NUM_WARPS,
    )  # fmt: skip
    return dlogits_CU
