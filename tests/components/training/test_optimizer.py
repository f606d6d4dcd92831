import pytest
import torch

from components.config import TrainConfig
from components.training.optimizer import learning_rate, make_optimizer


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
    matrix, gain, frozen = (torch.nn.Parameter(torch.ones(shape)) for shape in [(2, 2), (2,), (3, 3)])
    frozen.requires_grad_(False)
    optimizer = make_optimizer([matrix, gain, frozen], TrainConfig(weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {id(matrix): 0.1, id(gain): 0.0}
