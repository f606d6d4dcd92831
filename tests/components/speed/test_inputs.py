"""What is asked: held-out prompts as code_editing and the rest, or files at their first turn, as texts that give the same ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from components.config import Settings
from components.section import ConfigError
from components.speed.inputs import read_keys, task_file, write_inputs
from components.storage import Location
from components.target.chat import render
from tests.components.evaluation.artifacts import tiny_settings, write_responses

TEXTS = ("count the ships", "explain why bread rises", "rewrite this: two  blanks, ünïcode and a\ttab\n")
NOWHERE = Location("/nowhere")


def settings_of(target: Path, **speed: Any) -> Settings:
    return tiny_settings(target, speed={"concurrencies": [1, 4], "output_tokens": 16} | speed)


def held_out(target: Path, folder: Path, families: list[str]) -> Location:
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = [
        {
            "key": f"{family}-{i}",
            "family": family,
            "split": "held_out",
            "prompt_ids": render(tokenizer, [{"role": "user", "content": f"{family} {text}"}]),
            "output_ids": [20, 21],
        }
        for family in families
        for i, text in enumerate(TEXTS)
    ]
    return write_responses(folder / "responses", rows).location


def read_lines(output: Location, task: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in task_file(output, task).read_bytes().splitlines()]


def test_held_out_prompts_are_two_tasks_whose_texts_give_the_same_ids(tmp_path: Path, tiny_target: Path) -> None:
    responses = held_out(tiny_target, tmp_path, ["code_editing", "explanation", "rewriting"])
    output = Location(str(tmp_path / "output"))

    tasks = write_inputs(settings_of(tiny_target), str(tiny_target), responses, output)

    assert {name: (t["families"], t["num_prompts"], t["left_out"]) for name, t in tasks.items()} == {
        "code_editing": (["code_editing"], 3, 0),
        "chat": (["explanation", "rewriting"], 6, 0),
    }
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    for line in read_lines(output, "chat"):
        family, number = line["key"].split("-")
        ids = render(tokenizer, [{"role": "user", "content": f"{family} {TEXTS[int(number)]}"}])
        assert tokenizer(line["prompt"], add_special_tokens=False).input_ids == ids
    # four at once need four requests: of three prompts one is asked twice
    keys = read_keys(task_file(output, "code_editing"))
    assert len(keys) == 4
    assert keys[3] == keys[0]
    assert tasks["chat"]["sha256"] == task_file(output, "chat").sha256()


def test_a_prompt_whose_text_gives_other_ids_is_left_out(tmp_path: Path, tiny_target: Path) -> None:
    """Ids that no text is tokenised to: two bytes that a merge would have joined."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    merged = tokenizer("the", add_special_tokens=False).input_ids
    apart = [i for letter in "the" for i in tokenizer(letter, add_special_tokens=False).input_ids]
    assert merged != apart
    rows = [
        {"key": str(i), "family": "explanation", "split": "held_out", "prompt_ids": ids, "output_ids": [20]}
        for i, ids in enumerate([merged, apart, [20] * 300])
    ]
    responses = write_responses(tmp_path / "responses", rows).location

    tasks = write_inputs(settings_of(tiny_target), str(tiny_target), responses, Location(str(tmp_path / "output")))

    assert list(tasks) == ["chat"]
    assert (tasks["chat"]["num_prompts"], tasks["chat"]["left_out"]) == (1, 2)


def test_files_are_asked_at_their_first_turn_in_any_shape(tmp_path: Path, tiny_target: Path) -> None:
    rows = [
        {
            "id": "mt/1",
            "task": "mt/writing",
            "messages": [{"role": "user", "content": "a"}],
            "turns": ["first", "second"],
        },
        {
            "task": "mt/maths",
            "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "two"}],
        },
        {"task": "mt/maths"},
    ]
    file = tmp_path / "mt.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = Location(str(tmp_path / "output"))
    settings = settings_of(tiny_target, concurrencies=[1], prompts={"mt": str(file)})

    tasks = write_inputs(settings, str(tiny_target), NOWHERE, output)

    assert (tasks["mt"]["num_prompts"], tasks["mt"]["left_out"]) == (2, 1)
    assert tasks["mt"]["families"] == ["mt/maths", "mt/writing"]
    texts = sorted(line["prompt"] for line in read_lines(output, "mt"))
    assert [("first" in text, "second" in text, "be kind" in text) for text in texts] == [
        (False, False, True),
        (True, False, False),
    ]


@pytest.mark.parametrize(
    ("speed", "message"),
    [
        ({"output_tokens": 250}, r"speed\.output_tokens: task chat has 3 prompts, none usable"),
        ({"prompts": {"mt": "/no/such.jsonl"}}, r"speed\.prompts\.mt: "),
    ],
)
def test_what_cannot_be_asked_is_said(tmp_path: Path, tiny_target: Path, speed: dict[str, Any], message: str) -> None:
    responses = held_out(tiny_target, tmp_path, ["explanation"])

    with pytest.raises(ConfigError, match=message):
        write_inputs(settings_of(tiny_target, **speed), str(tiny_target), responses, Location(str(tmp_path / "out")))
