"""Turns become one document only where they continue one another token by token; only answers are supervised."""

from components.data.documents import merge_turns, merged_tokens


def turn(key: str, prompt_ids: list[int], output_ids: list[int]) -> dict:
    return {
        "key": key,
        "prompt_key": key.partition(":")[0],
        "family": "chat",
        "split": "train",
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
    }


def test_turns_that_continue_are_one_document():
    rows = [turn("p:0", [1, 2], [3, 4]), turn("p:1", [1, 2, 3, 4, 5], [6]), turn("p:2", [1, 2, 3, 4, 5, 6, 7], [8, 9])]
    (document,) = merge_turns(rows)
    assert document.key == "p:0"
    assert document.turn_keys == ("p:0", "p:1", "p:2")
    assert document.input_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert document.loss_mask == [0, 0, 1, 1, 0, 1, 0, 1, 1]
    assert merged_tokens(rows) == 9


def test_a_template_that_strips_an_answer_gives_a_document_a_turn():
    rows = [turn("p:0", [1, 2], [30, 31, 4]), turn("p:1", [1, 2, 4, 5], [6]), turn("p:2", [1, 2, 4, 5, 6, 7], [8])]
    first, second = merge_turns(rows)
    assert first.input_ids == [1, 2, 30, 31, 4]
    assert second.turn_keys == ("p:1", "p:2")
    assert second.loss_mask == [0, 0, 0, 0, 1, 0, 1]


def test_prompts_never_merge():
    rows = [turn("p:0", [1], [2]), turn("q:0", [1, 2, 3], [4])]
    assert [document.key for document in merge_turns(rows)] == ["p:0", "q:0"]
    assert list(merge_turns([])) == []
