"""Which documents capture workers die of, remembered beside the driver while the workers come and go (`data.mode: stream`).

A worker asks what to capture next and so says that it is done with what it asked for before. A process that starts where
another one had not said so tells that the other one died of it. Documents that a worker died with are then captured alone, the least
suspicious first, and one that ends its worker alone `data.max_attempts` times is lost. A worker that died with its node died of nothing
that it was given.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from components.data.blame import node_answers
from components.data.progress import DEATHS_PER_ATTEMPT
from components.data.verdict import SILENT_DEATH, Verdict


class Place(NamedTuple):
    """Where a document's outline lies."""

    shard: str
    row: int


class Trials:
    """An actor; workers are known by their numbers."""

    def __init__(self, max_attempts: int, num_workers: int, is_up: Callable[[str], bool] = node_answers) -> None:
        """Nothing was tried yet; `is_up` says whether a Ray node is there."""
        self._max_attempts = max_attempts
        self._max_deaths = num_workers + DEATHS_PER_ATTEMPT * max_attempts
        self._is_up = is_up
        self._nodes: dict[int, str] = {}
        """Where each worker is, or was when it died."""
        self._begun: dict[int, list[Place]] = {}
        self._tries: Counter[Place] = Counter()
        """Times that a suspect ended a worker alone."""
        self._suspects: set[Place] = set()
        self._verdicts: dict[Place, Verdict] = {}
        self._deaths = 0
        self._words = SILENT_DEATH.detail

    def start(self, worker: int, node: str) -> str | None:
        """A worker's process begins on a node; the last words of the dead where too many died in a row: no other should follow."""
        begun = self._begun.pop(worker, [])
        if begun and not self._is_up(self._nodes[worker]):
            begun = []
        self._nodes[worker] = node
        self._suspects.update(begun)
        self._tries.update(begun if len(begun) == 1 else [])
        self._deaths += 1
        return self._words if self._deaths > self._max_deaths else None

    def next(self, worker: int, left: Sequence[Place]) -> tuple[list[Place], Verdict | None]:
        """What of `left` to capture together now, or one document that is lost, and why."""
        if done := self._begun.pop(worker, None):
            self._suspects.difference_update(done)
            self._deaths = 0
        together = [place for place in left if place not in self._suspects]
        if not together and left:
            suspect = min(left, key=self._tries.__getitem__)
            if self._tries[suspect] >= self._max_attempts:
                return [suspect], self._verdicts.get(suspect, SILENT_DEATH)
            together = [suspect]
        if together:
            self._begun[worker] = together
        return together, None

    def fail(self, worker: int, verdict: Verdict) -> None:
        """A worker is about to end itself because of what it has begun."""
        self._words = verdict.detail
        self._verdicts |= dict.fromkeys(self._begun.get(worker, []), verdict)
