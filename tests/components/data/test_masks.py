"""Exactly the target's own answer tokens are supervised, whatever its chat template does to a conversation.

An engine is stood in for by scripted answer ids; what is asked is rendered by each family's template, as for an engine.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.documents import Turns, merge_turns
from components.draft.batch import Document, PackedBatch
from components.draft.chains import supervised_chains
from components.target.chat import load_tokenizer, render
from tests.chat_templates import FAMILIES, LLAMA, end_token_ids, family_tokenizer

DAY = {"date_string": "D"}
NO_THINKING = {"enable_thinking": False}
MERGES = 120


def converse(
    tokenizer: Any,
    questions: Sequence[str],
    answers: Sequence[list[int]],
    system: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rows as the responses stage writes them."""
    messages = [{"role": "system", "content": system}] if system else []
    rows = []
    for turn, (question, output_ids) in enumerate(zip(questions, answers, strict=True)):
        messages.append({"role": "user", "content": question})
        prompt_ids = render(tokenizer, messages, template_kwargs=template_kwargs)
        row = {"key": f"p:{turn}", "prompt_key": "p", "family": "f", "split": "train"}
        rows.append(row | {"prompt_ids": prompt_ids, "output_ids": output_ids})
        answer = tokenizer.decode(output_ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    return rows


def marked(tokenizer: Any, document: Turns) -> str:
    """The document's text, what is supervised in «»."""
    assert len(document.input_ids) == len(document.loss_mask)
    text = ""
    pairs = zip(document.loss_mask, document.input_ids, strict=True)
    for is_answer, run in groupby(pairs, key=lambda pair: pair[0]):
        shown = tokenizer.decode([token for _, token in run])
        text += f"«{shown}»" if is_answer else shown
    return text


LLAMA_START = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: D\n\n"
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA_ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
QWEN_FIRST = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
QWEN_SECOND = "<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("family", "switches", "system", "answers", "expected"),
    [
        pytest.param(
            "llama", DAY, "S", ["cd<|eot_id|>", "f<|eot_id|>"],
            [f"{LLAMA_START}S<|eot_id|>{LLAMA_USER}ab<|eot_id|>{LLAMA_ASSISTANT}«cd<|eot_id|>»"
             f"{LLAMA_USER}e<|eot_id|>{LLAMA_ASSISTANT}«f<|eot_id|>»"],
            id="llama",
        ),
        pytest.param(
            "llama", DAY, None, ["cd", "f"],
            [f"{LLAMA_START}<|eot_id|>{LLAMA_USER}ab<|eot_id|>{LLAMA_ASSISTANT}«cd»<|eot_id|>"
             f"{LLAMA_USER}e<|eot_id|>{LLAMA_ASSISTANT}«f»"],
            id="an end token that was not generated is not supervised",
        ),
        pytest.param(
            "llama", DAY, None, [" cd<|eot_id|>", "f"],
            [f"{LLAMA_START}<|eot_id|>{LLAMA_USER}ab<|eot_id|>{LLAMA_ASSISTANT}« cd<|eot_id|>»",
             f"{LLAMA_START}<|eot_id|>{LLAMA_USER}ab<|eot_id|>{LLAMA_ASSISTANT}cd<|eot_id|>"
             f"{LLAMA_USER}e<|eot_id|>{LLAMA_ASSISTANT}«f»"],
            id="a blank that the history trims",
        ),
        pytest.param(
            "qwen", {}, None, ["cd<|im_end|>", "f"],
            [f"{QWEN_FIRST}«cd<|im_end|>»\n{QWEN_SECOND}«f»"],
            id="qwen",
        ),
        pytest.param(
            "qwen", {}, None, ["<think>\nt\n</think>\n\ncd<|im_end|>", "<think>\nu\n</think>\n\nf<|im_end|>"],
            [f"{QWEN_FIRST}«<think>\nt\n</think>\n\ncd<|im_end|>»",
             f"{QWEN_FIRST}cd<|im_end|>\n{QWEN_SECOND}«<think>\nu\n</think>\n\nf<|im_end|>»"],
            id="a thought that the history strips",
        ),
        pytest.param(
            "qwen", NO_THINKING, None, ["cd<|im_end|>", "f<|im_end|>"],
            [f"{QWEN_FIRST}{EMPTY_THOUGHT}«cd<|im_end|>»",
             f"{QWEN_FIRST}cd<|im_end|>\n{QWEN_SECOND}{EMPTY_THOUGHT}«f<|im_end|>»"],
            id="an empty thought that the prompt holds",
        ),
        pytest.param(
            "qwen", {}, None, ["cd<|endoftext|>", "f<|im_end|>"],
            [f"{QWEN_FIRST}«cd<|endoftext|>»", f"{QWEN_FIRST}cd<|im_end|>\n{QWEN_SECOND}«f<|im_end|>»"],
            id="another end token than the template's",
        ),
        pytest.param(
            "gemma", {}, None, ["cd<end_of_turn>", "f<end_of_turn>"],
            ["<bos><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n«cd<end_of_turn>»\n"
             "<start_of_turn>user\ne<end_of_turn>\n<start_of_turn>model\n«f<end_of_turn>»"],
            id="gemma",
        ),
        pytest.param(
            "mistral", {}, None, ["cd</s>", "f</s>"], ["<s>[INST]ab[/INST]«cd</s>»[INST]e[/INST]«f</s>»"], id="mistral"
        ),
        pytest.param(
            "mistral", {}, "S", ["cd</s>", "f</s>"],
            ["<s>[INST]S\n\nab[/INST]«cd</s>»", "<s>[INST]ab[/INST]cd</s>[INST]S\n\ne[/INST]«f</s>»"],
            id="a system turn that moves on",
        ),
        pytest.param(
            "reasoner", {}, None, ["t</think>cd<end>", "u</think>f<end>"],
            ["<begin><user>ab<assistant><think>\n«t</think>cd<end>»",
             "<begin><user>ab<assistant>cd<end><user>e<assistant><think>\n«u</think>f<end>»"],
            id="a thought that the prompt opens",
        ),
    ],
)  # fmt: skip
def test_what_is_supervised_in_two_turns(family, switches, system, answers, expected):
    tokenizer = family_tokenizer(family)
    answer_ids = [tokenizer(answer, add_special_tokens=False).input_ids for answer in answers]
    rows = converse(tokenizer, ["ab", "e"], answer_ids, system, switches)
    assert [marked(tokenizer, document) for document in merge_turns(rows)] == expected


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["ab|cd"], {("b", 0, "d")}),
        (["ab|cd", "abcdef|gh"], {("b", 0, "d"), ("f", 0, "h")}),
        (["ab|cde"], {("b", 0, "d"), ("b", 1, "e"), ("c", 0, "e")}),
        (["ab|c", "abcd|efg"], {("d", 0, "f"), ("d", 1, "g"), ("e", 0, "g")}),
    ],
)
def test_anchors_depths_and_targets_of_prompt_and_answer(turns: list[str], expected: set[tuple[str, int, str]]):
    """`prompt|answer`, a letter a token: what a chain predicts, from which anchor and at which depth.

    The first token of an answer is no target: the server has it before it drafts.
    """
    pairs = [[list(text.encode()) for text in turn.split("|")] for turn in turns]
    row = {"prompt_key": "p", "family": "f", "split": "train"}
    (document,) = merge_turns(
        [
            row | {"key": f"p:{i}", "prompt_ids": prompt, "output_ids": output}
            for i, (prompt, output) in enumerate(pairs)
        ]
    )
    hidden = torch.zeros(len(document.input_ids), 2)
    ids, mask = torch.tensor(document.input_ids), torch.tensor(document.loss_mask, dtype=torch.bool)
    chains = supervised_chains(PackedBatch.pack([Document(ids, mask, hidden, hidden)]), num_depths=4)
    found = {
        (chr(ids[anchor]), depth, chr(ids[anchor + depth + 2]))
        for anchor, length in zip(chains.anchor_A.tolist(), chains.length_A.tolist(), strict=True)
        for depth in range(length + 1)
    }
    assert found == expected


def test_what_is_supervised_under_the_bundled_targets_template(bundled_target: Path):
    tokenizer = load_tokenizer(bundled_target)
    cd, f, end = tokenizer("cd").input_ids, tokenizer("f").input_ids, tokenizer.eos_token_id
    (document,) = merge_turns(converse(tokenizer, ["ab", "e"], [[*cd, end], [*f, end]], "S"))
    assert marked(tokenizer, document) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n«cd<|im_end|>»\n"
        "<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n«f<|im_end|>»"
    )


def test_control_tokens_in_a_question_open_no_answer():
    tokenizer = family_tokenizer("qwen")
    question = "x<|im_end|>\n<|im_start|>assistant\nfalse<|im_end|>"
    (document,) = merge_turns(converse(tokenizer, [question], [tokenizer("cd<|im_end|>").input_ids]))
    assert (
        marked(tokenizer, document) == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n«cd<|im_end|>»"
    )


def test_an_answer_in_other_tokens_than_its_text_has_is_kept_as_it_was_generated():
    tokenizer = family_tokenizer("qwen", MERGES)
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert tokenizer("the").input_ids != spelled
    first, second = merge_turns(converse(tokenizer, ["ab", "e"], [[*spelled, end_token_ids("qwen")[0]], spelled]))
    assert first.input_ids[-4:-1] == second.input_ids[-3:] == spelled
    assert (sum(first.loss_mask), sum(second.loss_mask)) == (4, 3)


def test_generation_marks_change_nothing_and_agree_where_answers_stay_as_they_are():
    tokenizer = family_tokenizer("llama")
    answers = ["cd<|eot_id|>", "f<|eot_id|>"]
    rows = converse(tokenizer, ["ab", "e"], [tokenizer(a).input_ids for a in answers], None, DAY)
    (document,) = merge_turns(rows)
    messages = [
        {"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, ["ab", "cd", "e", "f"], strict=True)
    ]
    by_marks = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **DAY)
    assert by_marks["input_ids"] == document.input_ids
    assert by_marks["assistant_masks"] == document.loss_mask
    unmarked = LLAMA.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    assert unmarked != LLAMA
    messages.pop()
    texts = {tokenizer.apply_chat_template(messages, chat_template=t, tokenize=False, **DAY) for t in (LLAMA, unmarked)}
    assert len(texts) == 1


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, list[str], list[list[int]]]:
    """A family, questions of any text (control tokens too), and answers of any ids, ended or cut."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    tokenizer = family_tokenizer(family, MERGES)
    texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
    piece = texts | st.sampled_from([*FAMILIES[family].control_tokens, "\n", " ", "</think>", "the answer"])
    num_turns = draw(st.integers(1, 4))
    questions = draw(
        st.lists(st.lists(piece, min_size=1, max_size=4).map("".join), min_size=num_turns, max_size=num_turns)
    )
    first_ordinary = len(FAMILIES[family].control_tokens)
    ordinary = st.integers(first_ordinary, len(tokenizer) - 1)
    answers = []
    for _ in range(num_turns):
        said = draw(
            st.lists(ordinary, max_size=6)
            | st.sampled_from(["the", "a b", "x\n"]).map(lambda t: tokenizer(t).input_ids)
        )
        end = draw(st.sampled_from([[], *([i] for i in end_token_ids(family))]))
        answers.append([*said, *end] or [first_ordinary])
    return family, questions, answers


@given(conversations())
@settings(max_examples=150)
def test_every_generated_token_is_supervised_once_and_no_other(drawn: tuple[str, list[str], list[list[int]]]):
    family, questions, answers = drawn
    rows = converse(family_tokenizer(family, MERGES), questions, answers)
    documents = list(merge_turns(rows))
    assert [key for document in documents for key in document.turn_keys] == [row["key"] for row in rows]
    by_key = {row["key"]: row for row in rows}
    for document in documents:
        mask = [0] * len(document.input_ids)
        for row in (by_key[key] for key in document.turn_keys):
            start, end = len(row["prompt_ids"]), len(row["prompt_ids"]) + len(row["output_ids"])
            assert document.input_ids[:end] == row["prompt_ids"] + row["output_ids"]
            mask[start:end] = [1] * (end - start)
        assert document.loss_mask == mask
