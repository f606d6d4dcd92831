"""The chunked loss against plain fp64, values and gradients."""

import pytest
import torch
from torch import Tensor

from components.draft.losses import Teacher, distillation_loss

# fp32 sums over 4096 terms.
FP32_TOLERANCE = 2e-6
# Factors of the products have 8 bits; sums and softmax are fp32. A bf16 softmax is 3% to 31% off.
BF16_TOLERANCE = 0.01


class Case:
    """Rows that share teacher positions in no order, over a vocabulary of 4096."""

    def __init__(self, num_rows: int = 53, vocab: int = 4096) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden, self.head = normal(num_rows, 64), normal(vocab, 64) * 0.4
        self.last_hidden = normal(29, 48)
        self.teacher = Teacher(0.5 + normal(48).abs(), 1e-5, normal(vocab, 48) * 0.4)
        self.position = torch.randint(0, 29, (num_rows,), generator=generator)
        self.target = torch.randint(0, vocab, (num_rows,), generator=generator)
        self.target[::7] = -1

    def run(self, dtype: torch.dtype, chunk_rows: int = 512, **options: object) -> tuple[Tensor, ...]:
        hidden, head = (x.to(dtype, copy=True).requires_grad_() for x in (self.hidden, self.head))
        teacher = Teacher(self.teacher.norm_T.to(dtype), 1e-5, self.teacher.lm_head_UT.to(dtype))
        result = distillation_loss(
            hidden, head, teacher, self.last_hidden.to(dtype), self.position, self.target,
            chunk_rows=chunk_rows, **options,
        )  # fmt: skip
        result.loss_sum.backward()
        return result.loss_R, result.hit_R, hidden.grad, head.grad

    def expected(self, kind: str) -> tuple[Tensor, ...]:
        hidden, head = self.hidden.clone().requires_grad_(), self.head.clone().requires_grad_()
        log_q = (hidden @ head.T).log_softmax(-1)
        state = self.last_hidden / (self.last_hidden.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        p = ((state * self.teacher.norm_T) @ self.teacher.lm_head_UT.T).softmax(-1)[self.position]
        if kind == "kl":
            loss = (p * (p.log() - log_q)).sum(-1)
        else:
            loss = torch.stack([-row[t] if t >= 0 else 0.0 * row[0] for row, t in zip(log_q, self.target, strict=True)])
        loss.sum().backward()
        return loss.detach(), log_q.argmax(-1) == self.target, hidden.grad, head.grad


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
@pytest.mark.parametrize("chunk_rows", [1, 10, 53, 512])
def test_fp64_equals_plain_autograd(kind: str, chunk_rows: int) -> None:
    case = Case()
    loss, hit, *grads = case.run(torch.float64, chunk_rows, kind=kind)
    exact_loss, exact_hit, *exact_grads = case.expected(kind)
    assert torch.equal(hit, exact_hit)
    for ours, exact in zip([loss, *grads], [exact_loss, *exact_grads], strict=True):
        assert relative_error(ours, exact) < 1e-13


@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
@pytest.mark.parametrize(
    ("product_dtype", "tolerance"), [(None, FP32_TOLERANCE), (torch.bfloat16, BF16_TOLERANCE)], ids=["fp32", "bf16"]
)
def test_gradients_at_vocabulary_4096_against_fp64(
    kind: str, product_dtype: torch.dtype | None, tolerance: float
) -> None:
    case = Case()
    loss, _, *grads = case.run(torch.float32, kind=kind, product_dtype=product_dtype)
    exact_loss, _, *exact_grads = case.expected(kind)
    for ours, exact in zip([loss, *grads], [exact_loss, *exact_grads], strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, exact) < tolerance


def test_head_equal_to_its_teacher_has_no_loss_and_no_gradient() -> None:
    case = Case()
    normed = case.teacher.normed(case.last_hidden)[case.position].requires_grad_()
    head = case.teacher.lm_head_UT.clone().requires_grad_()
    result = distillation_loss(normed, head, case.teacher, case.last_hidden, case.position, case.target)
    result.loss_sum.backward()
    assert result.loss_R.abs().max() < 1e-12
    assert normed.grad.abs().max() < 1e-12


def test_gradient_of_the_sum_scales_with_what_flows_back() -> None:
    case = Case(num_rows=5, vocab=30)
    hidden = case.hidden.clone().requires_grad_()
    arguments = (case.head, case.teacher, case.last_hidden, case.position, case.target)
    (3 * distillation_loss(hidden, *arguments).loss_sum).backward()
    three = hidden.grad.clone()
    hidden.grad = None
    distillation_loss(hidden, *arguments).loss_sum.backward()
    assert torch.allclose(three, 3 * hidden.grad, rtol=1e-12)


def test_gradients_are_used_once() -> None:
    case = Case(num_rows=5, vocab=30)
    hidden = case.hidden.clone().requires_grad_()
    loss = distillation_loss(hidden, case.head, case.teacher, case.last_hidden, case.position, case.target).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already used"):
        loss.backward()
