"""The gated MLP that keeps two of its activations equals the plain one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.draft.mlp import gated_products

ROWS, WIDTH, MLP = 9, 7, 11


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((MLP, WIDTH), (MLP, WIDTH), (WIDTH, MLP))
    return [nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def rows(part: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + part)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def ours(x: Tensor, *trained: Tensor) -> Tensor:
    return gated_products(x, trained, [weight.detach().to(x.dtype) for weight in trained])


def test_equals_the_plain_mlp_and_adds_over_parts() -> None:
    mine, theirs = weights(), weights()
    for part in range(2):
        x, same = rows(part), rows(part)
        out, expected = ours(x, *mine), plain(same, *theirs)
        torch.testing.assert_close(out, expected)
        (out**2).sum().backward()
        (expected**2).sum().backward()
        torch.testing.assert_close(x.grad, same.grad)
    for weight, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(weight.grad, other.grad)


def test_two_wide_activations_are_kept() -> None:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda saved: saved):
        ours(rows(0), *weights())
    assert sum(tensor.shape == (ROWS, MLP) for tensor in kept) == 2


def test_bf16_rows_leave_fp32_gradients_and_a_frozen_weight_none() -> None:
    mine = [nn.Parameter(weight.detach().float()) for weight in weights()]
    mine[1].requires_grad_(False)
    x = rows(0).detach().bfloat16().requires_grad_()
    ours(x, *mine).float().sum().backward()
    assert [weight.grad is None for weight in mine] == [False, True, False]
    theirs = weights()
    same = rows(0)
    plain(same, *theirs).sum().backward()
    for ours_grad, grad in ((mine[0].grad, theirs[0].grad), (mine[2].grad, theirs[2].grad), (x.grad, same.grad)):
        assert ours_grad.dtype in (torch.float32, torch.bfloat16)
        assert (ours_grad.double() - grad).norm() < 2e-2 * grad.norm()
