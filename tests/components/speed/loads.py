"""Measured loads with chosen speeds."""

import numpy as np

from components.speed.loads import Load
from components.speed.results import Measured
from components.speed.sweep import Point

NUM_PROMPTS, TOKENS = 20, 64
NOISE = 0.01


def make_measured(
    arm: str,
    k: int | None,
    concurrency: int,
    seconds: float,
    *,
    task: str = "chat",
    rate: float | None = None,
    invalid: str | None = None,
    seed: int = 0,
) -> Measured:
    """Every request takes `seconds` a token, within a percent; with speculation one draft a round is accepted."""
    rng = np.random.default_rng(seed)
    times = {f"p{i}": seconds * float(1 + NOISE * rng.standard_normal()) for i in range(NUM_PROMPTS)}
    rounds = NUM_PROMPTS * TOKENS // 2 if k else 0
    return Measured(
        arm=arm,
        num_speculative_tokens=k,
        point=Point(task, concurrency, rate),
        invalid=invalid,
        requests=NUM_PROMPTS,
        completed=NUM_PROMPTS - (5 if invalid else 0),
        duration_s=sum(times.values()) * TOKENS / concurrency,
        output_tokens=NUM_PROMPTS * TOKENS,
        seconds_a_token=times,
        rounds=rounds,
        drafted=rounds * (k or 0),
        accepted=rounds,
        accepted_at=(rounds,) + (0,) * ((k or 1) - 1) if k else (),
        preemptions=1,
        kv_capacity_tokens=1000 - 10 * (k or 0),
    )


def make_load(
    arm: str,
    k: int | None,
    concurrency: int,
    seconds: float,
    *,
    task: str = "chat",
    rate: float | None = None,
    invalid: str | None = None,
    repetitions: int = 2,
) -> Load:
    measured = [
        make_measured(arm, k, concurrency, seconds, task=task, rate=rate, invalid=invalid, seed=number)
        for number in range(repetitions)
    ]
    return Load(tuple(measured), {} if invalid else {"ttft_ms": {"p50": 1.0, "p95": 2.0, "p99": 3.0}})
