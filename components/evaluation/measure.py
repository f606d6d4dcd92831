"""Measuring one arm on a real vLLM engine of its own, in two passes that are never mixed.

*Speed*: one request at a time, a fixed number of tokens, end tokens ignored. *Answers*: greedy, many at once, until the target ends
them; acceptance and losslessness come from here. Each request is followed step by step: how often the target ran for it and
what each step gave is counted, not derived.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm import EngineArgs, SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter, Vector

from components.evaluation.acceptance import Acceptance, RequestRecord
from components.evaluation.arms import Arm
from components.evaluation.prompts import EvaluationPrompt
from components.evaluation.results import Answer, ArmResult, Speed, find_problems
from components.section import ConfigError

log = logging.getLogger("aerie")

WARMUP_TOKENS = 16
NUM_RIVALS = 4
"""Likely tokens recorded at each position of a plain answer: a tie of three tokens is still seen as one."""
PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True)
class MeasureOptions:
    max_new_tokens: int
    """Longest answer of the answers pass."""
    concurrency: int
    """Requests at once in the answers pass."""
    speed_prompts: int
    """Prompts of the speed pass; 0 leaves it out."""
    speed_tokens: int
    """Tokens of each answer in the speed pass."""


@dataclass
class Generation:
    """One request while it runs, and what it gave at its end."""

    prompt: EvaluationPrompt
    submitted_s: float
    token_ids: list[int] = field(default_factory=list)
    num_steps: int = 0
    """Engine steps that gave this request at least one token."""
    first_token_s: float = 0.0
    duration_s: float = 0.0
    rivals: list[dict[int, float]] = field(default_factory=list)
    last: CompletionOutput | None = None

    def add(self, output: CompletionOutput, now_s: float) -> None:
        if output.token_ids:
            self.num_steps += 1
            self.first_token_s = self.first_token_s or now_s - self.submitted_s
        self.token_ids += output.token_ids
        for token, candidates in zip(output.token_ids, output.logprobs or [], strict=False):
            best = candidates[token].logprob
            self.rivals.append({i: best - c.logprob for i, c in candidates.items() if i != token})
        self.duration_s = now_s - self.submitted_s
        self.last = output


def measure_arm(
    arm: Arm,
    prompts: Sequence[EvaluationPrompt],
    engine_kwargs: Mapping[str, Any],
    options: MeasureOptions,
    target: str,
) -> ArmResult:
    """Start the arm's engine in this process and run both passes.

    Args:
        arm: How to serve.
        prompts: What every arm is asked.
        engine_kwargs: Arguments of `vllm.EngineArgs`, without the speculative ones.
        options: Lengths and concurrency.
        target: The target's digest, kept beside the figures.
    """
    started = time.monotonic()
    engine = start_engine(arm, engine_kwargs, max_num_seqs=options.concurrency)
    engine_start_s = time.monotonic() - started
    log.info("arm %s: engine up in %.0f s", arm.name, engine_start_s)
    generate(engine, prompts[:1], greedy(WARMUP_TOKENS, ignore_eos=True), 1, "warm-up")
    speeds = _speed_pass(engine, arm, prompts[: options.speed_prompts], options)
    engine.reset_prefix_cache()  # or the answers pass would find its first prompts computed
    started = time.monotonic()
    answers, counters = _answers_pass(engine, arm, prompts, options)
    return ArmResult(
        arm=arm,
        platform=platform(engine, target),
        answers=answers,
        speeds=speeds,
        engine_start_s=engine_start_s,
        answers_s=time.monotonic() - started,
        engine_counters=counters,
        problems=find_problems(answers, counters),
    )


def start_engine(arm: Arm, engine_kwargs: Mapping[str, Any], **defaults: Any) -> LLMEngine:
    """A vLLM engine that serves the arm and counts per request; `engine_kwargs` go before `defaults`.

    Raises:
        ConfigError: vLLM takes what drafts for a draft of another method.
    """
    kwargs: dict[str, Any] = defaults | dict(engine_kwargs) | {"disable_log_stats": False}
    if arm.speculates:  # vLLM refuses the setting where nothing speculates
        kwargs |= {"speculative_config": arm.speculative_config(), "per_request_spec_decode_metrics": "summary"}
    engine = LLMEngine.from_engine_args(EngineArgs(**kwargs))
    _check_method(engine, arm)
    return engine


def _check_method(engine: LLMEngine, arm: Arm) -> None:
    """vLLM guesses the method of some drafts by their architecture, and then the figures would be another arm's."""
    wanted, served = arm.speculative_config(), engine.vllm_config.speculative_config
    if wanted and (served is None or served.method != wanted["method"]):
        found = served.method if served else "no speculation"
        raise ConfigError(
            f"evaluate.baselines.{arm.name}.method",
            f"vLLM serves {arm.model or 'the target'} by {found}, not by {wanted['method']}",
            "state the method that this draft was made for",
        )


def platform(engine: LLMEngine, target: str) -> dict[str, str]:
    """What figures depend on besides the arm."""
    device = engine.vllm_config.device_config.device_type
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "target": target,
    }


def generate(
    engine: LLMEngine, prompts: Sequence[EvaluationPrompt], params: SamplingParams, concurrency: int, label: str
) -> list[Generation]:
    """Run the prompts with at most `concurrency` at once; one result a prompt, in order."""
    waiting = deque(prompts)
    running: dict[str, Generation] = {}
    done: dict[str, Generation] = {}
    reported = started = time.monotonic()
    while waiting or running:
        while waiting and len(running) < concurrency:
            prompt = waiting.popleft()
            running[prompt.key] = Generation(prompt, time.monotonic())
            engine.add_request(prompt.key, {"prompt_token_ids": list(prompt.prompt_ids)}, params)
        for output in engine.step():
            running[output.request_id].add(output.outputs[0], time.monotonic())
            if output.finished:
                done[output.request_id] = running.pop(output.request_id)
        if time.monotonic() - reported > PROGRESS_EVERY_S:
            reported = time.monotonic()
            log.info("%s: %d/%d answers, %.2f/s", label, len(done), len(prompts), len(done) / (reported - started))
    return [done[prompt.key] for prompt in prompts]


def engine_acceptance(engine: LLMEngine) -> Acceptance:
    """The engine's counters since its start (all its drafts, of every request)."""
    metrics = engine.get_metrics()
    counts = {m.name.removeprefix("vllm:spec_decode_num_"): m.value for m in metrics if isinstance(m, Counter)}
    vectors = [m.values for m in metrics if isinstance(m, Vector)]
    return Acceptance(
        rounds=counts.get("drafts", 0),
        drafted=counts.get("draft_tokens", 0),
        accepted=counts.get("accepted_tokens", 0),
        accepted_at=tuple(vectors[0]) if vectors else (),
    )


def _speed_pass(
    engine: LLMEngine, arm: Arm, prompts: Sequence[EvaluationPrompt], options: MeasureOptions
) -> tuple[Speed, ...]:
    engine.reset_prefix_cache()
    params = greedy(options.speed_tokens, ignore_eos=True)
    runs = generate(engine, prompts, params, 1, f"arm {arm.name}, speed")
    return tuple(Speed(run.prompt.key, len(run.token_ids), run.duration_s, run.first_token_s) for run in runs)


def _answers_pass(
    engine: LLMEngine, arm: Arm, prompts: Sequence[EvaluationPrompt], options: MeasureOptions
) -> tuple[tuple[Answer, ...], Acceptance | None]:
    before = engine_acceptance(engine)
    params = greedy(options.max_new_tokens, logprobs=None if arm.speculates else NUM_RIVALS)
    runs = generate(engine, prompts, params, options.concurrency, f"arm {arm.name}, answers")
    answers = tuple(make_answer(run, arm) for run in runs)
    return answers, _difference(engine_acceptance(engine), before) if arm.speculates else None


def make_answer(run: Generation, arm: Arm) -> Answer:
    """What is kept of a finished request: its counters as vLLM sums them over its rounds, its tokens and its steps."""
    assert run.last is not None
    metrics = run.last.spec_decode_metrics
    histogram = metrics.histogram if metrics else []
    record = RequestRecord(
        key=run.prompt.key,
        family=run.prompt.family,
        arm=arm.name,
        prompt_tokens=len(run.prompt.prompt_ids),
        output_tokens=len(run.token_ids),
        finish_reason=run.last.finish_reason,
        rounds=sum(histogram),
        drafted=metrics.num_draft_tokens if metrics else 0,
        accepted=sum(accepted * count for accepted, count in enumerate(histogram)),
        accepted_at=tuple(sum(histogram[i:]) for i in range(1, len(histogram))),
        duration_s=run.duration_s,
        error=_error(run, arm),
    )
    return Answer(record, tuple(run.token_ids), max(run.num_steps - 1, 0), tuple(run.rivals))


def _error(run: Generation, arm: Arm) -> str | None:
    """An answer with nothing but its end token is empty: counting it as a success would hide a broken arm."""
    assert run.last is not None
    if run.last.finish_reason not in ("stop", "length"):
        return f"finish reason {run.last.finish_reason}"
    if len(run.token_ids) <= (run.last.finish_reason == "stop"):
        return "empty answer"
    if arm.speculates and run.last.spec_decode_metrics is None:
        return "no acceptance counters"
    return None


def greedy(max_tokens: int, ignore_eos: bool = False, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _difference(after: Acceptance, before: Acceptance) -> Acceptance:
    earlier = before.accepted_at or (0,) * len(after.accepted_at)
    return Acceptance(
        rounds=after.rounds - before.rounds,
        drafted=after.drafted - before.drafted,
        accepted=after.accepted - before.accepted,
        accepted_at=tuple(a - b for a, b in zip(after.accepted_at, earlier, strict=True)),
    )
