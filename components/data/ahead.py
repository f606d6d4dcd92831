"""Doing the next pieces of work while the last one is being used."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int, depth: int
) -> Iterator[Result]:
    """`function` of every item, in their order, computed by threads before it is asked for.

    Args:
        function: For work that leaves Python's lock: products, copies, checksums, files.
        items: Taken by the caller's own thread, one for every result that is asked for.
        num_threads: As many run at once.
        depth: As many results, done or under way, are held beside the one that is used.

    Raises:
        Exception: what `function` raised, when the turn of that item comes.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
