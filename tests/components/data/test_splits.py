"""The sides: by family and by the hash of the content, never by position."""

from collections import Counter

from components.data.prompts import row_key
from components.data.splits import split_prompts
from tests.components.data.prompt_rows import prompt, user


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
    counts = Counter(sides.values())
    assert counts["held_out"] == 200
    assert 10 < counts["validation"] < 55


def test_equal_content_is_never_on_two_sides():
    prompts = [prompt(f"row {i % 100}", family=f"f{i // 100}", occurrence=i // 100) for i in range(300)]
    for families in ([], ["f2"]):
        sides = split_prompts(prompts, families, 0.3)
        assert all(len({sides[row_key(user(f"row {i}"), None, n)] for n in range(3)}) == 1 for i in range(100))
