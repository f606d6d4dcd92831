"""What is measured: which arm with which K is served, and at which points each of these servers is asked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from components.arm_config import ArmConfig
from components.evaluation.arms import Arm
from components.speed_config import SpeedConfig

SCHEDULE = "num_speculative_tokens_per_batch_size"
INF = "inf"


@dataclass(frozen=True)
class Served:
    """One server: an arm with one K."""

    arm: Arm

    @property
    def label(self) -> str:
        """For files and logs."""
        k = self.arm.num_speculative_tokens
        return self.arm.name if k is None else f"{self.arm.name}-k{k}"


@dataclass(frozen=True)
class Point:
    """One load on one server."""

    task: str
    concurrency: int
    """Most requests at once."""
    request_rate: float | None = None
    """Requests a second; None: the next one starts as soon as one is done."""

    @property
    def rate(self) -> float | str:
        return self.request_rate or INF

    @property
    def label(self) -> str:
        limit = f"-rate{self.request_rate:g}" if self.request_rate else ""
        return f"{self.task}-c{self.concurrency}{limit}"


def servers(arms: Sequence[Arm], ks: Sequence[int]) -> list[Served]:
    """Every arm at every K and at its own; one that does not speculate, accepts by chance or has a schedule once, as it is."""
    return [Served(arm) for arm in arms for arm in _at_every_k(arm, ks)]


def points(tasks: Sequence[str], speed: SpeedConfig) -> list[Point]:
    """The loads of one server: every concurrency without a limit on the rate, then the limited one.

    A limited rate bounds the tokens a second by itself: it tells latencies, at one concurrency that it should not reach.
    """
    free = [Point(task, c) for task in tasks for c in speed.concurrencies]
    limited = [Point(task, speed.concurrencies[-1], speed.request_rate) for task in tasks if speed.request_rate]
    return free + limited


def num_requests(point: Point, num_prompts: int) -> int:
    """One for each prompt, and enough to reach the concurrency."""
    return max(num_prompts, point.concurrency)


def num_servers(baselines: Sequence[ArmConfig], head_ks: Sequence[int], ks: Sequence[int]) -> int:
    """How many servers `servers` will give: from the settings of the baselines and the Ks that heads are served with."""
    swept = [arm.num_speculative_tokens for arm in baselines if not _is_fixed(arm)]
    return len(baselines) - len(swept) + sum(len({*ks, own}) for own in [*swept, *head_ks])


def _at_every_k(arm: Arm, ks: Sequence[int]) -> Iterator[Arm]:
    if not arm.speculates or arm.is_synthetic or SCHEDULE in arm.options:
        yield arm
    else:
        assert arm.num_speculative_tokens is not None
        yield from (replace(arm, num_speculative_tokens=k) for k in sorted({*ks, arm.num_speculative_tokens}))


def _is_fixed(arm: ArmConfig) -> bool:
    has_schedule = arm.num_speculative_tokens_per_batch_size is not None
    return arm.method == "none" or has_schedule or arm.rejection_sample_method == "synthetic"
