"""One rank's training: steps, validation and the figures of both, without knowing who runs it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from components.config import TrainConfig
from components.draft.batch import Document, PackedBatch
from components.draft.chains import ChainRecipe, Chains, sample_chains
from components.draft.head import DraftHead
from components.draft.losses import Teacher
from components.draft.parts import Parts
from components.draft.products import forget_rounded_weights
from components.draft.schedule import StepOptions, StepSums, accumulate_gradients, prepare_parts
from components.training.memory import CPU_ROWS_PER_PART, free_bytes, part_gradient_bytes, plan_step
from components.training.optimizer import learning_rate, make_optimizer, set_learning_rate, sparse_parameters
from components.training.order import Entry, epoch_order, rank_share, steps_per_epoch
from components.training.reduce import reduce_gradients, reduce_sums, scale_gradients
from components.training.shard import is_sharded, whole
from components.training.state import Progress


class Prepared(NamedTuple):
    """What a step computes with, where it computes."""

    batch: PackedBatch | None
    """None: this rank has no document and none is needed."""

    chains: Chains | Parts
    options: StepOptions


@dataclass
class Trainer:
    """Optimiser steps over `entries`, the same global step on any number of ranks."""

    head: DraftHead
    teacher: Teacher
    entries: Sequence[Entry]
    documents: Callable[[Iterable[Entry]], Iterator[Document | None]]
    """Hands out the documents of entries, in their order; None for one that cannot be used."""
    config: TrainConfig
    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.head, self.config)
        self.recipe = ChainRecipe(self.config.num_depths, self.config.chain_rate, self.config.chain_floor)
        self.options = step_options(self.config)
        self._orders: dict[int, list[Entry]] = {}
        self._upcoming: tuple[int, Iterator[Document | None]] | None = None
        self._free_bytes = 0
        self._part_gradient_bytes = part_gradient_bytes(self.head)
        self._batches: Callable[[int], Prepared] = self._prepare
        if self._on_gpu:
            self._copies = torch.cuda.Stream(self.device)
            self._batches = ReadAhead(self._prepare, self._copies)

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
        """One optimiser step on the next global batch; the sums over all ranks.

        Raises:
            ValueError: the loss is not finite.
        """
        started = time.monotonic()
        if self._on_gpu:  # nothing of a step is there now: what the next one may use
            self._free_bytes = free_bytes(self.head, self.optimizer)
        # It keeps its name until the host has the sums: only then has the GPU read all of it.
        prepared = self._batches(self.progress.step)
        with whole(self.head):
            sums = self._accumulate(prepared)
        sums = unpack_sums(reduce_gradients(self.parameters, pack_sums(sums), sparse_parameters(self.head)))
        if not sums.loss.isfinite():
            raise ValueError("the loss is not finite: the features or the head's parameters have overflowed")
        if int(sums.count) > 0:  # a step without a supervised token anywhere has no gradient to follow
            scale_gradients(self.parameters, float(sums.count), self.config.clip_norm)
            set_learning_rate(self.optimizer, learning_rate(self.progress.step, self.total_steps, self.config))
            self.optimizer.step()
            forget_rounded_weights(self.head)
        # On a CPU fresh memory costs more than zeros; on a GPU the first product of the next step writes what would be zeroed.
        self.optimizer.zero_grad(set_to_none=self._on_gpu)
        self.progress.step += 1
        self.progress.supervised_tokens += int(sums.count_D[0])
        self.progress.train_seconds += time.monotonic() - started
        return sums

    @property
    def _on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def _accumulate(self, prepared: Prepared) -> StepSums:
        batch, chains, options = prepared
        if batch is None:
            return StepSums.zeros(self.config.num_depths)
        return accumulate_gradients(self.head, batch, chains, self.teacher, options)

    def _prepare(self, step: int) -> Prepared:
        """This rank's documents of a step and their chains, on a GPU cut into parts."""
        share = self._share(step)
        found = self._next_documents(step, len(share))
        usable = [(entry, document) for entry, document in zip(share, found, strict=True) if document is not None]
        if not usable:  # nothing to learn, but under FSDP every rank makes every pass
            stand_in = PackedBatch.pack([self._stand_in()], self.device) if is_sharded(self.head) else None
            return Prepared(stand_in, Chains.none(), self.options)
        batch = PackedBatch.pack([document for _, document in usable])
        epoch = step // self.steps_per_epoch
        seeds = [(self.config.seed, epoch, entry.number) for entry, _ in usable]
        chains = sample_chains(batch.outline(), self.recipe, seeds)
        options = self.options_for(batch)
        if not self._on_gpu:
            return Prepared(batch.to(self.device), chains, options)
        with torch.cuda.stream(self._copies):
            batch = batch.pin_memory().to(self.device)
            return Prepared(batch, prepare_parts(self.head, batch, chains, options), options)

    def options_for(self, batch: PackedBatch) -> StepOptions:
        """The options with the part size and checkpointing that this batch leaves room for between steps."""
        if not self._on_gpu:
            return self.options
        plan = plan_step(
            self.head.config, len(batch.position_N), self._free_bytes - batch.num_bytes,
            factor_bytes=2 if self.options.autocast else 4,
            rows_per_part=self.config.rows_per_part, recompute_prefix=self.config.activation_checkpointing,
            part_gradient_bytes=self._part_gradient_bytes,
        )  # fmt: skip
        return replace(
            self.options,
            rows_per_part=plan.rows_per_part,
            recompute_prefix=plan.recompute_prefix,
            head_start=plan.head_start,
        )

    def _next_documents(self, step: int, number: int) -> list[Document | None]:
        """The next `number` of all documents that this rank needs from `step` to the end: a source may look ahead."""
        if self._upcoming is None or self._upcoming[0] != step:  # the first one, or a trainer that was moved
            entries = (entry for s in range(step, self.total_steps) for entry in self._share(s))
            self._upcoming = (step, self.documents(entries))
        documents = self._upcoming[1]
        self._upcoming = (step + 1, documents)
        return list(islice(documents, number))

    def _share(self, step: int) -> list[Entry]:
        epoch, step = divmod(step, self.steps_per_epoch)
        return rank_share(self._order(epoch), step, self.config.documents_per_step, self.rank, self.world_size)

    def _order(self, epoch: int) -> list[Entry]:
        if epoch not in self._orders:  # the neighbours stay: a source looks ahead over the end of an epoch
            kept = {other: order for other, order in self._orders.items() if abs(other - epoch) == 1}
            self._orders = kept | {epoch: epoch_order(self.entries, self.config.seed, epoch)}
        return self._orders[epoch]

    def _stand_in(self) -> Document:
        """Two tokens that nothing is learned from."""
        width = self.head.config.target_hidden_size
        aux_hidden, last_hidden = torch.zeros(2, self.head.config.num_aux_layers * width), torch.zeros(2, width)
        nothing = torch.zeros(2, dtype=torch.long)
        return Document(nothing, nothing.bool(), aux_hidden, last_hidden)


class ReadAhead:
    """Prepares the next step's batch, and copies it to the GPU, while the GPU computes this one."""

    def __init__(self, prepare: Callable[[int], Prepared], copies: torch.cuda.Stream) -> None:
        self.prepare = prepare
        self.copies = copies
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self.next: tuple[int, Future[Prepared]] | None = None

    def __call__(self, step: int) -> Prepared:
        if self.next is None or self.next[0] != step:  # the first one, or a trainer that was moved
            self.next = (step, self.pool.submit(self.prepare, step))
        prepared = self.next[1].result()
        if prepared.batch is not None:
            torch.cuda.current_stream().wait_stream(self.copies)
            prepared.batch.record_stream(torch.cuda.current_stream())
        self.next = (step + 1, self.pool.submit(self.prepare, step + 1))
        return prepared


def step_options(config: TrainConfig) -> StepOptions:
    autocast = torch.bfloat16 if config.dtype == "bfloat16" else None
    rows = CPU_ROWS_PER_PART if config.rows_per_part == "auto" else config.rows_per_part
    return StepOptions(config.num_depths, rows, config.loss, autocast, config.activation_checkpointing is True)


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
