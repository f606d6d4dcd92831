"""What makes an answer to a benchmark's prompt right, and how many of an arm's are.

Without a reference an answer is not right or wrong, but it comes to what plain decoding's answer comes to, or it does not.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from components.evaluation.code_answers import code_alone, humaneval_reference, mbpp_reference, program_of
from components.evaluation.sandbox import Limits, run_programs
from components.evaluation.statistics import Bootstrap, ratios_of_sums

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
NO_NUMBER = "no number"
RUNS_CODE = ("humaneval", "mbpp")

Reference = Mapping[str, str]
"""Of one row; `score` names what is measured, and is not there where nothing says what is right."""
Outcomes = Mapping[str, str]
"""By prompt key: `passed`, `failed` or `timed out`; without a reference the number itself."""


@dataclass(frozen=True)
class Question:
    """One answer to judge."""

    key: str
    answer: str
    reference: Reference


def reference_of(scorer: str, row: Mapping[str, Any], prompt: str) -> dict[str, str] | None:
    """What the scorer needs of a row; None where the row has not got it.

    Args:
        scorer: Of the settings.
        row: As it stands in the file.
        prompt: What the target is asked.
    """
    if scorer == "humaneval":
        return humaneval_reference(row, prompt)
    if scorer == "mbpp":
        return mbpp_reference(row, prompt)
    number = last_number(str(row.get("answer", ""))) if scorer == "gsm8k" else None
    return None if number is None else {"score": "exact match", "number": number}


def plain_reference(scorer: str, prompt: str) -> dict[str, str]:
    """What stands in for the reference of a row that has none."""
    return code_alone(prompt) if scorer in RUNS_CODE else {}


def judge(scorer: str, questions: Sequence[Question], limits: Limits, num_workers: int) -> dict[str, str]:
    """How each answer did, by key; code is run in the sandbox."""
    if scorer in RUNS_CODE:
        programs = [program_of(question.answer, question.reference) for question in questions]
        return dict(zip([q.key for q in questions], run_programs(programs, limits, num_workers), strict=True))
    said = {q.key: last_number(q.answer) or NO_NUMBER for q in questions}
    wanted = {q.key: q.reference["number"] for q in questions if "number" in q.reference}
    return said | {key: "passed" if said[key] == number else "failed" for key, number in wanted.items()}


def last_number(text: str) -> str | None:
    """The number that an answer ends with, in one spelling (`1,200.50` is `1200.5`); behind `####` where that stands."""
    found = NUMBER.findall(text.rpartition("####")[2])
    if not found:
        return None
    number = found[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def score_facts(name: str, arm: Outcomes, plain: Outcomes, bootstrap: Bootstrap) -> dict[str, Any] | None:
    """The arm's score with its interval, and how much higher it is than plain decoding's on the same prompts (JSON).

    Args:
        name: Of the score.
        arm: The arm's outcomes.
        plain: Those of plain decoding.
        bootstrap: How intervals are drawn; the unit is the prompt, and both arms get the same draw.
    """
    right, paired = _shares(arm), _shares(plain)
    common = sorted(right.keys() & paired.keys())
    (own,) = ratios_of_sums([[right[key]] for key in sorted(right)], [1.0] * len(right), bootstrap) if right else [None]
    if own is None:
        return None
    differences = [[right[key] - paired[key]] for key in common]
    (difference,) = ratios_of_sums(differences, [1.0] * len(common), bootstrap) if common else [None]
    return {
        "name": name,
        **asdict(own),
        "num_prompts": len(right),
        "timed_out": sum(outcome == "timed out" for outcome in arm.values()),
        "against_none": None if difference is None else asdict(difference),
    }


def kept_facts(arm: Outcomes, plain: Outcomes, bootstrap: Bootstrap) -> dict[str, Any] | None:
    """The share of prompts on which the arm's answer comes to what plain decoding's comes to, with its interval (JSON); None without any.

    Prompts to which plain decoding gave no number are left out.
    """
    common = sorted(key for key in arm if plain.get(key, NO_NUMBER) != NO_NUMBER)
    same = [[float(arm[key] == plain[key])] for key in common]
    (share,) = ratios_of_sums(same, [1.0] * len(common), bootstrap) if common else [None]
    return None if share is None else {**asdict(share), "num_prompts": len(common)}


def _shares(outcomes: Outcomes) -> dict[str, float]:
    return {key: float(outcome == "passed") for key, outcome in outcomes.items()}
