"""Which records count, and when: those dealt by weights that are known and left a choice, once nothing that began before is missing."""

from collections.abc import Iterable, Mapping

from components.experiment.sessions import ended_at
from components.serving.records import LiveRecord


class Intake:
    """Records on their way into an experiment.

    Args:
        shares: Chance of the challenger (against the control) by weight epoch, as far as it is known; it may grow meanwhile.
    """

    def __init__(self, shares: Mapping[int, float]) -> None:
        self._shares = shares
        self._waiting: list[LiveRecord] = []
        self.left_out = 0
        """Requests whose weights nobody noted, or which had no choice."""

    def add(self, records: Iterable[LiveRecord]) -> None:
        self._waiting += records

    def take(self, complete_until: float) -> tuple[list[LiveRecord], list[LiveRecord]]:
        """The records that count and began before this time (Unix, seconds), once and in the order in which they began; and those that
        began later and have ended, in that order, which are given again.

        Epochs grow, so one that nobody noted before a later one was noted stays unknown; the newest may still be noted.
        """
        newest = max(self._shares, default=-1)
        due: list[LiveRecord] = []
        early: list[LiveRecord] = []
        unknown: list[LiveRecord] = []
        for record in self._waiting:
            share = self._shares.get(record.weight_epoch)
            if share is None and record.weight_epoch > newest:
                unknown.append(record)
            elif share is None or not 0 < share < 1:
                self.left_out += 1
            else:
                (due if record.started_at < complete_until else early).append(record)
        self._waiting = unknown + early
        return sorted(due, key=lambda record: (record.started_at, ended_at(record))), sorted(early, key=ended_at)
