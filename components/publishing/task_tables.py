"""An evaluation's figures task by task, as tables; none where it has no tasks."""

from collections.abc import Iterator, Mapping
from typing import Any

from components.publishing.tables import UNDEFINED, Table, estimate, number, percent

HEADERS = ("arm", "AL", "tokens/step", "coverage", "score", "looped", "ended by")
GROUPS = {"by_prompt_length": "prompt tokens", "by_answer_length": "answer tokens"}


def task_tables(evaluation: Mapping[str, Any]) -> Iterator[Table]:
    """For every task: its arms, acceptance by position, AL by length."""
    for task, facts in evaluation.get("tasks", {}).items():
        yield task_table(task, facts)
        yield task_positions(task, facts["arms"])
        for key, title in GROUPS.items():
            yield task_lengths(f"{task}: AL by {title}", key, facts["arms"])
    yield from sampled_tables(evaluation)


def task_table(task: str, facts: Mapping[str, Any]) -> Table:
    """Every arm on one task; the arms that do not speculate are its baseline for the score."""
    rows = [_arm_row(name, arm) for name, arm in facts["arms"].items()]
    return Table(f"Task {task} ({facts['num_prompts']} prompts)", HEADERS, rows)


def sampled_tables(evaluation: Mapping[str, Any]) -> Iterator[Table]:
    """The held-out prompts answered at temperatures above 0."""
    for temperature, arms in evaluation.get("sampled", {}).items():
        rows = [_arm_row(name, arm) for name, arm in arms.items()]
        yield Table(f"Sampled at temperature {temperature}", HEADERS, rows)


def task_positions(task: str, arms: Mapping[str, Any]) -> Table:
    """Share of rounds that accepted at least i tokens."""
    rates = {name: arm["accepted_at"] for name, arm in arms.items() if arm["accepted_at"]}
    width = max(map(len, rates.values()), default=0)
    rows = [
        (name, *[estimate(rate, percent) for rate in found], *[UNDEFINED] * (width - len(found)))
        for name, found in rates.items()
    ]
    return Table(f"{task}: accepted by position", ("arm", *[f"≥ {i + 1}" for i in range(width)]), rows)


def task_lengths(title: str, key: str, arms: Mapping[str, Any]) -> Table:
    """AL of every arm in every bucket; no rows where all prompts are in one."""
    groups = {name: arm.get(key) or {} for name, arm in arms.items() if arm["accepted_at"]}
    buckets = list(dict.fromkeys(bucket for found in groups.values() for bucket in found))
    if len(buckets) < 2:
        return Table(title, ("arm",), ())
    rows = [
        (name, *[estimate(found[bucket]["al"]) if bucket in found else UNDEFINED for bucket in buckets])
        for name, found in groups.items()
    ]
    return Table(title, ("arm", *buckets), rows)


def _arm_row(name: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        estimate(arm["al"]),
        number(arm["tokens_per_step"]),
        percent(arm["coverage"]),
        _score(arm),
        percent(arm.get("looped")),
        ", ".join(f"{reason} {count}" for reason, count in arm["finish_reasons"].items()) or UNDEFINED,
    )


def _score(arm: Mapping[str, Any]) -> str:
    """What share is right, and what share comes to the same as plain decoding's answer."""
    score, kept = arm.get("score"), arm.get("kept")
    said = [f"{score['name']} {estimate(score, percent)}"] if score else []
    return "; ".join([*said, f"as plain decoding {estimate(kept, percent)}"] if kept else said) or UNDEFINED
