"""Which prompts are used: duplicates, caps and weights, by content and never by position."""

import random
from collections import Counter

import pytest

from components.config import DataConfig, PromptSource
from components.data.prompts import Prompt, row_key
from components.data.said import Said
from components.data.selection import Selection, select_prompts, share_out
from tests.components.data.prompt_rows import prompt, read, user, write

STEM = "Write a short letter to the landlord about the broken window in the kitchen and ask when it will be mended"


def select(prompts: list[Prompt], benchmarks: list[Prompt] | None = None, /, **settings) -> Selection:
    each = [PromptSource(path=str(i)) for i in range(1 + max(p.origin for p in prompts))]
    data = DataConfig(**{"prompts": each, "held_out_families": [], **settings})
    return select_prompts(prompts, data, benchmarks or [], read_ids)


def read_ids(ids: list[int]) -> Said:
    text = " ".join(map(str, ids))
    return Said(text, [text])


def reasons(selection: Selection) -> dict[str, int]:
    return dict(Counter(row.reason for row in selection.left))


@pytest.fixture
def unequal_files(tmp_path) -> list[str]:
    return [
        write(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(n)])
        for name, n in (("a", 300), ("b", 100), ("c", 8))
    ]


def test_cap_takes_from_every_file_its_share(unequal_files):
    chosen = select(read(*unequal_files)[0], max_prompts=102)
    counts = Counter(p.family for p in chosen.prompts)
    assert len(chosen.prompts) == 102
    assert chosen.over_cap == 306
    for family, share in (("a", 75), ("b", 25), ("c", 2)):
        assert abs(counts[family] - share) <= 1
    assert [p.line for p in chosen.prompts if p.family == "a"] != list(range(1, counts["a"] + 1))


def test_cap_is_by_hash_and_seed_not_by_order(unequal_files):
    keys = [p.key for p in select(read(*unequal_files)[0], max_prompts=50).prompts]
    assert keys == sorted(keys)
    assert keys == [p.key for p in select(read(*unequal_files[::-1])[0], max_prompts=50).prompts]
    assert keys != [p.key for p in select(read(*unequal_files)[0], max_prompts=50, seed=1).prompts]


def test_cap_above_the_number_of_rows_keeps_all(unequal_files):
    chosen = select(read(*unequal_files)[0], max_prompts=1000)
    assert (len(chosen.prompts), chosen.over_cap) == (408, 0)


def sources(**keys: list) -> list[PromptSource]:
    return [
        PromptSource(path=f"{i}", **dict(zip(keys, values, strict=True)))
        for i, values in enumerate(zip(*keys.values(), strict=True))
    ]


def rows(*sizes: int) -> list[Prompt]:
    return [prompt(f"{origin} asks {i}", origin=origin) for origin, size in enumerate(sizes) for i in range(size)]


def by_origin(selection: Selection) -> list[int]:
    counts = Counter(p.origin for p in selection.prompts)
    return [counts[i] for i in range(3)]


def test_a_source_has_a_cap_of_its_own():
    chosen = select(rows(300, 100, 8), prompts=sources(max_prompts=[50, None, 20]))
    assert by_origin(chosen) == [50, 100, 8]
    assert chosen.over_cap == 250


def test_weights_share_out_the_total():
    chosen = select(rows(300, 100, 8), prompts=sources(weight=[1, 3, 1]), max_prompts=30)
    assert by_origin(chosen) == [6, 18, 6]
    # the third has 8 of its 20, and the other two take what it leaves
    chosen = select(rows(300, 100, 8), prompts=sources(weight=[1, 3, 1]), max_prompts=100)
    assert by_origin(chosen) == [23, 69, 8]


def test_weights_hold_beside_a_source_that_has_nothing():
    chosen = select(rows(300, 0, 300), prompts=sources(weight=[1, 5, 2]), max_prompts=30)
    assert by_origin(chosen) == [10, 0, 20]


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up_and_fit(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 7, 100, 1000]) for _ in range(rng.randint(1, 6))]
    weights = [rng.uniform(0.01, 5) for _ in sizes]
    for total in (0, 1, 10, 333, 5000):
        quotas = share_out(sizes, weights, total)
        assert sum(quotas) == min(total, sum(sizes))
        assert all(0 <= quota <= size for quota, size in zip(quotas, sizes, strict=True))
        open_ones = [i for i, quota in enumerate(quotas) if quota < sizes[i]]
        units = [quotas[i] / weights[i] for i in open_ones]
        assert all(abs(quotas[i] - units[0] * weights[i]) <= 1 + weights[i] / weights[open_ones[0]] for i in open_ones)


def test_of_equal_rows_one_stays(tmp_path):
    prompts, _ = read(write(tmp_path / "a.jsonl", ["Same?", "Other?", "Same? ", "Same?"]))
    chosen = select(prompts)
    assert [p.key for p in chosen.prompts] == sorted([row_key(user("Same?"), None), row_key(user("Other?"), None)])
    assert reasons(chosen) == {"duplicate": 2}
    assert len({row.line for row in chosen.left}) == 2
    assert all(row.detail.startswith(f"equal to {tmp_path}/a.jsonl:") for row in chosen.left)
    assert reasons(select(prompts, deduplicate="off")) == {}
    assert len(select(prompts, deduplicate="off").prompts) == 4


def test_of_equal_rows_the_held_out_one_stays():
    prompts = [prompt("Same?", "a", 0), prompt("Same?", "z", 1), prompt("Other?", "a")]
    chosen = select(prompts, held_out_families=["z"])
    assert {p.family: chosen.splits[p.key] for p in chosen.prompts if p.content == prompts[0].content} == {
        "z": "held_out"
    }


def test_near_duplicates_go_only_when_asked():
    prompts = [prompt(STEM, line=1), prompt(f"{STEM}, please", line=2), prompt("Name a river.", line=3)]
    assert reasons(select(prompts, contamination="off")) == {}
    chosen = select(prompts, contamination="off", deduplicate="near")
    assert reasons(chosen) == {"near_duplicate": 1}
    assert len(chosen.prompts) == 2
    assert chosen.left[0].detail == "0.95 like a.jsonl:" + str(3 - chosen.left[0].line)
    strict = select(prompts, contamination="off", deduplicate="near", near_similarity=0.97)
    assert reasons(strict) == {}


def test_equal_questions_under_other_system_turns_are_no_near_duplicates():
    pirate, judge = (
        [{"role": "system", "content": f"You are a {role} and you speak as one, at length."}, *user("Who are you?")]
        for role in ("pirate", "judge")
    )
    prompts = [Prompt(row_key(m, None), "f", m, None, "a.jsonl", i) for i, m in enumerate((pirate, judge))]
    assert len(select(prompts, deduplicate="near", contamination="off").prompts) == 2


def test_contaminated_prompts_are_dropped_reported_or_let_be():
    prompts = [prompt("Name a river in Peru."), prompt("Name a lake.")]
    bench = [prompt("name a river in peru", line=7)]
    chosen = select(prompts, bench)
    assert [p.messages for p in chosen.prompts] == [user("Name a lake.")]
    assert [(row.reason, row.detail) for row in chosen.left] == [("contaminated", "equal to a.jsonl:7")]
    warned = select(prompts, bench, contamination="warn")
    assert (len(warned.prompts), warned.contaminated, warned.left) == (2, 1, [])
    assert select(prompts, bench, contamination="off").contaminated == 0


def test_held_out_prompts_keep_training_prompts_from_repeating_them():
    prompts = [
        prompt("What is the capital of Peru?", "exam"),
        prompt("what is the CAPITAL of peru", "talk"),
        prompt("Hi", "talk"),
    ]
    chosen = select(prompts, held_out_families=["exam"])
    assert {p.family: chosen.splits[p.key] for p in chosen.prompts} == {
        "exam": "held_out",
        "talk": chosen.splits[prompts[2].key],
    }
    assert reasons(chosen) == {"contaminated": 1}


def test_benchmark_rows_that_are_held_out_stay():
    chosen = select(
        [prompt("Name a river.", "exam"), prompt("Hi", "f")], [prompt("Name a river.")], held_out_families=["exam"]
    )
    assert reasons(chosen) == {}
    assert len(chosen.prompts) == 2


def test_a_cap_is_filled_after_everything_else():
    prompts = [prompt(f"question {i} of many", occurrence=n) for i in range(40) for n in range(2)]
    chosen = select(
        prompts, [prompt(f"question {i} of many") for i in range(10)], max_prompts=25, validation_fraction=0.001
    )
    assert len(chosen.prompts) == 25
    assert len(chosen.prompts) + len(chosen.left) + chosen.over_cap == len(prompts)
