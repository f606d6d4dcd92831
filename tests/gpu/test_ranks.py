"""A group of GPUs makes the steps of one, with whole heads (one all-reduce over NCCL) and with heads cut by FSDP2.

Without the project's other requirements: `python -m pytest --noconftest tests/gpu/test_ranks.py`.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from components.config import TrainConfig
from components.draft.head import DraftHead
from components.draft.losses import Teacher
from components.training.memory import local
from components.training.order import Entry
from components.training.shard import shard_head, whole_tensor
from components.training.trainer import Trainer
from tests.gpu.test_step import CONFIG, documents

NUM_STEPS = 3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


def make_trainer(dtype: str, shard: bool, rank: int = 0, world_size: int = 1) -> Trainer:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    config = TrainConfig(
        epochs=NUM_STEPS, num_depths=5, chain_rate=0.8, documents_per_step=4, rows_per_part=1000, dtype=dtype,
        learning_rate=1e-3, shard=shard,
    )  # fmt: skip
    torch.manual_seed(0)
    head = DraftHead(CONFIG, torch.randperm(699)[:500])
    lm_head_UT = (torch.randn(500, 256) / 8).bfloat16()
    head.to(device)
    if shard:
        shard_head(head, world_size)
    teacher = Teacher(torch.ones(256, device=device), 1e-6, lm_head_UT.to(device))
    found = documents(torch.bfloat16)
    entries = [Entry("", row, row) for row in range(len(found))]
    return Trainer(
        head, teacher, entries, lambda wanted: (found[e.row] for e in wanted), config, rank, world_size, device
    )


def train(trainer: Trainer) -> dict:
    """Losses of the steps and the gradients that the optimiser was given in the first."""
    grads: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        if not grads:
            named = [(n, p.grad) for n, p in trainer.head.named_parameters() if p.grad is not None]
            grads.update({name: whole_tensor(grad).double().cpu() for name, grad in named})

    trainer.optimizer.parts[0].register_step_pre_hook(keep)
    losses = [float(trainer.step().loss) for _ in range(NUM_STEPS)]
    share = sum(local(p).numel() for p in trainer.parameters) / sum(p.numel() for p in trainer.parameters)
    return {"losses": losses, "grads": grads, "share": share}


def train_rank(rank: int, num_gpus: int, folder: str, dtype: str, shard: bool) -> None:
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=rendezvous, rank=rank, world_size=num_gpus)
    torch.save(train(make_trainer(dtype, shard, rank, num_gpus)), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("num_gpus", [1, pytest.param(2, marks=two_gpus)])
def test_a_group_makes_the_steps_of_one_gpu(
    tmp_path: Path, num_gpus: int, dtype: str, tolerance: float, shard: bool
) -> None:
    alone = train(make_trainer(dtype, shard=False))
    mp.spawn(train_rank, args=(num_gpus, str(tmp_path), dtype, shard), nprocs=num_gpus)
    for rank in range(num_gpus):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert found["share"] <= (0.51 if shard and num_gpus > 1 else 1)
        assert found["losses"] == pytest.approx(alone["losses"], rel=tolerance)
        assert found["grads"].keys() == alone["grads"].keys()
        off = {name: float((found["grads"][name] - g).norm() / g.norm()) for name, g in alone["grads"].items()}
        assert max(off.values()) < tolerance, off
