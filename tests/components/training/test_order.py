import itertools

import pytest

from components.training.order import Entry, epoch_order, rank_share, steps_per_epoch

ENTRIES = [Entry(f"part-{i // 7:05d}.parquet", i % 7, i) for i in range(150)]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_document_once_an_epoch(epoch: int) -> None:
    order = epoch_order(ENTRIES, seed=3, epoch=epoch)
    assert sorted(entry.number for entry in order) == list(range(150))


def test_order_depends_on_seed_and_epoch_only() -> None:
    assert epoch_order(ENTRIES, 3, 1) == epoch_order(list(reversed(ENTRIES))[::-1], 3, 1)
    assert epoch_order(ENTRIES, 3, 1) != epoch_order(ENTRIES, 3, 2)
    assert epoch_order(ENTRIES, 3, 1) != epoch_order(ENTRIES, 4, 1)


def test_order_mixes_shards_within_a_bounded_window() -> None:
    many = [Entry(f"part-{i // 2:05d}.parquet", i % 2, i) for i in range(200)]
    order = epoch_order(many, 0, 0)
    neighbours_apart = sum(a.shard != b.shard for a, b in itertools.pairwise(order))
    assert neighbours_apart > 150
    for start in range(0, 200, 32):
        assert len({entry.shard for entry in order[start : start + 32]}) <= 16


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_each_global_batch(world_size: int) -> None:
    order = epoch_order(ENTRIES, 0, 0)
    for step in range(steps_per_epoch(len(order), 4)):
        shares = [rank_share(order, step, 4, rank, world_size) for rank in range(world_size)]
        assert sorted(e.number for share in shares for e in share) == sorted(
            e.number for e in order[4 * step : 4 * step + 4]
        )


def test_last_step_may_leave_a_rank_without_documents() -> None:
    order = epoch_order(ENTRIES[:9], 0, 0)
    assert steps_per_epoch(9, 4) == 3
    assert [len(rank_share(order, 2, 4, rank, 2)) for rank in range(2)] == [1, 0]
