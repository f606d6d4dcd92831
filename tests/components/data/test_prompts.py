"""Keys and turns: by content, never by position."""

import random

from components.data.prompts import Prompt, row_key
from tests.components.data.prompt_rows import prompt, read, user, write


def test_key_ignores_form_and_end_blanks_and_line_ends():
    key = row_key(user("café\nnoir"), None)
    for text in ("cafe\u0301\nnoir", "café\r\nnoir", "café\rnoir", "  café\nnoir\n"):
        assert row_key(user(text), None) == key
    assert row_key([{"content": "café\nnoir", "role": "user"}], []) == key


def test_key_tells_what_is_asked_apart():
    tools = [{"type": "function", "function": {"name": "now"}}]
    conversations = [
        (user("a  b"), None),
        (user("a b"), None),
        (user("A b"), None),
        (user("a b"), tools),
        (user("a") + user("b"), None),
        ([{"role": "system", "content": "a b"}], None),
    ]
    keys = {row_key(messages, tools) for messages, tools in conversations}
    assert len(keys) == len(conversations)
    assert row_key(user("a b"), None, 1) not in keys


def test_keys_do_not_depend_on_order_or_names(tmp_path):
    texts = [f"Question {i}?" for i in range(40)] + ["Twice?", "Twice?", "Twice? "]
    first, _ = read(write(tmp_path / "first.jsonl", texts))
    random.Random(1).shuffle(texts)
    second, _ = read(*[write(tmp_path / f"part{i}.jsonl", texts[i::2]) for i in range(2)])
    assert [(p.key, p.messages) for p in first] == [(p.key, p.messages) for p in second]
    assert len({p.key for p in first}) == len(texts)


def test_equal_rows_differ_by_occurrence(tmp_path):
    prompts, _ = read(write(tmp_path / "a.jsonl", ["Same?"] * 3))
    assert [p.key for p in prompts] == [row_key(user("Same?"), None, i) for i in range(3)]


def test_turns_are_what_comes_before_each_answer():
    system = {"role": "system", "content": "s"}
    call = {"role": "assistant", "content": "", "tool_calls": []}
    result = {"role": "tool", "content": "r"}
    one, two = user("one")[0], user("two")[0]
    talk = Prompt("k", "f", [system, one, call, result, two], None, "a", 1)
    assert talk.turns() == [[system, one, call, result], [two]]
    assert prompt("one").turns() == [[one]]
