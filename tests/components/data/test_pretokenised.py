"""Rows of token ids: taken as they are, never guessed, never with a mask that does not fit."""

import pytest

from components.data.preparation import prepare_prompts
from components.data.pretokenised import IdPrompt, check_vocabulary, id_prompt
from components.data.prompts import row_key
from components.data.reasons import Reason, RowError
from tests.components.data.prompt_rows import read, write_rows
from tests.components.data.test_stages import settings_for
from tests.tiny import BOS, EOS, make_tokenizer

TALK = {"messages": [{"role": "user", "content": "Hi"}]}


def refused(row: dict) -> tuple[Reason, str]:
    with pytest.raises(RowError) as error:
        id_prompt(row)
    return error.value.reason, error.value.detail


@pytest.mark.parametrize(
    "row",
    [
        {"prompt_ids": [5, 6, 7]},
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt": [5, 6, 7]},
        {"input_ids": [5, 6, 7]},
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]},
        {"input_ids": [0, 0, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1]},
        {"prompt_ids": [5, 6, 7], **TALK},
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 0, 1, 1]},
        {"input_ids": [5, 6, 7, 8, 9], "assistant_masks": [0, 0, 0, 1, 0]},
        {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, -100, 8, 9]},
        {"input_ids": [0, 5, 6, 7, 8, 0], "loss_mask": [0, 0, 0, 0, 1, 0], "attention_mask": [0, 1, 1, 1, 1, 0]},
    ],
)
def test_every_shape_gives_the_same_ids(row):
    assert id_prompt(row) == IdPrompt([5, 6, 7], None)


@pytest.mark.parametrize(
    "row", [TALK, {**TALK, "input_ids": [5, 6, 7]}, {"prompt": "Hi"}, {"prompt": [TALK]}, {}, [5, 6], None]
)
def test_other_rows_are_none_of_ids(row):
    assert id_prompt(row) is None


def test_later_answers_are_left_out_and_said():
    row = {"input_ids": [5, 6, 7, 8, 9, 4], "loss_mask": [0, 0, 1, 0, 1, 1]}
    assert id_prompt(row) == IdPrompt([5, 6], Reason.LATER_TURNS)


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"prompt_ids": []}, "an empty one"),
        ({"prompt_ids": "5 6"}, "no list of integers"),
        ({"prompt_ids": [5, 6.0]}, "no list of integers"),
        ({"prompt_ids": [True]}, "no list of integers"),
        ({"input_ids": [[5, 6]]}, "no list of integers"),
        ({"prompt_ids": [5, 2**40]}, "more than 32 bits"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1]}, "loss_mask has 2 entries for 3 ids"),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6]}, "labels has 2 entries for 3 ids"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1]}, "attention_mask has 2 entries for 3 ids"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}, "marks no answer"),
        ({"input_ids": [5, 6, 7], "loss_mask": "001"}, "loss_mask is no list of integers"),
    ],
)
def test_ids_and_masks_that_do_not_fit_have_a_reason(row, detail):
    reason, said = refused(row)
    assert reason == Reason.BAD_IDS
    assert detail in said


def test_a_mask_of_nothing_but_answers_leaves_no_prompt():
    assert refused({"input_ids": [5, 6], "loss_mask": [1, 1]})[0] == Reason.NO_USER_TURN


@pytest.mark.parametrize("outside", [-1, 512, 2**31 - 1])
def test_ids_beyond_the_vocabulary_are_refused(outside):
    check_vocabulary([0, 511], 512)
    with pytest.raises(RowError) as error:
        check_vocabulary([5, outside], 512)
    assert error.value.reason == Reason.IDS_OUT_OF_VOCABULARY


def test_the_key_is_of_the_ids_alone(tmp_path):
    prompts, bad = read(write_rows(tmp_path / "a.jsonl", [{"prompt_ids": [5, 6]}, {"prompt_ids": [5, 6], **TALK}]))
    assert [p.key for p in prompts] == [row_key([], None, n, ids=[5, 6]) for n in range(2)]
    assert row_key([], None, ids=[5, 6]) != row_key([], None, ids=[6, 5])
    assert [(p.ids, p.messages, len(p.turns())) for p in prompts] == [([5, 6], [], 1)] * 2
    assert bad == []


def test_ids_need_no_template_and_get_no_token_added(tmp_path):
    """With and without a beginning-of-sequence token, in the middle of words or with control tokens: as given."""
    given = [[BOS, 9, 10], [9, 10], [BOS, BOS, 9], [EOS, 3, 9]]
    rows = [*({"prompt_ids": ids} for ids in given), {"prompt_ids": [600]}, TALK]
    tokenizer = make_tokenizer(512)
    tokenizer.chat_template = "{{ raise_exception('no chat') }}"
    data = settings_for(write_rows(tmp_path / "a.jsonl", rows), tmp_path).data
    prepared = prepare_prompts(data, tokenizer, 512)
    assert sorted(p.ids for p in prepared.prompts) == sorted(given)
    assert prepared.rows.dropped == {"ids_out_of_vocabulary": 1, "template_rejects": 1}
