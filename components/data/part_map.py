"""Running a stage's parts through Ray Data: actors that start once and take part after part, until every part exists.

A part is done when its file is there. An actor whose process dies costs the parts it was working on, not the job: they
are given to fresh actors, a bounded number of times, and what is then still missing is for the caller to account for.
"""

import logging
import os
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import ray
import ray.data
from ray.exceptions import ActorDiedError, RayError
from ray.util.annotations import RayDeprecationWarning

from components.config import StageResources
from components.data.parts import part_name
from components.storage import Location

log = logging.getLogger("aerie")

MAX_ATTEMPTS = 3  # times that a part is tried, each time by a fresh actor
PARTS_PER_CALL = 4  # in the first attempt: an engine then never runs dry between two parts
PROGRESS_INTERVAL_S = 10.0
REPORT_INTERVAL_S = 1.0
FAILURES = "_failures"


@dataclass(frozen=True)
class PartTask:
    """A part to make: its number, and what the worker needs to find its rows."""

    number: int
    start: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class PartJob:
    """What is made, by whom and where."""

    title: str
    unit: str
    """What is counted, in the plural, such as `answers`."""
    total: int
    """How many there are to make."""
    output: Location
    worker: type["PartWorker"]
    worker_args: tuple[Any, ...]
    resources: StageResources
    env: Mapping[str, str]


class Progress:
    """Counts what the workers have done (an actor)."""

    def __init__(self) -> None:
        self._done: Counter[str] = Counter()

    def add(self, done: Mapping[str, int]) -> None:
        self._done.update(done)

    def done(self) -> dict[str, int]:
        return dict(self._done)


class PartWorker:
    """Base of the workers: makes the parts of each call, and ends its process when that fails.

    An engine that failed once may hold requests or memory of what it was doing, so the next part gets a fresh process.
    """

    def __init__(self, output: Location, progress: Any) -> None:
        self.output = output
        self._progress = progress
        self._unreported: Counter[str] = Counter()
        self._reported_at_s = time.monotonic()

    def make(self, tasks: list[PartTask]) -> None:
        """Write every part, each the moment it is complete."""
        raise NotImplementedError

    def count(self, **done: int) -> None:
        """Add to the figures of the progress lines."""
        self._unreported.update(done)
        if time.monotonic() - self._reported_at_s >= REPORT_INTERVAL_S:
            self._flush()

    def __call__(self, call: dict[str, Any]) -> dict[str, Any]:
        tasks = [PartTask(**task) for task in call["tasks"]]
        try:
            self.make(tasks)
        except Exception:
            self._leave_reason(tasks, traceback.format_exc())
            os._exit(1)
        self._flush()
        return {"parts": len(tasks)}

    def _flush(self) -> None:
        ray.get(self._progress.add.remote(dict(self._unreported)))
        self._unreported.clear()
        self._reported_at_s = time.monotonic()

    def _leave_reason(self, tasks: list[PartTask], reason: str) -> None:
        for task in tasks:
            if not self.output.join(part_name(task.number)).exists():
                self.output.join(FAILURES, str(task.number)).write_bytes(reason.encode())


def make_parts(job: PartJob, tasks: Sequence[PartTask]) -> list[PartTask]:
    """Make the parts that do not exist yet; finished ones are never touched.

    Returns:
        The parts that could not be made in `MAX_ATTEMPTS` attempts.
    """
    pending = _missing(job, tasks)
    if len(pending) < len(tasks):
        log.info("%s: %d of %d parts are there already", job.title, len(tasks) - len(pending), len(tasks))
    job.output.join(FAILURES).delete()
    for attempt in range(MAX_ATTEMPTS):
        if not pending:
            break
        parts_per_call = min(PARTS_PER_CALL, -(-len(pending) // job.resources.replicas)) if attempt == 0 else 1
        try:
            _run(job, pending, parts_per_call)
        except ActorDiedError as error:
            # A constructor that raised will raise again; a process that was ended while it started may not.
            if error.actor_init_failed or attempt + 1 == MAX_ATTEMPTS:
                raise
            log.warning("%s: a worker ended while it started: %s", job.title, " ".join(str(error).split()))
        pending = _missing(job, tasks)
        for task in pending:
            reason, detail = failure_reason(job.output, task.number)
            last_line = detail.strip().rpartition("\n")[2]
            log.warning(
                "%s: part %d failed in attempt %d of %d: %s (%s)",
                job.title, task.number, attempt + 1, MAX_ATTEMPTS, reason, last_line,
            )  # fmt: skip
    return pending


def failure_reason(output: Location, number: int) -> tuple[str, str]:
    """Why a part could not be made: (name of the reason, what is known of it)."""
    note = output.join(FAILURES, str(number))
    if note.exists():
        return "worker_error", note.read_bytes().decode()[-2000:]
    return "worker_died", "the worker's process ended without a word"


def _missing(job: PartJob, tasks: Sequence[PartTask]) -> list[PartTask]:
    there = set(job.output.files())
    return [task for task in tasks if part_name(task.number) not in there]


def _run(job: PartJob, tasks: Sequence[PartTask], parts_per_call: int) -> None:
    progress = ray.remote(num_cpus=0)(Progress).remote()
    calls = [
        {"tasks": [asdict(task) for task in tasks[start : start + parts_per_call]]}
        for start in range(0, len(tasks), parts_per_call)
    ]
    replicas = min(job.resources.replicas, len(calls))
    with _quiet_context(), _progress_lines(job, lambda: ray.get(progress.done.remote(), timeout=5)):
        done = ray.data.from_items(calls, override_num_blocks=len(calls)).map(
            job.worker,
            fn_constructor_args=(job.output, progress, *job.worker_args),
            compute=ray.data.ActorPoolStrategy(size=replicas, max_tasks_in_flight_per_actor=1),
            num_cpus=job.resources.num_cpus,
            num_gpus=job.resources.num_gpus,
            runtime_env={"env_vars": dict(job.env)},
            max_restarts=len(calls),  # each death costs one call of this run, so no more can be needed
            max_task_retries=0,  # retried by the next run, on its own: Ray would repeat a deadly part for ever
        )
        for _ in done.iter_rows():
            pass


@contextmanager
def _quiet_context() -> Iterator[None]:
    """Ray Data without progress bars and tracebacks in the job's log, and without ending the job for one failed call."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.max_errored_blocks = -1
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # `make_parts` says in a line what failed
    try:
        with ray.data.DataContext.current(context), warnings.catch_warnings():
            # bounds on restarts and retries have no named parameter in the tested Ray
            warnings.simplefilter("ignore", RayDeprecationWarning)
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _progress_lines(job: PartJob, done: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    stop = threading.Event()
    started_at_s = time.monotonic()

    def speak() -> None:
        while not stop.wait(PROGRESS_INTERVAL_S):
            with suppress(RayError):  # the figures are a courtesy
                log.info("%s", _progress_line(job, done(), time.monotonic() - started_at_s))

    thread = threading.Thread(target=speak, name=f"{job.title}-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _progress_line(job: PartJob, done: Mapping[str, int], elapsed_s: float) -> str:
    number = done.get(job.unit, 0)
    line = f"{job.title}: {number}/{job.total} {job.unit}, {done.get('tokens', 0) / elapsed_s:.0f} tokens/s"
    if not number:
        return f"{line} (starting)"
    return f"{line}, about {max(0, job.total - number) * elapsed_s / number:.0f} s left"
