"""FSDP2: weights, gradients and optimiser state cut over the workers (`train.shard`).

The whole head is one FSDP unit whose forward is the prefix pass. FSDP gathers the weights before it. The parts run between that
forward and its backward, on the gathered weights, and add their gradients to them; the backward of the prefix pass comes last,
and at its end FSDP sums the gradients over the workers and leaves every worker its share. So a step gathers once and reduces
once, however many parts it has. What a worker saves is the optimiser state, most of a head's memory; the weights themselves
are whole during a step.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from components.draft.head import DraftHead
from components.draft.products import forget_rounded_weights
from components.training.optimizer import Optimizers


def shard_head(head: DraftHead, world_size: int) -> None:
    """Cuts the head's trained parameters over all workers, in place; frozen ones stay whole everywhere."""
    mesh = init_device_mesh(head.fc.weight.device.type, (world_size,))
    frozen = {p for p in head.parameters() if not p.requires_grad}
    fully_shard(head, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
    assert isinstance(head, FSDPModule)
    head.set_gradient_divide_factor(1.0)  # sums; the trainer divides once, by the number of supervised elements
    head.set_force_sum_reduction_for_comms(True)  # gloo knows no sum that multiplies first
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # keys and values are views that nobody writes to


def is_sharded(head: nn.Module) -> bool:
    return isinstance(head, FSDPModule)


@contextmanager
def whole(head: DraftHead) -> Iterator[None]:
    """Inside, the parameters are whole tensors on every worker; every worker must enter. Nothing to do for a head that is not cut."""
    if not isinstance(head, FSDPModule):
        yield
        return
    head.unshard()
    forget_rounded_weights(head)
    yield
    head.reshard()


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor of which every worker holds a share; every worker must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_optimizer_state(optimizers: Optimizers) -> list[dict[str, Any]]:
    """`state_dict()` of each optimiser with whole tensors; every worker must call."""
    return [_whole_state(part.state_dict()) for part in optimizers.parts]


def _whole_state(state: dict[str, Any]) -> dict[str, Any]:
    whole = {i: {k: whole_tensor(v) for k, v in entry.items()} for i, entry in state["state"].items()}
    return state | {"state": whole}


def load_optimizer_state(optimizers: Optimizers, states: list[dict[str, Any]]) -> None:
    """Puts whole tensors back into the shares that this worker holds."""
    for part, state in zip(optimizers.parts, states, strict=True):
        parameters = [p for group in part.param_groups for p in group["params"]]
        shared = {i: {k: _like(v, parameters[i]) for k, v in entry.items()} for i, entry in state["state"].items()}
        part.load_state_dict(state | {"state": shared})


def _like(value: Any, parameter: Tensor) -> Any:
    """A state tensor of its parameter's shape, cut as its parameter is; scalars (the step count) as they are."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value
