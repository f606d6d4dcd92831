"""The part size that a GPU's free memory allows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from components.draft.batch import PackedBatch
from components.draft.chains import ChainRows, supervised_chains
from components.draft.passes import chain_pass, prefix_pass
from components.training.memory import MOST_ROWS_PER_PART, layer_bytes, plan_step, prefix_bytes
from tests.components.draft.dense import tiny_config, tiny_document, tiny_head

GIB = 2**30
LARGE = replace(
    tiny_config(), hidden_size=4096, target_hidden_size=4096, num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=12288,
)  # fmt: skip


def test_parts_grow_with_the_memory_up_to_the_size_that_gains_nothing() -> None:
    sizes = [plan_step(LARGE, 8192, gib * GIB).rows_per_part for gib in (8, 10, 12, 2000)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[-1] == MOST_ROWS_PER_PART


def test_the_first_part_may_have_what_the_gradients_will_take() -> None:
    gradients = 3 * GIB
    ample = plan_step(LARGE, 8192, 100 * GIB, part_gradient_bytes=gradients)
    assert ample.head_start == gradients // (4 * layer_bytes(LARGE, 2)) > 5000
    scarce = plan_step(LARGE, 8192, 10 * GIB, part_gradient_bytes=gradients)
    assert scarce.rows_per_part < MOST_ROWS_PER_PART
    assert scarce.head_start == plan_step(LARGE, 8192, 100 * GIB).head_start == 0
    assert plan_step(LARGE, 8192, 100 * GIB, rows_per_part=9, part_gradient_bytes=gradients).head_start == 0


def test_a_long_prefix_is_recomputed_and_a_short_one_is_kept() -> None:
    assert not plan_step(LARGE, 8192, 100 * GIB).recompute_prefix
    assert plan_step(LARGE, 131_072, 100 * GIB).recompute_prefix
    assert prefix_bytes(LARGE, 2, recompute=True) < prefix_bytes(LARGE, 2, recompute=False) / 2


def test_the_user_s_numbers_are_taken() -> None:
    plan = plan_step(LARGE, 131_072, 100 * GIB, rows_per_part=77, recompute_prefix=False)
    assert (plan.rows_per_part, plan.recompute_prefix) == (77, False)


def test_too_little_memory_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"train\.rows_per_part.*train\.documents_per_step"):
        plan_step(LARGE, 131_072, 10 * GIB)


def test_the_estimate_covers_what_autograd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain pass in fp32, with the products of a GPU: close from above, so that neither memory is wasted nor a step fails."""
    for module in ("products", "mlp"):
        monkeypatch.setattr(f"components.draft.{module}.product_dtype", lambda x: torch.float32)
    config = replace(
        tiny_config(), hidden_size=64, target_hidden_size=64, head_dim=16, intermediate_size=192, num_layers=3
    )
    head = tiny_head(config).float()
    batch = PackedBatch.pack([tiny_document(config, 100, [(2, 100)], seed=1)])
    prefix = prefix_pass(head, batch)
    rows = ChainRows.of(supervised_chains(batch, 4), batch).to(batch.device)
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.dim() > 1 and tensor.shape[0] == len(rows.anchor_R):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
        out = chain_pass(head, rows, prefix)
    assert out.shape[0] == len(rows.anchor_R)
    estimate = len(rows.anchor_R) * config.num_layers * layer_bytes(config, factor_bytes=4)
    # Above 1 on a CPU alone, whose plain norms keep more than the compiled ones of a GPU.
    assert 0.8 < sum(kept.values()) / estimate < 1.15
