"""The heavy work of evaluation as tasks, each in a process of its own that writes its own file and ends.

A fresh process an arm: nothing of one arm's engine (memory, threads, counters) is there when the next one is timed.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch

from components.config import StageResources
from components.draft.checkpoint import load_head
from components.evaluation.answer_sets import missing_sets
from components.evaluation.arms import Arm
from components.evaluation.benchmark_facts import score_benchmark
from components.evaluation.job import AGAIN, HELD_OUT, Job
from components.evaluation.measure import MeasureOptions, measure_arm, time_arm
from components.evaluation.preflight import RecordedText, compare_drafts, record_texts
from components.evaluation.processes import FreshProcesses, log_to_driver
from components.evaluation.prompts import (
    PREFLIGHT_PROMPTS,
    PREFLIGHT_TOKENS,
    PROMPTS,
    PromptSet,
    dump_prompts,
    load_prompts,
    read_responses,
    select_prompts,
)
from components.evaluation.recorder import RecordedDraft
from components.evaluation.results import TimedAgain, as_json, cut_short, load_result, save_result, save_timed_again
from components.evaluation.walked import RecordedAnswer, walk_bigram, walk_head
from components.storage import Location
from components.target.engine import engine_env, has_gpu
from components.target.layers import load_target

RECORDED = "_recorded.json"
PREFLIGHT = "preflight.json"
WALKED = "walked.json"


def fresh_processes(job: Job) -> FreshProcesses:
    """Processes with the evaluation's resources, for the tasks below."""
    return FreshProcesses(job.resources, task_env(job.resources), __name__)


def task_env(resources: StageResources) -> dict[str, str]:
    env = engine_env(resources, in_process=True)
    if not has_gpu(resources) and resources.engine.get("enforce_eager", True):
        # one small function of vLLM's log probabilities would be compiled while the first answers wait for it (a minute)
        env = {"TORCH_COMPILE_DISABLE": "1"} | env
    return env


def measure_task(job: Job, arm: Arm, only_held_out: bool) -> None:
    """Let the arm answer every set of prompts that it has not answered yet, and write `<place>/<arm>.json` of each as it is done."""
    log_to_driver()
    sets = missing_sets(job, arm.name, only_held_out)
    for asked, result in measure_arm(arm, sets, job.engine_kwargs(), _options(job), job.target_digest):
        if asked.place == HELD_OUT:
            job.output.join(PROMPTS).write_bytes(dump_prompts(asked.prompts))
        save_result(result, job.arm_file(arm.name, asked.place))


def time_again_task(job: Job, arm: Arm) -> None:
    """Repeat the speed pass of an arm that was measured, and write `again/<arm>.json`."""
    log_to_driver()
    speeds = time_arm(arm, load_prompts(job.output.join(PROMPTS)), job.engine_kwargs(), _options(job))
    problems = cut_short(speeds, job.settings.evaluate.speed_tokens)
    save_timed_again(TimedAgain(speeds, tuple(problems)), job.arm_file(arm.name, AGAIN))


def _options(job: Job) -> MeasureOptions:
    evaluate = job.settings.evaluate
    return MeasureOptions(evaluate.concurrency, evaluate.speed_prompts, evaluate.speed_tokens)


def answer_task(job: Job, arm: Arm, prompts: Location, place: str) -> None:
    """Let the arm answer the prompts in the file `prompts` greedily, and write `<place>/<arm>.json`."""
    log_to_driver()
    asked = PromptSet(place, load_prompts(prompts), job.settings.evaluate.max_new_tokens)
    options = MeasureOptions(job.settings.evaluate.concurrency, speed_prompts=0, speed_tokens=0)
    for _, result in measure_arm(arm, [asked], job.engine_kwargs(), options, job.target_digest):
        save_result(result, job.arm_file(arm.name, place))


def score_task(job: Job, name: str, arms: tuple[str, ...]) -> None:
    """Judge the answers of these arms to one benchmark."""
    log_to_driver()
    score_benchmark(job, name, arms)


def walk_task(job: Job, head: str, num_depths: tuple[int, ...]) -> None:
    """Walk head and bigram table along the plain arm's answers and write `walked.json`."""
    prompts = select_prompts(job.responses, job.settings.evaluate.num_prompts, job.max_prompt_tokens).prompts
    outputs = {a.record.key: a.output_ids for a in load_result(job.arm_file("none")).answers}
    answers = [RecordedAnswer(p.prompt_ids, outputs[p.key]) for p in prompts if outputs[p.key]]
    training = read_responses(job.responses, ["output_ids"], split="train")["output_ids"].to_pylist()
    walks = walk_head(answers, _target(job), load_head(head).to(_device(job)), num_depths)
    bigram = {k: walk_bigram(answers, training, job.vocab_size, k) for k in num_depths}
    figures = {"head": walks, "bigram": bigram}
    lines = {name: {str(k): _walk_json(walk) for k, walk in by_k.items()} for name, by_k in figures.items()}
    job.output.join(WALKED).write_bytes(json.dumps(lines, indent=1).encode())


def record_task(job: Job, arm: Arm) -> None:
    """Let vLLM draft with the head and write what it proposed to `_recorded.json`."""
    log_to_driver()
    prompts = select_prompts(job.responses, PREFLIGHT_PROMPTS, job.max_prompt_tokens).prompts
    texts = record_texts(arm, prompts, job.engine_kwargs(), PREFLIGHT_TOKENS)
    job.output.join(RECORDED).write_bytes(json.dumps([as_json(text) for text in texts]).encode())


def compare_task(job: Job, head: str) -> None:
    """Draft on the recorded texts ourselves and write `preflight.json`."""
    rows = json.loads(job.output.join(RECORDED).read_bytes())
    report = compare_drafts([recorded_text(row) for row in rows], _target(job), load_head(head).to(_device(job)))
    job.output.join(PREFLIGHT).write_bytes(json.dumps(as_json(report), indent=1).encode())


def recorded_text(row: Mapping[str, Any]) -> RecordedText:
    proposals = [
        RecordedDraft(request, anchor, token, tuple(drafts)) for request, anchor, token, drafts in row["proposals"]
    ]
    return RecordedText(row["key"], row["num_prompt_tokens"], tuple(row["token_ids"]), tuple(proposals))


def _target(job: Job) -> Any:
    return load_target(job.target_path, getattr(torch, job.settings.target.dtype), _device(job))


def _device(job: Job) -> str:
    return "cuda" if has_gpu(job.resources) else "cpu"


def _walk_json(walk: Any) -> dict[str, Any]:
    return {
        "al": walk.acceptance_length,
        "rounds": walk.rounds,
        "accepted": walk.accepted,
        "accepted_at": list(walk.accepted_at_K),
    }
