"""Distillation losses over the draft vocabulary, chunked over rows, with gradients formed in the forward.

Legend: R rows with a loss, P teacher positions, H head width, T target width, U draft vocabulary, C rows of a
chunk, B rows of a block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from components.draft.products import add_product
from kernels.chain_attention.layout import send

LossKind = Literal["kl", "cross_entropy"]

# Logits exist for this many elements at once: 28 MiB in fp32, just below the size from which glibc asks the kernel
# for fresh pages at every allocation. Softmax works on blocks that fit a core's cache.
CHUNK_ELEMENTS = 7 << 20
BLOCK_ELEMENTS = 1 << 19
# A GPU wants products of thousands of rows, and every chunk reads and writes the gradient of lm_head: half a GiB of fp32 logits.
GPU_CHUNK_ELEMENTS = 128 << 20


@dataclass(frozen=True)
class Teacher:
    """The target's output layer, cut to the draft vocabulary."""

    norm_T: Tensor
    """[T] weight of the target's final RMS norm."""

    norm_eps: float
    lm_head_UT: Tensor
    """[U, T] rows of the target's lm_head, in draft id order."""

    def normed(self, last_hidden_PT: Tensor) -> Tensor:
        """The final norm in at least fp32; `last_hidden` must not have been through it yet."""
        dtype = torch.promote_types(self.norm_T.dtype, torch.float32)
        return F.rms_norm(last_hidden_PT.to(dtype), self.norm_T.shape, self.norm_T.to(dtype), self.norm_eps)


class Chunk(NamedTuple):
    """Rows whose logits exist at once, and the positions that teach them."""

    rows: slice
    positions: slice


@dataclass(frozen=True)
class TaughtRows:
    """Rows in the order of the positions that teach them, so that rows of one position stand together, in chunks."""

    order_R: Tensor
    """[R] the rows, sorted by position."""

    position_S: Tensor
    """[S] the positions, ascending, each once."""

    lesson_R: Tensor
    """[R] of each row in this order, which of its chunk's positions teaches it."""

    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, position_R: Tensor, chunk_rows: int) -> "TaughtRows":
        """Worked out where `position_R` is: on the CPU, it does not make a GPU wait."""
        order_R = position_R.argsort(stable=True)
        position_S, lesson_R = position_R[order_R].unique_consecutive(return_inverse=True)
        chunks = []
        for begin in range(0, len(order_R), chunk_rows):
            rows = slice(begin, min(begin + chunk_rows, len(order_R)))
            first, last = lesson_R[[rows.start, rows.stop - 1]].tolist()
            chunks.append(Chunk(rows, slice(first, last + 1)))
            lesson_R[rows] -= first
        return cls(order_R, position_S, lesson_R, tuple(chunks))

    def to(self, device: torch.device) -> "TaughtRows":
        return TaughtRows(
            send(self.order_R, device), send(self.position_S, device), send(self.lesson_R, device), self.chunks
        )


class LossRows(NamedTuple):
    """Sum of the losses (with its graph) and one value per row (without)."""

    loss_sum: Tensor
    loss_R: Tensor
    hit_R: Tensor
    """True where the head's best draft is the recorded next token."""


def distillation_loss(
    hidden_RH: Tensor,
    lm_head_UH: Tensor,
    teacher: Teacher,
    last_hidden_PT: Tensor,
    position_R: Tensor | TaughtRows,
    target_R: Tensor,
    *,
    kind: LossKind = "kl",
    product_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> LossRows:
    """Sum over rows of KL(teacher || head) or of the cross entropy with the recorded token.

    Both softmaxes are over the draft vocabulary and in fp32 (fp64 for fp64 inputs): the teacher is renormalised
    over it (design.md, section 5). A teacher position that several rows share is computed once a chunk. A row
    whose recorded token cannot be drafted (`target_R` = -1) is never a hit; its KL counts like any other, its
    cross entropy is 0.

    Args:
        hidden_RH: [R, H] the head's rows after its final norm.
        lm_head_UH: [U, H] the head's output rows.
        teacher: the target's output layer.
        last_hidden_PT: [P, T] target states before its final norm.
        position_R: [R] which of the P states teaches each row, or what `TaughtRows.of` made of that.
        target_R: [R] draft id of the recorded token, -1 when it has none.
        kind: "kl" or "cross_entropy".
        product_dtype: dtype of the factors of matrix products (bf16); their sums are fp32. Default: as given.
        chunk_rows: rows whose logits exist at once; by default `rows_per_chunk`.

    Returns:
        The sum, whose gradients for `hidden_RH` and `lm_head_UH` are already formed, and per-row values.
    """
    wants_grad = torch.is_grad_enabled() and (hidden_RH.requires_grad or lm_head_UH.requires_grad)
    if isinstance(position_R, Tensor):
        chunk_rows = chunk_rows or rows_per_chunk(len(lm_head_UH), lm_head_UH.device)
        position_R = TaughtRows.of(position_R, chunk_rows).to(hidden_RH.device)
    return LossRows(*_Distillation.apply(
        hidden_RH, lm_head_UH, teacher, last_hidden_PT, position_R, target_R,
        kind, product_dtype or hidden_RH.dtype, wants_grad,
    ))  # fmt: skip


def best_drafts(hidden_RH: Tensor, lm_head_UH: Tensor, product_dtype: torch.dtype | None = None) -> Tensor:
    """[R] draft id of the largest logit, with the same products as the loss; no gradient."""
    if len(hidden_RH) == 0:
        return torch.empty(0, dtype=torch.int64, device=hidden_RH.device)
    dtype = product_dtype or hidden_RH.dtype
    hidden_RH, lm_head_UH = _factor(hidden_RH.detach(), dtype), _factor(lm_head_UH.detach(), dtype)
    chunks = hidden_RH.split(rows_per_chunk(len(lm_head_UH), lm_head_UH.device))
    return torch.cat([_logits(rows_CH, lm_head_UH, dtype).argmax(1) for rows_CH in chunks])


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        lm_head_UH: Tensor,
        teacher: Teacher,
        last_hidden_PT: Tensor,
        taught: TaughtRows,
        target_R: Tensor,
        kind: LossKind,
        dtype: torch.dtype,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss_R = hidden_RH.new_empty(len(hidden_RH), dtype=torch.promote_types(hidden_RH.dtype, torch.float32))
        hit_R = torch.empty_like(loss_R, dtype=torch.bool)
        with torch.autocast(hidden_RH.device.type, enabled=False):
            head_UH = _factor(lm_head_UH, dtype)
            gradients = _Gradients(hidden_RH, lm_head_UH, head_UH.to(dtype)) if wants_grad else None
            teacher_UT = _factor(teacher.lm_head_UT, dtype)
            rows_loss = _rows_loss_for(hidden_RH, dtype)
            for chunk in taught.chunks:
                rows_C = taught.order_R[chunk.rows]
                hidden_CH = _factor(hidden_RH[rows_C], dtype)
                logits_CU = _logits(hidden_CH, head_UH, dtype)
                lesson = None
                if kind == "kl":
                    hidden_ST = teacher.normed(last_hidden_PT[taught.position_S[chunk.positions]])
                    lesson = _logits(_factor(hidden_ST, dtype), teacher_UT, dtype), taught.lesson_R[chunk.rows]
                loss_C, hit_C = loss_R.new_empty(len(rows_C)), hit_R.new_empty(len(rows_C))
                dlogits_CU = rows_loss(logits_CU, target_R[rows_C], lesson, loss_C, hit_C, dtype)
                loss_R[rows_C], hit_R[rows_C] = loss_C, hit_C
                del logits_CU, lesson
                if gradients is not None:
                    gradients.add(rows_C, hidden_CH.to(dtype), dlogits_CU)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(loss_R, hit_R)
        return loss_R.sum(), loss_R, hit_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: the buffers belong to this call alone, and a second backward is refused like any other.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss were already used")
        hidden_RH = gradients.hidden_RH.mul_(grads[0])
        lm_head_UH = None if gradients.lm_head_UH is None else gradients.lm_head_UH.mul_(grads[0])
        return hidden_RH, lm_head_UH, None, None, None, None, None, None, None


class _Gradients:
    """Gradients of the sum of the losses, gathered over chunks in the parameters' dtype; a frozen lm_head has none."""

    def __init__(self, hidden_RH: Tensor, lm_head_UH: Tensor, weights_UH: Tensor) -> None:
        self.weights_UH = weights_UH
        self.hidden_RH = torch.empty_like(hidden_RH)
        self.lm_head_UH = torch.zeros_like(lm_head_UH) if lm_head_UH.requires_grad else None

    def add(self, rows_C: Tensor, hidden_CH: Tensor, dlogits_CU: Tensor) -> None:
        self.hidden_RH[rows_C] = (dlogits_CU @ self.weights_UH).to(self.hidden_RH.dtype)
        if self.lm_head_UH is not None:
            add_product(self.lm_head_UH, dlogits_CU, hidden_CH)


class _SoftTargets(NamedTuple):
    probs_PU: Tensor
    negative_entropy_P: Tensor
    teacher_C: Tensor
    """[C] which position teaches each row."""


def _soft_targets(logits_PU: Tensor, teacher_C: Tensor) -> _SoftTargets:
    """The teacher's distributions, in place of its logits."""
    negative_entropy_P = logits_PU.new_empty(len(logits_PU))
    for rows in _blocks(*logits_PU.shape):
        log_p_BU = logits_PU[rows].log_softmax(1)
        logits_PU[rows] = log_p_BU.exp()
        negative_entropy_P[rows] = (logits_PU[rows] * log_p_BU).sum(1)
    return _SoftTargets(logits_PU, negative_entropy_P, teacher_C)


def _rows_loss_for(hidden_RH: Tensor, dtype: torch.dtype) -> Callable[..., Tensor]:
    """What computes rows of logits best where they are: Triton for fp32 sums on a GPU, else plain PyTorch."""
    if hidden_RH.is_cuda and dtype != torch.float64:
        from kernels.distillation.kernel import rows_loss  # Triton is only there where it is used

        return rows_loss
    return blockwise_rows_loss


def blockwise_rows_loss(
    logits_CU: Tensor,
    target_C: Tensor,
    taught: tuple[Tensor, Tensor] | None,
    loss_C: Tensor,
    hit_C: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Fills the rows' losses and hits and returns the gradient of the logits [C, U], in blocks that fit a core's cache.

    `taught`: the teacher's logits [P, U], which are overwritten, and which of them teaches each row. With q = softmax(logits): KL = sum p log p - sum p logits + logsumexp, its gradient is q - p.
    """
    soft = None if taught is None else _soft_targets(*taught)
    dlogits_CU = torch.empty_like(logits_CU, dtype=dtype)
    for rows in _blocks(*logits_CU.shape):
        logits_BU, target_B1 = logits_CU[rows], target_C[rows, None]
        has_target_B, target_B1 = target_B1[:, 0] >= 0, target_B1.clamp(min=0)
        true_B, best_B = logits_BU.gather(1, target_B1)[:, 0], logits_BU.amax(1)
        hit_C[rows] = has_target_B & (true_B >= best_B)
        grad_BU = logits_BU.softmax(1)
        lse_B = best_B - grad_BU.amax(1).log()
        if soft is None:
            loss_C[rows] = torch.where(has_target_B, lse_B - true_B, 0.0)
            grad_BU.scatter_add_(1, target_B1, -torch.ones_like(true_B)[:, None]).mul_(has_target_B[:, None])
        else:
            teacher_B = soft.teacher_C[rows]
            p_BU = soft.probs_PU[teacher_B]
            loss_C[rows] = soft.negative_entropy_P[teacher_B] - (p_BU * logits_BU).sum(1) + lse_B
            grad_BU.sub_(p_BU)
        dlogits_CU[rows] = grad_BU
    return dlogits_CU


def _blocks(num_rows: int, vocab: int) -> Iterator[slice]:
    block = max(1, BLOCK_ELEMENTS // vocab)
    return (slice(begin, min(begin + block, num_rows)) for begin in range(0, num_rows, block))


def rows_per_chunk(vocab: int, device: torch.device) -> int:
    """Rows whose logits over `vocab` ids exist at once: as many as make 28 MiB of fp32 (512 MiB on a GPU)."""
    elements = GPU_CHUNK_ELEMENTS if device.type == "cuda" else CHUNK_ELEMENTS
    return max(1, elements // vocab)


def _factor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor of `_logits`: on CPUs oneDNN itself rounds fp32 factors to bf16."""
    return x.float() if dtype == torch.bfloat16 and not x.is_cuda else x.to(dtype)


def _logits(x_CH: Tensor, weight_UH: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ weight.T of factors in `dtype`, summed and returned in at least fp32.

    A bf16 result would round logits of 20 by 0.06, and the softmax with them.
    """
    if dtype in (torch.float32, torch.float64):
        return F.linear(x_CH, weight_UH)
    if x_CH.is_cuda:
        return torch.mm(x_CH, weight_UH.T, out_dtype=torch.float32)
    with _bf16_factors():
        return F.linear(x_CH, weight_UH)


@contextmanager
def _bf16_factors() -> Iterator[None]:
    """Lets oneDNN round the fp32 factors of a product to bf16 and keep its fp32 sums."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
