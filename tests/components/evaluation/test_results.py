from dataclasses import replace

import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from components.evaluation.acceptance import Acceptance
from components.evaluation.arms import Arm
from components.evaluation.measure import Generation, make_answer
from components.evaluation.prompts import EvaluationPrompt
from components.evaluation.results import (
    Answer,
    ArmResult,
    Speed,
    TimedAgain,
    add_timed_again,
    figures,
    find_problems,
    load_result,
    save_result,
    save_timed_again,
)
from components.storage import Location

NGRAM = Arm("ngram", "ngram", 3)
NONE = Arm("none", "none")


def step(
    *token_ids: int, finish: str | None = None, logprobs: list | None = None, accepted: list[int] | None = None
) -> CompletionOutput:
    metrics = None
    if accepted is not None:
        metrics = RequestSpecDecodeMetrics.new(3)
        for count in accepted:
            metrics.observe(3, count)
    return CompletionOutput(
        index=0,
        text="",
        token_ids=list(token_ids),
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason=finish,
        spec_decode_metrics=metrics,
    )


def run(*steps: CompletionOutput, arm: Arm = NGRAM, key: str = "p") -> Answer:
    generation = Generation(EvaluationPrompt(key, "code", (5, 6)), submitted_s=100.0)
    for number, output in enumerate(steps, 1):
        generation.add(output, 100.0 + number)
    return make_answer(generation, arm)


GOOD = run(step(1), step(2, 3, 4), step(5), step(6, 7, finish="stop", accepted=[2, 1]))


def test_what_is_counted_of_one_answer() -> None:
    record = GOOD.record

    assert GOOD.output_ids == (1, 2, 3, 4, 5, 6, 7)
    assert GOOD.target_steps == 3
    assert (record.rounds, record.drafted, record.accepted) == (2, 6, 3)
    assert record.accepted_at == (2, 1, 0)
    assert record.duration_s == 4.0
    assert record.error is None


def test_likely_rivals_are_kept_with_their_distance() -> None:
    candidates = {7: Logprob(-0.5), 8: Logprob(-0.75), 9: Logprob(-2.5)}

    answer = run(step(7, logprobs=[candidates]), step(3, finish="length", logprobs=[{3: Logprob(0.0)}]), arm=NONE)

    assert answer.rivals == ({8: 0.25, 9: 2.0}, {})


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (step(2, finish="stop", accepted=[]), "empty answer"),  # nothing but the end token
        (step(finish="length", accepted=[]), "empty answer"),
        (step(1, 2, finish="abort", accepted=[]), "finish reason abort"),
        (step(1, 2, finish="stop"), "no acceptance counters"),
    ],
)
def test_an_answer_that_is_no_success(last: CompletionOutput, error: str) -> None:
    assert run(last).record.error == error


def test_one_empty_answer_in_three_makes_the_arm_invalid() -> None:
    answers = tuple(GOOD if i % 3 else run(step(2, finish="stop", accepted=[])) for i in range(9))

    assert find_problems(answers, None) == ("3 of 9 answers: empty answer",)
    assert find_problems(answers[1:3], None) == ()
    assert find_problems((), None) == ("no answers",)


def test_counters_that_disagree_make_the_arm_invalid() -> None:
    counted = Acceptance(rounds=2, drafted=6, accepted=3, accepted_at=(2, 1, 0))

    assert find_problems((GOOD,), counted) == ()
    for wrong in ({"rounds": 3}, {"drafted": 5}, {"accepted": 4}, {"accepted_at": (2, 0, 1)}):
        (problem,) = find_problems((GOOD,), replace(counted, **wrong))
        assert "the engine counted" in problem


def test_a_timed_answer_that_was_cut_short_is_no_slow_one() -> None:
    speeds = [Speed("p", 64, 4.0, 0.5), Speed("q", 3, 4.0, 0.5)]

    assert find_problems((GOOD,), None, speeds, 64) == ("1 of 2 timed answers: not 64 tokens",)
    assert find_problems((GOOD,), None, speeds[:1], 64) == ()


def test_of_two_speed_passes_the_faster_one_counts_and_both_must_be_whole(tmp_path) -> None:
    first, place = (Speed("p", 64, 4.0, 0.5), Speed("q", 64, 2.0, 0.5)), Location(str(tmp_path / "again.json"))
    measured = result(GOOD, speeds=first)
    assert add_timed_again(measured, place) is measured

    for seconds, counts in ((1.0, 64.0), (8.0, 24.0)):
        save_timed_again(TimedAgain((Speed("p", 64, seconds, 0.5), Speed("q", 64, seconds, 0.5)), ("cut",)), place)
        both = add_timed_again(measured, place)
        assert both.speeds == first
        assert figures(both)["tokens_per_s_c1"] == counts
        assert figures(both)["problems"] == ["cut"]


def result(*answers: Answer, arm: Arm = NGRAM, speeds: tuple[Speed, ...] = ()) -> ArmResult:
    return ArmResult(arm, {"vllm": "0.32.0"}, answers, speeds, engine_start_s=9.96, answers_s=1.0)


def test_figures_are_ratios_of_sums() -> None:
    longer = run(step(1), step(2), step(3), step(4, 5, finish="length", accepted=[1]), key="q")

    got = figures(result(GOOD, longer, speeds=(Speed("p", 64, 4.0, 0.5), Speed("q", 64, 2.0, 0.3))))

    assert got["al"] == pytest.approx(1 + 4 / 3)
    assert got["coverage"] == pytest.approx(3 / 6)
    assert got["tokens_per_step"] == pytest.approx((6 + 4) / 6)
    assert got["tokens_per_s_c1"] == 24.0
    assert got["accepted_at"] == pytest.approx([1.0, 1 / 3, 0.0])


def test_drafts_accepted_past_the_end_are_no_part_of_the_answer() -> None:
    cut = run(step(1), step(2, 3, 4, 5), step(6, 7, finish="length", accepted=[3, 3]))  # 3 + 1 tokens, 2 of them wanted
    exact = run(step(1), step(2, 3, 4, finish="length", accepted=[3]))  # only the target's own token was cut off

    assert (cut.accepted_past_end, exact.accepted_past_end, GOOD.accepted_past_end) == (1, 0, 0)
    assert result(cut).acceptance_length_within == pytest.approx(1 + 5 / 2)
    assert figures(result(cut))["al"] == 4.0
    assert result(arm=NONE).acceptance_length_within is None


def test_failed_answers_are_in_no_figure() -> None:
    bad = run(step(2, finish="stop", accepted=[0, 0, 0, 0]), key="bad")

    assert figures(result(GOOD, bad))["al"] == figures(result(GOOD))["al"]
    assert figures(result(GOOD, bad))["errors"] == 1


def test_what_was_not_measured_is_none_and_not_zero() -> None:
    got = figures(result(arm=NONE))

    assert got["al"] is got["acceptance_rate"] is got["tokens_per_step"] is got["tokens_per_s_c1"] is None


def test_a_result_survives_its_file(tmp_path) -> None:
    place = Location(str(tmp_path / "arms" / "ngram.json"))
    before = result(replace(GOOD, rivals=({8: 0.25}, {})), speeds=(Speed("p", 64, 4.0, 0.5),))

    save_result(before, place)

    assert load_result(place) == before
