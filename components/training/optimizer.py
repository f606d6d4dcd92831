"""AdamW over the head's parameters and a learning rate that depends on the step alone."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from components.config import TrainConfig

BETAS = (0.9, 0.95)


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW in fp32; gains and other vectors are not decayed."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS, fused=True)


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Linear warm-up over the first share of steps, then cosine or linear decay that ends at 0 after the last step."""
    warmup = max(1, round(config.warmup_fraction * total_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    left = 1 - (step - warmup) / max(1, total_steps - warmup)
    shape = left if config.lr_schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return config.learning_rate * shape


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
