"""What is asked: prompts of each task as rendered text, in the file that `vllm bench serve` reads, the same for every arm.

The file has texts and no ids, so only prompts whose text gives their very ids again are used; the others are counted.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from components.config import PromptSource, Settings
from components.data.prompts import Prompt, read_prompts
from components.data.sources import blamed_on
from components.evaluation.job import DRAFT_ROOM
from components.evaluation.prompts import EvaluationPrompt, select_prompts
from components.section import ConfigError
from components.speed.sweep import num_requests, points
from components.storage import Location
from components.target.chat import TemplateError, load_tokenizer, render

CODE, CHAT = "code_editing", "chat"
ALL = 10**9


@dataclass(frozen=True)
class Task:
    """Prompts of one kind, reported apart."""

    name: str
    families: tuple[str, ...]
    prompts: tuple[EvaluationPrompt, ...]
    num_left_out: int
    """Too long, refused by the chat template, or with a text that gives other ids."""


def task_file(output: Location, task: str) -> Location:
    """One line a request: `prompt` and the `key` of what is asked."""
    return output.join("inputs", f"{task}.jsonl")


def read_keys(file: Location) -> list[str]:
    return [json.loads(line)["key"] for line in file.read_bytes().splitlines()]


def write_inputs(settings: Settings, target_path: str, responses: Location, output: Location) -> dict[str, Any]:
    """Write every task's file and say what is in it.

    Raises:
        ConfigError: a task without a usable prompt.
    """
    tokenizer = load_tokenizer(target_path)
    named = settings.speed.prompts
    tasks = _from_files(settings, tokenizer) if named else _held_out(settings, tokenizer, responses)
    largest = {task.name: _num_lines(settings, task) for task in tasks}
    for task in tasks:
        lines = [
            {"prompt": _text(tokenizer, p.prompt_ids), "key": p.key}
            for p in islice(cycle(task.prompts), largest[task.name])
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        task_file(output, task.name).write_bytes(text.encode())
    return {task.name: _described(task, task_file(output, task.name)) for task in tasks}


def _num_lines(settings: Settings, task: Task) -> int:
    return max(num_requests(point, len(task.prompts)) for point in points([task.name], settings.speed))


def _described(task: Task, file: Location) -> dict[str, Any]:
    return {
        "families": list(task.families),
        "num_prompts": len(task.prompts),
        "left_out": task.num_left_out,
        "prompt_tokens": sum(len(prompt.prompt_ids) for prompt in task.prompts),
        "sha256": file.sha256(),
    }


def _held_out(settings: Settings, tokenizer: PreTrainedTokenizerBase, responses: Location) -> list[Task]:
    """Held-out prompts that ask to edit code, and all the others."""
    selection = select_prompts(responses, ALL, ALL)
    tasks = []
    for name in (CODE, CHAT):
        prompts = [p for p in selection.prompts if (p.family == CODE) == (name == CODE)]
        if prompts:
            tasks.append(_task(settings, tokenizer, name, prompts, 0))
    return tasks


def _from_files(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    tasks = []
    for name, path in settings.speed.prompts.items():
        with blamed_on(f"speed.prompts.{name}"):
            prompts, bad = read_prompts([PromptSource(path=path)])
        asked = list(_first_turns(prompts, tokenizer, settings.target.chat_template_kwargs))
        tasks.append(_task(settings, tokenizer, name, asked, len(bad) + len(prompts) - len(asked)))
    return tasks


def _first_turns(
    prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> Iterable[EvaluationPrompt]:
    for prompt in prompts:
        try:
            first = prompt.ids or render(tokenizer, prompt.turns()[0], prompt.tools, template_kwargs=template_kwargs)
        except TemplateError:
            continue
        yield EvaluationPrompt(prompt.key, prompt.family, tuple(first))


def _task(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    prompts: Sequence[EvaluationPrompt],
    num_bad: int,
) -> Task:
    room = settings.target.max_model_len - settings.speed.output_tokens - DRAFT_ROOM
    usable = [p for p in prompts if len(p.prompt_ids) <= room and _same_ids(tokenizer, p.prompt_ids)]
    if not usable:
        raise ConfigError(
            "speed.prompts" if settings.speed.prompts else "speed.output_tokens",
            f"task {name} has {len(prompts) + num_bad} prompts, none usable of at most {room} tokens",
            "raise target.max_model_len, lower speed.output_tokens or name other prompts",
        )
    chosen = tuple(usable[: settings.speed.num_prompts])
    families = tuple(sorted({prompt.family for prompt in chosen}))
    return Task(name, families, chosen, num_bad + len(prompts) - len(usable))


def _same_ids(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> bool:
    text = _text(tokenizer, prompt_ids)
    return tokenizer(text, add_special_tokens=False).input_ids == list(prompt_ids)


def _text(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str:
    return tokenizer.decode(list(prompt_ids), clean_up_tokenization_spaces=False)
