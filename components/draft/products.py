"""Matrix products of mixed precision: rounded factors, fp32 sums, and weight gradients that are summed where they stay.

Under autocast every part of a step rounds its weight gradient to bf16, widens it again and adds it: a rounding that the
exact partition has no need of, and on a GPU 20 bytes of traffic a weight. Here cuBLAS adds its own fp32 sums to
`weight.grad` in place, 8 bytes a weight, and a weight is rounded once a step instead of once a part.

Legend: R rows, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Projection(nn.Linear):
    """`nn.Linear` without a bias; on a GPU under autocast its gradient goes straight into `weight.grad`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self._rounded: tuple[tuple[Any, ...], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        dtype = product_dtype(input)
        if dtype is None:
            return super().forward(input)
        return _Product.apply(input.to(dtype), self.weight, self.rounded_weight(dtype))

    def rounded_weight(self, dtype: torch.dtype) -> Tensor:
        """[O, I] the weight in `dtype`, made anew after the weight has changed in a way that its version counter shows."""
        made_from = (dtype, self.weight.data_ptr(), self.weight._version)
        if self._rounded is None or self._rounded[0] != made_from:
            self._rounded = None  # frees the old one first
            self._rounded = (made_from, self.weight.detach().to(dtype))
        return self._rounded[1]

    def forget_rounded(self) -> None:
        self._rounded = None


def forget_rounded_weights(module: nn.Module) -> None:
    """For those who write weights where version counters do not see it: fused optimisers, and FSDP when it gathers."""
    for part in module.modules():
        if isinstance(part, Projection):
            part.forget_rounded()


def product_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of the factors of products with `x` where this module computes them: on a GPU under autocast, else None."""
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return None


def mixed_product(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """[R, O] x @ weight.T in the dtype of x; the backward adds the weight's gradient to `weight.grad` in the weight's own."""
    return _Product.apply(x_RI, weight_OI, weight_OI.detach().to(x_RI.dtype))


def add_product(sum_OI: Tensor, left_RO: Tensor, right_RI: Tensor) -> None:
    """Adds left.T @ right to `sum_OI` in place, rounding nothing to the factors' dtype on a GPU."""
    if sum_OI.is_cuda and sum_OI.dtype == torch.float32 and left_RO.element_size() == 2:
        torch.addmm(sum_OI, left_RO.T, right_RI, out_dtype=torch.float32, out=sum_OI)
    else:
        sum_OI.add_(left_RO.T @ right_RI)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor, rounded_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, rounded_OI)
        ctx.weight = weight_OI
        return x_RI @ rounded_OI.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        x_RI, rounded_OI = ctx.saved_tensors
        weight_OI = ctx.weight
        if weight_OI.requires_grad:
            if weight_OI.grad is None:
                weight_OI.grad = torch.zeros_like(weight_OI)
            add_product(weight_OI.grad, grads[0], x_RI)
        return grads[0] @ rounded_OI if ctx.needs_input_grad[0] else None, None, None
