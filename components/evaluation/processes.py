"""Heavy work in processes that are fresh but start in a second: forked from one that has imported everything already."""

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayTaskError

from components.cluster_room import Need, are_up, waiting_lines
from components.config import StageResources

log = logging.getLogger("aerie")

POLL_S = 10.0


class FreshProcesses:
    """`with FreshProcesses(resources, env, preload) as processes: processes.run(title, function, ...)`, one at a time.

    An actor holds the stage's resources from the first call on and gives them back at the end of the block.

    Args:
        resources: Of the actor.
        env: Environment variables of the processes.
        preload: Name of the module that the first process imports for all of them.
    """

    def __init__(self, resources: StageResources, env: Mapping[str, str], preload: str) -> None:
        self._need = Need.of("resources.evaluate", resources)._replace(num_actors=1)
        self._make_actor = lambda: (
            ray.remote(_Starter)
            .options(
                num_cpus=resources.num_cpus,
                num_gpus=resources.num_gpus,
                runtime_env={"env_vars": dict(env)},
            )
            .remote(preload)
        )
        self._actor: Any = None

    def __enter__(self) -> "FreshProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._actor is not None:
            ray.kill(self._actor)

    def run(self, title: str, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function(*arguments)` in a fresh process, say that it is still at it, and raise what it raises."""
        log.info("%s: starting", title)
        started = time.monotonic()
        self._actor = self._actor or self._make_actor()
        with waiting_lines(title, [self._need], are_up([self._actor])):
            reference = self._actor.run.remote(function, arguments)
            while not ray.wait([reference], timeout=POLL_S)[0]:
                log.info("%s: %.0f s", title, time.monotonic() - started)
        try:
            ray.get(reference)
        except RayTaskError as error:
            raise error.cause from error
        log.info("%s: done in %.0f s", title, time.monotonic() - started)


def log_to_driver() -> None:
    """For a task's first line: Ray shows its process's standard error in the driver's log."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)


class _Starter:
    """The actor: its fork server imports once, and starts no engine itself, so nothing is left in it to inherit."""

    def __init__(self, preload: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])

    def run(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        with ProcessPoolExecutor(1, mp_context=self._context, initializer=_end_with_starter) as pool:
            pool.submit(function, *arguments).result()


def _end_with_starter() -> None:
    """A killed actor takes its process along: no engine outlives the job."""
    starter = multiprocessing.parent_process()
    assert starter is not None

    def follow() -> None:
        wait([starter.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="follow-starter", daemon=True).start()
