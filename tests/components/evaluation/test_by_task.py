from dataclasses import replace

import pytest

from components.evaluation.acceptance import RequestRecord, total
from components.evaluation.arms import Arm
from components.evaluation.by_task import answer_figures, length_bucket, task_facts, task_of
from components.evaluation.results import Answer, ArmResult
from components.evaluation.statistics import Bootstrap, ratios_of_sums

TASKS = {"code_editing": ["code_editing"], "chat": ["explanation", "rewriting"]}
NGRAM, NONE = Arm("ngram", "ngram", 2), Arm("none", "none")


def answer(key: str, family: str, histogram: tuple[int, int, int], steps: int, **changes: object) -> Answer:
    """An answer whose rounds accepted 0, 1 and 2 drafts so often, over `steps` steps of the target."""
    accepted = histogram[1] + 2 * histogram[2]
    record = RequestRecord(
        key=key,
        family=family,
        arm="ngram",
        prompt_tokens=10,
        output_tokens=1 + steps + accepted,
        finish_reason="stop",
        rounds=sum(histogram),
        drafted=2 * sum(histogram),
        accepted=accepted,
        accepted_at=(histogram[1] + histogram[2], histogram[2]),
        duration_s=1.0,
    )
    record = replace(record, **changes)  # type: ignore[arg-type]
    return Answer(record, tuple(range(record.output_tokens)), steps)


def result(arm: Arm, *answers: Answer) -> ArmResult:
    return ArmResult(arm, {}, answers, (), engine_start_s=1.0, answers_s=1.0)


def test_families_that_belong_together_are_one_task_and_others_their_own() -> None:
    assert [task_of(family, TASKS) for family in ("rewriting", "code_editing", "maths")] == [
        "chat",
        "code_editing",
        "maths",
    ]


def test_each_task_has_its_own_figures_beside_plain_decodings() -> None:
    code = [answer(f"c{i}", "code_editing", (0, 0, 4), 5) for i in range(6)]
    chat = [answer(f"t{i}", "rewriting", (3, 1, 0), 8) for i in range(4)]
    plain = [answer(a.record.key, a.record.family, (0, 0, 0), 12) for a in code + chat]

    facts = task_facts({"none": result(NONE, *plain), "ngram": result(NGRAM, *code, *chat)}, TASKS, Bootstrap())

    assert list(facts) == ["chat", "code_editing"]
    assert (facts["chat"]["num_prompts"], facts["code_editing"]["num_prompts"]) == (4, 6)
    ours = facts["code_editing"]["arms"]["ngram"]
    assert ours["al"] == {"estimate": 3.0, "low": 3.0, "high": 3.0}
    assert ours["histogram"] == [0, 0, 24]
    assert ours["coverage"] == pytest.approx(4 / 5)
    assert ours["tokens_per_step"] == pytest.approx((5 + 8) / 5)
    assert facts["chat"]["arms"]["ngram"]["al"] == {"estimate": 1.25, "low": None, "high": None}  # too few prompts
    none = facts["code_editing"]["arms"]["none"]
    assert none["al"] is none["coverage"] is None
    assert none["tokens_per_step"] == 1.0


def test_positions_have_intervals_and_the_histogram_adds_up_to_the_rounds() -> None:
    answers = [answer(str(i), "f", (i, 3, 1 + i % 2), 20) for i in range(8)]

    figures = answer_figures(answers, True, Bootstrap())

    sums = total(a.record for a in answers)
    assert [rate["estimate"] for rate in figures["accepted_at"]] == pytest.approx(sums.rate_at)
    assert all(rate["low"] < rate["estimate"] < rate["high"] for rate in figures["accepted_at"])
    assert figures["histogram"] == [28, 24, 12]
    assert sum(figures["histogram"]) == sums.rounds
    assert sum(i * n for i, n in enumerate(figures["histogram"])) == sums.accepted


def test_failed_answers_are_counted_and_in_no_figure() -> None:
    good = [answer(str(i), "f", (1, 1, 1), 9) for i in range(5)]
    bad = answer("bad", "f", (50, 0, 0), 50, error="empty answer")

    figures = answer_figures([*good, bad], True, Bootstrap())

    assert (figures["requests"], figures["errors"]) == (6, 1)
    assert figures["al"] == answer_figures(good, True, Bootstrap())["al"]
    assert figures["finish_reasons"] == {"stop": 5}


def test_looped_answers_and_reasons_are_counted() -> None:
    stuck = answer("s", "f", (0, 0, 5), 6, finish_reason="length")
    stuck = replace(stuck, output_ids=(1, 2) * 10)

    figures = answer_figures([stuck, answer("e", "f", (1, 0, 0), 3)], True, Bootstrap())

    assert figures["looped"] == 0.5
    assert figures["finish_reasons"] == {"length": 1, "stop": 1}
    assert answer_figures([], True, Bootstrap())["looped"] is None


def test_lengths_fall_into_buckets_in_their_order() -> None:
    assert [length_bucket(n) for n in (0, 63, 64, 255, 1024, 9999)] == [
        "0-63", "0-63", "64-255", "64-255", "1024-4095", "4096-",
    ]  # fmt: skip
    answers = [answer(str(n), "f", (1, 1, 0), 9, prompt_tokens=n) for n in (2000, 10, 300, 70)]

    buckets = answer_figures(answers, True, Bootstrap())["by_prompt_length"]

    assert list(buckets) == ["0-63", "64-255", "256-1023", "1024-4095"]
    assert {entry["num_prompts"] for entry in buckets.values()} == {1}


def test_turns_of_one_conversation_are_drawn_together() -> None:
    """Two equal turns a conversation are no more evidence than one."""
    one = [answer(str(i), "f", (i, 3, 2), 20) for i in range(8)]

    assert answer_figures(one * 2, True, Bootstrap())["al"] == answer_figures(one, True, Bootstrap())["al"]


def test_a_ratio_of_sums_and_its_interval_at_known_answers() -> None:
    """Of a share p over n prompts the bootstrap's interval is near the normal one, p +- 1.96 sqrt(p (1 - p) / n)."""
    n, p = 400, 0.25
    (found,) = ratios_of_sums([[float(i < p * n)] for i in range(n)], [1.0] * n, Bootstrap())

    assert found is not None
    assert found.estimate == p
    half = 1.96 * (p * (1 - p) / n) ** 0.5
    assert found.low == pytest.approx(p - half, abs=0.01)
    assert found.high == pytest.approx(p + half, abs=0.01)
    assert ratios_of_sums([[1.0], [2.0]], [0.0, 0.0], Bootstrap()) == [None]
