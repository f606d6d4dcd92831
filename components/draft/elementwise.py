"""What a head computes between its matrix products. On a GPU each function is compiled into as few kernels as it allows.

Legend: R rows, H hidden size, I MLP width, Q heads, D head dimension.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.draft.products import product_dtype

P = ParamSpec("P")
T = TypeVar("T")


def fused_on_gpu(function: Callable[P, T]) -> Callable[P, T]:
    """Compiles `function` the first time that its first argument lies on a GPU; elsewhere it runs as it is written.

    Only the number of rows may vary in what is compiled: with a width known at run time alone, a kernel divides for every
    element (the rotary embedding took eight times as long).
    """

    @lru_cache(maxsize=1)
    def compiled() -> Callable[P, T]:
        return torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0]
        assert isinstance(first, Tensor)
        if not first.is_cuda:
            return function(*args, **kwargs)
        for arg in args:
            if isinstance(arg, Tensor) and arg.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        return compiled()(*args, **kwargs)

    return call


class Norm(nn.RMSNorm):
    """RMS norm with a gain, computed in at least fp32 and rounded to the dtype that the next product wants."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, product_dtype(x))

    def of_sum(self, residual_RH: Tensor, update_RH: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of a residual stream and what a layer adds to it, and the norm of that sum."""
        return add_and_norm(residual_RH, update_RH, self.weight, self.epsilon, product_dtype(residual_RH))


@fused_on_gpu
def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype | None) -> Tensor:
    normed_RH = F.rms_norm(x_RH.to(weight_H.dtype), weight_H.shape, weight_H, eps)
    return normed_RH if dtype is None else normed_RH.to(dtype)


@fused_on_gpu
def add_and_norm(
    residual_RH: Tensor, update_RH: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    sum_RH = residual_RH + update_RH
    normed_RH = F.rms_norm(sum_RH, weight_H.shape, weight_H, eps)
    return sum_RH, normed_RH if dtype is None else normed_RH.to(dtype)


@fused_on_gpu
def gated_silu(gate_RI: Tensor, up_RI: Tensor) -> Tensor:
    return F.silu(gate_RI) * up_RI


@fused_on_gpu
def gated_silu_backward(gate_RI: Tensor, up_RI: Tensor, grad_RI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and what `gated_silu` made of them."""
    dtype = torch.promote_types(gate_RI.dtype, torch.float32)
    gate, up, grad = gate_RI.to(dtype), up_RI.to(dtype), grad_RI.to(dtype)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    dgate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return dgate.to(gate_RI.dtype), (grad * silu).to(gate_RI.dtype), (silu * up).to(gate_RI.dtype)


@fused_on_gpu
def rotate(x_RQD: Tensor, cos_R1D: Tensor, sin_R1D: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout (vLLM's `is_neox_style`), rounded once to the input's dtype.

    `sin_R1D` is negated in its first half, so that the halves need only change places: one load, no masks.
    """
    swapped_RQD = x_RQD.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (x_RQD * cos_R1D + swapped_RQD * sin_R1D).to(x_RQD.dtype)
