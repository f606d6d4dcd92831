"""The Ray Train job: workers that step, validate and checkpoint; a callback that tells MLflow and the log."""

import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    UserCallback,
)
from ray.train.torch import TorchConfig, TorchTrainer

from components.beside import start_beside_driver
from components.cluster_room import Need, Started, waiting_lines
from components.config import StageResources, TrainConfig
from components.draft.schedule import StepSums
from components.training.reduce import reduce_sums
from components.training.setup import HeadSpec, build_trainer, own_documents
from components.training.sources import DocumentSource
from components.training.stages import TrainingFailed
from components.training.state import save_state
from components.training.trainer import Trainer, figures
from components.training.validation import validate

log = logging.getLogger("aerie")

REPORT_EVERY_S = 10.0  # a report waits for the controller, which looks every second or two: not every step
MAX_WORKER_FAILURES = 2  # a lost worker restarts from the last checkpoint this often


@dataclass(frozen=True)
class Best:
    """Which checkpoints are worth measuring: the `count` with the highest `figure`."""

    count: int
    figure: str

    def keep(self) -> CheckpointConfig:
        """Ray Train keeps these, and the last one, from which a killed run goes on."""
        return CheckpointConfig(num_to_keep=self.count, checkpoint_score_attribute=self.figure)

    def choose(self, checkpoints: Sequence[tuple[Checkpoint, Mapping[str, Any]]]) -> list[Checkpoint]:
        """The best first; between equals the later one. One inside an epoch has no figure, and comes last."""
        ordered = sorted(
            checkpoints, key=lambda found: (found[1].get(self.figure, 0.0), found[1]["step"]), reverse=True
        )
        return [checkpoint for checkpoint, _ in ordered[: self.count]]


@dataclass
class ReportCallback(UserCallback):
    """Runs in Ray Train's controller: one log line and one set of MLflow figures a report."""

    report: Callable[[Mapping[str, float], int], None]

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        row = metrics[0]
        self.report({k: v for k, v in row.items() if "/" in k}, int(row["step"]))
        print(progress_line(row), flush=True)


def run_training(
    spec: HeadSpec,
    source: DocumentSource,
    config: TrainConfig,
    resources: StageResources,
    folder: str,
    report: Callable[[Mapping[str, float], int], None],
    best: Best | None = None,
) -> tuple[Checkpoint, list[Checkpoint]]:
    """Train to the end, going on from the last checkpoint in `folder` (a path or s3://...).

    Returns:
        The last checkpoint; those that become heads: with `best` the best ones, the best first, else the last.

    Raises:
        TrainingFailed: a worker failed for good; the message has its error.
    """
    started = start_beside_driver(Started)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"spec": spec, "source": source, "config": config, "started": started},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if resources.num_gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=resources.replicas,
            use_gpu=resources.num_gpus > 0,
            resources_per_worker={"CPU": resources.num_cpus}
            | ({"GPU": resources.num_gpus} if resources.num_gpus else {}),
        ),
        run_config=RunConfig(
            name="head",
            storage_path=folder,
            checkpoint_config=best.keep() if best else CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=MAX_WORKER_FAILURES),
            logging_config=LoggingConfig(log_level="WARNING"),  # Ray says every report too, at length
            callbacks=[ReportCallback(report)],
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": str(max(1, int(resources.num_cpus)))} | resources.env},
        ),
    )
    try:
        with waiting_lines(
            "head", [Need.of("resources.train", resources)], lambda: ray.get(started.is_set.remote(), timeout=5)
        ):
            result = trainer.fit()
    except TrainingFailedError as error:
        raise TrainingFailed(f"training failed: {error}") from error
    if result.checkpoint is None:
        raise TrainingFailed("training ended without a checkpoint")
    return result.checkpoint, best.choose(result.best_checkpoints) if best else [result.checkpoint]


def train_worker(job: dict[str, Any]) -> None:
    """One worker: from the last checkpoint, or from the target's weights, to the last step."""
    job["started"].set.remote()
    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    torch.manual_seed(job["config"].seed)
    ranks = (context.get_world_rank(), context.get_world_size())
    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
        trainer = build_trainer(
            job["spec"], job["config"], job["source"], *ranks, device, Path(folder) if folder else None
        )
    keep_every = trainer.config.checkpoint_every_steps or trainer.steps_per_epoch
    sums = StepSums.zeros(trainer.config.num_depths)
    reported_at_s = time.monotonic()
    while trainer.progress.step < trainer.total_steps:
        sums.add(trainer.step())
        step = trainer.progress.step
        if step % trainer.steps_per_epoch == 0:
            row = figures(sums, "train") | validate(trainer, own_documents(job["spec"], "validation", trainer))
            if step == trainer.total_steps:
                row |= validate(trainer, own_documents(job["spec"], "held_out", trainer), "held_out")
            _report(trainer, row, keep=True)
        elif step % keep_every == 0 or _is_due(trainer.rank, reported_at_s):
            _report(trainer, figures(sums, "train"), keep=step % keep_every == 0)
        else:
            continue
        sums = StepSums.zeros(trainer.config.num_depths)
        reported_at_s = time.monotonic()


def _is_due(rank: int, reported_at_s: float) -> bool:
    """Whether it is time to report, as rank 0 sees it: every rank must report as often as the others."""
    due = rank == 0 and time.monotonic() - reported_at_s >= REPORT_EVERY_S
    return bool(reduce_sums(torch.tensor([float(due)], dtype=torch.float64))[0])


def _report(trainer: Trainer, row: dict[str, float], keep: bool) -> None:
    progress = trainer.progress
    row = {
        "step": progress.step,
        "total_steps": trainer.total_steps,
        "epoch": progress.step / trainer.steps_per_epoch,
        "train/lr": trainer.optimizer.param_groups[0]["lr"],
        "train/tokens_per_s": progress.supervised_tokens / max(progress.train_seconds, 1e-9),
        **row,
    }
    progress.history.append(row)
    if not keep:
        ray.train.report(row)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_state(Path(folder), trainer.head, trainer.optimizer, progress, write=trainer.rank == 0)
        ray.train.report(row, Checkpoint.from_directory(folder) if trainer.rank == 0 else None)


def progress_line(row: Mapping[str, Any]) -> str:
    """`train 120/300 (epoch 1.2): loss 2.31, accuracy by depth .61 .33 .20, 410 tokens/s`."""
    depths = [row[k] for k in sorted(row) if k.startswith("train/accuracy_depth_")]
    line = f"train {row['step']}/{row['total_steps']} (epoch {row['epoch']:.2f}):"
    if "train/loss" in row:
        line += f" loss {row['train/loss']:.3f}, accuracy by depth {' '.join(f'{a:.2f}' for a in depths)},"
    line += f" {row['train/tokens_per_s']:.0f} answer tokens/s"
    walked = [f"K={k.rsplit('_', 1)[-1]} {row[k]:.3f}" for k in sorted(row) if k.startswith("validation/walked_al_")]
    return line + (f"; validation walked AL {', '.join(walked)}" if walked else "")
