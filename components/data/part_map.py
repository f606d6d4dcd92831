"""Running a stage's parts through Ray Data: actors that start once and take part after part, until every part exists.

A part is done when its file is there. A worker whose process dies, or whose node does, costs the parts it was working
on, not the job: they are made again in pieces (`components.data.pieces`), until each of their rows is there or is known
to end a worker. The driver holds the parts' numbers and no row.
"""

import errno
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError
from ray.util.annotations import RayDeprecationWarning

from components.beside import start_beside_driver
from components.cluster_room import Need, check_room, waiting_lines
from components.config import StageResources
from components.data.part_worker import PartRunner, PartTask, PartWorker
from components.data.parts import part_name
from components.data.pieces import parts_in_pieces
from components.data.progress import (
    DEATHS_PER_ATTEMPT,
    Progress,
    Stop,
    WorkersFailed,
    progress_lines,
)
from components.lease import Hold, LeaseLost, hold_of_this_process
from components.section import ConfigError
from components.stage import LEASE
from components.storage import Location

log = logging.getLogger("aerie")

PARTS_PER_CALL = 4  # an engine then never runs dry between two parts
MAX_FAILED_RUNS = 3


@dataclass(frozen=True)
class PartJob:
    """What is made, by whom and where."""

    title: str
    unit: str
    """What is counted, in the plural, such as `answers`."""
    total: int
    """How many there are to make."""
    output: Location
    worker: type[PartWorker]
    worker_args: tuple[Any, ...]
    resources: StageResources
    env: Mapping[str, str]
    max_attempts: int
    """Times that a row may end a worker before it is given up."""
    stall_timeout_s: float
    """A worker that gives no sign of life for so long is ended."""


def make_parts(job: PartJob, tasks: Sequence[PartTask]) -> None:
    """Make the parts that do not exist yet; finished ones are never touched.

    Raises:
        OSError: the storage is full; what is done stays.
        ConfigError: the cluster has not the workers' resources; or the storage did not answer, again and again, and what is done stays.
        LeaseLost: another run took the output over.
        WorkersFailed: workers did not start, or did nothing but die; or what they read is damaged.
    """
    pending, need = _missing(job, tasks), Need.of(f"resources.{job.title}", job.resources)
    if len(pending) < len(tasks):
        log.info("%s: %d of %d parts are there already", job.title, len(tasks) - len(pending), len(tasks))
    if not pending:
        return
    progress = start_beside_driver(Progress, job.resources.replicas + DEATHS_PER_ATTEMPT * job.max_attempts)
    hold = hold_of_this_process(job.output.join(LEASE))
    check_room([need])
    with waiting_lines(job.title, [need], lambda: ray.get(progress.has_begun.remote(), timeout=5)):
        _make(job, tasks, pending, progress, hold)


def _make(job: PartJob, tasks: Sequence[PartTask], pending: list[PartTask], progress: Any, hold: Hold) -> None:
    failed_runs = 0
    while pending:
        try:
            _run(job, pending, progress, hold)
            failed_runs = 0
        except RayError as error:  # not a worker's end: those are seen by the parts they leave
            failed_runs += 1
            if failed_runs == MAX_FAILED_RUNS:
                raise
            log.warning("%s: Ray failed: %s", job.title, " ".join(str(error).split())[:500])
        _check(job, ray.get(progress.stopped.remote()))
        pending = [replace(task, in_pieces=True) for task in _missing(job, tasks)]
        if pending:
            numbers = ", ".join(str(task.number) for task in pending[:10]) + (", ..." if len(pending) > 10 else "")
            words = ray.get(progress.last_words.remote()).strip().rpartition("\n")[2]
            log.warning(
                "%s: a worker ended with parts %s; made again in pieces (%s)",
                job.title, numbers, words or "its process ended without a word",
            )  # fmt: skip


def _check(job: PartJob, stop: Stop | None) -> None:
    if stop is None:
        return
    last_line = stop.words.strip().rpartition("\n")[2]
    if stop.failure == "full":
        raise OSError(errno.ENOSPC, last_line)
    if stop.failure == "storage":
        problem = f"it cannot be read or written ({last_line}); what is done of {job.title} stays"
        raise ConfigError("storage.uri", problem, "repeat the command once it answers: it goes on")
    its_own = last_line.partition(": ")[2]  # without the class
    if stop.failure == "damaged":
        raise WorkersFailed(f"{job.title}: {its_own}")
    if stop.failure == "lost":
        raise LeaseLost(its_own)
    happened = "its worker does not start" if stop.failure == "start" else "workers die of whatever they are given"
    raise WorkersFailed(f"{job.title}: {happened}; the last one said:\n{stop.words}")


def _missing(job: PartJob, tasks: Sequence[PartTask]) -> list[PartTask]:
    names = job.output.files()
    there, in_pieces = set(names), parts_in_pieces(names)
    missing = [task for task in tasks if part_name(task.number) not in there]
    return [replace(task, in_pieces=True) if task.number in in_pieces else task for task in missing]


def _calls(job: PartJob, tasks: Sequence[PartTask]) -> list[dict[str, Any]]:
    """Parts in pieces come alone, so that one's deadly row costs no other part a start."""
    whole = [task for task in tasks if not task.in_pieces]
    size = max(1, min(PARTS_PER_CALL, -(-len(whole) // job.resources.replicas)))
    groups = [whole[start : start + size] for start in range(0, len(whole), size)]
    groups += [[task] for task in tasks if task.in_pieces]
    return [{"tasks": [asdict(task) for task in group]} for group in groups]


def _run(job: PartJob, tasks: Sequence[PartTask], progress: Any, hold: Hold) -> None:
    calls = _calls(job, tasks)
    figures = progress_lines(job.title, job.unit, job.total, lambda: ray.get(progress.done.remote(), timeout=5))
    with _quiet_context(), figures:
        done = ray.data.from_items(calls, override_num_blocks=len(calls)).map(
            PartRunner,
            fn_constructor_args=(
                job.worker,
                job.output,
                progress,
                hold,
                job.worker_args,
                job.max_attempts,
                job.stall_timeout_s,
            ),
            compute=ray.data.ActorPoolStrategy(
                size=min(job.resources.replicas, len(calls)), max_tasks_in_flight_per_actor=1
            ),
            num_cpus=job.resources.num_cpus,
            num_gpus=job.resources.num_gpus,
            runtime_env={"env_vars": dict(job.env)},
            max_restarts=-1,  # the constructor cannot fail, and `Progress` bounds what can
            max_task_retries=0,  # retried by the next run, in pieces: Ray would repeat a deadly part for ever
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
