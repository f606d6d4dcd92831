"""The `target` stage: what it writes down of the chat template, and what makes it anew."""

import json
import shutil
from pathlib import Path

import pytest

from components.config import Settings
from components.stage import Outcome, Output
from components.storage import Location
from components.target.stages import target_stage
from tests.tiny import EOS, SWITCH, add_switch

DATED = "{{ strftime_now('%d %B %Y') if day is not defined else day }}"


@pytest.fixture
def folder(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def settings_of(folder: Path, **switches: object) -> Settings:
    return Settings.model_validate({"target": {"model": str(folder), "chat_template_kwargs": switches}})


def run(folder: Path, **switches: object) -> tuple[Outcome, dict]:
    place = Location(str(folder.parent / "output"))
    outcome = target_stage(settings_of(folder, **switches)).run(
        {}, Output("target", place, "f", lambda figures, step: None)
    )
    return outcome, json.loads(place.join("target.json").read_bytes())


def test_the_template_is_described_with_its_switches(folder: Path):
    add_switch(folder)
    outcome, described = run(folder, **SWITCH)
    assert described["chat_template_kwargs"] == SWITCH
    assert described["chat_template"] == {
        "opening": "<|im_end|>\n<|im_start|>assistant\n",
        "end_token_id": EOS,
        "turns_continue": True,
        "shows_system": True,
        "is_dated": False,
    }
    assert outcome.facts == described | {"path": str(folder)}


def test_another_switch_is_another_target(folder: Path):
    add_switch(folder)
    stages = [target_stage(settings_of(folder, **switches)) for switches in ({}, SWITCH, {"brief": False})]
    assert len({json.dumps(stage.identity({}), sort_keys=True) for stage in stages}) == 3
    assert stages[0].identity({}) == target_stage(settings_of(folder)).identity({})


def test_a_date_in_every_prompt_is_warned_of_unless_it_is_pinned(folder: Path, caplog: pytest.LogCaptureFixture):
    template = folder / "chat_template.jinja"
    template.write_text(DATED + template.read_text())
    run(folder, day="Monday")
    assert "today's date" not in caplog.text
    run(folder)
    assert "today's date" in caplog.text
