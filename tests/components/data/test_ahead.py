"""Work done ahead keeps its order, its bound and its errors."""

import threading
import time

import pytest

from components.data.ahead import map_ahead


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_results_keep_the_order_of_the_items(depth):
    def slow_at_first(i: int) -> int:
        time.sleep(0.02 / (i + 1))
        return i * i

    assert list(map_ahead(slow_at_first, range(10), 4, depth)) == [i * i for i in range(10)]


def test_the_next_result_is_computed_while_the_last_one_is_used():
    started = [threading.Event() for _ in range(3)]
    results = map_ahead(lambda i: started[i].set() or i, range(3), 1, 1)
    assert next(results) == 0
    assert started[1].wait(timeout=60)
    results.close()


def test_no_more_than_depth_results_are_made_ahead():
    begun = []
    results = map_ahead(begun.append, range(100), 4, 3)
    for used in range(1, 50):
        next(results)
        time.sleep(0.001)
        assert len(begun) <= used + 3
    results.close()


def test_an_error_comes_at_its_turn():
    results = map_ahead(lambda i: 1 / (2 - i), range(5), 2, 3)
    assert [next(results), next(results)] == [0.5, 1.0]
    with pytest.raises(ZeroDivisionError):
        next(results)
