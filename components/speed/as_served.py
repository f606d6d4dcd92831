"""The candidate under load as it would be served, against what it would replace: what the gate is told of the speed pass."""

from collections.abc import Mapping, Sequence
from typing import Any

from components.config import GateConfig
from components.evaluation.arms import Arm
from components.evaluation.gate import UnderLoad
from components.evaluation.results import as_json
from components.evaluation.statistics import Bootstrap, Interval
from components.speed.loads import Load
from components.speed.summary import compare


def compare_as_served(loads: Sequence[Load], candidate: Arm, baseline: Arm, policy: GateConfig) -> dict[str, Any]:
    """By concurrency the ratio of the two arms' tokens/s over all tasks, each at its own K (JSON); None: no valid figure.

    Args:
        loads: All of them.
        candidate: The new head's arm.
        baseline: The champion's arm, or plain decoding.
        policy: Says how intervals are drawn.
    """
    bootstrap = Bootstrap(policy.confidence, policy.bootstrap_samples, policy.seed)
    free = [load for load in loads if load.point.request_rate is None]
    ratios = {}
    for c in sorted({load.point.concurrency for load in free}):
        ours, theirs = (
            [x for x in free if (x.arm, x.num_speculative_tokens, x.point.concurrency) == (*_served(arm), c)]
            for arm in (candidate, baseline)
        )
        is_whole = [x.point for x in ours] == [x.point for x in theirs]
        ratios[str(c)] = as_json(compare(ours, theirs, bootstrap) if is_whole else None)
    return {"baseline": baseline.name, "ratio": ratios}


def under_load(speed: Mapping[str, Any]) -> list[UnderLoad]:
    """What the gate reads in the facts of the stage `speed`; nothing where it was left out."""
    found = speed.get("as_served")
    if not found:
        return []
    return [
        UnderLoad(int(c), found["baseline"], Interval(**ratio) if ratio else None)
        for c, ratio in found["ratio"].items()
    ]


def _served(arm: Arm) -> tuple[str, int | None]:
    return arm.name, arm.num_speculative_tokens
