from pathlib import Path

import pytest

from components.data.parts import CorruptPart
from components.evaluation.prompts import dump_prompts, load_prompts, select_prompts
from components.storage import Location
from tests.components.evaluation.artifacts import write_responses


def row(key: str, family: str, *, length: int = 4, turn: int = 0, split: str = "held_out") -> dict:
    return {
        "key": f"{key}:{turn}",
        "prompt_key": key,
        "family": family,
        "split": split,
        "turn": turn,
        "prompt_ids": [turn] * length,
        "output_ids": [1],
    }


def select(folder: Path, rows: list[dict], num_prompts: int = 100, max_prompt_tokens: int = 50):
    return select_prompts(write_responses(folder / "r", rows).location, num_prompts, max_prompt_tokens)


def test_families_take_turns_and_only_held_out_prompts_are_asked(tmp_path: Path) -> None:
    rows = [row(f"a{i}", "a") for i in range(5)] + [row("b0", "b"), row("t", "a", split="train")]

    prompts = select(tmp_path, rows).prompts

    assert [p.family for p in prompts] == ["a", "b", "a", "a", "a", "a"]
    assert "t" not in {p.key for p in prompts}


def test_fewer_prompts_are_the_first_of_more_whatever_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = [row(f"{family}{i}", family) for family in "abc" for i in range(4)]

    everything = select(tmp_path / "1", rows).prompts
    few = select(tmp_path / "2", rows[::-1], num_prompts=5).prompts

    assert few == everything[:5]


def test_a_conversation_is_asked_at_its_last_answered_turn(tmp_path: Path) -> None:
    rows = [row("a", "f", turn=turn) for turn in (1, 2, 0)]

    (prompt,) = select(tmp_path, rows).prompts

    assert prompt.key == "a"
    assert prompt.prompt_ids == (2, 2, 2, 2)


def test_a_prompt_without_room_for_its_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    selection = select(tmp_path, [row("a", "f", length=50), row("b", "f", length=51)])

    assert [p.key for p in selection.prompts] == ["a"]
    assert selection.num_too_long == 1


def test_no_prompt_left_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.max_model_len"):
        select(tmp_path, [row("b", "f", length=51)])


def test_a_shard_that_is_not_whole_is_named(tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "r", [row("a", "f")]).location
    shard = responses.join("part-00000.parquet")
    shard.write_bytes(shard.read_bytes()[:-20])

    with pytest.raises(CorruptPart, match=r"part-00000\.parquet: not a whole Parquet file"):
        select_prompts(responses, 5, 50)


def test_prompts_survive_their_file(tmp_path: Path) -> None:
    prompts = select(tmp_path, [row("a", "f"), row("b", "g")]).prompts
    place = Location(str(tmp_path / "prompts.json"))

    place.write_bytes(dump_prompts(prompts))

    assert load_prompts(place) == prompts


def test_no_rows_at_all(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with pytest.raises(ValueError, match="0 held-out prompts"):
        select_prompts(Location(str(tmp_path / "r")), 5, 50)
