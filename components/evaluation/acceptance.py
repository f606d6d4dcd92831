"""Acceptance of draft tokens: one record a request, and the figures that are summed first and divided once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class RequestRecord:
    """One answered (or failed) request, without its text.

    A round is one verification step of the target that had a proposal to verify.
    """

    key: str
    """The prompt's row key; for live traffic the session's hash."""
    family: str
    arm: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None
    rounds: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]
    """accepted_at[i]: rounds that accepted at least i + 1 draft tokens (marginal, as vLLM counts); length K."""
    duration_s: float
    error: str | None = None
    started_at: float | None = None
    """Unix time in seconds, of live traffic; None offline."""

    @property
    def ended_at(self) -> float | None:
        return None if self.started_at is None else self.started_at + self.duration_s


@dataclass(frozen=True)
class Acceptance:
    """Sums over requests; a share without a denominator is None, never 0."""

    rounds: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]

    @property
    def acceptance_length(self) -> float | None:
        """AL = 1 + accepted / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def rate_at(self) -> tuple[float | None, ...]:
        """Share of rounds that accepted at least i + 1 tokens, for position i."""
        return tuple(n / self.rounds if self.rounds else None for n in self.accepted_at)

    @property
    def histogram(self) -> tuple[int, ...]:
        """histogram[j]: rounds that accepted exactly j draft tokens, for j of 0..K; empty without a position."""
        at_least = (self.rounds, *self.accepted_at)
        return tuple(a - b for a, b in pairwise((*at_least, 0))) if self.accepted_at else ()


def total(records: Iterable[RequestRecord]) -> Acceptance:
    """The sums of `records`; positions beyond a record's own K count as never accepted."""
    rows = [r for r in records if r.error is None]
    return Acceptance(
        rounds=sum(r.rounds for r in rows),
        drafted=sum(r.drafted for r in rows),
        accepted=sum(r.accepted for r in rows),
        accepted_at=_sum_positions([r.accepted_at for r in rows]),
    )


def by_family(records: Iterable[RequestRecord]) -> dict[str, Acceptance]:
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.family, []).append(record)
    return {family: total(rows) for family, rows in sorted(groups.items())}


def _sum_positions(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    width = max((len(row) for row in rows), default=0)
    return tuple(sum(row[i] for row in rows if i < len(row)) for i in range(width))
