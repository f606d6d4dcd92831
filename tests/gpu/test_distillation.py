"""The fused distillation loss on a real GPU, against the plain one in fp64.

Without the project's other requirements: `python -m pytest --noconftest tests/gpu`.
"""

import pytest
import torch

from components.draft.losses import LossKind, LossRows, Teacher, distillation_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

WIDTH, POSITIONS = 96, 200


def loss_and_gradients(
    dtype: torch.dtype, product: torch.dtype | None, rows: int, vocab: int, kind: LossKind, chunk_rows: int
) -> tuple[LossRows, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows + vocab)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16().to(dtype)

    hidden, lm_head = random(rows, WIDTH).requires_grad_(), (random(vocab, WIDTH) / 4).requires_grad_()
    teacher = Teacher(torch.ones(WIDTH, dtype=dtype, device="cuda"), 1e-6, random(vocab, WIDTH) / 4)
    states = random(POSITIONS, WIDTH)
    positions = torch.randint(0, POSITIONS, (rows,), generator=generator, device="cuda")
    targets = torch.randint(-1, vocab, (rows,), generator=generator, device="cuda")
    found = distillation_loss(
        hidden, lm_head, teacher, states, positions, targets, kind=kind, product_dtype=product, chunk_rows=chunk_rows
    )
    (2 * found.loss_sum).backward()
    return found, hidden.grad, lm_head.grad


@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
@pytest.mark.parametrize("vocab", [1, 1000, 4096, 32001])
@pytest.mark.parametrize(
    ("dtype", "product", "tolerance"), [(torch.float32, None, 2e-5), (torch.float32, torch.bfloat16, 1e-2)]
)
def test_equals_fp64(dtype: torch.dtype, product: torch.dtype, tolerance: float, vocab: int, kind: LossKind) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for rows, chunk_rows in ((0, 64), (1, 64), (777, 100)):
        ours = loss_and_gradients(dtype, product, rows, vocab, kind, chunk_rows)
        exact = loss_and_gradients(torch.float64, None, rows, vocab, kind, rows or 1)
        loss = (ours[0].loss_R.double() - exact[0].loss_R).abs().max().item() if rows else 0.0
        assert loss < tolerance * 10
        if product is None:
            assert torch.equal(ours[0].hit_R, exact[0].hit_R)
        for gradient, true in zip(ours[1:], exact[1:], strict=True):
            assert (gradient.double() - true).norm() <= tolerance * true.norm() + 1e-9
