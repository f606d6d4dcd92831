"""Products whose weight gradients are summed where they stay."""

import pytest
import torch
import torch.nn.functional as F

from components.draft.products import Projection, add_product, forget_rounded_weights, mixed_products


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return mixed_products(x, [weight], [weight.detach().to(x.dtype)])[0]


def test_equals_linear_and_adds_over_parts() -> None:
    weight, same = (torch.nn.Parameter(random(5, 7, seed=0)) for _ in range(2))
    for part in range(3):
        x, theirs = (random(4 + part, 7, seed=part + 1).requires_grad_() for _ in range(2))
        out, expected = product(x, weight), F.linear(theirs, same)
        assert torch.equal(out, expected)
        (out**2).sum().backward()
        (expected**2).sum().backward()
        torch.testing.assert_close(x.grad, theirs.grad)
    torch.testing.assert_close(weight.grad, same.grad)


def test_bf16_factors_leave_an_fp32_gradient() -> None:
    weight = torch.nn.Parameter(random(5, 7, seed=0, dtype=torch.float32))
    x = random(400, 7, seed=1, dtype=torch.bfloat16)
    product(x, weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, x.float().sum(0).expand(5, 7), rtol=1e-2, atol=1e-2)


def test_a_frozen_weight_gets_no_gradient() -> None:
    weight = torch.nn.Parameter(random(5, 7, seed=0), requires_grad=False)
    x = random(4, 7, seed=1).requires_grad_()
    product(x, weight).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 7))


def test_add_product_adds() -> None:
    total = torch.ones(5, 7, dtype=torch.float64)
    left, right = random(3, 5, seed=0), random(3, 7, seed=1)
    add_product(total, left, right)
    torch.testing.assert_close(total, 1 + left.T @ right)


@pytest.mark.parametrize("how", ["add_", "optimiser", "data moved"])
def test_the_rounded_weight_follows_the_weight(how: str) -> None:
    layer = Projection(7, 5)
    before = layer.rounded_weight(torch.bfloat16)
    assert layer.rounded_weight(torch.bfloat16) is before
    if how == "add_":
        with torch.no_grad():
            layer.weight.add_(1)
    elif how == "optimiser":
        layer.weight.grad = torch.ones_like(layer.weight)
        torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True).step()  # raises no version counter
        forget_rounded_weights(layer)
    else:
        layer.load_state_dict({"weight": torch.ones(5, 7)}, assign=True)
    assert torch.equal(layer.rounded_weight(torch.bfloat16), layer.weight.detach().bfloat16())
