"""Causes of a gain that is there for one request and gone with many: the target's idle arithmetic, the KV cache, the queue, K."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from components.evaluation.causes.finding import GAIN, NONE, Evidence, Facts, Finding

Cause = tuple[str, str, str]
"""(cause, evidence, next step)."""

KEPT = 0.5
"""Share of the gain at the lightest load that must be left at the heaviest."""
SCALES = 0.6
"""Throughput's growth over concurrency's growth: below it the target is bound by arithmetic, above by memory."""
LESS_ROOM = 0.9
"""KV capacity over that without speculation."""
BETTER = 1.02
"""Tokens/s of a smaller K over those of the served one."""


@dataclass(frozen=True)
class Loads:
    """The valid points of one task, without a limit on the request rate."""

    task: str
    points: Sequence[Facts]
    arm: str
    k: int

    def plain(self, concurrency: int) -> Facts | None:
        return self._at(NONE, None, concurrency)

    def served(self, concurrency: int, k: int | None = None) -> Facts | None:
        return self._at(self.arm, k or self.k, concurrency)

    def gain(self, concurrency: int, k: int | None = None) -> float | None:
        """Tokens/s over those without speculation at the same load."""
        ours, plain = self.served(concurrency, k), self.plain(concurrency)
        return ours["output_tokens_per_s"] / plain["output_tokens_per_s"] if ours and plain else None

    @property
    def concurrencies(self) -> list[int]:
        """Those at which there is a gain to speak of."""
        return [c for c in sorted({p["concurrency"] for p in self.points}) if self.gain(c) is not None]

    @property
    def ks(self) -> list[int]:
        return sorted({p["num_speculative_tokens"] for p in self.points if p["arm"] == self.arm})

    def _at(self, arm: str, k: int | None, concurrency: int) -> Facts | None:
        wanted = (arm, k, concurrency)
        keys = ("arm", "num_speculative_tokens", "concurrency")
        return next((p for p in self.points if tuple(p[key] for key in keys) == wanted), None)


def find_lost_under_load(found: Evidence) -> Iterator[Finding]:
    """Nothing where the speed pass did not run, or where half of the gain of the lightest load is left at the heaviest."""
    if not found.speed:
        return
    for task in dict.fromkeys(p["task"] for p in found.speed["points"]):
        loads = _loads(found, found.speed, task)
        if len(loads.concurrencies) > 1:
            yield from _find(found, found.speed, loads)


def _find(found: Evidence, speed: Facts, loads: Loads) -> Iterator[Finding]:
    light, heavy = loads.concurrencies[0], loads.concurrencies[-1]
    at_first, at_last = loads.gain(light), loads.gain(heavy)
    if at_first is None or at_last is None or at_first < GAIN or at_last - 1 >= KEPT * (at_first - 1):
        return
    symptom = (
        f"{loads.task}: the gain of {loads.arm} at K={loads.k} is {at_first - 1:+.0%} at concurrency {light} and "
        f"{at_last - 1:+.0%} at {heavy}"
    )
    causes = [
        _preempted(speed, loads),
        _queued(found, loads, heavy),
        _less_room(speed, loads),
        _smaller_k(loads, heavy),
        _compute_bound(loads),
    ]
    named = [Finding(symptom, *cause) for cause in causes if cause is not None]
    yield from named or [Finding(symptom, *_unknown(speed, loads, heavy))]


def _loads(found: Evidence, speed: Facts, task: str) -> Loads:
    """Of the candidate as it is served, or at the nearest K that was measured."""
    points = [
        p for p in speed["points"] if p["task"] == task and p["invalid"] is None and str(p["request_rate"]) == "inf"
    ]
    ks = [p["num_speculative_tokens"] for p in points if p["arm"] == found.candidate_name]
    k = min(ks, key=lambda measured: abs(measured - found.k), default=found.k)
    return Loads(task, points, found.candidate_name, k)


def _preempted(speed: Facts, loads: Loads) -> Cause | None:
    ours, plain = _engine(speed, loads.arm, loads.k), _engine(speed, NONE, 0)
    if not ours["preemptions"] or ours["preemptions"] <= (plain["preemptions"] or 0):
        return None
    return (
        "requests are preempted: the KV cache is full, and their work is done again",
        f"{ours['preemptions']} preemptions, {plain['preemptions'] or 0} without speculation; KV capacity {ours['kv_capacity_tokens']} tokens",
        "raise gpu_memory_utilization, lower max_model_len or max_num_seqs (resources.*.engine), or store the KV cache in fp8",
    )


def _queued(found: Evidence, loads: Loads, heavy: int) -> Cause | None:
    if found.max_num_seqs is None or found.max_num_seqs >= heavy:
        return None
    point = loads.served(heavy)
    waited = (
        "" if point is None or not point["ttft_ms"] else f"; first tokens take {point['ttft_ms']['p95']:.0f} ms (p95)"
    )
    return (
        "requests wait for a place: the engine runs fewer at once than are sent",
        f"max_num_seqs {found.max_num_seqs}, concurrency {heavy}{waited}",
        "raise max_num_seqs to the concurrency that is served",
    )


def _less_room(speed: Facts, loads: Loads) -> Cause | None:
    ours, plain = (_engine(speed, arm, k)["kv_capacity_tokens"] for arm, k in ((loads.arm, loads.k), (NONE, 0)))
    if not ours or not plain or ours >= LESS_ROOM * plain:
        return None
    return (
        "head and drafts take room that the KV cache had",
        f"KV capacity {ours} tokens, {plain} without speculation ({ours / plain - 1:+.0%})",
        "raise gpu_memory_utilization, use a smaller head, or store the KV cache in fp8",
    )


def _smaller_k(loads: Loads, heavy: int) -> Cause | None:
    served = loads.served(heavy)
    others = [(k, p) for k in loads.ks if k < loads.k and (p := loads.served(heavy, k)) is not None]
    if served is None or not others:
        return None
    k, best = max(others, key=lambda pair: pair[1]["output_tokens_per_s"])
    if best["output_tokens_per_s"] < BETTER * served["output_tokens_per_s"]:
        return None
    return (
        "K is too large for this load: refused drafts are paid for",
        f"at concurrency {heavy} K={k} gives {best['output_tokens_per_s']:.0f} tokens/s, K={loads.k} {served['output_tokens_per_s']:.0f}",
        f"serve this load with K={k}, or by the recommended K of the report",
    )


def _compute_bound(loads: Loads) -> Cause | None:
    before, last = loads.concurrencies[-2:]
    rates = [point["output_tokens_per_s"] for c in (before, last) if (point := loads.plain(c)) is not None]
    growth, load = rates[1] / rates[0], last / before
    if growth >= SCALES * load:
        return None
    return (
        "the target computes without a pause at this load, so verifying drafts is no longer free",
        f"without speculation {before} -> {last} requests at once ({load:.1f} times) give {growth:.2f} times the tokens/s "
        f"({rates[0]:.0f} -> {rates[1]:.0f})",
        "serve this load with a smaller K or without speculation (the recommended K by concurrency), or add replicas",
    )


def _unknown(speed: Facts, loads: Loads, heavy: int) -> Cause:
    choice = (speed.get("recommended") or {}).get(loads.task, {}).get(str(heavy))
    k = choice and choice["num_speculative_tokens"]
    return (
        "none of the known ones",
        f"KV capacity, preemptions, queue and smaller K (where measured) look sound at concurrency {heavy}",
        f"follow the recommended K: {f'K={k}' if k else 'off'} at this load"
        if choice
        else "measure more K (speed.num_speculative_tokens)",
    )


def _engine(speed: Facts, arm: str, k: int) -> dict[str, Any]:
    """KV capacity and preemptions of an arm at a K; of all its Ks where they are not told apart."""
    entry = (speed.get("arms") or {}).get(arm) or {"kv_capacity_tokens": None, "preemptions": None}
    return entry.get("by_k", {}).get(str(k), entry)
