"""What AL a head had: measured live, task by task, or recorded of its version."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from components.experiment.sessions import Session, by_task


@dataclass
class Acceptance:
    """Sums by task."""

    source: str
    """Where it was measured, for people."""
    accepted: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, sessions: Iterable[Session], source: str) -> "Acceptance":
        made = cls(source)
        for session in sessions:
            made.add(session)
        return made

    def add(self, session: Session) -> None:
        for task, records in by_task(session):
            self.accepted[task] = self.accepted.get(task, 0) + sum(r.accepted for r in records)
            self.rounds[task] = self.rounds.get(task, 0) + sum(r.rounds for r in records)

    @property
    def pooled(self) -> float | None:
        """AL of all tasks, summed first and divided once; None without a round."""
        rounds = sum(self.rounds.values())
        return 1 + sum(self.accepted.values()) / rounds if rounds else None

    def al(self, task: str) -> float | None:
        """Of a task, or of all of them where this one had no round: what clients call a task is theirs to change."""
        return 1 + self.accepted[task] / self.rounds[task] if self.rounds.get(task) else self.pooled

    def __str__(self) -> str:
        return ", ".join(f"{task or 'all'} {self.al(task):.3f}" for task in self.rounds if self.rounds[task]) or "none"


@dataclass(frozen=True)
class Recorded:
    """The AL that a head was registered with: one figure over its held-out prompts, of whatever tasks they were."""

    source: str
    length: float
    num_speculative_tokens: int
    """With which it was measured; at another K it says nothing."""

    def al(self, task: str) -> float:
        return self.length

    def __str__(self) -> str:
        return f"{self.length:.3f}"


Reference = Acceptance | Recorded
