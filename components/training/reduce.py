"""Sums over ranks: one all-reduce for all gradients and counts of a step.

No DDP wrapper: with several forward and backward pairs in a step its hooks fire in the first pair only, or never.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def reduce_gradients(parameters: Sequence[nn.Parameter], sums: Tensor) -> Tensor:
    """Add up gradients and `sums` over all ranks; a rank that had no supervised element adds zeros.

    Args:
        parameters: the trained parameters, the same on every rank; a missing gradient counts as zero. FSDP has summed the
            gradients of those that it cut.
        sums: [M] fp64 figures to be summed with them; sums[0] is the count of supervised elements.

    Returns:
        [M] the sums over all ranks; the gradients are those of the *sum* of all losses (`scale_gradients` divides).
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in parameters if p.grad is not None]
    whole = [g for g in grads if not isinstance(g, DTensor)]
    if whole and dist.is_initialized() and dist.get_world_size() > 1:
        bucket = torch.cat([g.reshape(-1) for g in whole])
        dist.all_reduce(bucket)
        for grad, summed in zip(whole, bucket.split([g.numel() for g in whole]), strict=True):
            grad.copy_(summed.view_as(grad))
    return reduce_sums(sums)


def scale_gradients(parameters: Sequence[nn.Parameter], count: float, clip_norm: float) -> None:
    """From gradients of a sum over `count` elements to those of the mean, no longer than `clip_norm`, in one pass."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(grads) / count
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch._foreach_mul_(grads, (clip_norm / (norm + 1e-6)).clamp(max=1.0) / count)


def reduce_sums(sums: Tensor) -> Tensor:
    """[M] fp64 figures summed over all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return sums
