"""Traffic to rehearse an experiment on: many replications at once, made up from stated figures or drawn from real records.

A session is one conversation of one task. Its difficulty is its own, so its requests are alike; how many there are has a heavy tail. What the
challenger would do differently is applied by `treat`: the same tokens in fewer rounds, as lossless decoding has it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from components.experiment.difference import Array
from components.section import ConfigError

MIN_POOL = 20
"""Fewer real requests would be drawn again and again."""
NO_TASK = "none"


@dataclass(frozen=True)
class Scenario:
    """How traffic behaves over one experiment."""

    name: str
    tail: float
    """Sessions of at least m requests: m^-tail."""
    longest: int
    """Requests of the longest session."""
    drift: float
    """AL rises and falls by this share over the experiment, and ends lower by it; the mix of tasks turns over with it."""
    weights: tuple[tuple[float, float], ...]
    """(share of the requests at which it begins, the challenger's weight): the weight epochs."""


SCENARIOS = (
    Scenario("steady", tail=2.0, longest=50, drift=0.0, weights=((0.0, 0.5),)),
    Scenario(
        "drift, weights .1 .5 .3", tail=1.5, longest=100, drift=0.1, weights=((0.0, 0.1), (0.1, 0.5), (0.75, 0.3))
    ),
    Scenario("whales, weights .05 .5", tail=1.1, longest=500, drift=0.2, weights=((0.0, 0.05), (0.1, 0.5))),
)


@dataclass(frozen=True)
class Synthetic:
    """Made-up requests. AL by task is of the order published for P-EAGLE at K = 5; the spreads are those of real requests (an n-gram arm
    on 32 prompts had 0.18 between requests, a weak head 0.03)."""

    depth: int = 5
    """K."""
    lengths: tuple[float, ...] = (3.2, 3.5, 3.7)
    """AL of each task."""
    mix: tuple[float, ...] = (0.5, 0.25, 0.25)
    session_spread: float = 0.12
    """Standard deviation of log AL between sessions of a task."""
    request_spread: float = 0.12
    """... between requests of a session."""
    median_tokens: float = 150.0
    token_spread: float = 1.0
    """Standard deviation of the log of a request's output tokens."""
    most_tokens: float = 2048.0


ROUND_S = 0.03
"""A request takes so long a round."""
TIME_SPREAD = 0.2
"""Standard deviation of the log of what a request's time differs by from that."""
ERROR_RATE = 0.005
"""Of requests, on either arm."""


@dataclass(frozen=True)
class Pool:
    """Real requests that speculated, from records; arrays [requests]."""

    task: Array
    tokens: Array
    """Tokens that its rounds gave: rounds + accepted."""
    rounds: Array
    depth: int


@dataclass(frozen=True)
class Sessions:
    """Arrays [replications, sessions] in the order in which the sessions begin; of the requests that count."""

    task: Array
    requests: Array
    tokens: Array
    rounds: Array
    """Under the control, as times and failures."""
    times_s: Array
    """Of single requests; [replications, sessions, requests], float32, nan where there is none and where it failed."""
    failed: Array
    """Likewise, bool."""
    depth: int
    num_tasks: int


def read_pool(paths: Sequence[Path], arm: str | None) -> Pool:
    """Requests of one arm from records of the A/B stage, of live traffic or of the evaluation.

    Raises:
        ConfigError: too few of them speculated without an error.
    """
    rows = [row for path in paths for row in _rows(path) if row["rounds"] and not row.get("error")]
    rows = [row for row in rows if arm is None or row["arm"] == arm]
    if len(rows) < MIN_POOL:
        raise ConfigError(
            "--records",
            f"{len(rows)} requests with speculation",
            f"give files with at least {MIN_POOL}, or another --arm",
        )
    names = sorted({_task(row) for row in rows})
    accepted, rounds, drafted = (
        np.array([row[key] for row in rows], float) for key in ("accepted", "rounds", "drafted")
    )
    task = np.array([names.index(_task(row)) for row in rows])
    return Pool(task, accepted + rounds, rounds, depth=round(float((drafted / rounds).max())))


def make_sessions(
    rng: np.random.Generator, shape: tuple[int, int], scenario: Scenario, source: Synthetic | Pool, most_counted: int
) -> Sessions:
    """Sessions under the control; of each the first `most_counted` requests count."""
    requests = np.floor((1 - rng.random(shape)) ** (-1 / scenario.tail))
    counted = np.minimum(requests, min(scenario.longest, most_counted)).astype(int)
    made = _draw(rng, counted, source) if isinstance(source, Pool) else _invent(rng, counted, scenario, source)
    begun = (np.arange(shape[1]) + 0.5) / shape[1]
    wave = 1 + scenario.drift * (np.sin(4 * np.pi * begun) - begun)
    rounds = np.maximum(made.rounds / wave, made.tokens / (made.depth + 1))
    times_s = made.times_s * (rounds / made.rounds).astype(np.float32)[..., None]
    return replace(made, rounds=rounds, times_s=times_s)


def treat(sessions: Sessions, effect: float) -> Array:
    """Rounds of each session under a challenger whose AL is larger by the share `effect`."""
    return np.maximum(sessions.rounds / (1 + effect), sessions.tokens / (sessions.depth + 1))


def _invent(rng: np.random.Generator, counted: Array, scenario: Scenario, source: Synthetic) -> Sessions:
    begun = np.broadcast_to((np.arange(counted.shape[1]) + 0.5) / counted.shape[1], counted.shape)
    turned = np.array(source.mix)[:, None] * (1 - begun[0] * min(1.0, 5 * scenario.drift))  # towards the last task
    thresholds = np.cumsum(turned, axis=0)[:-1]
    task = (rng.random(counted.shape)[None] > thresholds[:, None]).sum(axis=0)
    own = np.array(source.lengths)[task] * np.exp(source.session_spread * rng.standard_normal(counted.shape))
    owner = np.repeat(np.arange(counted.size), counted.ravel())
    tokens = source.median_tokens * np.exp(source.token_spread * rng.standard_normal(owner.size))
    tokens = np.ceil(np.minimum(tokens, source.most_tokens))
    length = own.ravel()[owner] * np.exp(source.request_spread * rng.standard_normal(owner.size))
    length = np.clip(length, 1.0, source.depth + 1.0)
    # a round accepts 0..K: about uniform noise of the rounds that the tokens take
    noise = np.sqrt(tokens * np.maximum((length - 1) * (source.depth + 1 - length), 0) / 3 / length**3)
    rounds = np.clip(tokens / length + noise * rng.standard_normal(owner.size), tokens / (source.depth + 1), tokens)
    made, took = (np.bincount(owner, values, counted.size).reshape(counted.shape) for values in (tokens, rounds))
    return Sessions(task, counted, made, took, *_serve(rng, counted, rounds), source.depth, len(source.lengths))


def _draw(rng: np.random.Generator, counted: Array, pool: Pool) -> Sessions:
    """A session repeats one real request: as alike as requests of a session can be."""
    drawn = rng.integers(0, len(pool.tokens), counted.shape)
    tokens, rounds = counted * pool.tokens[drawn], counted * pool.rounds[drawn]
    served = _serve(rng, counted, np.repeat(pool.rounds[drawn].ravel(), counted.ravel()))
    return Sessions(pool.task[drawn], counted, tokens, rounds, *served, pool.depth, int(pool.task.max()) + 1)


def _serve(rng: np.random.Generator, counted: Array, rounds: Array) -> tuple[Array, Array]:
    """Times and failures of `Sessions`, from the rounds of every request in turn."""
    there = np.arange(counted.max()) < counted[..., None]
    times_s, failed = np.full(there.shape, np.nan, np.float32), np.zeros(there.shape, bool)
    times_s[there] = ROUND_S * rounds * np.exp(TIME_SPREAD * rng.standard_normal(rounds.size))
    failed[there] = rng.random(rounds.size) < ERROR_RATE
    times_s[failed] = np.nan
    return times_s, failed


def _rows(path: Path) -> list[dict[str, Any]]:
    """Requests of a JSONL file, or of an arm's file of the evaluation."""
    try:
        content = path.read_bytes()
        if path.suffix == ".json":
            return [answer["record"] for answer in json.loads(content)["answers"]]
        return [json.loads(line) for line in content.splitlines()]  # of bytes: U+2028 in a text ends no line
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = f"cannot read {path} ({error})"
        raise ConfigError(
            "--records", problem, "name files of requests: JSONL, or evaluation/.../arms/*.json"
        ) from None


def _task(row: dict[str, Any]) -> str:
    return row.get("family") or row.get("task") or NO_TASK
