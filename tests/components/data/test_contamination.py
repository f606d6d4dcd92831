"""What repeats an evaluation prompt: equal, alike or a long passage of it, and what only shares the wording of a template."""

import random

import pytest

from components.data.contamination import find_repeats
from components.data.prompts import Prompt, row_key
from components.data.said import Said
from tests.components.data.prompt_rows import prompt, user

WORDS = [f"word{i}" for i in range(400)]


def text(seed: int, length: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def read_ids(ids: list[int]) -> Said:
    """Of a template that says something itself."""
    turn = " ".join(f"word{i}" for i in ids)
    return Said(f"system You are kind. user {turn} assistant", [turn])


def talk(*turns: str, system: str | None = None) -> Prompt:
    messages = ([{"role": "system", "content": system}] if system else []) + [m for turn in turns for m in user(turn)]
    return Prompt(row_key(messages, None), "f", messages, None, "a.jsonl", 1)


def repeats(candidate: Prompt, *evaluation: Prompt) -> str | None:
    return find_repeats([candidate], list(evaluation), 0.8, read_ids).get(candidate.key)


EXAM = prompt(f"{text(1, 60)}", line=9)


def test_equal_words_in_another_dress():
    assert repeats(prompt("  NAME a river,\nin Peru!"), prompt("Name a river in Peru", line=9)) == "equal to a.jsonl:9"


def test_a_system_turn_hides_nothing():
    assert repeats(talk("Name a river in Peru", system="Be kind."), prompt("Name a river in Peru", line=9))


def test_the_first_turn_of_a_longer_conversation_and_the_other_way_round():
    one, two = talk("What is the highest mountain?"), talk("What is the highest mountain?", "And the second?")
    assert repeats(one, two)
    assert repeats(two, one)
    assert repeats(talk("Hello", "What is snow?"), talk("Hello")) is None


def test_a_later_turn_that_asks_what_an_evaluation_asks():
    exam = talk("What is the highest mountain?", "Now say it in French please")
    assert repeats(talk("Hello", "What is the highest mountain?", "Thanks"), exam) == "equal to a.jsonl:1"
    assert repeats(talk("How do trees drink?", "Now say it in French please"), exam) is None


def test_one_changed_word_in_thirty():
    changed = text(1, 60).split()
    changed[20] = "other"
    assert repeats(prompt(" ".join(changed)), EXAM).endswith("like a.jsonl:9")


def test_a_question_wrapped_in_much_else():
    wrapped = prompt(f"{text(2, 80)} {text(1, 60)} {text(3, 80)}")
    assert repeats(wrapped, EXAM) == "100% of the runs of 13 words of a.jsonl:9"


def test_half_of_it_is_a_repeat_and_a_quotation_is_none():
    words = text(1, 60).split()
    assert repeats(prompt(f"{text(2, 80)} {' '.join(words[:40])}"), EXAM)
    assert repeats(prompt(f"{text(2, 80)} {' '.join(words[:20])}"), EXAM) is None


def test_other_texts_repeat_nothing():
    others = [prompt(text(seed, 60)) for seed in range(10, 40)]
    assert find_repeats(others, [EXAM], 0.8, read_ids) == {}
    assert repeats(prompt("Name a lake."), prompt("Name a river.")) is None
    assert repeats(prompt("?!"), prompt("...")) is None


@pytest.mark.parametrize(("num_evaluation", "num_training"), [(11, 1), (1, 11)])
def test_the_wording_of_a_template_is_no_repeat(num_evaluation, num_training):
    template = text(5, 40)
    evaluation = [prompt(f"{template} {text(100 + i, 10)}") for i in range(num_evaluation)]
    training = [prompt(f"{template} {text(500 + i, 50)}") for i in range(num_training)]
    assert find_repeats(training, evaluation, 0.8, read_ids) == {}


def test_the_same_wording_in_few_prompts_is_a_repeat():
    """What makes the test above one of counts."""
    template = text(5, 40)
    evaluation, training = [prompt(f"{template} {text(100, 10)}")], [prompt(f"{template} {text(500, 50)}")]
    assert len(find_repeats(training, evaluation, 0.8, read_ids)) == 1


def test_ids_are_compared_by_their_text():
    ids = [int(word.removeprefix("word")) for word in text(1, 60).split()]
    given = Prompt(row_key([], None, ids=ids), "f", [], None, "a.jsonl", 1, ids=ids)
    assert repeats(given, EXAM) == "equal to a.jsonl:9"


def test_without_an_evaluation_nothing_is_a_repeat():
    assert find_repeats([EXAM], [], 0.8, read_ids) == {}
