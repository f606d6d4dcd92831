"""The `speed` stage: plain vLLM servers, one arm with one K at a time, under `vllm bench serve`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

from components.config import PromptSource, Settings
from components.data.sources import blamed_on, source_identity
from components.evaluation.arms import Arm, baseline_arms
from components.evaluation.forecasts import MEASURING_SHARE
from components.evaluation.processes import FreshProcesses
from components.evaluation.stages import (
    candidate_heads,
    champion_head,
    platform_identity,
)
from components.evaluation.summary import CANDIDATE, CHAMPION, NONE, needed_arms
from components.forecast import Forecast, target_parameters
from components.publishing.drafts import draft_keys
from components.speed.dynamic import SUFFIX, dynamic_server, judge, why_not
from components.speed.metrics import metrics_of_speed
from components.speed.sweep import SCHEDULE, Point, Served, num_requests, num_servers, points, servers
from components.stage import Artifact, Outcome, Output, Stage
from components.target.engine import engine_env, engine_identity
from components.target.stages import target_facts, target_path

if TYPE_CHECKING:  # vLLM and transformers take seconds to import: only a stage that measures loads them
    from components.speed.loads import Load
    from components.speed.measuring import Job
    from components.speed.results import PointFiles

log = logging.getLogger("aerie")

LEFT_OUT = "left out: speed.concurrencies is empty"
SERVER_START_S = 60.0
HELD_OUT_TASKS = 2
TASKS = "components.speed.measuring"


def speed_stage(settings: Settings) -> Stage:
    """Measures tokens/s and latencies of every arm at every K and load; without `speed.concurrencies` it does nothing."""
    speed = settings.speed

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        if speed.is_left_out:
            log.info("speed: %s", LEFT_OUT)
            return Outcome({"left_out": True, "points": [], "arms": {}, "recommended": {}})
        return _measure(settings, inputs, output)

    return Stage(
        name="speed",
        run=run,
        config={"speed": "left out"}
        if speed.is_left_out
        else engine_identity(settings, settings.resources.evaluate) | _identity(settings),
        inputs=() if speed.is_left_out else ("target", "responses", "head", "incumbent", "drafts", "evaluation"),
        extra=lambda: {} if speed.is_left_out else platform_identity(settings) | _files_identity(settings),
        check=lambda: None if speed.is_left_out else _check(settings),
        plan=lambda artifacts: LEFT_OUT if speed.is_left_out else _plan(settings, artifacts),
        forecast=lambda known, expected: Forecast() if speed.is_left_out else _forecast(settings, known),
        tokens_done=lambda manifest: manifest["facts"].get("tokens"),
    )


def arms_of(settings: Settings, inputs: Mapping[str, Artifact]) -> list[Arm]:
    """The evaluation's arms: the baselines, the candidate that it chose, and the champion; plain decoding first."""
    chosen = inputs["evaluation"].facts["candidate"]["arm"]
    candidate = next(head for head in candidate_heads(settings, inputs) if head.name == chosen)
    baselines = baseline_arms(settings.evaluate.baselines, draft_keys(inputs["drafts"]))
    arms = needed_arms(baselines, candidate, champion_head(inputs["incumbent"]))
    return [arm for arm, is_served in arms if is_served]


def _measure(settings: Settings, inputs: Mapping[str, Artifact], output: Output) -> Outcome:
    from components.speed.as_served import compare_as_served
    from components.speed.inputs import write_inputs
    from components.speed.loads import load_all
    from components.speed.measuring import Job
    from components.speed.summary import best_k, summarise

    path = str(target_path(inputs["target"]))
    tasks = write_inputs(settings, path, inputs["responses"].location, output.location)
    output.join("pip-freeze.txt").write_bytes(_installed().encode())
    job = Job(settings, path, output.location, {name: task["num_prompts"] for name, task in tasks.items()})
    arms, loads = arms_of(settings, inputs), points(list(tasks), settings.speed)
    resources = settings.resources.evaluate
    with FreshProcesses(resources, engine_env(resources), TASKS) as processes:
        files = _sweep(processes, job, servers(arms, settings.speed.num_speculative_tokens), loads)
        speculating = [arm for arm in arms if arm.speculates] if settings.speed.dynamic else []
        best = {arm.name: best_k(load_all(files), arm.name) for arm in speculating}
        refused = {arm.name: why_not(arm, best[arm.name]) for arm in speculating}
        scheduled = [dynamic_server(arm, best[arm.name]) for arm in speculating if refused[arm.name] is None]
        files += _sweep(processes, job, scheduled, [load for load in loads if load.request_rate is None])
    measured = load_all(files)
    facts = summarise(measured) | {
        "as_served": compare_as_served(measured, *_compared(arms), settings.publish.gate),
        "tasks": tasks,
        "tokens": sum(load.total("output_tokens") for load in measured),
        "dynamic": {arm.name: _dynamic(measured, arm, refused[arm.name], scheduled) for arm in speculating},
    }
    output.report(metrics_of_speed(facts), 0)
    output.join("speed.json").write_bytes(json.dumps(facts, indent=1, sort_keys=True).encode())
    for row in facts["points"]:
        if row["invalid"]:
            log.warning(
                "speed: %s, %s at c=%d is not valid: %s", row["arm"], row["task"], row["concurrency"], row["invalid"]
            )
    return Outcome(facts)


def _compared(arms: Sequence[Arm]) -> tuple[Arm, Arm]:
    """The candidate, and the arm that it would replace: the champion, or plain decoding while there is none."""
    named = {arm.name: arm for arm in arms}
    candidate = next(arm for arm in arms if arm.name.startswith(CANDIDATE))
    return candidate, named.get(CHAMPION, named[NONE])


def _sweep(processes: FreshProcesses, job: Job, swept: Sequence[Served], loads: Sequence[Point]) -> list[PointFiles]:
    """Measure what no earlier run has: all servers in turn, and then again, so that a slow hour meets them all."""
    from components.speed.measuring import measure_server

    turns = [(repetition, served) for repetition in range(job.settings.speed.repetitions) for served in swept]
    for number, (repetition, served) in enumerate(turns, 1):
        missing = job.missing(served, loads, repetition)
        if missing:
            title = f"speed: server {number} of {len(turns)}, {served.label}"
            processes.run(title, measure_server, job, served, missing, repetition)
    return [job.files(served, load, repetition) for repetition, served in turns for load in loads]


def _dynamic(measured: Sequence[Load], arm: Arm, refused: str | None, scheduled: Sequence[Served]) -> dict[str, Any]:
    if refused is not None:
        return {"refused": refused}
    served = next(s for s in scheduled if s.arm.name == arm.name + SUFFIX)
    return {"arm": served.arm.name, "schedule": served.arm.options[SCHEDULE]} | judge(measured, arm.name, NONE)


def _identity(settings: Settings) -> dict[str, Any]:
    """What can change a figure; not how long one waits for a server."""
    speed = settings.speed.model_dump(mode="json", exclude={"start_timeout_s", "prompts"})
    baselines = {name: arm.model_dump(mode="json") for name, arm in settings.evaluate.baselines.items()}
    gate = settings.publish.gate  # draws the intervals that it is shown
    own = {"num_speculative_tokens": settings.evaluate.num_speculative_tokens, "baselines": baselines}
    return {
        "speed": speed,
        "tasks": list(settings.speed.prompts),
        "arms": own,
        "intervals": gate.model_dump(include={"confidence", "bootstrap_samples", "seed"}),
    }


def _files_identity(settings: Settings) -> dict[str, Any]:
    identities = {}
    for name, path in settings.speed.prompts.items():
        with blamed_on(f"speed.prompts.{name}"):
            identities[name] = source_identity(PromptSource(path=path))
    return {"prompts": identities} if identities else {}


def _check(settings: Settings) -> None:
    """Raises ConfigError for a file of prompts that is not there: not after hours of training."""
    _files_identity(settings)


def _installed() -> str:
    """What `pip freeze` lists."""
    found = {f"{package.name}=={package.version}" for package in distributions()}
    return "".join(f"{line}\n" for line in sorted(found, key=str.lower))


def _num_servers(settings: Settings, known: Mapping[str, Artifact]) -> int:
    heads = [settings.evaluate.num_speculative_tokens]
    if "incumbent" in known and known["incumbent"].facts["version"] is not None:
        heads.append(known["incumbent"].facts["num_speculative_tokens"])
    baselines = list(settings.evaluate.baselines.values())
    return num_servers(baselines, heads, settings.speed.num_speculative_tokens) * settings.speed.repetitions


def _loads(settings: Settings) -> list[Point]:
    tasks = list(settings.speed.prompts) or [str(number) for number in range(HELD_OUT_TASKS)]
    return points(tasks, settings.speed)


def _plan(settings: Settings, known: Mapping[str, Artifact]) -> str:
    num, loads = _num_servers(settings, known), len(_loads(settings))
    return f"{num} servers one after another, {num * loads} points"


def _forecast(settings: Settings, known: Mapping[str, Artifact]) -> Forecast:
    """Without dynamic K, which depends on what is measured; tokens only where the number of prompts is a setting."""
    speed, resources, num = settings.speed, settings.resources.evaluate, _num_servers(settings, known)
    if speed.num_prompts is None:
        return Forecast(start_s=num * SERVER_START_S)
    requests = num * sum(num_requests(load, speed.num_prompts) for load in _loads(settings))
    tokens = requests * speed.output_tokens
    return Forecast(
        rows=requests,
        tokens=tokens,
        operations=2.0 * target_parameters(target_facts(settings, known)) * tokens,
        share=MEASURING_SHARE,
        num_gpus=resources.num_gpus * resources.replicas,
        start_s=num * SERVER_START_S,
    )
