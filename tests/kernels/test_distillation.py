"""The Triton loss in the interpreter against the plain one in fp64."""

import pytest
import torch

from components.draft.losses import blockwise_rows_loss
from kernels.distillation.kernel import rows_loss

TOLERANCE = 2e-6


@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
@pytest.mark.parametrize(("size", "block"), [(37, 4096), (64, 16), (100, 32)])
def test_loss_hit_and_gradient(kind: str, size: int, block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, size, generator=generator) * 5
    target = torch.randint(-1, size, (9,), generator=generator)
    target[0], target[1] = -1, logits[1].argmax()
    taught = None
    if kind == "kl":
        taught = (torch.randn(4, size, generator=generator) * 5, torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3]))
    loss, hit = torch.full((9,), torch.nan), torch.zeros(9, dtype=torch.bool)
    grad = rows_loss(logits, target, taught, loss, hit, torch.float32, block)
    exact_loss, exact_hit = torch.empty(9, dtype=torch.float64), torch.zeros(9, dtype=torch.bool)
    exact_taught = None if taught is None else (taught[0].double(), taught[1])
    exact = blockwise_rows_loss(logits.double(), target, exact_taught, exact_loss, exact_hit, torch.float64)
    assert hit.tolist() == exact_hit.tolist()
    assert hit[1]
    assert (loss - exact_loss).abs().max() < TOLERANCE * exact_loss.abs().max()
    assert (grad - exact).norm() < TOLERANCE * exact.norm()


def test_no_rows() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    grad = rows_loss(torch.empty(0, 8), empty, None, torch.empty(0), torch.empty(0, dtype=torch.bool), torch.bfloat16)
    assert grad.shape == (0, 8)
    assert grad.dtype == torch.bfloat16
