"""What is written of one measured point, `bench/` beside `points/`, and how it is read again."""

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from components.speed.counters import Counters
from components.speed.sweep import Point, Served
from components.storage import Location


@dataclass(frozen=True)
class Measured:
    """One point in one repetition."""

    arm: str
    num_speculative_tokens: int | None
    point: Point
    invalid: str | None
    """Why its figures must not be used; None: they may."""
    requests: int
    completed: int
    duration_s: float
    output_tokens: int
    seconds_a_token: dict[str, float]
    """By prompt key: the time of its requests / the tokens of their answers."""
    rounds: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]
    """accepted_at[i]: rounds that accepted at least i + 1 draft tokens."""
    preemptions: int
    kv_capacity_tokens: int | None


_MEASURED = TypeAdapter(Measured)


@dataclass(frozen=True)
class PointFiles:
    """Where one point in one repetition is written."""

    output: Location
    served: Served
    point: Point
    repetition: int

    @property
    def _name(self) -> str:
        return f"{self.point.label}-{self.repetition}"

    @property
    def figures(self) -> Location:
        """Written last: it makes the point a finished one."""
        return self.output.join("points", self.served.label, f"{self._name}.json")

    @property
    def bench(self) -> Location:
        """The JSON of `vllm bench serve` as it was, compressed."""
        return self.output.join("bench", self.served.label, f"{self._name}.json.gz")

    def save(self, measured: Measured, bench: Mapping[str, Any]) -> None:
        self.bench.write_bytes(gzip.compress(json.dumps(bench).encode(), mtime=0))
        self.figures.write_bytes(_MEASURED.dump_json(measured, indent=1))

    def load(self) -> Measured:
        return _MEASURED.validate_json(self.figures.read_bytes())

    def load_bench(self) -> dict[str, Any]:
        return json.loads(gzip.decompress(self.bench.read_bytes()))


def measured(
    files: PointFiles,
    bench: Mapping[str, Any],
    counted: Counters,
    keys: Sequence[str],
    invalid: str | None,
    kv_capacity_tokens: int | None,
) -> Measured:
    """What is kept of a point; acceptance is the difference of the server's counters that `vllm bench serve` took after the warm-ups.

    Args:
        files: Says which point it is.
        bench: The JSON of `vllm bench serve`.
        counted: The server's counters over the point.
        keys: Of the prompts, in the order of the requests.
        invalid: Why it must not be used.
        kv_capacity_tokens: Of the server.
    """
    rounds = bench.get("spec_decode_num_drafts", 0)
    rates = bench.get("spec_decode_per_position_acceptance_rates", [])
    return Measured(
        arm=files.served.arm.name,
        num_speculative_tokens=files.served.arm.num_speculative_tokens,
        point=files.point,
        invalid=invalid,
        requests=len(keys),
        completed=bench["completed"],
        duration_s=bench["duration"],
        output_tokens=bench["total_output_tokens"],
        seconds_a_token=_seconds_a_token(bench, keys),
        rounds=rounds,
        drafted=bench.get("spec_decode_draft_tokens", 0),
        accepted=bench.get("spec_decode_accepted_tokens", 0),
        accepted_at=tuple(round(rate * rounds) for rate in rates),
        preemptions=counted.preemptions,
        kv_capacity_tokens=kv_capacity_tokens,
    )


def _seconds_a_token(bench: Mapping[str, Any], keys: Sequence[str]) -> dict[str, float]:
    seconds, tokens = defaultdict[str, float](float), defaultdict[str, int](int)
    for key, latency, length in zip(keys, bench["latencies"], bench["output_lens"], strict=True):
        seconds[key] += latency
        tokens[key] += length
    return {key: seconds[key] / tokens[key] for key in seconds if tokens[key]}
