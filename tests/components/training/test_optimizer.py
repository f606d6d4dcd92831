import pytest
import torch

from components.config import TrainConfig
from components.training.optimizer import learning_rate, make_optimizer
from tests.components.draft.dense import tiny_head


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_learning_rate_warms_up_then_falls_to_zero(schedule: str) -> None:
    config = TrainConfig(learning_rate=1e-3, lr_schedule=schedule, warmup_fraction=0.1)
    rates = [learning_rate(step, 100, config) for step in range(101)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == pytest.approx(1e-3)
    assert rates.index(max(rates)) in (9, 10)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.0, abs=1e-12)


def test_learning_rate_of_a_one_step_run_is_usable() -> None:
    assert learning_rate(0, 1, TrainConfig(learning_rate=1e-3)) > 0


def test_only_matrices_decay_and_frozen_parameters_stay_out() -> None:
    head = tiny_head()
    head.lm_head.requires_grad_(False)
    groups = make_optimizer(head, TrainConfig(weight_decay=0.1)).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    trained = {id(p): 0.1 if p.dim() >= 2 else 0.0 for p in head.parameters() if p is not head.lm_head.weight}
    assert decays == trained


def test_sparse_embeddings_have_an_optimiser_of_their_own() -> None:
    head = tiny_head()
    head.embed_tokens.sparse = True
    adamw, rows = make_optimizer(head, TrainConfig()).parts
    assert isinstance(rows, torch.optim.SparseAdam)
    assert rows.param_groups[0]["params"] == [head.embed_tokens.weight]
    assert all(p is not head.embed_tokens.weight for group in adamw.param_groups for p in group["params"])
