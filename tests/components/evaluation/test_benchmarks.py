import json
from pathlib import Path
from typing import Any

import pytest

from components.config import BenchmarkConfig, Settings
from components.config_loading import load_settings
from components.evaluation.benchmarks import benchmark_identity, load_rows, num_turns, read_benchmark, save_rows
from components.evaluation.stages import evaluation_stage
from components.section import ConfigError
from components.storage import Location

HUMANEVAL = {
    "task_id": "H/0",
    "prompt": "def f(x):\n",
    "entry_point": "f",
    "test": "def check(c):\n    assert c(1) == 2\n",
}
MBPP = {"task_id": 11, "text": "Double a number.", "code": "...", "test_list": ["assert double(2) == 4"]}
GSM8K = {"question": "How much is 2 + 2?", "answer": "2 + 2 = 4\n#### 4"}
PLAIN = {"id": "x/1", "task": "chat", "messages": [{"role": "user", "content": "Hello."}]}
TWO_TURNS = {"id": "m/1", "task": "mt/writing", "turns": ["Write a poem.", "Now shorter."], "messages": []}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("scorer", "row", "asked"),
    [
        ("humaneval", HUMANEVAL, "def f(x):\n"),
        ("mbpp", MBPP, "Double a number. Your code should pass these tests:\n\nassert double(2) == 4"),
        ("gsm8k", GSM8K, "How much is 2 + 2?"),
    ],
)
def test_rows_are_read_as_their_authors_publish_them(tmp_path: Path, scorer: Any, row: dict, asked: str) -> None:
    (found,) = read_benchmark("b", BenchmarkConfig(path=write(tmp_path / "b.jsonl", row), scorer=scorer))

    assert found.turns[0][-1]["content"].endswith(asked)
    assert found.reference


@pytest.mark.parametrize(
    ("scorer", "asked"), [("gsm8k", "How much?"), ("mbpp", "Double it."), ("humaneval", "def f(x):\n  pass")]
)
def test_rows_without_a_reference_have_no_score_and_are_compared_with_plain_decoding(
    tmp_path: Path, scorer: Any, asked: str
) -> None:
    (found,) = read_benchmark("b", BenchmarkConfig(path=write(tmp_path / "b.jsonl", {"prompt": asked}), scorer=scorer))

    assert found.reference is not None
    assert "score" not in found.reference


def test_a_conversation_is_asked_in_turns(tmp_path: Path) -> None:
    rows = read_benchmark("b", BenchmarkConfig(path=write(tmp_path / "b.jsonl", TWO_TURNS, PLAIN)))

    assert sorted(len(row.turns) for row in rows) == [1, 2]
    assert {row.family for row in rows} == {"mt/writing", "chat"}
    assert num_turns(rows) == 2
    save_rows(rows, Location(str(tmp_path)), "b")
    assert load_rows(Location(str(tmp_path)), "b") == rows


def test_the_cap_takes_the_same_rows_whatever_the_files_order_and_equal_rows_stay_apart(tmp_path: Path) -> None:
    many = [{"prompt": f"Question {i}?"} for i in range(9)]

    def keys(*rows: Any) -> list[str]:
        config = BenchmarkConfig(path=write(tmp_path / "b.jsonl", *rows), max_prompts=4)
        return [row.key for row in read_benchmark("b", config)]

    assert keys(*many) == keys(*many[::-1])
    assert len(set(keys(PLAIN, PLAIN, PLAIN))) == 3


@pytest.mark.parametrize(
    ("rows", "scorer", "message"),
    [
        ([], "none", r"benchmarks\.b\.path: .* holds no row"),
        ([PLAIN, {"nothing": 1}], "none", r"benchmarks\.b\.path: .*b\.jsonl:2 is no prompt"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(tmp_path: Path, rows: list, scorer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_benchmark("b", BenchmarkConfig(path=write(tmp_path / "b.jsonl", *rows), scorer=scorer))


def test_no_file_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.benchmarks\.b\.path: /nowhere\.jsonl does not exist"):
        read_benchmark("b", BenchmarkConfig(path="/nowhere.jsonl"))


def test_the_content_and_not_the_place_is_in_the_stages_identity(tmp_path: Path) -> None:
    def identity(path: str, **more: Any) -> tuple[Any, Any]:
        stage = evaluation_stage(Settings.model_validate({"evaluate": {"benchmarks": {"b": {"path": path, **more}}}}))
        return stage.config, stage.extra()["benchmarks"]

    (tmp_path / "other").mkdir()
    one, moved = (write(folder / "b.jsonl", PLAIN) for folder in (tmp_path, tmp_path / "other"))
    before = identity(one)
    assert before == identity(moved)
    assert before != identity(one, max_new_tokens=9)
    write(tmp_path / "b.jsonl", TWO_TURNS)
    assert before != identity(one)
    assert benchmark_identity(BenchmarkConfig(path=one)) != benchmark_identity(BenchmarkConfig(path=moved))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluate.temperatures=[1.0]", r"evaluate: evaluate\.temperatures must hold 0\.0"),
        ("evaluate.temperatures=[0.0, 0.0]", r"evaluate\.temperatures must hold 0\.0 and nothing twice"),
        ("evaluate.tasks={a: [x], b: [x]}", r"the family x is in evaluate\.tasks twice"),
        ("evaluate.benchmarks={chat: {path: f}}", r"evaluate\.benchmarks\.chat has the name of a task"),
        ("evaluate.benchmarks={a/b: {path: f}}", r"evaluate\.benchmarks\.a/b"),
        ("evaluate.benchmarks={a: {path: f, scorer: rouge}}", r"evaluate\.benchmarks\.a\.scorer: 'rouge'"),
    ],
)
def test_settings_that_contradict_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(None, None, [override])
