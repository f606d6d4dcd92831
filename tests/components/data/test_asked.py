"""How much is asked: every turn comes with those before it, and texts count in bytes; the plan's upper bounds hold for what then comes."""

from pathlib import Path

import pytest

from components.config import Settings
from components.data.asked import Asked
from components.data.forecasts import PromptsForecast, forecast_features, forecast_prompts, forecast_responses
from components.data.prompts import Prompt
from components.stage import Artifact
from components.storage import Location
from tests.components.data.prompt_rows import user, write

LONGEST = 40
SETTINGS = Settings.model_validate({"data": {"max_new_tokens": LONGEST}})
SHAPE = {
    "num_layers": 8, "hidden_size": 64, "vocab_size": 512, "tie_word_embeddings": True, "num_heads": 2, "num_kv_heads": 1,
    "head_dim": 32, "intermediate_size": 128,
}  # fmt: skip


def talk(*turns: str) -> Prompt:
    return Prompt("k", "f", [message for turn in turns for message in user(turn)], None, "a.jsonl", 1)


def target(turns_continue: bool) -> dict[str, Artifact]:
    facts = {**SHAPE, "turns_continue": turns_continue}
    return {"target": Artifact("target", Location("/nowhere"), "f", {"facts": facts})}


def test_turns_are_asked_with_the_turns_before_them() -> None:
    asked = Asked.of([talk("a" * 1000, "b" * 2000, "c" * 3000), talk("d" * 1000)])
    assert (asked.prompts, asked.turns, asked.earlier_answers) == (2, 4, 3)
    assert asked.text_bytes == pytest.approx(7000, rel=0.05)
    assert asked.repeated_bytes == pytest.approx(1000 + 3000 + 6000 + 1000, rel=0.05)


def test_texts_count_in_bytes_and_half_a_surrogate_pair_is_no_error() -> None:
    assert Asked.of([talk("雪" * 1000)]).text_bytes == pytest.approx(3000, rel=0.05)
    assert Asked.of([talk("\ud83d")]).turns == 1


def test_the_cap_of_a_source_is_its_own(tmp_path: Path) -> None:
    many = {"path": write(tmp_path / "many.jsonl", [f"{i} {'a' * 1000}" for i in range(500)]), "max_prompts": 10}
    few = {"path": write(tmp_path / "few.jsonl", ["b"] * 4), "max_prompts": 8}
    for total, expected in ((None, 14), (7, 7), (20, 14)):
        settings = Settings.model_validate({"data": {"prompts": [many, few], "max_prompts": total}})
        forecast = forecast_prompts(settings, {}, {})
        assert (forecast.asked.prompts, forecast.rows) == (expected, expected)
        assert 500 * expected < forecast.bytes < 1500 * expected


def test_a_conversation_is_recorded_once_or_once_a_turn() -> None:
    asked = Asked.of([talk(*["a" * 400] * 10)])
    expected = {"prompts": PromptsForecast(asked=asked)}
    once = forecast_features(SETTINGS, target(True), expected).tokens
    each = forecast_features(SETTINGS, target(False), expected).tokens
    assert once == asked.tokens + 10 * LONGEST
    assert each == asked.repeated_tokens + (10 + 45) * LONGEST
    assert each > 5 * once
    responses = forecast_responses(SETTINGS, target(True), expected)
    assert (responses.rows, responses.tokens) == (10, 10 * LONGEST)
    assert responses.bytes == 6 * each  # the ids of every prompt are kept with its answer
