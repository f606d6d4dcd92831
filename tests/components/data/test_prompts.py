"""Keys, turns, the cap and the split: by content, never by position."""

import json
import random
from collections import Counter

import pytest

from components.data.prompts import Prompt, read_prompts, row_key, split_of, split_prompts


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def prompt(text: str, family: str = "f", occurrence: int = 0) -> Prompt:
    return Prompt(row_key(user(text), None, occurrence), family, user(text), None, "a.jsonl", 1)


def write(path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


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
    first, _ = read_prompts(write(tmp_path / "first.jsonl", texts), None, 0)
    random.Random(1).shuffle(texts)
    second, _ = read_prompts([write(tmp_path / f"part{i}.jsonl", texts[i::2]) for i in range(2)], None, 0)
    assert [(p.key, p.messages) for p in first] == [(p.key, p.messages) for p in second]
    assert len({p.key for p in first}) == len(texts)


def test_equal_rows_differ_by_occurrence(tmp_path):
    prompts, _ = read_prompts(write(tmp_path / "a.jsonl", ["Same?"] * 3), None, 0)
    assert [p.key for p in prompts] == [row_key(user("Same?"), None, i) for i in range(3)]


def test_turns_are_what_comes_before_each_answer():
    system = {"role": "system", "content": "s"}
    call = {"role": "assistant", "content": "", "tool_calls": []}
    result = {"role": "tool", "content": "r"}
    one, two = user("one")[0], user("two")[0]
    talk = Prompt("k", "f", [system, one, call, result, two], None, "a", 1)
    assert talk.turns() == [[system, one, call, result], [two]]
    assert prompt("one").turns() == [[one]]


@pytest.fixture
def unequal_files(tmp_path) -> list[str]:
    return [
        write(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(n)])
        for name, n in (("a", 300), ("b", 100), ("c", 8))
    ]


def test_cap_takes_from_every_file_its_share(unequal_files):
    prompts, _ = read_prompts(unequal_files, 102, 0)
    counts = Counter(p.family for p in prompts)
    assert len(prompts) == 102
    for family, share in (("a", 75), ("b", 25), ("c", 2)):
        assert abs(counts[family] - share) <= 1
    assert [p.line for p in prompts if p.family == "a"] != list(range(1, counts["a"] + 1))


def test_cap_is_by_hash_and_seed_not_by_order(unequal_files):
    keys = [p.key for p in read_prompts(unequal_files, 50, 0)[0]]
    assert keys == [p.key for p in read_prompts(unequal_files[::-1], 50, 0)[0]]
    assert keys != [p.key for p in read_prompts(unequal_files, 50, 1)[0]]


def test_cap_above_the_number_of_rows_keeps_all(unequal_files):
    assert len(read_prompts(unequal_files, 1000, 0)[0]) == 408


def test_bad_rows_beyond_the_cap_are_reported(tmp_path):
    path = write(tmp_path / "a.jsonl", ["one", "two", "three"])
    with open(path, "a") as file:
        file.write("{oops\n[]\n")
    prompts, bad = read_prompts(path, 1, 0)
    assert len(prompts) == 1
    assert [(row.line, row.reason) for row in bad] == [(4, "bad_json"), (5, "not_an_object")]


def test_split_gives_every_row_one_side_at_the_asked_share():
    prompts = [prompt(f"row {i}") for i in range(12_501)]
    sides = split_prompts(prompts, ["other"], 0.2)
    assert len(sides) == 12_501
    counts = Counter(sides.values())
    # Four standard deviations of a binomial share of 0.2 at n = 12501: 179.
    assert abs(counts["held_out"] - 2500) < 179
    assert abs(counts["validation"] - 2500) < 179
    assert counts["train"] == 12_501 - counts["held_out"] - counts["validation"]


def test_side_of_a_row_does_not_change_when_rows_are_added_or_moved():
    prompts = [prompt(f"row {i}") for i in range(500)]
    before = split_prompts(prompts, [], 0.2)
    after = split_prompts([prompt("new"), *prompts[::-1]], [], 0.2)
    assert {key: after[key] for key in before} == before


def test_held_out_families_are_held_out_whole():
    prompts = [prompt(f"row {i}", family=f"f{i % 5}") for i in range(500)]
    sides = split_prompts(prompts, ["f1", "f3"], 0.1)
    for p in prompts:
        assert (sides[p.key] == "held_out") == (p.family in ("f1", "f3"))
        assert sides[p.key] == split_of(p, ["f1", "f3"], 0.1)
    counts = Counter(sides.values())
    assert counts["held_out"] == 200
    assert 10 < counts["validation"] < 55


def test_equal_content_is_never_on_two_sides():
    prompts = [prompt(f"row {i % 100}", family=f"f{i // 100}", occurrence=i // 100) for i in range(300)]
    for families in ([], ["f2"]):
        sides = split_prompts(prompts, families, 0.3)
        assert all(len({sides[row_key(user(f"row {i}"), None, n)] for n in range(3)}) == 1 for i in range(100))
