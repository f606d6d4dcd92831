"""What moves the head's parameters, and a learning rate that depends on the step alone."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from components.config import TrainConfig
from components.draft.head import DraftHead

BETAS = (0.9, 0.95)


class Optimizers:
    """Several optimisers, each with its own parameters, used like one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def make_optimizer(head: DraftHead, config: TrainConfig) -> Optimizers:
    """AdamW in fp32; gains and other vectors are not decayed. SparseAdam for embeddings whose gradient is sparse."""
    sparse = sparse_parameters(head)
    trainable = [p for p in head.parameters() if p.requires_grad and all(p is not other for other in sparse)]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS, fused=True)
    rows = [torch.optim.SparseAdam(sparse, lr=config.learning_rate, betas=BETAS)] if sparse else []
    return Optimizers([adamw, *rows])


def sparse_parameters(head: DraftHead) -> list[nn.Parameter]:
    """Those whose gradient holds only the rows that a step read."""
    return [p for p in head.embed_tokens.parameters() if p.requires_grad] if head.embed_tokens.sparse else []


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Linear warm-up over the first share of steps, then cosine or linear decay that ends at 0 after the last step."""
    warmup = max(1, round(config.warmup_fraction * total_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    left = 1 - (step - warmup) / max(1, total_steps - warmup)
    shape = left if config.lr_schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return config.learning_rate * shape


def set_learning_rate(optimizer: Optimizers, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
