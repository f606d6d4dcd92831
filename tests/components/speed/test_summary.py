"""The stage's facts: a row a load, what to serve by task and load, and nothing made of invalid points."""

import json

import pytest

from components.speed.loads import Load
from components.speed.metrics import metrics_of_speed
from components.speed.summary import best_k, recommended, summarise
from tests.components.speed.loads import NUM_PROMPTS, TOKENS, make_load


def loads(invalid: str | None = None) -> list[Load]:
    """Code is edited faster with the head at any load; chat only alone, and only with K=1."""
    times = {
        ("none", None): {"code": (1.0, 2.0), "chat": (1.0, 2.0)},
        ("head", 1): {"code": (0.8, 1.7), "chat": (0.9, 2.2)},
        ("head", 3): {"code": (0.5, 1.5), "chat": (1.1, 2.6)},
    }
    return [
        make_load(arm, k, c, seconds, task=task, invalid=invalid if (arm, task, c) == ("head", "code", 8) else None)
        for (arm, k), tasks in times.items()
        for task, by_c in tasks.items()
        for c, seconds in zip((1, 8), by_c, strict=True)
    ]


def test_rows_have_the_figures_of_all_repetitions_and_are_json() -> None:
    facts = json.loads(json.dumps(summarise(loads())))

    assert len(facts["points"]) == 12
    row = next(r for r in facts["points"] if (r["arm"], r["num_speculative_tokens"]) == ("head", 3))
    assert (row["task"], row["concurrency"], row["request_rate"], row["repetitions"]) == ("code", 1, "inf", 2)
    assert (row["completed"], row["errors"], row["invalid"]) == (2 * NUM_PROMPTS, 0, None)
    assert row["output_tokens_per_s"] == pytest.approx(2.0, rel=0.02)
    assert row["al"] == 2.0
    assert row["accepted_at"] == [1.0, 0.0, 0.0]
    assert (row["rounds"], row["drafted"]) == (NUM_PROMPTS * TOKENS, 3 * NUM_PROMPTS * TOKENS)
    assert row["against_off"]["estimate"] == pytest.approx(2.0, rel=0.02)
    assert row["against_off"]["low"] > 1.9
    off = next(r for r in facts["points"] if r["arm"] == "none")
    assert off["al"] is off["against_off"] is off["num_speculative_tokens"] is None


def test_tasks_are_recommended_for_apart_and_together() -> None:
    found = summarise(loads())["recommended"]

    ks = {task: {c: choice["num_speculative_tokens"] for c, choice in by_c.items()} for task, by_c in found.items()}
    assert ks["code"] == {"1": 3, "8": 3}
    assert ks["chat"] == {"1": 1, "8": None}
    assert ks["overall"] == {"1": 3, "8": None}  # at 8 chat loses what code gains
    assert found["chat"]["8"]["arm"] == "none"
    assert found["code"]["1"]["gain"] == pytest.approx(1.0, rel=0.05)
    assert best_k(loads(), "head") == {1: 3, 8: 0}


def test_an_invalid_load_is_never_a_slow_one() -> None:
    broken = loads(invalid="5 of 20 requests failed")
    rows = [row for row in summarise(broken)["points"] if row["invalid"]]

    assert {(row["arm"], row["task"], row["concurrency"]) for row in rows} == {("head", "code", 8)}
    for row in rows:
        assert row["errors"] == 10
        figures = ("output_tokens_per_s", "ttft_ms", "al", "rounds", "against_off")
        assert [row[name] for name in figures] == [None] * len(figures)
    assert recommended(broken)["code"][8].num_speculative_tokens is None
    assert not [
        name for name in metrics_of_speed(summarise(broken)) if name.startswith("speed/head/") and "/code/c8/" in name
    ]


def test_without_a_valid_baseline_nothing_is_recommended() -> None:
    broken = [load for load in loads() if load.arm != "none"]
    broken += [make_load("none", None, c, 1.0, task="code", invalid="empty") for c in (1, 8)]

    found = recommended(broken)

    assert found == {"code": {}, "chat": {}, "overall": {}}


def test_a_limited_rate_tells_latencies_and_recommends_nothing() -> None:
    limited = [make_load(*arm, 8, 1.0, rate=0.5) for arm in (("none", None), ("head", 3))]
    facts = summarise([*loads(), *limited])

    row = facts["points"][-1]
    assert (row["request_rate"], row["against_off"]) == (0.5, None)
    assert row["ttft_ms"] == {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    assert facts["recommended"] == summarise(loads())["recommended"]


def test_a_cache_is_the_smallest_of_an_arms_ks_and_preemptions_are_summed() -> None:
    arms = summarise(loads())["arms"]

    assert arms["none"] == {
        "kv_capacity_tokens": 1000,
        "preemptions": 8,
        "by_k": {"0": {"kv_capacity_tokens": 1000, "preemptions": 8}},
    }
    assert (arms["head"]["kv_capacity_tokens"], arms["head"]["preemptions"]) == (970, 16)


def test_metrics_line_up_by_arm_k_task_and_load() -> None:
    named = metrics_of_speed(summarise([*loads(), make_load("head", 3, 8, 1.0, rate=0.5)]))

    assert named["speed/head/k3/code/c1/tokens_per_s"] == pytest.approx(2.0, rel=0.02)
    assert named["speed/none/k0/chat/c8/ttft_ms_p95"] == 2.0
    assert named["speed/head/k1/chat/c8/al"] == 2.0
    assert "speed/head/k3/chat/c8_rate0.5/ttft_ms_p99" in named
