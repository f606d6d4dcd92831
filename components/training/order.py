"""Which documents a step trains on: a pure function of the seed, the epoch and the step, on any number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHARDS_SHUFFLED_TOGETHER = 16  # documents mix over this many shards, so a reader needs no more than these open


@dataclass(frozen=True)
class Entry:
    """Where one document lies."""

    shard: str
    row: int
    number: int
    """Its number among all training documents: the seed of its chains, whoever computes them."""


def epoch_order(entries: Sequence[Entry], seed: int, epoch: int) -> list[Entry]:
    """All entries once, shards in random order and rows mixed over groups of neighbouring shards."""
    rng = np.random.default_rng([seed, epoch])
    by_shard: dict[str, list[Entry]] = {}
    for entry in entries:
        by_shard.setdefault(entry.shard, []).append(entry)
    shards = sorted(by_shard)
    rng.shuffle(shards)
    order: list[Entry] = []
    for start in range(0, len(shards), SHARDS_SHUFFLED_TOGETHER):
        group = [entry for shard in shards[start : start + SHARDS_SHUFFLED_TOGETHER] for entry in by_shard[shard]]
        order += [group[i] for i in rng.permutation(len(group))]
    return order


def steps_per_epoch(num_documents: int, documents_per_step: int) -> int:
    return -(-num_documents // documents_per_step)


def rank_share(order: Sequence[Entry], step: int, documents_per_step: int, rank: int, world_size: int) -> list[Entry]:
    """The documents of one rank in step `step` of the epoch; may be empty, and the rank then still takes part."""
    batch = order[step * documents_per_step : (step + 1) * documents_per_step]
    return list(batch[rank::world_size])
