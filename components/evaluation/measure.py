"""Measuring one arm on a real vLLM engine of its own, in two passes that are never mixed.

*Speed*: one request at a time, a fixed number of tokens, end tokens ignored. *Answers*: many at once, until the target ends them, greedy
or sampled, one set of prompts after another; acceptance and losslessness come from here. Each request is followed step by step: how often the target ran for it and
what each step gave is counted, not derived.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from components.evaluation.acceptance import Acceptance, RequestRecord
from components.evaluation.arm_engine import (
    engine_acceptance,
    kv_capacity_tokens,
    num_preemptions,
    platform,
    start_engine,
)
from components.evaluation.arms import Arm
from components.evaluation.prompts import EvaluationPrompt, PromptSet
from components.evaluation.results import Answer, ArmResult, Speed, find_problems

log = logging.getLogger("aerie")

WARMUP_TOKENS = 16
NUM_RIVALS = 8
"""Likely tokens recorded at each position of a plain answer: a tie of several tokens is still seen as one."""
PROGRESS_EVERY_S = 10.0
SAMPLING_SEED = 0
"""Of the first sampled answer; the others count on from it."""


@dataclass(frozen=True)
class MeasureOptions:
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
    sets: Iterable[PromptSet],
    engine_kwargs: Mapping[str, Any],
    options: MeasureOptions,
    target: str,
) -> Iterator[tuple[PromptSet, ArmResult]]:
    """Start the arm's engine in this process and answer one set of prompts after another; each result as it is there.

    Args:
        arm: How to serve.
        sets: What is asked; the next one is looked at when the one before it is answered.
        engine_kwargs: Arguments of `vllm.EngineArgs`, without the speculative ones.
        options: Lengths and concurrency.
        target: The target's digest, kept beside the figures.
    """
    engine, engine_start_s = _start(arm, engine_kwargs, options)
    for number, asked in enumerate(sets):
        if number == 0:
            _warm_up(engine, asked.prompts)
        yield asked, _measure_set(engine, arm, asked, options, target, engine_start_s)


def time_arm(
    arm: Arm, prompts: Sequence[EvaluationPrompt], engine_kwargs: Mapping[str, Any], options: MeasureOptions
) -> tuple[Speed, ...]:
    """The speed pass alone, on an engine of its own as in `measure_arm`, whose arguments these are."""
    engine, _ = _start(arm, engine_kwargs, options)
    _warm_up(engine, prompts)
    return _speed_pass(engine, arm, prompts[: options.speed_prompts], options)


def _start(arm: Arm, engine_kwargs: Mapping[str, Any], options: MeasureOptions) -> tuple[LLMEngine, float]:
    """The arm's engine, and the seconds that it took to start."""
    started = time.monotonic()
    engine = start_engine(arm, engine_kwargs, max_num_seqs=options.concurrency)
    took_s = time.monotonic() - started
    log.info("arm %s: engine up in %.0f s", arm.name, took_s)
    return engine, took_s


def _warm_up(engine: LLMEngine, prompts: Sequence[EvaluationPrompt]) -> None:
    generate(engine, prompts[:1], sampling(WARMUP_TOKENS, ignore_eos=True), 1, "warm-up")


def _measure_set(
    engine: LLMEngine, arm: Arm, asked: PromptSet, options: MeasureOptions, target: str, engine_start_s: float
) -> ArmResult:
    timed = asked.prompts[: options.speed_prompts] if asked.is_timed else ()
    speeds = _speed_pass(engine, arm, timed, options) if timed else ()
    engine.reset_prefix_cache()  # or the answers pass would find its first prompts computed
    started, preempted = time.monotonic(), num_preemptions(engine)
    answers, counters = _answers_pass(engine, arm, asked, options.concurrency)
    return ArmResult(
        arm=arm,
        platform=platform(engine, target),
        answers=answers,
        speeds=speeds,
        engine_start_s=engine_start_s,
        answers_s=time.monotonic() - started,
        engine_counters=counters,
        problems=find_problems(answers, counters, speeds, options.speed_tokens),
        kv_capacity_tokens=kv_capacity_tokens(engine),
        preemptions=num_preemptions(engine) - preempted,
    )


def generate(
    engine: LLMEngine, prompts: Sequence[EvaluationPrompt], params: SamplingParams, concurrency: int, label: str
) -> list[Generation]:
    """Run the prompts with at most `concurrency` at once; one result a prompt, in order.

    Where `params` has a seed, the prompt in place i draws from seed + i.
    """
    waiting = deque(enumerate(prompts))
    running: dict[str, Generation] = {}
    done: dict[str, Generation] = {}
    reported = started = time.monotonic()
    while waiting or running:
        while waiting and len(running) < concurrency:
            place, prompt = waiting.popleft()
            running[prompt.key] = Generation(prompt, time.monotonic())
            engine.add_request(prompt.key, {"prompt_token_ids": list(prompt.prompt_ids)}, _seeded(params, place))
        for output in engine.step():
            running[output.request_id].add(output.outputs[0], time.monotonic())
            if output.finished:
                done[output.request_id] = running.pop(output.request_id)
        if time.monotonic() - reported > PROGRESS_EVERY_S:
            reported = time.monotonic()
            log.info("%s: %d/%d answers, %.2f/s", label, len(done), len(prompts), len(done) / (reported - started))
    return [done[prompt.key] for prompt in prompts]


def _speed_pass(
    engine: LLMEngine, arm: Arm, prompts: Sequence[EvaluationPrompt], options: MeasureOptions
) -> tuple[Speed, ...]:
    engine.reset_prefix_cache()
    params = sampling(options.speed_tokens, ignore_eos=True)
    runs = generate(engine, prompts, params, 1, f"arm {arm.name}, speed")
    return tuple(Speed(run.prompt.key, len(run.token_ids), run.duration_s, run.first_token_s) for run in runs)


def _answers_pass(
    engine: LLMEngine, arm: Arm, asked: PromptSet, concurrency: int
) -> tuple[tuple[Answer, ...], Acceptance | None]:
    before = engine_acceptance(engine)
    keeps_rivals = not arm.speculates and not asked.temperature
    params = sampling(asked.max_new_tokens, asked.temperature, logprobs=NUM_RIVALS if keeps_rivals else None)
    runs = generate(engine, asked.prompts, params, concurrency, f"arm {arm.name}, {asked.place}")
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


def _seeded(params: SamplingParams, place: int) -> SamplingParams:
    if params.seed is None:
        return params
    own = params.clone()
    own.seed = params.seed + place
    return own


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


def sampling(
    max_tokens: int, temperature: float = 0.0, ignore_eos: bool = False, logprobs: int | None = None
) -> SamplingParams:
    """How answers are drawn: greedily at temperature 0, else from a fixed seed."""
    return SamplingParams(
        temperature=temperature,
        seed=SAMPLING_SEED if temperature else None,
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
