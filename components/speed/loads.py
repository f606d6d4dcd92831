"""A load: one server at one point, all repetitions together, and its figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.speed.results import Measured, PointFiles
from components.speed.sweep import Point

PERCENTILES = (50, 95, 99)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms")
MS = 1000.0

Percentiles = dict[str, float]
"""`p50`, `p95`, `p99`, in ms."""


@dataclass(frozen=True)
class Load:
    repetitions: tuple[Measured, ...]
    latencies: dict[str, Percentiles]
    """`ttft_ms`, `tpot_ms` and `itl_ms` over all requests of all repetitions; none of an invalid load.

    ITL is the time between two pieces of a stream: with speculation one piece holds all tokens of a round. TPOT is a token's.
    """

    @property
    def arm(self) -> str:
        return self.repetitions[0].arm

    @property
    def num_speculative_tokens(self) -> int | None:
        return self.repetitions[0].num_speculative_tokens

    @property
    def point(self) -> Point:
        return self.repetitions[0].point

    @property
    def invalid(self) -> str | None:
        return next((m.invalid for m in self.repetitions if m.invalid), None)

    @property
    def tokens_per_s(self) -> float | None:
        """All tokens over all time; None for an invalid load, which is never a slow one."""
        return None if self.invalid else self.total("output_tokens") / self.total("duration_s")

    @property
    def times(self) -> list[dict[str, float]]:
        """A mapping a repetition: seconds a token by prompt."""
        return [m.seconds_a_token for m in self.repetitions]

    def total(self, name: str) -> Any:
        return sum(getattr(m, name) for m in self.repetitions)

    @property
    def al(self) -> float | None:
        """1 + accepted drafts / rounds with a proposal."""
        rounds = self.total("rounds")
        return 1 + self.total("accepted") / rounds if rounds and not self.invalid else None

    @property
    def accepted_at(self) -> list[float]:
        """Share of the rounds that accepted at least i + 1 draft tokens, for position i."""
        rounds = self.total("rounds")
        if not rounds or self.invalid:
            return []
        return [sum(counts) / rounds for counts in zip(*(m.accepted_at for m in self.repetitions), strict=True)]


def load_all(files: Iterable[PointFiles]) -> list[Load]:
    """The finished points, those of one server and point together, in the order in which they first come."""
    groups: dict[tuple[str, Point], list[PointFiles]] = {}
    for file in files:
        groups.setdefault((file.served.label, file.point), []).append(file)
    return [_load(group) for group in groups.values()]


def _load(files: Sequence[PointFiles]) -> Load:
    load = Load(tuple(file.load() for file in files), {})
    return load if load.invalid else Load(load.repetitions, _latencies(files))


def _latencies(files: Sequence[PointFiles]) -> dict[str, Percentiles]:
    seconds: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for file in files:
        bench = file.load_bench()
        requests = zip(bench["ttfts"], bench["latencies"], bench["output_lens"], strict=True)
        seconds["ttft_ms"] += bench["ttfts"]
        seconds["tpot_ms"] += [(latency - ttft) / (length - 1) for ttft, latency, length in requests if length > 1]
        seconds["itl_ms"] += [gap for gaps in bench["itls"] for gap in gaps]
    return {name: _percentiles(values) for name, values in seconds.items() if values}


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    return {f"p{p}": float(np.percentile(seconds, p)) * MS for p in PERCENTILES}
