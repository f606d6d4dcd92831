"""The sets of prompts that an arm answers, as token ids: held-out ones, greedily and sampled, and benchmarks turn by turn."""

from collections.abc import Iterator

from components.evaluation.benchmarks import BenchmarkRow, load_rows, place_of
from components.evaluation.job import HELD_OUT, Job, sampled_place
from components.evaluation.prompts import EvaluationPrompt, PromptSet, select_prompts
from components.evaluation.results import load_result
from components.target.chat import load_tokenizer, render

PLAIN = "none"


def missing_sets(job: Job, arm: str, only_held_out: bool) -> Iterator[PromptSet]:
    """The sets that the arm has not answered yet, each made when it is its turn.

    Args:
        job: The evaluation's.
        arm: Its name; plain decoding goes first, because later turns follow its answers.
        only_held_out: Leave out sampled answers, benchmarks and times.
    """
    missing = {place for place in job.places(only_held_out) if not job.arm_file(arm, place).exists()}
    evaluate = job.settings.evaluate
    held_out = select_prompts(job.responses, evaluate.num_prompts, job.max_prompt_tokens).prompts
    temperatures = {HELD_OUT: 0.0} | {sampled_place(t): t for t in evaluate.temperatures if t}
    for place, temperature in temperatures.items():
        if place in missing:
            is_timed = place == HELD_OUT and not only_held_out
            yield PromptSet(place, held_out, evaluate.max_new_tokens, temperature, is_timed)
    for name, turns in job.turns.items():
        for turn in range(1, turns + 1):
            if place_of(name, turn) in missing:
                yield benchmark_set(job, name, turn)


def benchmark_set(job: Job, name: str, turn: int) -> PromptSet:
    """One turn of a benchmark's conversations.

    Raises:
        ValueError: no prompt is short enough for the engine.
    """
    config = job.settings.evaluate.benchmarks[name]
    tokenizer = load_tokenizer(job.target_path)
    said = plain_answers(job, name, turn - 1)
    prompts = []
    for row in load_rows(job.output, name):
        if len(row.turns) < turn or len(said.get(row.key, [])) < turn - 1:
            continue
        messages = list(row.turns[0])
        for answer, piece in zip(said.get(row.key, []), row.turns[1:turn], strict=True):
            messages += [{"role": "assistant", "content": answer}, *piece]
        ids = render(tokenizer, messages, row.tools, True, job.settings.target.chat_template_kwargs)
        prompts.append(EvaluationPrompt(row.key, row.family, tuple(ids)))
    fitting = [prompt for prompt in prompts if len(prompt.prompt_ids) <= job.room_for(config.max_new_tokens)]
    if not fitting and turn == 1:
        raise ValueError(
            f"evaluate.benchmarks.{name}: none of {len(prompts)} prompts and an answer of {config.max_new_tokens} tokens fit "
            "the engine: raise target.max_model_len or lower the benchmark's max_new_tokens"
        )
    return PromptSet(place_of(name, turn), tuple(fitting), config.max_new_tokens)


def plain_answers(job: Job, name: str, turns: int) -> dict[str, list[str]]:
    """What plain decoding said in the first `turns` turns, by the row's key."""
    return answer_texts(job, name, PLAIN, turns)


def answer_texts(job: Job, name: str, arm: str, turns: int) -> dict[str, list[str]]:
    """An arm's answers to the first `turns` turns as text, without the end token, by the row's key."""
    tokenizer = load_tokenizer(job.target_path)
    texts: dict[str, list[str]] = {}
    for turn in range(1, turns + 1):
        for answer in load_result(job.arm_file(arm, place_of(name, turn))).answers:
            texts.setdefault(answer.record.key, []).append(
                tokenizer.decode(answer.output_ids, skip_special_tokens=True)
            )
    return texts


def scored_rows(job: Job, name: str) -> list[BenchmarkRow]:
    """The rows whose answer comes to something that the scorer can tell."""
    return [row for row in load_rows(job.output, name) if row.reference is not None]
