"""What a diagnosis reads and what it says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Any]

NONE = "none"
GOOD_AL = 1.3
"""Below this little is won, whatever drafting costs: 30% fewer steps of the target."""
GAIN = 1.05
"""Tokens/s against plain decoding below which nobody notices."""


@dataclass(frozen=True)
class Finding:
    symptom: str
    cause: str
    evidence: str
    """The numbers that say so."""
    next_step: str


@dataclass(frozen=True)
class Evidence:
    """Facts of the finished stages; None where a stage did not run."""

    evaluation: Facts
    target: Facts | None = None
    vocabulary: Facts | None = None
    head: Facts | None = None
    curves: Sequence[Mapping[str, float]] = ()
    preflight: Facts | None = None
    speed: Facts | None = None
    max_num_seqs: int | None = None

    @property
    def plain(self) -> Facts:
        return self.evaluation["arms"][NONE]

    @property
    def candidate_name(self) -> str:
        return self.evaluation["candidate"]["arm"]

    @property
    def candidate(self) -> Facts:
        return self.evaluation["arms"][self.candidate_name]

    @property
    def k(self) -> int:
        """Draft tokens of a round, as served."""
        return self.evaluation["candidate"]["num_speculative_tokens"]

    @property
    def accepted_at(self) -> Sequence[float]:
        """By position; 0 where nothing was measured."""
        return [rate or 0.0 for rate in self.candidate["accepted_at"]]

    def last(self, name: str) -> float | None:
        """The last value of a training curve."""
        return next((row[name] for row in reversed(self.curves) if row.get(name) is not None), None)

    def curve(self, name: str) -> list[float]:
        return [row[name] for row in self.curves if row.get(name) is not None]


def listed(values: Sequence[float]) -> str:
    """`61% 33% 20%`."""
    return " ".join(f"{value:.0%}" for value in values)
