"""The built-in set: enough, different, short, and without a defect."""

import json
from collections import Counter

import jsonschema
import pytest

from components.config import DataConfig
from components.data.sources import BUILTIN_FOLDER
from components.data.splits import split_prompts
from tests.components.data.prompt_rows import read

LONGEST_CHARACTERS = 1000
"""About 300 tokens of English or code: a small target on a small machine answers them in time."""

ROW_SCHEMA = {
    "type": "object",
    "required": ["messages"],
    "additionalProperties": False,
    "properties": {
        "messages": {
            "type": "array",
            "minItems": 1,
            "prefixItems": [{"properties": {"role": {"enum": ["system", "user"]}}}],
            "items": {"properties": {"role": {"const": "user"}}},
            "contains": {"properties": {"role": {"const": "user"}}},
            "allOf": [
                {
                    "items": {
                        "type": "object",
                        "required": ["role", "content"],
                        "additionalProperties": False,
                        "properties": {"role": {"type": "string"}, "content": {"type": "string", "pattern": r"\S"}},
                    }
                }
            ],
        }
    },
}


@pytest.fixture(scope="module")
def prompts():
    found, bad = read("builtin")
    assert bad == []
    return found


def test_counts(prompts):
    families = Counter(prompt.family for prompt in prompts)
    assert len(prompts) >= 440
    assert len(families) >= 14
    assert min(families.values()) >= 18


def test_every_row_fits_the_schema():
    validator = jsonschema.Draft202012Validator(ROW_SCHEMA)
    for path in BUILTIN_FOLDER.glob("*.jsonl"):
        for line in path.read_bytes().splitlines():
            validator.validate(json.loads(line))


def test_no_two_prompts_are_the_same(prompts):
    assert all(prompt.key.endswith("-0") for prompt in prompts)
    openings = Counter(prompt.turns()[0][-1]["content"].casefold() for prompt in prompts)
    assert openings.most_common(1)[0][1] == 1


def test_prompts_are_short(prompts):
    assert max(sum(len(message["content"]) for message in prompt.messages) for prompt in prompts) <= LONGEST_CHARACTERS


def test_system_turns_and_several_turns_occur(prompts):
    assert sum(prompt.messages[0]["role"] == "system" for prompt in prompts) >= 20
    assert all(len(prompt.turns()) >= 2 for prompt in prompts if prompt.family == "chat")
    assert len({prompt.family for prompt in prompts if len(prompt.turns()) > 1}) >= 8


def test_default_held_out_families_make_an_evaluation_set(prompts):
    config = DataConfig()
    assert set(config.held_out_families) <= {prompt.family for prompt in prompts}
    counts = Counter(split_prompts(prompts, config.held_out_families, config.validation_fraction).values())
    assert 40 <= counts["held_out"] <= 60
    assert counts["validation"] >= 10
    assert counts["train"] >= 350
