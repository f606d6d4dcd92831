"""How many elements of a step fit into a GPU's free memory.

Legend: N depth-0 rows, H hidden size, Q query heads, G key heads, D head dimension, I MLP width, U draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from components.draft.head import DraftHead
from components.draft.head_config import HeadConfig
from components.draft.losses import GPU_CHUNK_ELEMENTS
from components.training.optimizer import Optimizers, sparse_parameters

CPU_ROWS_PER_PART = 4096
MOST_ROWS_PER_PART = 16384
"""Parts twice as large made a step 1-3% faster and needed 8 GiB more (an H200, a head of 0.85 G parameters without embeddings)."""
FEWEST_ROWS_PER_PART = 64
"""Smaller parts would take hours."""
USABLE_SHARE = 0.85
"""Of the free memory: the rest is for cuBLAS, cuDNN and what the allocator cannot hand out in one piece."""
PREFIX_SHARE = 0.35
"""Of the usable memory: a prefix pass that would keep more than this is computed again in the backward."""


@dataclass(frozen=True)
class StepPlan:
    rows_per_part: int
    recompute_prefix: bool
    head_start: int
    """Chain rows that the first part may have beyond the others."""


def plan_step(
    head: HeadConfig,
    num_rows: int,
    free_bytes: int,
    *,
    factor_bytes: int = 2,
    rows_per_part: int | Literal["auto"] = "auto",
    recompute_prefix: bool | Literal["auto"] = "auto",
    part_gradient_bytes: int = 0,
) -> StepPlan:
    """The part size and the checkpointing of one step.

    Args:
        head: shape of the head.
        num_rows: N of the batch.
        free_bytes: memory that the step may use, gradients and optimiser state apart.
        factor_bytes: bytes of a number in matrix products: 2 under bf16 autocast, else 4.
        rows_per_part: a number that the user set, or auto.
        recompute_prefix: what the user set, or auto.
        part_gradient_bytes: gradients that the first part makes, and later ones find there.

    Raises:
        ValueError: not even one chain fits.
    """
    usable = USABLE_SHARE * free_bytes - 6.5 * GPU_CHUNK_ELEMENTS
    element = head.num_layers * layer_bytes(head, factor_bytes) + transient_bytes(head, factor_bytes)
    recompute = recompute_prefix
    if recompute == "auto":
        recompute = num_rows * prefix_bytes(head, factor_bytes, recompute=False) > PREFIX_SHARE * usable
    if rows_per_part != "auto":
        return StepPlan(rows_per_part, recompute, 0)
    prefix = prefix_bytes(head, factor_bytes, recompute)
    # The parts, and then the prefix pass's own backward, take turns in what it leaves.
    backward = transient_bytes(head, factor_bytes) + (layer_bytes(head, factor_bytes) if recompute else 0)
    rows = int((usable - num_rows * prefix) / element)
    if rows < FEWEST_ROWS_PER_PART or num_rows * (prefix + backward) > usable:
        raise ValueError(
            f"train.rows_per_part: a batch of {num_rows} rows does not fit into {free_bytes / 2**30:.0f} GiB with its chains; "
            "lower train.documents_per_step or target.max_model_len, or use more GPUs"
        )
    most = min(rows, MOST_ROWS_PER_PART)
    # Even if the gradients were there (half, since a part may have another depth-0 element for each of them).
    head_start = min(part_gradient_bytes // (head.num_layers * layer_bytes(head, factor_bytes)), (rows - most) // 2)
    return StepPlan(most, recompute, head_start)


def layer_bytes(head: HeadConfig, factor_bytes: int) -> int:
    """What one element keeps in one layer for the backward: two fp32 residual streams and the factors of every product."""
    heads = (2 * head.num_heads + 2 * head.num_kv_heads) * head.head_dim
    return 8 * head.hidden_size + factor_bytes * (2 * head.hidden_size + heads + 2 * head.intermediate_size)


def transient_bytes(head: HeadConfig, factor_bytes: int) -> int:
    """What one element needs besides: the gradients of one layer, the final norm and its gradient."""
    return factor_bytes * (4 * head.intermediate_size + 4 * head.hidden_size) + 12 * head.hidden_size


def prefix_bytes(head: HeadConfig, factor_bytes: int, recompute: bool) -> int:
    """What one depth-0 row keeps while the parts run: features, keys, values and their fp32 gradients, and its graph."""
    pairs = head.num_layers * 2 * head.num_kv_heads * head.head_dim * (factor_bytes + 4)
    inputs = factor_bytes * (head.num_aux_layers * head.target_hidden_size + 4 * head.hidden_size)
    graph = head.num_layers * ((4 + factor_bytes) * head.hidden_size if recompute else layer_bytes(head, factor_bytes))
    return inputs + pairs + graph


def free_bytes(head: DraftHead, optimizers: Optimizers) -> int:
    """Memory of the head's GPU that a step may use: what nobody holds, less what a step always needs and is not there yet."""
    device = head.fc.weight.device
    free, _ = torch.cuda.mem_get_info(device)
    return (
        free
        + torch.cuda.memory_reserved(device)
        - torch.cuda.memory_allocated(device)
        - missing_bytes(head, optimizers)
    )


def missing_bytes(head: DraftHead, optimizers: Optimizers) -> int:
    """What a step will hold besides its activations and is not there yet: gradients, optimiser state, weights that FSDP gathers for it."""
    rows_only = {id(p) for p in sparse_parameters(head)}
    trained = [p for p in head.parameters() if p.requires_grad and id(p) not in rows_only]
    kept = [p for group in optimizers.param_groups for p in group["params"]]  # shares of the trained ones under FSDP
    there = optimizers.state
    missing = sum(p.numel() * p.element_size() for p in trained if p.grad is None)
    missing += sum(2 * local(p).numel() * p.element_size() for p in kept if p not in there)
    missing += sum(p.numel() * p.element_size() for p in head.parameters() if isinstance(p, DTensor))
    return missing


def part_gradient_bytes(head: DraftHead) -> int:
    """Gradients that a step's first part makes and the others find there; 0 under FSDP, whose buffers were not measured."""
    first = head.layers[0]  # a constant up to its attention: those gradients come with the prefix pass's backward
    constant = [first.input_layernorm, first.hidden_norm, *(getattr(first.self_attn, f"{x}_proj") for x in "qkv")]
    late = {id(p) for module in constant for p in module.parameters()}
    makes = [*head.layers.parameters(), *head.norm.parameters(), *head.lm_head.parameters()]
    return sum(
        p.numel() * p.element_size()
        for p in makes
        if p.requires_grad and id(p) not in late and not isinstance(p, DTensor)
    )


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
