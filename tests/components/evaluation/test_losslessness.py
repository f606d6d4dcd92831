import pytest
import torch

from components.evaluation.losslessness import TIE_GAPS, GreedyAnswer, compare_answers


def plain(*tokens: int, gap: float = 1.0, rival: int = 99) -> GreedyAnswer:
    return GreedyAnswer(tokens, tuple({rival: gap} for _ in tokens))


def test_equal_answers_have_no_difference() -> None:
    result = compare_answers({"a": plain(1, 2, 3), "b": plain(4)}, {"a": [1, 2, 3], "b": [4]}, 0.25)

    assert (result.compared, result.equal, result.differences) == (2, 2, ())


def test_a_difference_at_a_small_gap_is_a_tie_and_is_listed() -> None:
    result = compare_answers({"a": plain(1, 2, 3, gap=0.125)}, {"a": [1, 99, 7]}, TIE_GAPS["bfloat16"])

    (difference,) = result.differences
    assert (difference.kind, difference.position) == ("tie", 1)
    assert (difference.plain_token, difference.arm_token) == (2, 99)
    assert difference.top2_gap == difference.token_gap == 0.125
    assert (result.equal, result.ties, result.faults) == (0, 1, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ties_end_between_two_numbers_of_the_dtype(dtype: str) -> None:
    """The last bits of a log probability decide nothing, and a token that is clearly worse is a fault."""
    step = torch.finfo(getattr(torch, dtype)).eps * 16
    for steps, kind in ((8, "tie"), (9, "fault")):
        for noise in (-1e-6, 1e-6):
            answer = plain(1, 2, gap=steps * step + noise)
            (difference,) = compare_answers({"a": answer}, {"a": [1, 99]}, TIE_GAPS[dtype]).differences
            assert difference.kind == kind


def test_the_same_gap_is_a_fault_in_float32() -> None:
    result = compare_answers({"a": plain(1, 2, 3, gap=0.125)}, {"a": [1, 99, 7]}, TIE_GAPS["float32"])

    assert result.faults == 1


def test_a_third_token_is_a_fault_even_where_the_best_two_tie() -> None:
    result = compare_answers({"a": plain(1, 2, gap=0.0)}, {"a": [1, 50]}, 0.25)

    (difference,) = result.differences
    assert (difference.kind, difference.top2_gap, difference.token_gap) == ("fault", 0.0, None)


def test_a_tie_of_three_tokens_is_a_tie() -> None:
    answer = GreedyAnswer((1, 2), ({}, {8: 0.0, 9: 0.125}))

    assert compare_answers({"a": answer}, {"a": [1, 9]}, 0.25).ties == 1


def test_only_the_first_difference_counts() -> None:
    answer = GreedyAnswer((1, 2, 3), ({9: 0.0}, {9: 5.0}, {9: 5.0}))

    (difference,) = compare_answers({"a": answer}, {"a": [9, 9, 9]}, 0.25).differences

    assert (difference.position, difference.kind) == (0, "tie")


def test_an_answer_cut_short_or_run_over_is_a_fault() -> None:
    short, long = (compare_answers({"a": plain(1, 2, gap=0.0)}, {"a": ids}, 0.25) for ids in ([1], [1, 2, 99]))

    assert short.differences[0].position == 1
    assert short.differences[0].arm_token is None
    assert long.differences[0].plain_token is None
    assert short.faults == long.faults == 1


def test_unanswered_prompts_are_not_compared() -> None:
    assert compare_answers({"a": plain(1), "b": plain(2)}, {"a": [1]}, 0.25).compared == 1
