"""What became of the rows of a stage: every one is kept, cut, dropped for a reason or failed for one."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RowAccount:
    """rows_in = kept + truncated + dropped[reason] + failed[reason]; truncated rows are used, but cut."""

    rows_in: int
    kept: int
    truncated: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = self.kept + self.truncated + self.lost
        if total != self.rows_in:
            raise ValueError(f"rows do not add up: {self.rows_in} in, {total} accounted for ({self.table()})")

    @property
    def lost(self) -> int:
        return sum(self.dropped.values()) + sum(self.failed.values())

    @property
    def lost_fraction(self) -> float | None:
        return self.lost / self.rows_in if self.rows_in else None

    def table(self) -> str:
        parts = [f"in {self.rows_in}", f"kept {self.kept}", f"truncated {self.truncated}"]
        parts += [f"dropped[{reason}] {n}" for reason, n in sorted(self.dropped.items())]
        parts += [f"failed[{reason}] {n}" for reason, n in sorted(self.failed.items())]
        return ", ".join(parts)


class TooManyRowsLost(Exception):
    """A data stage lost a larger share of its rows than `data.max_dropped_fraction` allows."""


def check_rows(
    account: RowAccount, max_dropped_fraction: float, stage: str, quarantine: str, first: str | None = None
) -> None:
    """Raises TooManyRowsLost, with the whole table, the file that names the rows and the first of them, over the allowed share."""
    if account.lost_fraction is not None and account.lost_fraction > max_dropped_fraction:
        raise TooManyRowsLost(
            f"{stage}: {account.lost_fraction:.1%} of the rows were lost, data.max_dropped_fraction allows "
            f"{max_dropped_fraction:.1%}: {account.table()}. Fix: mend the rows that {quarantine} names"
            f"{f' (the first: {first})' if first else ''}, or allow more"
        )
