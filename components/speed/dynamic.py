"""Dynamic K: vLLM chooses K by the number of running requests (`num_speculative_tokens_per_batch_size`).

The schedule of an arm is its best K at each measured load. Where one K is best at all of them there is nothing to choose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from components.arm_config import KEYS
from components.evaluation.arms import Arm
from components.evaluation.statistics import Bootstrap, compare_throughput
from components.speed.loads import Load
from components.speed.sweep import SCHEDULE, Point, Served

SUFFIX = "_dynamic"
FIXED_SLOTS = "P-EAGLE's draft slots are fixed at K"
NO_SCHEDULE = "its method takes no schedule"
SAME_AT_EVERY_LOAD = "one K is the best at every load"


def why_not(arm: Arm, best: Mapping[int, int]) -> str | None:
    """Why the arm is not measured with dynamic K; None: it is.

    Args:
        arm: One that speculates.
        best: By concurrency, its best K; 0 is no speculation.
    """
    if arm.method == "peagle" or arm.options.get("parallel_drafting"):
        return FIXED_SLOTS
    if SCHEDULE not in KEYS[arm.method] or SCHEDULE in arm.options or arm.is_synthetic:
        return NO_SCHEDULE
    return SAME_AT_EVERY_LOAD if len(set(best.values())) < 2 else None


def schedule_of(best: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """[first batch size, last batch size, K]: up to each concurrency its best K; beyond the last, vLLM keeps the last one's."""
    entries: list[tuple[int, int, int]] = []
    first = 1
    for concurrency, k in sorted(best.items()):
        if entries and entries[-1][2] == k:
            entries[-1] = (entries[-1][0], concurrency, k)
        else:
            entries.append((first, concurrency, k))
        first = concurrency + 1
    return entries


def dynamic_server(arm: Arm, best: Mapping[int, int]) -> Served:
    """The arm with that schedule; its K is the largest one in it."""
    schedule = schedule_of(best)
    options = {**arm.options, SCHEDULE: [list(entry) for entry in schedule]}
    return Served(replace(arm, name=arm.name + SUFFIX, num_speculative_tokens=max(best.values()), options=options))


def judge(loads: Sequence[Load], arm: str, off: str) -> dict[str, Any]:
    """Dynamic K against the arm's best single K over all loads together, each load counting the same (JSON).

    A single K is what one would have to choose without it, for light and heavy load alike. It wins where its speed is higher
    beyond doubt.

    Args:
        loads: All of them.
        arm: The arm's own name.
        off: Name of the arm that does not speculate.
    """
    scale = {load.point: _mean_time(load) for load in loads if load.arm == off and not load.invalid}
    free = [load for load in loads if load.point.request_rate is None and not load.invalid and load.point in scale]
    ours = _scaled([load for load in free if load.arm == arm + SUFFIX], scale)
    ks = sorted({load.num_speculative_tokens for load in free if load.arm == arm and load.num_speculative_tokens})
    single = {k: _scaled([x for x in free if x.arm == arm and x.num_speculative_tokens == k], scale) for k in ks}
    whole = {k: times for k, times in single.items() if ours and times and times[0].keys() == ours[0].keys()}
    if not whole:
        return {"against": None, "gain": None, "low": None, "high": None, "wins": False}
    best = min(whole, key=lambda k: sum(sum(times.values()) for times in whole[k]))
    ratio = compare_throughput(ours, whole[best], Bootstrap())
    gain = [None] * 3 if ratio is None else [ratio.estimate - 1, ratio.low - 1, ratio.high - 1]
    named = dict(zip(("gain", "low", "high"), gain, strict=True))
    return {"against": best, **named, "wins": ratio is not None and ratio.low > 1}


def _mean_time(load: Load) -> float:
    return mean(s for times in load.times for s in times.values())


def _scaled(loads: Sequence[Load], scale: Mapping[Point, float]) -> list[dict[str, float]]:
    """A mapping a repetition: a token's time in units of that load's mean without speculation."""
    if not loads:
        return []
    return [
        {f"{x.point.label}/{key}": s / scale[x.point] for x in loads for key, s in x.times[repetition].items()}
        for repetition in range(len(loads[0].repetitions))
    ]
