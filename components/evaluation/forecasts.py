"""What an evaluation will take, before it runs: arms, tokens and work."""

from collections.abc import Mapping
from typing import Any

from components.config import Settings
from components.evaluation.benchmarks import read_benchmark
from components.evaluation.summary import NONE
from components.forecast import Forecast, target_parameters
from components.stage import Artifact
from components.target.stages import target_facts

ARM_START_S = 45.0
MEASURING_SHARE = 0.05  # of a matrix product's speed: one request at a time waits for memory


def tokens_of_arm(evaluate: Mapping[str, Any], benchmark_rows: Mapping[str, int]) -> int:
    """Most tokens that one arm answers with, from the `evaluate` settings (JSON) and the benchmarks' rows."""
    answers = len(evaluate["temperatures"]) * evaluate["num_prompts"] * evaluate["max_new_tokens"]
    asked = sum(rows * evaluate["benchmarks"][name]["max_new_tokens"] for name, rows in benchmark_rows.items())
    return answers + evaluate["speed_prompts"] * evaluate["speed_tokens"] + asked


def _num_timed_again(has_champion: bool) -> int:
    """Arms that the gate compares: plain decoding, the candidate and the champion, where there is one."""
    return 2 + has_champion


def _tokens(arms: int, timed_again: int, evaluate: Mapping[str, Any], benchmark_rows: Mapping[str, int]) -> int:
    """Of all arms, and of the second speed pass of some."""
    second = timed_again * evaluate["speed_prompts"] * evaluate["speed_tokens"]
    return arms * tokens_of_arm(evaluate, benchmark_rows) + second


def _benchmark_rows(settings: Settings) -> dict[str, int]:
    """Answers to each benchmark, over all turns."""
    benchmarks = settings.evaluate.benchmarks.items()
    return {name: sum(len(row.turns) for row in read_benchmark(name, config)) for name, config in benchmarks}


def tokens_done(manifest: Mapping[str, Any]) -> float:
    """The tokens that a finished evaluation's time grew with."""
    facts, evaluate = manifest["facts"], manifest["config"]["evaluate"]
    rows = {name: facts["tasks"][name]["arms"][NONE]["requests"] for name in evaluate["benchmarks"]}
    return _tokens(len(facts["arms"]), _num_timed_again(facts["champion"] is not None), evaluate, rows)


def num_arms(settings: Settings, artifacts: Mapping[str, Artifact]) -> int:
    """Arms that a run measures, as far as the outputs before it say."""
    evaluate = settings.evaluate
    arms = len(evaluate.baselines) + evaluate.candidates
    if _has_champion(artifacts):
        k = artifacts["incumbent"].facts["num_speculative_tokens"]
        arms += 1 + evaluate.candidates * (k != evaluate.num_speculative_tokens)
    return arms


def _has_champion(artifacts: Mapping[str, Artifact]) -> bool:
    return "incumbent" in artifacts and artifacts["incumbent"].facts["version"] is not None


def plan_evaluation(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    """One line for `--plan`."""
    tokens = tokens_of_arm(settings.evaluate.model_dump(), _benchmark_rows(settings))
    return f"{num_arms(settings, artifacts)} arms one after another, at most {tokens} tokens each"


def forecast_evaluation(settings: Settings, known: Mapping[str, Artifact]) -> Forecast:
    """Answers, tokens and work of all arms, one after another."""
    arms, resources = num_arms(settings, known), settings.resources.evaluate
    again = _num_timed_again(_has_champion(known))
    tokens = _tokens(arms, again, settings.evaluate.model_dump(), _benchmark_rows(settings))
    return Forecast(
        rows=arms * settings.evaluate.num_prompts,
        tokens=tokens,
        operations=2.0 * target_parameters(target_facts(settings, known)) * tokens,
        share=MEASURING_SHARE,
        num_gpus=resources.num_gpus * resources.replicas,
        start_s=(arms + again) * ARM_START_S,
    )
