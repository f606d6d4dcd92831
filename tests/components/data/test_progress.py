"""When a job whose workers fail goes on, and when it stops."""

from typing import get_args

import pytest

from components.data.progress import MAX_FAILED_STARTS, STILL_S, Failure, Progress, _figures


def test_calls_in_a_row_with_nothing_done_stop_the_job():
    progress = Progress(3)
    assert [progress.begin() for _ in range(4)] == [True, True, True, False]
    assert progress.stopped().failure == "rows"


def test_whatever_is_done_starts_the_count_anew():
    progress = Progress(2)
    for _ in range(5):
        assert progress.begin()
        progress.add({})
    assert progress.stopped() is None


def test_a_worker_that_never_worked_is_not_started_again():
    progress = Progress(10)
    progress.fail("start", "no such model", "a")
    assert progress.stopped() == ("start", "no such model")
    assert not progress.begin()


def test_a_start_may_fail_after_an_engine_died():
    """Its memory is not always free again at once."""
    progress = Progress(10)
    progress.add({"rows": 1})
    for _ in range(MAX_FAILED_STARTS - 1):
        progress.fail("start", "not enough memory", "a")
        assert progress.begin()
    progress.fail("start", "not enough memory", "a")
    assert not progress.begin()


@pytest.mark.parametrize(
    ("failure", "words"),
    [("full", "No space left on device"), ("damaged", "not what was written"), ("lost", "taken over")],
)
def test_what_no_other_worker_is_spared_stops_the_job_whatever_was_done(failure, words):
    progress = Progress(10)
    progress.add({"rows": 5})
    progress.fail(failure, words, "a")
    assert progress.stopped() == (failure, words)
    assert not progress.begin()


def test_a_storage_that_is_away_stops_the_job_only_when_it_stays_away():
    progress = Progress(3)
    for _ in range(3):
        assert progress.begin()
        progress.fail("storage", "no answer", "a")
    assert not progress.begin()
    assert progress.stopped() == ("storage", "no answer")
    others = Progress(3)
    for _ in range(9):
        assert others.begin()
        others.fail("storage", "no answer", "a")
        others.add({})


def test_processes_that_did_not_end_by_their_rows_are_excused():
    progress = Progress(10)
    for failure in get_args(Failure):
        progress.fail(failure, "", f"of {failure}")
    blamed = [failure for failure in get_args(Failure) if not progress.is_excused(f"of {failure}")]
    assert blamed == ["rows", "start"]


def test_failing_rows_alone_stop_nothing():
    progress = Progress(10)
    progress.fail("rows", "CUDA error", "a")
    assert progress.begin()
    assert progress.last_words() == "CUDA error"


def test_a_line_guesses_what_is_left_only_while_something_is_done():
    done = {"answers": 25, "tokens": 500}
    assert _figures("answers", 100, {}, 50.0, 50.0) == "0/100 answers, 0 tokens/s (starting)"
    assert _figures("answers", 100, done, 50.0, STILL_S - 1) == "25/100 answers, 10 tokens/s, about 150 s left"
    assert _figures("answers", 100, done, 500.0, 400.0) == "25/100 answers, 1 tokens/s, nothing new for 400 s"


def test_figures_add_up():
    progress = Progress(1)
    progress.add({"answers": 2, "tokens": 10})
    progress.add({"answers": 1})
    assert progress.done() == {"answers": 3, "tokens": 10}
