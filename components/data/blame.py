"""Whether rows can be what ended a worker: a storage that is away, damaged input, a lost lease, a dead node and a killed driver are not."""

import os
import socket
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import ray

import components
from components import s3, storage
from components.data.parts import CorruptPart
from components.lease import LeaseLost
from components.storage import is_full

PROJECT = Path(components.__file__).parent
STORAGE_FILES = {storage.__file__, s3.__file__}
PYARROW = "pyarrow"
NODE_TIMEOUT_S = 5.0


class Unheard(Exception):
    """Nobody beside the driver listens any more: the run is over."""


class Life(NamedTuple):
    """A worker's process: whoever finds rows that it had begun wants to know what became of it."""

    run: str
    """Ray's name of the job."""
    node: str
    process: str

    @classmethod
    def here(cls) -> "Life":
        """Of this process of a Ray job; ids of nodes are new in every cluster, so runs of two clusters differ as well."""
        context = ray.get_runtime_context()
        return cls(context.get_job_id(), context.get_node_id(), f"{os.getpid()}-{uuid.uuid4().hex}")


def node_answers(node: str) -> bool:
    """Whether a Ray node is up: Ray itself notices a dead one only after half a minute."""
    for found in ray.nodes():
        if found["NodeID"] == node and found["Alive"]:
            try:
                socket.create_connection(
                    (found["NodeManagerAddress"], found["NodeManagerPort"]), NODE_TIMEOUT_S
                ).close()
            except OSError:
                return False
            return True
    return False


def innocent_cause(error: BaseException) -> Literal["full", "storage", "damaged", "lost", "driver"] | None:
    """What failed, where it was not the rows' doing; None where it may have been.

    An error of the operating system is the storage's when `Location` or pyarrow met it, and may be the rows' when an engine did.
    """
    if is_full(error):
        return "full"
    for found in _chain(error):
        if isinstance(found, Unheard):
            return "driver"
        if isinstance(found, CorruptPart):  # pyarrow's OSError of a checksum is below it
            return "damaged"
        if isinstance(found, LeaseLost):
            return "lost"
        if isinstance(found, OSError) and _met_by_storage(found):
            return "storage"
    return None


def _met_by_storage(error: OSError) -> bool:
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    for file in reversed(files):  # the innermost one that is not of a library that anybody may call
        if PYARROW in Path(file).parts:
            return True
        if PROJECT in Path(file).parents:
            return file in STORAGE_FILES
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and not any(error is other for other in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__
