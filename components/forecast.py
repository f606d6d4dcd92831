"""What a stage is expected to take before it runs: rows, tokens, bytes and time, and where the time is taken from.

Time comes from the newest finished output of the same stage on the same target (`last run`), scaled by tokens; else, where the stage runs the
target on CPUs and the target is there, from a few of its own forward passes on this machine (`target`); else from a short sample of the
matrix products of this machine's CPUs or GPU (`sample`); else, for GPUs of other machines, from a documented speed (`guess`).
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from components.storage import Location

SAMPLE_S = 0.5
SAMPLE_SIZE, GPU_SAMPLE_SIZE = 1024, 8192
GPU_OPERATIONS_PER_S = 4e14
"""About half of an H100's dense bf16 peak; what a GPU is taken for when this machine has none to measure and no run says better."""

FORWARD_SHARE = 0.32
"""Of a plain matrix product's speed, a bare forward pass: what `Forecast.share` is compared with where the target was measured."""
TARGET_SAMPLE_S = 1.0

LAST_RUN, TARGET, SAMPLE, GUESS = "last run", "target", "sample", "guess"


@dataclass(frozen=True)
class Forecast:
    """None: not known."""

    rows: int | None = None
    tokens: int | None = None
    """The tokens that its time grows with."""
    bytes: int | None = None
    """Most that lies on the disk at once."""
    operations: float | None = None
    """Floating-point operations of its matrix products."""
    share: float = 0.3
    """Of a plain matrix product's speed that it reaches; from finished runs on two cores of a CPU."""
    num_gpus: float = 0.0
    """Over all of its workers; 0: it runs on CPUs."""
    target_threads: int = 0
    """Of CPUs, over all of its workers, that run the target; 0: it does not, or on GPUs."""
    start_s: float = 0.0
    """Until its engines and workers are up."""


@dataclass(frozen=True)
class Duration:
    seconds: float
    basis: str
    """`last run`, `target`, `sample` or `guess`."""


@dataclass
class Stopwatch:
    """Turns forecasts into durations; measures this machine once, when that is first needed."""

    dtype: str
    sample_s: float = SAMPLE_S
    _measure: Callable[[str, float], float] = field(default_factory=lambda: matrix_operations_per_s)
    _measure_gpu: Callable[[str, float], float | None] = field(default_factory=lambda: gpu_operations_per_s)
    measure_target: Callable[[int], float | None] | None = None
    """Operations per second of the target's forward pass with so many threads; None: it is not there, or not to be measured."""
    _target_speeds: dict[int, float | None] = field(default_factory=dict)

    def duration(self, forecast: Forecast, done: tuple[float, float | None] | None) -> Duration | None:
        """How long a stage takes.

        Args:
            forecast: What it has to do.
            done: (seconds, tokens) of a finished one; None: there is none.
        """
        if done is not None:
            seconds, tokens = done
            scale = forecast.tokens / tokens if forecast.tokens is not None and tokens else 1.0
            return Duration(seconds * scale, LAST_RUN)
        if not forecast.operations:
            return Duration(forecast.start_s, GUESS) if forecast.start_s else None
        if forecast.num_gpus:
            speed = (self._gpu_speed or GPU_OPERATIONS_PER_S) * forecast.num_gpus
            basis = GUESS if self._gpu_speed is None else SAMPLE
            return Duration(forecast.start_s + forecast.operations / (speed * forecast.share), basis)
        if target_speed := self._target_speed(forecast.target_threads):
            speed = target_speed * forecast.share / FORWARD_SHARE
            return Duration(forecast.start_s + forecast.operations / speed, TARGET)
        return Duration(forecast.start_s + forecast.operations / (self._cpu_speed * forecast.share), SAMPLE)

    def _target_speed(self, num_threads: int) -> float | None:
        """Of more threads than this machine has, on other nodes, each is taken to be as fast."""
        if not num_threads or self.measure_target is None:
            return None
        here = min(num_threads, os.cpu_count() or 1)
        if here not in self._target_speeds:
            self._target_speeds[here] = self.measure_target(here)
        speed = self._target_speeds[here]
        return None if speed is None else speed * num_threads / here

    @cached_property
    def _cpu_speed(self) -> float:
        return self._measure(self.dtype, self.sample_s)

    @cached_property
    def _gpu_speed(self) -> float | None:
        """Of one; those of a cluster are taken for alike."""
        return self._measure_gpu(self.dtype, self.sample_s)


def gpu_operations_per_s(dtype: str, seconds: float) -> float | None:
    """As `matrix_operations_per_s`, on this machine's first GPU; None where it has none.

    In a process of its own: the memory that a process holds on a GPU once it used it would be missing in the engines that start next.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_on_gpu, dtype, seconds).result()


def _on_gpu(dtype: str, seconds: float) -> float | None:
    import torch  # seconds to import

    return matrix_operations_per_s(dtype, seconds, "cuda", GPU_SAMPLE_SIZE) if torch.cuda.is_available() else None


def matrix_operations_per_s(dtype: str, seconds: float, device: str = "cpu", size: int = SAMPLE_SIZE) -> float:
    """Floating-point operations per second of a plain matrix product, on a CPU with torch's threads."""
    import torch  # seconds to import

    left, right = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))

    def multiply() -> None:
        (left @ right)[0, 0].item()  # waits for the product, which a GPU only puts in a queue

    multiply()  # the first one prepares
    started_s, products = time.monotonic(), 0
    while time.monotonic() - started_s < seconds:
        multiply()
        products += 1
    return products * 2 * size**3 / (time.monotonic() - started_s)


def free_bytes(storage: Location) -> int | None:
    """What the disk of a local storage has free; None on S3, where nobody says."""
    if not storage.is_local:
        return None
    folder = next(p for p in [Path(storage.uri), *Path(storage.uri).parents] if p.exists())
    return shutil.disk_usage(folder).free


def target_parameters(target: Mapping[str, Any]) -> int:
    """Parameters of a dense target, from the facts of the target stage."""
    hidden, vocabulary = target["hidden_size"], target["vocab_size"]
    embeddings = vocabulary * hidden * (1 if target["tie_word_embeddings"] else 2)
    return embeddings + target["num_layers"] * _layer_parameters(target, hidden)


def head_parameters(target: Mapping[str, Any], num_layers: int, vocab_size: int, num_aux_layers: int) -> int:
    """Parameters of a head on this target, without its embeddings (V * H)."""
    hidden = target["hidden_size"]
    first = _layer_parameters(target, 2 * hidden)
    later = (num_layers - 1) * _layer_parameters(target, hidden)
    return first + later + num_aux_layers * hidden * hidden + min(vocab_size, target["vocab_size"]) * hidden


def _layer_parameters(target: Mapping[str, Any], num_inputs: int) -> int:
    """Of one decoder layer whose attention reads `num_inputs` values a row."""
    heads = (target["num_heads"] + 2 * target["num_kv_heads"]) * target["head_dim"]
    hidden = target["hidden_size"]
    output = target["num_heads"] * target["head_dim"] * hidden
    return num_inputs * heads + output + 3 * hidden * target["intermediate_size"]
