"""An evaluation's figures task by task: families of held-out prompts that belong together, and benchmarks.

Prompts of one task are alike, those of two tasks are not: a head that is good at editing code and bad at chat has no one AL worth
quoting. Every figure has the prompt as its unit, and its interval by bootstrap (`statistics`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from components.evaluation.acceptance import total
from components.evaluation.estimates import acceptance_length_estimate, interval_facts
from components.evaluation.results import Answer, ArmResult, as_json, share_looped, tokens_per_step
from components.evaluation.statistics import Bootstrap

LENGTH_EDGES = (64, 256, 1024, 4096)
"""Tokens at which a length bucket begins; the first begins at 0."""


def task_of(family: str, tasks: Mapping[str, Sequence[str]]) -> str:
    """The task that lists the family; a family that none lists is a task of its own."""
    return next((task for task, families in tasks.items() if family in families), family)


def tasks_of(result: ArmResult, tasks: Mapping[str, Sequence[str]]) -> dict[str, list[Answer]]:
    """The arm's answers by task, in the order of the tasks' names."""
    found: dict[str, list[Answer]] = {}
    for answer in result.answers:
        found.setdefault(task_of(answer.record.family, tasks), []).append(answer)
    return dict(sorted(found.items()))


def task_facts(
    results: Mapping[str, ArmResult], tasks: Mapping[str, Sequence[str]], bootstrap: Bootstrap
) -> dict[str, dict[str, Any]]:
    """`{task: {"num_prompts": n, "arms": {arm: figures}}}` of answers to the same prompts (JSON)."""
    found: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        for task, answers in tasks_of(result, tasks).items():
            entry = found.setdefault(task, {"num_prompts": len(answers), "arms": {}})
            entry["arms"][name] = answer_figures(answers, result.arm.speculates, bootstrap)
    return dict(sorted(found.items()))


def answer_figures(answers: Sequence[Answer], speculates: bool, bootstrap: Bootstrap) -> dict[str, Any]:
    """What some answers of one arm say (JSON); failed ones are counted and in no other figure.

    `al` and each `accepted_at` (share of rounds that accepted at least so many drafts) are null where nothing was proposed, their
    bounds where there are too few prompts. `histogram[j]`: rounds that accepted exactly j drafts. `tokens_per_step` and `coverage`
    as in `results.figures`. `score` is null but for a benchmark.
    """
    good = [answer for answer in answers if answer.record.error is None]
    records = [answer.record for answer in good]
    sums = total(records)
    steps = sum(answer.target_steps for answer in good)
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        **interval_facts(records, bootstrap),
        "histogram": list(sums.histogram),
        "tokens_per_step": tokens_per_step(good),
        "coverage": sums.rounds / steps if steps and speculates else None,
        "looped": share_looped(good),
        "finish_reasons": dict(sorted(Counter(str(r.finish_reason) for r in records).items())),
        "score": None,
        "by_family": _groups(good, lambda answer: answer.record.family, bootstrap),
        "by_prompt_length": _groups(good, lambda answer: length_bucket(answer.record.prompt_tokens), bootstrap),
        "by_answer_length": _groups(good, lambda answer: length_bucket(answer.record.output_tokens), bootstrap),
    }


def length_bucket(num_tokens: int) -> str:
    """The bucket of a length: `0-63`, `64-255`, ..., `4096-`."""
    starts = [0, *(edge for edge in LENGTH_EDGES if edge <= num_tokens)]
    ends = [edge for edge in LENGTH_EDGES if edge > num_tokens]
    return f"{starts[-1]}-{ends[0] - 1 if ends else ''}"


def _groups(answers: Sequence[Answer], name_of: Callable[[Answer], str], bootstrap: Bootstrap) -> dict[str, Any]:
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(name_of(answer), []).append(answer)
    return {name: _group(groups[name], bootstrap) for name in sorted(groups, key=_bucket_order)}


def _bucket_order(name: str) -> tuple[int, str]:
    """Buckets by their start, families by name."""
    start = name.partition("-")[0]
    return (int(start) if start.isdigit() else 0, name)


def _group(answers: Sequence[Answer], bootstrap: Bootstrap) -> dict[str, Any]:
    return {
        "num_prompts": len(answers),
        "al": as_json(acceptance_length_estimate([answer.record for answer in answers], bootstrap)),
        "tokens_per_step": tokens_per_step(answers),
    }
