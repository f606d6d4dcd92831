"""From the measured arms to the evaluation's facts, and from those files to the gate's verdict."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.config import GateConfig
from components.evaluation.acceptance import RequestRecord, total
from components.evaluation.arms import Arm, head_arm
from components.evaluation.by_task import task_facts, task_of
from components.evaluation.estimates import interval_facts
from components.evaluation.gate import Measured, UnderLoad, Verdict, decide
from components.evaluation.job import AGAIN, HELD_OUT
from components.evaluation.losslessness import TIE_GAPS, GreedyAnswer, Losslessness, compare_answers
from components.evaluation.results import ArmResult, add_timed_again, as_json, figures, load_result, tokens_per_s
from components.evaluation.statistics import (
    Bootstrap,
    compare_acceptance,
    compare_acceptance_by_family,
    compare_speed,
)
from components.stage import Artifact
from components.storage import Location

NONE, CANDIDATE, CHAMPION = "none", "candidate", "champion"
CHALLENGER = "challenger"
"""The candidate's name under live traffic."""
SUMMARY = "evaluation.json"
STEADY = 0.2
"""Plain decoding's speed after the last arm over that before the first: an interval that leaves 1 by no more than this is not worth a warning."""
AGREEMENT = 0.03
"""Largest relative difference between our walked AL and vLLM's AL within the answers. More is a head that the server reads otherwise than we do."""


@dataclass(frozen=True)
class HeadIdentity:
    digest: str
    num_speculative_tokens: int
    """The K that it is served with."""
    folder: Path | None = None
    name: str = CANDIDATE
    """Of its arm."""
    place: str = "head"
    """Of its folder in the output of the stage `head`."""


def candidate_at(k: int, name: str = CANDIDATE) -> str:
    """Name of the arm that measures a candidate at the champion's K."""
    return f"{name}_at_k{k}"


def head_places(head: Artifact) -> list[str]:
    """The folders of the heads in the output of the stage `head`; without candidates it has one."""
    return list(head.facts.get("candidates", ["head"]))


def chosen_place(evaluation: Artifact) -> str:
    """The folder of the candidate that the evaluation chose, in the output of the stage `head`."""
    return evaluation.facts["candidate"]["place"]


def choose(
    results: Mapping[str, ArmResult], candidates: Sequence[HeadIdentity], champion: HeadIdentity | None
) -> HeadIdentity:
    """The candidate with the best AL in vLLM: at the champion's K, or at its own where there is no champion.

    One whose figures are not valid is chosen only where none is valid.
    """

    def merit(candidate: HeadIdentity) -> tuple[bool, float]:
        k = champion.num_speculative_tokens if champion else candidate.num_speculative_tokens
        result = results[_arm_at(candidate, k)]
        return not result.problems, total(result.records).acceptance_length or 0.0

    return max(candidates, key=merit)


def _arm_at(candidate: HeadIdentity, k: int) -> str:
    return candidate.name if candidate.num_speculative_tokens == k else candidate_at(k, candidate.name)


def summarise(
    results: Mapping[str, ArmResult],
    walked: Mapping[str, Mapping[str, Any]],
    candidate: HeadIdentity,
    champion: HeadIdentity | None,
    num_candidates: int = 1,
    tasks: Mapping[str, Sequence[str]] | None = None,
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The facts of an evaluation, and every difference from plain decoding by arm (JSON both).

    Args:
        results: By arm name; `none` and the candidate's are required.
        walked: `walked.json`.
        candidate: The new head, the one that was chosen.
        champion: The one it would replace.
        num_candidates: Among how many it was chosen.
        tasks: Families that are reported together, `evaluate.tasks`.
    """
    lossless = compare_with_plain(results)
    arms = {
        name: figures(result)
        | {
            "intervals": interval_facts(result.records),
            "lossless": lossless_counts(lossless[name]) if name in lossless else None,
        }
        for name, result in results.items()
    }
    k = str(candidate.num_speculative_tokens)
    facts: dict[str, Any] = {
        "num_prompts": len(results[NONE].answers),
        "candidate": {
            "arm": candidate.name,
            "place": candidate.place,
            "head_digest": candidate.digest,
            "num_speculative_tokens": candidate.num_speculative_tokens,
            "chosen_among": num_candidates,
        },
        "champion": champion
        and {"head_digest": champion.digest, "num_speculative_tokens": champion.num_speculative_tokens},
        "arms": arms,
        "tasks": task_facts(results, tasks or {}, Bootstrap()),
        "bigram_walked_al": walked["bigram"][k]["al"],
        "walked": _agreement(walked["head"][k]["al"], results[candidate.name]),
        "speed_against_none": as_json(
            compare_speed(results[candidate.name].tokens_per_s, results[NONE].tokens_per_s, Bootstrap())
        ),
        "plain_again": as_json(
            compare_speed(tokens_per_s(results[NONE].speeds_again), tokens_per_s(results[NONE].speeds), Bootstrap())
        ),
    }
    if champion is not None:
        facts["against_champion"] = _against_champion(results, candidate, champion, tasks or {})
    return facts, {name: [as_json(d) for d in found.differences] for name, found in lossless.items()}


def compare_with_plain(results: Mapping[str, ArmResult]) -> dict[str, Losslessness]:
    """Every speculating arm's greedy answers against plain decoding's."""
    plain = results[NONE]
    answers = {a.record.key: GreedyAnswer(a.output_ids, a.rivals) for a in plain.answers}
    tie_gap = TIE_GAPS[plain.platform["dtype"]]
    return {
        name: compare_answers(answers, {a.record.key: a.output_ids for a in result.answers}, tie_gap)
        for name, result in results.items()
        if result.arm.speculates
    }


def evaluation_verdict(evaluation: Artifact, policy: GateConfig, loads: Sequence[UnderLoad] = ()) -> Verdict:
    """The gate's verdict on a finished evaluation, and on the loads of the speed pass where it ran."""
    facts = evaluation.facts
    results = {name: load_arm(evaluation.location, name) for name in facts["arms"]}
    lossless = compare_with_plain(results)
    head = facts["candidate"]
    at_champions_k = candidate_at(facts["champion"]["num_speculative_tokens"], head["arm"]) if facts["champion"] else ""
    ours = [result for name, result in results.items() if name in (head["arm"], at_champions_k)]
    candidate = _measured(head["arm"], ours, head, lossless)
    champion = _measured(CHAMPION, [results[CHAMPION]], facts["champion"], lossless) if facts["champion"] else None
    plain = _measured(NONE, [results[NONE]], {}, lossless)
    return decide(candidate, champion, plain, policy, head["chosen_among"], loads)


def load_arm(output: Location, name: str) -> ArmResult:
    """What an evaluation measured of an arm on the held-out prompts, both speed passes of those that have two."""
    file = f"{name}.json"
    return add_timed_again(load_result(output.join(HELD_OUT, file)), output.join(AGAIN, file))


def write_summary(location: Location, facts: Mapping[str, Any], differences: Mapping[str, Any]) -> None:
    body = {**facts, "differences": differences}
    location.join(SUMMARY).write_bytes(json.dumps(body, indent=1, sort_keys=True).encode())


def _measured(
    name: str, results: Sequence[ArmResult], head: Mapping[str, Any], lossless: Mapping[str, Losslessness]
) -> Measured:
    """What the gate sees of an arm; a candidate may come as several results, one a K, the served one among them."""
    served = next(result for result in results if result.arm.name == name)
    faults = [lossless[r.arm.name].faults for r in results if r.arm.name in lossless]
    return Measured(
        name=name,
        platform=served.platform,
        num_speculative_tokens=served.arm.num_speculative_tokens,
        head_digest=head.get("head_digest"),
        records={k: r.records for r in results if (k := r.arm.num_speculative_tokens) is not None},
        tokens_per_s=served.tokens_per_s,
        num_errors=sum(max(result.num_errors, len(result.problems)) for result in results),
        num_faults=sum(faults) if faults else None,
        is_synthetic=any(result.arm.is_synthetic for result in results),
    )


def _against_champion(
    results: Mapping[str, ArmResult],
    candidate: HeadIdentity,
    champion: HeadIdentity,
    tasks: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    k = champion.num_speculative_tokens
    ours = results[_arm_at(candidate, k)]
    theirs = results[CHAMPION]
    families = compare_acceptance_by_family(ours.records, theirs.records, Bootstrap())
    our_tasks, their_tasks = (_named_by_task(result.records, tasks) for result in (ours, theirs))
    by_task = compare_acceptance_by_family(our_tasks, their_tasks, Bootstrap())
    return {
        "num_speculative_tokens": k,
        "al": as_json(compare_acceptance(ours.records, theirs.records, Bootstrap())),
        "families": {family: as_json(comparison) for family, comparison in families.items()},
        "tasks": {task: as_json(comparison) for task, comparison in by_task.items()},
        "speed": as_json(compare_speed(results[candidate.name].tokens_per_s, theirs.tokens_per_s, Bootstrap())),
    }


def _agreement(walked_al: float | None, candidate: ArmResult) -> dict[str, Any]:
    """Our walk beside vLLM's figures for the same head, prompts and K; compared without what vLLM accepted past the answers' ends."""
    within = candidate.acceptance_length_within
    difference = _relative_difference(walked_al, within)
    return {
        "al": walked_al,
        "vllm_al": total(candidate.records).acceptance_length,
        "vllm_al_within_answers": within,
        "relative_difference": difference,
        "agrees": None if difference is None else abs(difference) <= AGREEMENT,
    }


def _named_by_task(records: Sequence[RequestRecord], tasks: Mapping[str, Sequence[str]]) -> list[RequestRecord]:
    return [replace(record, family=task_of(record.family, tasks)) for record in records]


def lossless_counts(lossless: Losslessness) -> dict[str, int]:
    """How many answers were compared, and how they were (JSON)."""
    return {
        "compared": lossless.compared,
        "equal": lossless.equal,
        "ties": lossless.ties,
        "faults": lossless.faults,
    }


def needed_arms(
    baselines: Sequence[Arm], candidate: HeadIdentity, champion: HeadIdentity | None, *others: HeadIdentity
) -> list[tuple[Arm, bool]]:
    """The arms to measure, each with whether its speed is wanted; plain decoding first.

    Args:
        baselines: Plain decoding first.
        candidate: The new head.
        champion: The one it would replace.
        others: Further candidates of the same training run.
    """
    candidates = [candidate, *others]
    arms = [(arm, True) for arm in baselines]
    arms += [(_head_arm(head.name, head, head.num_speculative_tokens), True) for head in candidates]
    if champion is not None:
        k = champion.num_speculative_tokens
        arms.append((_head_arm(CHAMPION, champion, k), True))
        wider = [head for head in candidates if head.num_speculative_tokens != k]
        arms += [(_head_arm(candidate_at(k, head.name), head, k), False) for head in wider]
    return arms


def _head_arm(name: str, head: HeadIdentity, k: int) -> Arm:
    return head_arm(name, str(head.folder), k)


def _relative_difference(walked: float | None, measured: float | None) -> float | None:
    """(walked - measured) / measured; None when either is undefined."""
    return None if walked is None or measured is None else walked / measured - 1
