"""One rank's training: steps, validation and the figures of both, without knowing who runs it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from components.config import TrainConfig
from components.draft.batch import Document, PackedBatch
from components.draft.chains import ChainRecipe, sample_chains
from components.draft.head import DraftHead
from components.draft.losses import Teacher
from components.draft.schedule import StepOptions, StepSums, accumulate_gradients
from components.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from components.training.order import Entry, epoch_order, rank_share, steps_per_epoch
from components.training.reduce import reduce_gradients, reduce_sums
from components.training.state import Progress


@dataclass
class Trainer:
    """Optimiser steps over `entries`, the same global step on any number of ranks."""

    head: DraftHead
    teacher: Teacher
    entries: Sequence[Entry]
    read: Callable[[Entry], Document]
    config: TrainConfig
    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.head.parameters(), self.config)
        self.recipe = ChainRecipe(self.config.num_depths, self.config.chain_rate, self.config.chain_floor)
        self.options = step_options(self.config)
        self._orders: dict[int, list[Entry]] = {}

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.entries), self.config.documents_per_step)

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.head.parameters() if p.requires_grad]

    def step(self) -> StepSums:
        """One optimiser step on the next global batch; the sums over all ranks."""
        started = time.monotonic()
        epoch, step = divmod(self.progress.step, self.steps_per_epoch)
        share = rank_share(self._order(epoch), step, self.config.documents_per_step, self.rank, self.world_size)
        sums = self._accumulate(share, epoch)
        sums = unpack_sums(reduce_gradients(self.parameters, pack_sums(sums)))
        if int(sums.count) > 0:  # a step without a supervised token anywhere has no gradient to follow
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
            set_learning_rate(self.optimizer, learning_rate(self.progress.step, self.total_steps, self.config))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.progress.step += 1
        self.progress.supervised_tokens += int(sums.count_D[0])
        self.progress.train_seconds += time.monotonic() - started
        return sums

    def _accumulate(self, share: Sequence[Entry], epoch: int) -> StepSums:
        if not share:
            return StepSums.zeros(self.config.num_depths)
        batch = PackedBatch.pack([self.read(entry) for entry in share], self.device)
        chains = sample_chains(batch, self.recipe, [(self.config.seed, epoch, entry.number) for entry in share])
        return accumulate_gradients(self.head, batch, chains, self.teacher, self.options)

    def _order(self, epoch: int) -> list[Entry]:
        if epoch not in self._orders:
            self._orders = {epoch: epoch_order(self.entries, self.config.seed, epoch)}
        return self._orders[epoch]


def step_options(config: TrainConfig) -> StepOptions:
    autocast = torch.bfloat16 if config.dtype == "bfloat16" else None
    return StepOptions(config.num_depths, config.rows_per_part, config.loss, autocast)


def pack_sums(sums: StepSums) -> Tensor:
    """[2 + 3 D] fp64: count, loss, then counts, correct and outside at each depth."""
    head = torch.stack([sums.count.double(), sums.loss.double()])
    return torch.cat([head, sums.count_D.double(), sums.correct_D.double(), sums.outside_D.double()]).cpu()


def unpack_sums(packed: Tensor) -> StepSums:
    count_D, correct_D, outside_D = packed[2:].view(3, -1).round().long()
    return StepSums(packed[1], count_D, correct_D, outside_D)


def all_rank_sums(sums: StepSums) -> StepSums:
    return unpack_sums(reduce_sums(pack_sums(sums)))


def figures(sums: StepSums, prefix: str) -> dict[str, float]:
    """Loss an element and accuracy at each depth; a depth without an element has no figure."""
    count = int(sums.count)
    rows = {f"{prefix}/loss": float(sums.loss) / count} if count else {}
    for depth, (correct, total) in enumerate(zip(sums.correct_D.tolist(), sums.count_D.tolist(), strict=True)):
        if total:
            rows[f"{prefix}/accuracy_depth_{depth}"] = correct / total
    if count:
        rows[f"{prefix}/outside_vocabulary"] = float(sums.outside_D.sum()) / count
    return rows
