"""Held-out figures during training: loss and accuracy at each depth, and the walked AL that serving would see."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch

from components.draft.batch import Document, PackedBatch
from components.draft.chains import supervised_chains
from components.draft.drafting import Walk, answer_spans, greedy_drafts, walked_acceptance
from components.draft.head import DraftHead
from components.draft.losses import Teacher
from components.draft.schedule import StepOptions, StepSums, measure
from components.training.host_memory import DOCUMENTS_PER_PACK
from components.training.reduce import reduce_sums
from components.training.shard import whole
from components.training.trainer import Trainer, all_rank_sums, figures


def validate(trainer: Trainer, documents: Iterable[Document], prefix: str = "validation") -> dict[str, float]:
    """Figures named `<prefix>/...` over this rank's documents and all other ranks'; a rank may have none.

    `DOCUMENTS_PER_PACK` of them are in memory at a time.
    """
    options = trainer.options
    sums = StepSums.zeros(options.num_depths, trainer.device)
    walks = [Walk() for _ in range(options.num_depths)]
    trainer.head.eval()
    with whole(trainer.head):
        for pack in _packs(documents):
            sums.add(loss_sums(trainer.head, pack, trainer.teacher, options))
            for walk, more in zip(walks, walks_by_depth(trainer.head, pack, options), strict=True):
                walk.add(more)
    trainer.head.train()
    rows = figures(all_rank_sums(sums), prefix)
    reduced = reduce_sums(torch.tensor([[w.rounds, w.accepted] for w in walks], dtype=torch.float64))
    for num_drafts, (rounds, accepted) in enumerate(reduced.tolist(), 1):
        if rounds:
            rows[f"{prefix}/walked_al_{num_drafts}"] = 1 + accepted / rounds
    return rows


def loss_sums(head: DraftHead, documents: Sequence[Document], teacher: Teacher, options: StepOptions) -> StepSums:
    """Loss and hits of every supervised element at every depth."""
    batch = PackedBatch.pack(documents, head.fc.weight.device)
    return measure(head, batch, supervised_chains(batch, options.num_depths), teacher, options)


def _packs(documents: Iterable[Document]) -> Iterator[list[Document]]:
    documents = iter(documents)
    while pack := list(islice(documents, DOCUMENTS_PER_PACK)):
        yield pack


def walks_by_depth(head: DraftHead, documents: Sequence[Document], options: StepOptions) -> list[Walk]:
    """The walk for every K from 1 to the number of trained depths."""
    walks = [Walk() for _ in range(options.num_depths)]
    drafts = greedy_drafts(
        head, documents, options.num_depths, rows_per_pack=options.rows_per_part, autocast=options.autocast
    )
    for document, drafts_NK in zip(documents, drafts, strict=True):
        spans = answer_spans(document.loss_mask)
        for num_drafts, walk in enumerate(walks, 1):
            walk.add(walked_acceptance(drafts_NK, document.input_ids, spans, num_drafts))
    return walks
