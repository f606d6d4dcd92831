"""What an arm still has to answer, and what the benchmarks' answers come to: with a real tokenizer and sandbox, without an engine."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from components.evaluation.acceptance import RequestRecord
from components.evaluation.answer_sets import answer_texts, missing_sets
from components.evaluation.arms import Arm
from components.evaluation.benchmark_facts import benchmark_facts, sampled_facts, score_benchmark
from components.evaluation.benchmarks import load_rows, num_turns, read_benchmark, save_rows
from components.evaluation.job import Job
from components.evaluation.prompts import PromptSet
from components.evaluation.results import Answer, ArmResult, save_result
from components.storage import Location
from components.target.chat import load_tokenizer, render
from tests.components.evaluation.artifacts import tiny_settings, write_responses

NONE, NGRAM = Arm("none", "none"), Arm("ngram", "ngram", 2)
RIGHT, WRONG = "```python\ndef f(x):\n    return x + 1\n```", "```python\ndef f(x):\n    return x\n```"
CODE = {"prompt": 'def f(x):\n    """Add 1.\n    >>> f(1)\n    2\n    """\n'}
CHAT = {"turns": ["Write a poem.", "Shorter."], "task": "writing"}
PLACES = [
    "arms",
    "sampled/0.7",
    "benchmarks/code/turn-1",
    "benchmarks/chat_turns/turn-1",
    "benchmarks/chat_turns/turn-2",
]


@pytest.fixture
def job(tmp_path: Path, tiny_target: Path) -> Job:
    for name, row in (("code", CODE), ("chat_turns", CHAT)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    benchmarks = {
        "code": {"path": str(tmp_path / "code.jsonl"), "scorer": "humaneval", "max_new_tokens": 40},
        "chat_turns": {"path": str(tmp_path / "chat_turns.jsonl"), "max_new_tokens": 8},
    }
    evaluate = {"temperatures": [0.0, 0.7], "benchmarks": benchmarks, "max_new_tokens": 16, "speed_tokens": 16}
    settings = tiny_settings(tiny_target, evaluate=evaluate)
    rows = [{"key": "p", "family": "f", "split": "held_out", "prompt_ids": [9, 10], "output_ids": [9]}]
    responses, output = write_responses(tmp_path / "responses", rows), Location(str(tmp_path / "out"))
    turns = {}
    for name, config in settings.evaluate.benchmarks.items():
        found = read_benchmark(name, config)
        save_rows(found, output, name)
        turns[name] = num_turns(found)
    return Job(settings, str(tiny_target), "target", 512, responses.location, output, turns)


def answer(job: Job, arm: Arm, place: str, keys: Sequence[str], text: str) -> None:
    """Let the arm have said `text` to the prompts `keys`."""
    ids = tuple(load_tokenizer(job.target_path)(text, add_special_tokens=False).input_ids)
    answers = []
    for key in keys:
        rounds = len(ids) // 2 if arm.speculates else 0
        at = (rounds, 0) if rounds else ()
        record = RequestRecord(key, "f", arm.name, 5, len(ids), "stop", rounds, 2 * rounds, rounds, at, 1.0)
        rivals = () if arm.speculates else tuple({} for _ in ids)
        answers.append(Answer(record, ids, len(ids) - 1 - rounds, rivals))
    platform = {"dtype": "float32"}
    save_result(ArmResult(arm, platform, tuple(answers), (), 1.0, 1.0), job.arm_file(arm.name, place))


def answer_everything(job: Job, arm: Arm, code: str) -> None:
    """As `measure_task` does: one set after another, each made when it is its turn."""
    for asked in missing_sets(job, arm.name, only_held_out=False):
        said = code if "code" in asked.place else "A poem."
        answer(job, arm, asked.place, [prompt.key for prompt in asked.prompts], said)


def places(sets: Sequence[PromptSet]) -> list[str]:
    return [asked.place for asked in sets]


def test_an_arm_answers_what_is_missing_in_order(job: Job) -> None:
    assert list(job.places(only_held_out=False)) == PLACES
    assert places(list(missing_sets(job, "candidate_at_k3", only_held_out=True))) == ["arms"]
    answer_everything(job, NONE, RIGHT)
    assert job.is_measured("none", only_held_out=False)
    for place in ("benchmarks/chat_turns/turn-2", "sampled/0.7"):  # killed before these were written
        job.arm_file("none", place).delete()
    assert not job.is_measured("none", only_held_out=False)
    assert job.is_measured("none", only_held_out=True)

    sampled, turn = missing_sets(job, "none", only_held_out=False)

    assert (sampled.place, sampled.temperature, sampled.is_timed) == ("sampled/0.7", 0.7, False)
    assert turn.place == "benchmarks/chat_turns/turn-2"


def test_only_the_greedy_held_out_prompts_are_timed(job: Job) -> None:
    first = next(missing_sets(job, "none", only_held_out=False))
    assert (first.place, first.temperature, first.is_timed, first.max_new_tokens) == ("arms", 0.0, True, 16)
    assert not next(missing_sets(job, "none", only_held_out=True)).is_timed


def test_a_later_turn_follows_plain_decodings_answer_on_every_arm(job: Job) -> None:
    answer_everything(job, NONE, RIGHT)
    answer(job, NGRAM, "benchmarks/chat_turns/turn-1", [load_rows(job.output, "chat_turns")[0].key], "Another poem.")

    *_, turn = missing_sets(job, "ngram", only_held_out=False)

    conversation = [
        {"role": "user", "content": "Write a poem."},
        {"role": "assistant", "content": "A poem."},
        {"role": "user", "content": "Shorter."},
    ]
    assert list(turn.prompts[0].prompt_ids) == render(load_tokenizer(job.target_path), conversation)
    assert answer_texts(job, "chat_turns", "none", 2) == {turn.prompts[0].key: ["A poem.", "A poem."]}


def test_a_prompt_without_room_for_its_answer_is_counted(job: Job, tiny_target: Path) -> None:
    target = job.settings.target.model_copy(update={"max_model_len": 90})
    small = Job(
        job.settings.model_copy(update={"target": target}), str(tiny_target), "target", 512, job.responses, job.output, job.turns
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"evaluate\.benchmarks\.code: none of 1 prompts and an answer of 40 tokens"):
        list(missing_sets(small, "none", only_held_out=False))


def test_scores_stand_beside_plain_decodings_and_turns_are_joined(job: Job) -> None:
    answer_everything(job, NONE, RIGHT)
    answer_everything(job, NGRAM, WRONG)
    score_benchmark(job, "code", ("none", "ngram"))

    facts = benchmark_facts(job, ("none", "ngram"))

    code, chat = facts["code"]["arms"], facts["chat_turns"]["arms"]
    assert facts["code"]["isolation"].keys() == {"namespaces", "landlock"}
    assert code["none"]["score"]["name"] == "docstring examples"
    assert (code["none"]["score"]["estimate"], code["ngram"]["score"]["estimate"]) == (1.0, 0.0)
    assert code["ngram"]["score"]["against_none"]["estimate"] == -1.0
    assert (code["none"]["kept"], code["ngram"]["kept"]["estimate"]) == (None, 0.0)
    assert code["ngram"]["lossless"]["faults"] == 1  # another answer that no rounding explains
    assert code["none"]["lossless"] is None
    assert (chat["ngram"]["requests"], facts["chat_turns"]["num_prompts"]) == (2, 1)
    assert chat["ngram"]["lossless"] == {"compared": 2, "equal": 2, "ties": 0, "faults": 0}
    assert chat["ngram"]["al"]["estimate"] == 2.0
    assert chat["ngram"]["score"] is facts["chat_turns"]["isolation"] is None
    assert set(sampled_facts(job, ("none", "ngram"))["0.7"]) == {"none", "ngram"}
