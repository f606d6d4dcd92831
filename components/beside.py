"""Work that goes on beside other work: a thread of this process, a process or an actor on the driver's node."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

T = TypeVar("T")


@contextmanager
def thread_beside(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs `work` in a thread while the block runs; the event that it gets says that the block is over."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def start_beside_driver(actor: type, *arguments: Any) -> Any:
    """An actor on the driver's own node: the workers of all other nodes should outlive any one of them."""
    return ray.remote(num_cpus=0)(actor).options(scheduling_strategy=_this_node()).remote(*arguments)


def run_beside_driver(function: Callable[..., T], *arguments: Any) -> T:
    """What the function returns, called in another process on the driver's own node (it sees the same disk): the driver holds none of
    what it holds meanwhile. Where Ray is not connected it is called here.

    Raises:
        Exception: what the function raised.
    """
    if not ray.is_initialized():
        return function(*arguments)
    task = ray.remote(num_cpus=0)(function).options(scheduling_strategy=_this_node(), max_retries=0)
    try:
        return ray.get(task.remote(*arguments))
    except RayTaskError as error:
        raise error.cause from None


def _this_node() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
