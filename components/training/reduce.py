"""Sums over ranks: one all-reduce for all gradients of a step but those of a few embedding rows, which are gathered.

No DDP wrapper: with several forward and backward pairs in a step its hooks fire in the first pair only, or never.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def reduce_gradients(parameters: Sequence[nn.Parameter], sums: Tensor, sparse: Sequence[nn.Parameter] = ()) -> Tensor:
    """Add up gradients and `sums` over all ranks; a rank that had no supervised element adds zeros.

    Args:
        parameters: the trained parameters, the same on every rank; a missing gradient counts as zero. FSDP has summed the
            gradients of those that it cut.
        sums: [M] fp64 figures to be summed with them; sums[0] is the count of supervised elements.
        sparse: those of `parameters` whose gradient holds a few rows only.

    Returns:
        [M] the sums over all ranks; the gradients are those of the *sum* of all losses (`scale_gradients` divides).
    """
    for parameter in sparse:
        parameter.grad = _sum_of_rows(parameter)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in parameters if p.grad is not None]
    whole = [g for g in grads if not isinstance(g, DTensor) and not g.is_sparse]
    if whole and dist.is_initialized() and dist.get_world_size() > 1:
        bucket = torch.cat([g.reshape(-1) for g in whole])
        dist.all_reduce(bucket)
        for grad, summed in zip(whole, bucket.split([g.numel() for g in whole]), strict=True):
            grad.copy_(summed.view_as(grad))
    return reduce_sums(sums)


def _sum_of_rows(parameter: nn.Parameter) -> Tensor:
    """The sparse gradient of an embedding, coalesced, summed over ranks that read different rows."""
    grad = parameter.grad
    if grad is None:
        grad = torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=parameter.device), parameter.new_empty(0, *parameter.shape[1:]),
            parameter.shape,
        )  # fmt: skip
    grad = grad.coalesce()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return grad
    ids, rows = grad.indices()[0], grad.values()
    counts = [ids.new_zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, ids.new_tensor([len(ids)]))
    most = max(int(count) for count in counts)
    missing = most - len(ids)
    all_ids = [ids.new_empty(most) for _ in counts]
    all_rows = [rows.new_empty(most, *rows.shape[1:]) for _ in counts]
    dist.all_gather(all_ids, torch.cat([ids, ids.new_zeros(missing)]))
    dist.all_gather(all_rows, torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]))
    ids = torch.cat([x[: int(n)] for x, n in zip(all_ids, counts, strict=True)])
    rows = torch.cat([x[: int(n)] for x, n in zip(all_rows, counts, strict=True)])
    return torch.sparse_coo_tensor(ids[None], rows, grad.shape).coalesce()


def scale_gradients(parameters: Sequence[nn.Parameter], count: float, clip_norm: float) -> None:
    """From gradients of a sum over `count` elements to those of the mean, no longer than `clip_norm`, in one pass."""
    grads = [p.grad.values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(grads) / count
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch._foreach_mul_(grads, (clip_norm / (norm + 1e-6)).clamp(max=1.0) / count)


def reduce_sums(sums: Tensor) -> Tensor:
    """[M] fp64 figures summed over all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return sums
