"""The gated MLP of a layer, which under autocast on a GPU keeps two of its three wide activations.

The product silu(gate) * up is one pass over what is kept anyway; the backward makes it again in the kernel that it runs there in
any case. Kept, it would be a sixth of all that a row keeps.

Legend: R rows, H hidden size, I MLP width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from components.draft.elementwise import gated_silu, gated_silu_backward
from components.draft.products import Projection, add_weight_grad, product_dtype, project_together


def gated_mlp(x_RH: Tensor, gate: Projection, up: Projection, down: Projection) -> Tensor:
    """[R, H] down(silu(gate(x)) * up(x)), as in Llama."""
    dtype = product_dtype(x_RH)
    if dtype is None:
        return down(gated_silu(*project_together(x_RH, gate, up)))
    layers = (gate, up, down)
    weights, rounded = [layer.weight for layer in layers], [layer.rounded_weight(dtype) for layer in layers]
    return gated_products(x_RH.to(dtype), weights, rounded)


def gated_products(x_RH: Tensor, weights: Sequence[Tensor], rounded: Sequence[Tensor]) -> Tensor:
    """[R, H]; the backward adds the weights' gradients to their `grad`, in the weights' dtype (`mixed_products`).

    Args:
        x_RH: [R, H] input.
        weights: of gate [I, H], up [I, H] and down [H, I], what is trained.
        rounded: the weights in the dtype of x.
    """
    return _GatedProducts.apply(x_RH, rounded, *weights)


class _GatedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, rounded: Sequence[Tensor], *weights: Tensor) -> Tensor:
        gate_IH, up_IH, down_HI = rounded
        gate_RI, up_RI = x_RH @ gate_IH.T, x_RH @ up_IH.T
        ctx.save_for_backward(x_RH, gate_RI, up_RI, *rounded)
        ctx.weights = weights
        return gated_silu(gate_RI, up_RI) @ down_HI.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, gate_RI, up_RI, gate_IH, up_IH, down_HI = ctx.saved_tensors
        gate, up, down = ctx.weights
        dgate_RI, dup_RI, gated_RI = gated_silu_backward(gate_RI, up_RI, grads[0] @ down_HI)
        add_weight_grad(down, grads[0], gated_RI)
        del gated_RI
        add_weight_grad(gate, dgate_RI, x_RH)
        add_weight_grad(up, dup_RI, x_RH)
        dx_RH = (dgate_RI @ gate_IH).addmm_(dup_RI, up_IH) if ctx.needs_input_grad[0] else None
        return dx_RH, None, None, None, None
