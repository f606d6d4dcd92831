"""What a training run needs to go on exactly where it was: weights, optimiser, place, and the figures so far."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from components.draft.head import DraftHead
from components.training.optimizer import Optimizers
from components.training.shard import load_optimizer_state, whole_optimizer_state, whole_tensor


@dataclass
class Progress:
    """How far a run is; `history` holds one row a report, so that the curves survive any kill."""

    step: int = 0
    """Optimiser steps done, over all epochs."""
    supervised_tokens: int = 0
    train_seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def save_state(folder: Path, head: DraftHead, optimizers: Optimizers, progress: Progress, write: bool = True) -> None:
    """Write a checkpoint; whoever stores the folder does so atomically (Ray Train lists only whole ones).

    A head that FSDP has cut is written whole, so that a run may go on with another number of workers: every rank calls,
    and the one with `write` writes.
    """
    tensors = {name: whole_tensor(tensor).contiguous() for name, tensor in head.state_dict().items()}
    state = whole_optimizer_state(optimizers)
    if not write:
        return
    save_file(tensors, folder / "head.safetensors")
    torch.save(state, folder / "optimizer.pt")
    (folder / "progress.json").write_text(json.dumps(asdict(progress)))


def load_weights(folder: Path, head: DraftHead) -> None:
    """Put a checkpoint's tensors into a head that is not cut (yet)."""
    head.load_state_dict(load_file(folder / "head.safetensors"))


def load_progress(folder: Path, optimizers: Optimizers) -> Progress:
    """Put a checkpoint's state into the optimisers of its head, cut or whole; how far the run was comes back."""
    load_optimizer_state(optimizers, torch.load(folder / "optimizer.pt", weights_only=True))
    return read_progress(folder)


def read_progress(folder: Path) -> Progress:
    return Progress(**json.loads((folder / "progress.json").read_text()))
