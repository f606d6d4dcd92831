"""Matrix products of mixed precision: rounded factors, fp32 sums, and weight gradients that are summed where they stay.

Under autocast every part of a step rounds its weight gradient to bf16, widens it again and adds it: a rounding that the
exact partition has no need of, and on a GPU 20 bytes of traffic a weight. Here cuBLAS adds its own fp32 sums to
`weight.grad` in place, 8 bytes a weight, and a weight is rounded once a step instead of once a part.

Legend: R rows, I inputs, O outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Linear):
    """`nn.Linear` without a bias; on a GPU under autocast its gradient goes straight into `weight.grad`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self._rounded: tuple[tuple[Any, ...], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        return project_together(input, self)[0]

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


def project_together(x: Tensor, *layers: Projection) -> tuple[Tensor, ...]:
    """What each layer makes of the same input; their gradients of it are summed by the products themselves."""
    weights = [layer.weight for layer in layers]
    dtype = product_dtype(x)
    if dtype is None:
        return tuple(F.linear(x, weight) for weight in weights)
    return mixed_products(x.to(dtype), weights, [layer.rounded_weight(dtype) for layer in layers])


def mixed_products(x_RI: Tensor, weights_OI: Sequence[Tensor], rounded_OI: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[R, O] x @ rounded.T for each weight; the backward adds the weights' gradients to their `grad`, in the weights' dtype.

    Args:
        x_RI: [R, I] input.
        weights_OI: [O, I] each, what is trained.
        rounded_OI: the weights in the dtype of x.
    """
    return _Products.apply(x_RI, rounded_OI, *weights_OI)


def add_product(sum_OI: Tensor, left_RO: Tensor, right_RI: Tensor) -> None:
    """Adds left.T @ right to `sum_OI` in place, rounding nothing to the factors' dtype on a GPU."""
    if _keeps_fp32_sums(left_RO, sum_OI.dtype):
        torch.addmm(sum_OI, left_RO.T, right_RI, out_dtype=torch.float32, out=sum_OI)
    else:
        sum_OI.add_(left_RO.T @ right_RI)


def product_sum(left_RO: Tensor, right_RI: Tensor, dtype: torch.dtype) -> Tensor:
    """left.T @ right in `dtype`: where `add_product` starts, without zeros to add to."""
    if _keeps_fp32_sums(left_RO, dtype):
        return torch.mm(left_RO.T, right_RI, out_dtype=torch.float32)
    return (left_RO.T @ right_RI).to(dtype)


def add_weight_grad(weight_OI: Tensor, grad_RO: Tensor, x_RI: Tensor) -> None:
    """Adds grad.T @ x to `weight.grad` in the weight's dtype; a frozen weight has none."""
    if not weight_OI.requires_grad:
        return
    if weight_OI.grad is None:
        weight_OI.grad = product_sum(grad_RO, x_RI, weight_OI.dtype)
    else:
        add_product(weight_OI.grad, grad_RO, x_RI)


def _keeps_fp32_sums(factor: Tensor, dtype: torch.dtype) -> bool:
    """Whether cuBLAS can hand out the sums that it makes of rounded factors."""
    return factor.is_cuda and dtype == torch.float32 and factor.element_size() == 2


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, rounded: Sequence[Tensor], *weights_OI: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_RI, *rounded)
        ctx.weights = weights_OI
        return tuple(x_RI @ rounded_OI.T for rounded_OI in rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, *rounded = ctx.saved_tensors
        dx_RI = None
        for grad_RO, rounded_OI, weight_OI in zip(grads, rounded, ctx.weights, strict=True):
            add_weight_grad(weight_OI, grad_RO, x_RI)
            if ctx.needs_input_grad[0]:
                dx_RI = grad_RO @ rounded_OI if dx_RI is None else dx_RI.addmm_(grad_RO, rounded_OI)
        return dx_RI, None, *(None for _ in ctx.weights)
