"""What benchmarks and sampled answers say of every arm: the figures of any task, losslessness, a score beside plain decoding's, and
what share of the answers comes to the same as plain decoding's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from components.evaluation.answer_sets import PLAIN, answer_texts, scored_rows
from components.evaluation.benchmarks import FOLDER, load_rows, place_of
from components.evaluation.by_task import answer_figures
from components.evaluation.job import Job, sampled_place
from components.evaluation.results import ArmResult, load_result
from components.evaluation.sandbox import Limits, isolation
from components.evaluation.scorers import RUNS_CODE, Question, judge, kept_facts, score_facts
from components.evaluation.statistics import Bootstrap
from components.evaluation.summary import compare_with_plain, lossless_counts
from components.storage import Location

SCORES = "scores.json"


def score_benchmark(job: Job, name: str, arms: Sequence[str]) -> None:
    """Judge the first answer of every arm to every row, and write `benchmarks/<name>/scores.json`."""
    evaluate = job.settings.evaluate
    scorer, sandbox = evaluate.benchmarks[name].scorer, evaluate.sandbox
    limits = Limits(sandbox.timeout_s, sandbox.memory_mb << 20)
    num_workers = max(1, int(job.resources.num_cpus))
    rows = scored_rows(job, name)
    outcomes = {}
    for arm in arms:
        said = answer_texts(job, name, arm, 1)
        questions = [Question(row.key, said[row.key][0], row.reference or {}) for row in rows if row.key in said]
        outcomes[arm] = judge(scorer, questions, limits, num_workers)
    kept_in = asdict(isolation()) if scorer in RUNS_CODE else None
    scores_file(job, name).write_bytes(json.dumps({"isolation": kept_in, "outcomes": outcomes}, indent=1).encode())


def scores_file(job: Job, name: str) -> Location:
    return job.output.join(FOLDER, name, SCORES)


def benchmark_facts(job: Job, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`{benchmark: {"num_prompts", "num_too_long", "scorer", "isolation", "arms": {arm: figures}}}` (JSON)."""
    return {name: _facts(job, name, arms) for name in job.turns}


def sampled_facts(job: Job, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`{temperature: {arm: figures}}` of the sampled answers to the held-out prompts (JSON)."""
    temperatures = [t for t in job.settings.evaluate.temperatures if t]
    results = {t: _results(job, sampled_place(t), arms) for t in temperatures}
    return {str(t): {arm: _arm_figures([result]) for arm, result in found.items()} for t, found in results.items()}


def _facts(job: Job, name: str, arms: Sequence[str]) -> dict[str, Any]:
    rows = load_rows(job.output, name)
    turns = [_results(job, place_of(name, turn), arms) for turn in range(1, job.turns[name] + 1)]
    answered = len(turns[0][PLAIN].answers)
    scorer = job.settings.evaluate.benchmarks[name].scorer
    facts = {"num_prompts": answered, "num_too_long": len(rows) - answered, "scorer": scorer, "isolation": None}
    figures = {arm: _arm_figures([results[arm] for results in turns]) for arm in arms}
    lossless = _lossless(turns)
    for arm, found in figures.items():
        found["lossless"] = lossless.get(arm)
    if scorer != "none":
        facts["isolation"] = _add_scores(job, name, figures)
    return facts | {"arms": figures}


def _add_scores(job: Job, name: str, figures: Mapping[str, dict[str, Any]]) -> Any:
    """`score` over the rows that say what is right, `kept` (as plain decoding) over all; gives back what contained the programs."""
    found = json.loads(scores_file(job, name).read_bytes())
    rows = {
        row.key: row.reference["score"] for row in scored_rows(job, name) if row.reference and "score" in row.reference
    }
    plain = found["outcomes"][PLAIN]
    for arm, entry in figures.items():
        outcomes = found["outcomes"][arm]
        if rows:  # of several kinds the weakest gives the score its name
            ours, theirs = ({key: o for key, o in of.items() if key in rows} for of in (outcomes, plain))
            entry["score"] = score_facts(min(rows.values()), ours, theirs, Bootstrap())
        entry["kept"] = None if arm == PLAIN else kept_facts(outcomes, plain, Bootstrap())
    return found["isolation"]


def _results(job: Job, place: str, arms: Sequence[str]) -> dict[str, ArmResult]:
    return {arm: load_result(job.arm_file(arm, place)) for arm in arms}


def _arm_figures(turns: Sequence[ArmResult]) -> dict[str, Any]:
    answers = [answer for result in turns for answer in result.answers]
    problems = [problem for result in turns if result.answers for problem in result.problems]
    return answer_figures(answers, turns[0].arm.speculates, Bootstrap()) | {"problems": problems}


def _lossless(turns: Sequence[Mapping[str, ArmResult]]) -> dict[str, dict[str, int]]:
    """By arm, over all turns; plain decoding is what the others are compared with."""
    sums: dict[str, dict[str, int]] = {}
    for results in turns:
        for arm, found in compare_with_plain(results).items():
            counts = lossless_counts(found)
            sums[arm] = {key: count + sums.get(arm, {}).get(key, 0) for key, count in counts.items()}
    return sums
