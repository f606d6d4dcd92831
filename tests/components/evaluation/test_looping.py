import pytest

from components.evaluation.looping import LONGEST_LOOP, LOOP_REPEATS, LOOP_TOKENS, is_looped

START = list(range(100, 140))


@pytest.mark.parametrize("size", [1, 2, 3, 7, LONGEST_LOOP])
def test_a_tail_that_repeats_until_it_is_cut_off_is_a_loop(size: int) -> None:
    repeats = max(LOOP_REPEATS, -(-LOOP_TOKENS // size))

    looped = START + list(range(size)) * repeats

    assert is_looped(looped, "length")
    assert is_looped([*looped, 0], "length")  # cut off in the middle of a round: the window only moves
    assert not is_looped(looped, "stop")
    assert not is_looped([*looped, 99], "length")


def test_a_short_repetition_is_none() -> None:
    assert not is_looped(START + [7] * (LOOP_TOKENS - 1), "length")
    assert not is_looped(START + [1, 2, 3, 4, 5, 6] * (LOOP_REPEATS - 1), "length")
    assert not is_looped(START, "length")
    assert not is_looped([], "length")


def test_a_loop_that_is_longer_than_what_is_looked_for_is_none() -> None:
    assert not is_looped(list(range(LONGEST_LOOP + 1)) * LOOP_REPEATS, "length")
