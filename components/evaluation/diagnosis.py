"""Why a head is not what one hoped for: likely causes, each with the numbers that say so and what to do next.

Pure functions of what finished stages found; nothing is measured here. Causes are ordered: the first of a symptom is to be ruled out first.
"""

from collections.abc import Mapping, Sequence

from components.evaluation.causes.finding import Evidence, Facts, Finding
from components.evaluation.causes.lost_under_load import find_lost_under_load
from components.evaluation.causes.low_acceptance import find_low_acceptance
from components.evaluation.causes.no_speedup import find_no_speedup

__all__ = ["Finding", "diagnose"]


def diagnose(
    evaluation: Facts,
    *,
    target: Facts | None = None,
    vocabulary: Facts | None = None,
    head: Facts | None = None,
    curves: Sequence[Mapping[str, float]] = (),
    preflight: Facts | None = None,
    speed: Facts | None = None,
    max_num_seqs: int | None = None,
) -> list[Finding]:
    """The likely causes of whatever is wrong with the candidate; empty when nothing is.

    Args:
        evaluation: Facts of the stage `evaluation`; the others are facts of the stages of their names, where those ran.
        target: Its digest and shape.
        vocabulary: Its coverage of the answers.
        head: How it was trained.
        curves: Rows of `curves.jsonl`.
        preflight: Whether vLLM drafts what we draft.
        speed: Points over K and concurrency.
        max_num_seqs: Most requests that the engines of the speed pass ran at once.
    """
    found = Evidence(evaluation, target, vocabulary, head, curves, preflight, speed, max_num_seqs)
    return [*find_low_acceptance(found), *find_no_speedup(found), *find_lost_under_load(found)]
