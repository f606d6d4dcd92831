"""What Ray Data adds to every row: jobs of two sizes whose worker does next to nothing, against the worker alone."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import ray

from components.config import StageResources
from components.data.part_map import PartJob, make_parts
from components.data.part_worker import PartTask, PartWorker, Piece
from components.data.parts import PartAccount, part_name, part_writer
from components.storage import Location

LOGICAL_CPUS = 8  # Ray Data needs more to move than a small machine has cores
FEW_PARTS, MANY_PARTS = 16, 1040


class IdleWorker(PartWorker):
    """Writes its rows, which hold a number each."""

    schema = pa.schema([("number", pa.int64())])

    def __init__(self, output: Location, report: Callable[[Mapping[str, int]], Any], rows_per_part: int) -> None:
        super().__init__(output, report)
        self.rows = pa.table({"number": range(rows_per_part)}, schema=self.schema)

    def make(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            with part_writer(piece.file, self.schema, PartAccount(kept=len(self.rows))) as writer:
                writer.write_table(self.rows)
            self.count(rows=len(self.rows))


def measure_ray(rows_per_part: int, folder: Location) -> dict[str, float]:
    """Milliseconds that Ray Data adds to a row and to a part, and the seconds that a job takes to start and to end.

    It starts a Ray of its own, and ends it.

    Args:
        rows_per_part: As `data.rows_per_shard`.
        folder: For the parts.
    """
    options = {"num_cpus": LOGICAL_CPUS, "include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", logging_level="warning", **options)
    try:
        _job_s(folder.join("warm-up"), rows_per_part, FEW_PARTS)
        few_s = _job_s(folder.join("few"), rows_per_part, FEW_PARTS)
        many_s = _job_s(folder.join("many"), rows_per_part, MANY_PARTS)
    finally:
        ray.shutdown()
    alone_s = _alone_s(folder.join("alone"), rows_per_part)
    part_s = (many_s - few_s) / (MANY_PARTS - FEW_PARTS)
    added_ms = (part_s - alone_s) * 1e3
    return {
        "rows_per_part": rows_per_part,
        "ms_per_row": added_ms / rows_per_part,
        "ms_per_part": added_ms,
        "start_and_end_s": few_s - FEW_PARTS * part_s,
    }


def _job_s(output: Location, rows_per_part: int, num_parts: int) -> float:
    job = PartJob(
        title="idle",
        unit="rows",
        total=rows_per_part * num_parts,
        output=output,
        worker=IdleWorker,
        worker_args=(rows_per_part,),
        resources=StageResources(),
        env={},
        max_attempts=1,
        stall_timeout_s=600.0,
    )
    started = time.perf_counter()
    make_parts(job, [PartTask(number) for number in range(num_parts)])
    return time.perf_counter() - started


def _alone_s(output: Location, rows_per_part: int) -> float:
    """Of one part."""
    worker = IdleWorker(output, lambda done: None, rows_per_part)
    pieces = [Piece(PartTask(number), output.join(part_name(number))) for number in range(MANY_PARTS)]
    started = time.perf_counter()
    worker.make(pieces)
    return (time.perf_counter() - started) / MANY_PARTS
