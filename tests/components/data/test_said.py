"""What a prompt that is given as ids says, under the templates of many families."""

import pytest

from components.config import DataConfig
from components.data.contamination import find_repeats
from components.data.prompts import Prompt, row_key
from components.data.said import reader_of_ids
from components.data.selection import select_prompts
from components.target.chat import render
from tests.chat_templates import FAMILIES, family_tokenizer
from tests.components.data.prompt_rows import prompt, user

QUESTION, LATER = "Which river is the longest, of all?", "And the second?"
DEFAULT_SYSTEM = "{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\nYou are Ada, a kind assistant<|im_end|>\n' -}}{%- endif -%}"


def given(ids: list[int], family: str = "f") -> Prompt:
    return Prompt(row_key([], None, ids=ids), family, [], None, "ids.jsonl", 1, ids=ids)


@pytest.fixture
def tokenizer():
    """That of a target whose template has a system turn of its own."""
    tokenizer = family_tokenizer.__wrapped__("qwen")
    tokenizer.chat_template = DEFAULT_SYSTEM + tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_users_turns_are_told_from_what_the_template_writes(family):
    tokenizer = family_tokenizer(family)
    read = reader_of_ids(tokenizer)
    said = read(render(tokenizer, user(QUESTION)))
    assert (said.text.strip(), said.turns) == (QUESTION, [QUESTION])
    talk = [*user(QUESTION), {"role": "assistant", "content": "The Nile."}, *user(LATER)]
    said = read(render(tokenizer, talk))
    assert (said.text.split("\n")[:1], said.turns) == ([QUESTION], [QUESTION, LATER])
    assert "The Nile." in said.text


def test_a_system_turn_is_said_only_where_the_row_has_it(tokenizer):
    read = reader_of_ids(tokenizer)
    assert read(render(tokenizer, user(QUESTION))).text.strip() == QUESTION
    own = read(render(tokenizer, [{"role": "system", "content": "Be terse."}, *user(QUESTION)]))
    assert own.turns == [QUESTION]
    assert "Be terse." in own.text


def test_what_another_template_wrote_is_taken_whole(tokenizer):
    ids = tokenizer("A story begins<|im_end|>").input_ids
    said = reader_of_ids(tokenizer)(ids)
    assert said.turns == [said.text]
    assert said.text.strip() == "A story begins"


def test_ids_that_ask_what_an_evaluation_asks_are_found(tokenizer):
    """As short as it is, whichever of the two is given as ids, and with another system turn."""
    read = reader_of_ids(tokenizer)
    as_ids = given(render(tokenizer, [{"role": "system", "content": "Be terse."}, *user(QUESTION)]))
    as_text = prompt(QUESTION.lower(), line=9)
    for training, exam in ((as_ids, as_text), (as_text, as_ids), (given(render(tokenizer, user(QUESTION))), as_ids)):
        assert find_repeats([training], [exam], 0.8, read) == {training.key: f"equal to {exam.source}:{exam.line}"}


def test_the_words_of_the_template_make_no_two_prompts_alike(tokenizer):
    read = reader_of_ids(tokenizer)
    river, lake, shout = (
        given(render(tokenizer, user(text))) for text in ("Name a river", "Name a lake", "NAME a river!")
    )
    assert find_repeats([river], [lake], 0.5, read) == {}
    data = DataConfig(deduplicate="near", near_similarity=0.5, held_out_families=[])
    chosen = select_prompts(sorted([river, lake, shout], key=lambda p: p.key), data, [], read)
    assert len(chosen.prompts) == 2
    assert lake in chosen.prompts
