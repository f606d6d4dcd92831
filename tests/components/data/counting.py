"""A worker that costs nothing: part p of `rows_per_part` holds the numbers from p * rows_per_part on."""

import errno
import os
import re
import subprocess
import time
from collections import Counter

import pyarrow as pa

from components.config import StageResources
from components.data.part_map import PartJob
from components.data.part_worker import PartTask, PartWorker, Piece
from components.data.parts import PartAccount, part_names, part_writer, read_columns
from components.storage import Location

MADE, HELPERS, OUTAGE = "_made", "_helpers", "_outage"
OUTAGES = 3


class CountingWorker(PartWorker):
    """Ends its process at a deadly number, raises at an impossible one and hangs at an endless one.

    The storage is away at each of `unstored`, until it was asked for `OUTAGES` times.
    """

    schema = pa.schema([("number", pa.int64()), ("text", pa.string())])

    def __init__(
        self,
        output,
        report,
        rows_per_part,
        deadly=(),
        impossible=(),
        endless=(),
        text="",
        seconds_a_row=0.0,
        unstored=(),
    ):
        super().__init__(output, report)
        self.unstored = unstored
        self.rows_per_part, self.deadly, self.impossible, self.endless = rows_per_part, deadly, impossible, endless
        self.text, self.seconds_a_row = text, seconds_a_row
        self.log = output.join(MADE, f"{time.time_ns()}").path
        self.log.parent.mkdir(parents=True, exist_ok=True)

    def make(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            numbers = piece.of(self.numbers(piece.task))
            rows = [self.row(number) for number in numbers]
            with part_writer(piece.file, self.schema, PartAccount(kept=len(rows))) as writer:
                writer.write_table(pa.Table.from_pylist(rows, schema=self.schema))

    def row(self, number: int) -> dict:
        time.sleep(self.seconds_a_row)
        if number in self.deadly:
            os._exit(9)
        if number in self.unstored and len(self.output.join(OUTAGE).files()) < OUTAGES:
            missing = self.output.join(OUTAGE, f"{time.time_ns()}")
            missing.write_bytes(b"")
            missing.join("below a file").write_bytes(b"")
        if number in self.impossible:
            raise ArithmeticError(f"{number} is impossible")
        if number in self.endless:
            self.hang(number)
        with self.log.open("a") as made:
            made.write(f"{number}\n")
        self.count(rows=1)
        return {"number": number, "text": self.text}

    def hang(self, number: int) -> None:
        """Beside a process of its own, like an engine with workers: that one should not be left behind."""
        helper = subprocess.Popen(["sleep", "1000"])
        self.output.join(HELPERS, str(helper.pid)).write_bytes(b"")
        while True:
            time.sleep(1)

    def num_rows(self, task: PartTask) -> int:
        return self.rows_per_part

    def lose(self, piece: Piece, reason: str, detail: str) -> None:
        account = PartAccount()
        for number in piece.of(self.numbers(piece.task)):
            account.fail(reason, {"key": number}, detail)
        with part_writer(piece.file, self.schema, account):
            pass

    def numbers(self, task: PartTask) -> list[int]:
        return list(range(task.number * self.rows_per_part, (task.number + 1) * self.rows_per_part))


class FullDiskWorker(CountingWorker):
    """Every write of its third part fails as on a full disk."""

    def row(self, number: int) -> dict:
        if number >= 2 * self.rows_per_part:
            with open("/dev/full", "wb", buffering=0) as full:
                full.write(b".")
        return super().row(number)


class LockingWorker(CountingWorker):
    """At even numbers it hangs inside native code that holds Python's lock."""

    def hang(self, number: int) -> None:
        if number % 2:
            super().hang(number)
        re.match("(a+)+$", "a" * 100 + "b")  # takes 2 ** 100 steps


class NoStartWorker(CountingWorker):
    def __init__(self, output, report, *args):
        raise OSError(errno.ENOENT, "there is no such model")


def counting_job(output: Location, *args, worker: type[PartWorker] = CountingWorker, **settings) -> PartJob:
    """A job of `worker(output, report, *args)`; `settings` change fields of the job or of its resources."""
    resources = {"num_cpus": 1, "num_gpus": 0, "replicas": settings.pop("replicas", 2)}
    return PartJob(
        title="counting",
        unit="rows",
        total=0,
        output=output,
        worker=worker,
        worker_args=args,
        resources=StageResources.model_validate(resources),
        env={},
        max_attempts=settings.pop("max_attempts", 3),
        stall_timeout_s=settings.pop("stall_timeout_s", 600.0),
    )


def numbers_in(output: Location) -> list[int]:
    """What the parts hold, in their order."""
    names = part_names(output)
    return [number for name in names for number in read_columns(output.join(name), ["number"])["number"].to_pylist()]


def times_made(output: Location) -> Counter[int]:
    """How often each number was made, in whatever process."""
    logs = [output.join(MADE, name) for name in output.join(MADE).files()]
    return Counter(int(line) for log in logs for line in log.read_bytes().split(b"\n")[:-1])
